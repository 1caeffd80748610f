// Weights that are packed as codes: what a code means, and panels of the numbers that codes stand for (codes.py has the same in torch).
// A number is level * scale [/ divisor] [+ offset], each operation rounded to float32, and the result rounded to the type of the weights.
//
// Where float32 holds zero * scale exactly, code * scale - zero * scale is the number, in one operation. Where an offset is added, it holds
// code * scale exactly, so it does not matter whether that is rounded before.
#pragma once
#include <algorithm>
#include <vector>

#include "vec.h"

namespace {

enum Levels { ITSELF = 0, TABLE = 1, E4M3 = 2, SHORT = 3, DIVIDED = 4 };  // SHORT: a table of bfloat16; DIVIDED: codes stand for themselves
enum Numbers { MISSING = 0, FLOAT32 = 1, FLOAT16 = 2, BFLOAT16 = 3 };
enum Fine { WHOLE = 0, UNSIGNED = 1, SIGNED = 2, FLOAT8 = 3, POWER = 4, NIBBLE = 5, ODD = 6 };  // the last two of 4 bits; ODD: 2 n + 1

struct Groups {  // a number for each group of inputs, [panels][groups][columns of a panel]: a coarse one, times (or below) a fine one
    const void* coarse;
    const uint8_t* fine;
    int64_t type, fine_type, per_coarse, divides;  // groups that have one coarse number
};
struct Codes {  // `CodesArguments` in coded.py is the same
    const uint32_t* planes[4];  // of 8, 4, 2 and 1 bits, [panels][words][columns of a panel]; the first inputs are in the lowest bits of a word
    const float* table;         // of 16 levels, and then the lowest bytes of all, the next ones, ...
    const uint8_t* zeros;       // [panels][groups][columns], or null
    const int32_t* group_of;    // [inputs]; null if groups have `group` inputs, a multiple of 8
    const uint32_t *index, *upper;  // of `unit` inputs each, as the planes: the lowest 8 bits of where their codes of 4 bits are in `grid`, and
    const uint32_t* grid;           // `upper_bits` more. Null if codes lie in planes. The highest bits of the codes may be in the last plane.
    Groups scales, offsets;
    int64_t inputs, groups, group, levels, zero, exact, rounds, unit, upper_bits;  // exact: float32 holds the products of zeros and scales
    double divisor;
};

typedef uint8_t bytes __attribute__((vector_size(LANES)));

INLINE uints load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (uints)_mm512_cvtepu8_epi32(load<__m128i>(p));
#elif defined(__AVX2__)
    return (uints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    return __builtin_convertvector(load<bytes>(p), uints);
#endif
}

INLINE uints moved(uints x, int left) { return left > 0 ? x << uint32_t(left) : x >> uint32_t(-left); }

INLINE floats from_float16(const uint16_t* p) {  // finite
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtph_ps(load<__m128i>(p));
#else
    const uints h = __builtin_convertvector(load<halves>(p), uints);
    return (floats)((uints)((floats)((h & 0x7fffu) << 13) * 0x1p112f) | (h & 0x8000u) << 16);
#endif
}

INLINE floats from_float8(uints code) {  // e4m3 without infinities; no NaN
    const uints magnitude = code & 0x7fu;
    const floats normal = (floats)((magnitude << 20) + (120u << 23));
    const floats y = select((ints)(magnitude < 8u), normal + normal - 0x1p-6f, normal);
    return (floats)((uints)y | (code & 0x80u) << 24);
}

INLINE floats from_whole(uints x) {  // below 2^23
#if defined(__AVX512F__)
    return (floats)(x | 150u << 23) - 0x1p23f;  // `or` is part of the `and` before it, and a subtraction takes no longer than a conversion
#else
    return to_floats((ints)x);
#endif
}

// Divides numbers below 2^32: with 64 bits this takes up to three times as long.
INLINE int64_t quotient(int64_t a, int64_t b) { return b == 1 ? a : uint32_t(a) / uint32_t(b); }

// The numbers of a group, the `row`th of all panels', in LANES columns from `lane` on.
INLINE floats numbers_of(const Groups& g, int64_t row, int64_t coarse_row, int columns, int lane) {
    const int64_t coarse_at = coarse_row * columns + lane;
    floats coarse = splat(1.0f);
    if (g.type == FLOAT32) coarse = load<floats>((const float*)g.coarse + coarse_at);
    if (g.type == FLOAT16) coarse = from_float16((const uint16_t*)g.coarse + coarse_at);
    if (g.type == BFLOAT16) coarse = load_floats((const bf16*)g.coarse + coarse_at);
    if (g.fine_type == WHOLE) return coarse;
    uints code;
    if (g.fine_type < NIBBLE) code = load_bytes(g.fine + row * columns + lane);
    else code = load_bytes(g.fine + row / 2 * columns + lane) >> uint32_t(row % 2 * 4) & 15u;
    floats fine;
    if (g.fine_type == UNSIGNED || g.fine_type == NIBBLE) fine = to_floats((ints)code);
    if (g.fine_type == ODD) fine = to_floats((ints)(code + code + 1u));
    if (g.fine_type == SIGNED) fine = to_floats((ints)(code << 24) >> 24);
    if (g.fine_type == FLOAT8) fine = from_float8(code);
    if (g.fine_type == POWER) fine = (floats)(code << 23);
    return g.divides ? fine / coarse : fine * coarse;
}

// The codes that stand for 0 in LANES columns, of codes without levels.
INLINE floats zeros_of(const Codes& c, int64_t at) { return c.zeros ? to_floats((ints)load_bytes(c.zeros + at)) : splat(float(c.zero)); }

INLINE floats level_of(const float* table, uints code) {
#if defined(__AVX512F__)
    return (floats)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(table));
#else  // AVX2 looks up all codes of a word at once
    return (floats)gather((const uint32_t*)table, code);
#endif
}

INLINE uints rounded_bits(floats x) {  // to bfloat16, in the upper half; no NaN
    const uints bits = (uints)x;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

// Two bfloat16 in each word, the first in the lower half.
INLINE uints in_pairs(floats a, floats b) {
#if defined(__AVX512BF16__)
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (uints)_mm512_permutexvar_epi16(order, both);
#else
    return rounded_bits(a) >> 16 | (rounded_bits(b) & 0xffff0000u);
#endif
}

#if defined(__AVX512F__)
// The float16 of a code's bits, one to the right, is its number / 256.
INLINE __m512i halves_of_float8(__m512i bytes) { return _mm512_and_si512(_mm512_srai_epi16(bytes, 1), _mm512_set1_epi16(int16_t(0xbf80))); }

// Of codes of e4m3 in bytes FIRST and FIRST + 1 of each word: pairs of bfloat16. `low`, `high`: the scales of a half of the words, each twice.
template <int FIRST>
INLINE uints pairs_of_float8(uints words, floats low, floats high) {
    constexpr int order = (FIRST + 1) << 24 | 0x80 << 16 | FIRST << 8 | 0x80;  // 0x80: a zero
    const __m512i all = _mm512_or_si512(_mm512_set1_epi32(order), _mm512_broadcast_i32x4(_mm_set_epi32(0x0c000c00, 0x08000800, 0x04000400, 0)));
    const __m512i halves = halves_of_float8(_mm512_shuffle_epi8((__m512i)words, all));
    const floats a = (floats)_mm512_cvtph_ps(_mm512_castsi512_si256(halves)) * low, b = (floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)) * high;
#if defined(__AVX512BF16__)
    return (uints)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    return (uints)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)to_bf16(a)), (__m256i)to_bf16(b), 1);
#endif
}

// Each of LANES / 2 numbers twice, from number FIRST on.
template <int FIRST>
INLINE floats twice(floats x) {
    const __m512i order = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return (floats)_mm512_permutexvar_ps(_mm512_add_epi32(order, _mm512_set1_epi32(FIRST)), (__m512)x);
}
#elif defined(__AVX2__)
// Of codes of e4m3 in bytes FIRST and FIRST + 1 of each word: their numbers / 256. The float16 of a code's bits, one to the right, is that.
template <int FIRST>
INLINE void from_two_float8(uints words, floats (&to)[2]) {
    constexpr int first = 0x04800080 + 0x01000100 * FIRST, second = first + 0x01000100, next = 0x08000800;  // 0x80: a zero
    const __m256i order = _mm256_broadcastsi128_si256(_mm_set_epi32(second + next, second, first + next, first));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)words, order), 0xd8);
    const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(bytes, 1), _mm256_set1_epi16(int16_t(0xbf80)));
    to[0] = (floats)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), to[1] = (floats)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}

// The levels of eight codes in each word, looked up 32 at a time. With j = i % 2 + i / 4 * 2, to[j] has those of codes i and i + 2, of a table of
// bfloat16 in pairs. Of floats, to[2 * j] and to[2 * j + 1] have the lower and the upper halves; if interleaved, they are those of i and of i + 2.
template <bool OF_FLOATS>
INLINE void look_up(const float* table, uints words, uints (&to)[OF_FLOATS ? 8 : 4]) {
    const __m128i pairs = _mm_set_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100), ones = _mm_set_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    const __m256i order = _mm256_broadcastsi128_si256(OF_FLOATS ? ones : pairs);
    const __m256i w = _mm256_shuffle_epi8((__m256i)words, order), mask = _mm256_set1_epi8(15);
    for (int odd = 0; odd < 2; odd++) {
        const __m256i codes = _mm256_and_si256(odd ? _mm256_srli_epi16(w, 4) : w, mask);
        for (int half = OF_FLOATS ? 0 : 1; half < 2; half++) {  // of a float
            const auto bytes = [&](int byte) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>((const char*)(table + 16) + 16 * byte)), codes); };
            const __m256i low = bytes(2 * half), high = bytes(2 * half + 1);
            const int at = OF_FLOATS ? 2 * odd + half : odd;
            to[at] = (uints)_mm256_unpacklo_epi8(low, high), to[at + (OF_FLOATS ? 4 : 2)] = (uints)_mm256_unpackhi_epi8(low, high);
        }
    }
}
#endif

struct GroupNumbers {  // of a group, in LANES columns; offset: what is added, or -zero * scale
    floats scale, zero, offset;
};

// The numbers of the groups of a part of some panels, [groups][panels][columns / LANES].
class PanelGroups {
   public:
    // Makes those of inputs [k, k + count); where inputs may be in any groups, all at k = 0. Returns those of the first group.
    const GroupNumbers* take(const Codes& c, int64_t panel, int64_t panels, int columns, int64_t k, int64_t count) {
        if (c.group_of && k > 0) return made_.data();
        const int64_t first = c.group_of ? 0 : quotient(k, c.group), groups = (c.group_of ? c.groups : quotient(k + count - 1, c.group) + 1) - first;
        const int vectors = columns / LANES;
        made_.resize(groups * panels * vectors);
        for (int64_t i = 0; i < panels; i++) {
            GroupNumbers* to = made_.data() + i * vectors;
            const int64_t stride = panels * vectors, at = (panel + i) * c.groups + first;
            fill(c, c.scales, panel + i, first, groups, columns, stride, &to->scale);
            if (c.offsets.type != MISSING) fill(c, c.offsets, panel + i, first, groups, columns, stride, &to->offset);
            if (c.levels != ITSELF && c.levels != DIVIDED) continue;
            for (int64_t group = 0; group < groups; group++, to += stride)
                for (int v = 0; v < vectors; v++) {
                    to[v].zero = zeros_of(c, (at + group) * columns + v * LANES);
                    if (c.offsets.type == MISSING) to[v].offset = -to[v].zero * to[v].scale;
                }
        }
        return made_.data();
    }

   private:
    // Writes the numbers of some groups of a panel, those of a group in `stride` structures.
    static void fill(const Codes& c, const Groups& g, int64_t panel, int64_t first, int64_t groups, int columns, int64_t stride, floats* to) {
        auto as = fill_as<-1, -1>;
        if (g.type == FLOAT32 && g.fine_type == WHOLE) as = fill_as<FLOAT32, WHOLE>;
        if (g.type == FLOAT16 && g.fine_type == WHOLE) as = fill_as<FLOAT16, WHOLE>;
        if (g.type == FLOAT16 && g.fine_type == UNSIGNED) as = fill_as<FLOAT16, UNSIGNED>;
        if (g.type == FLOAT16 && g.fine_type == SIGNED) as = fill_as<FLOAT16, SIGNED>;
        if (g.type == FLOAT16 && g.fine_type == NIBBLE) as = fill_as<FLOAT16, NIBBLE>;
        if (g.type == FLOAT32 && g.fine_type == ODD) as = fill_as<FLOAT32, ODD>;
        if (g.type == BFLOAT16 && g.fine_type == WHOLE) as = fill_as<BFLOAT16, WHOLE>;
        if (g.type == MISSING && g.fine_type == POWER) as = fill_as<MISSING, POWER>;
        as(c, g, panel, first, groups, columns, stride, to);
    }

    // What is known of the types, unless it is -1, need not be asked for each group.
    template <int TYPE, int FINE_TYPE>
    static void fill_as(const Codes& c, Groups g, int64_t panel, int64_t first, int64_t groups, int columns, int64_t stride, floats* to) {
        constexpr int64_t SIZE = sizeof(GroupNumbers) / sizeof(floats);
        if (TYPE >= 0) g.type = TYPE, g.fine_type = FINE_TYPE, g.divides = false;
        const int64_t coarse_row = panel * quotient(c.groups + g.per_coarse - 1, g.per_coarse);
        for (int64_t group = first; group < first + groups; group++, to += stride * SIZE) {
            const int64_t row = panel * c.groups + group, coarse = coarse_row + quotient(group, g.per_coarse);
            for (int lane = 0; lane < columns; lane += LANES) to[lane / LANES * SIZE] = numbers_of(g, row, coarse, columns, lane);
        }
    }
    std::vector<GroupNumbers> made_;
};

// Codes of 4 bits that are chosen from a grid, in LANES columns.
class GridCodes {
   public:
    INLINE GridCodes(const Codes& c, int64_t panel, int lane, int columns) : c_(c), columns_(columns) {
        const int64_t indices = c.inputs / c.unit, first = panel * columns;
        index_ = c.index + (indices >> 2) * first + lane;
        upper_ = c.upper + (indices * c.upper_bits >> 5) * first + lane;
        highest_ = c.planes[3] + (c.inputs >> 5) * first + lane;
    }

    // Returns those of inputs [k, k + 8), k a multiple of 8, the first in the lowest bits.
    INLINE uints eight(uint64_t k) const {
        uints codes = c_.unit == 8 ? chosen(k / 8) : chosen(k / 4) | chosen(k / 4 + 1) << 16;
        if (c_.planes[3]) {
            uints x = bits(highest_, k, 8);  // one to each four bits
            x = (x | x << 12) & 0x000f000fu;
            x = (x | x << 6) & 0x03030303u;
            x = (x | x << 3) & 0x11111111u;
            codes |= x << 3;
        }
        return codes;
    }

   private:
    INLINE uints chosen(uint64_t i) const {
        uints at = bits(index_, 8 * i, 8);
        if (c_.upper_bits) at |= bits(upper_, c_.upper_bits * i, c_.upper_bits) << 8;
        return gather(c_.grid, at);
    }
    INLINE uints bits(const uint32_t* words, uint64_t from, int64_t count) const {
        return ::load<uints>(words + from / 32 * columns_) >> uint32_t(from % 32) & ((1u << count) - 1);
    }

    const Codes& c_;
    const int64_t columns_;
    const uint32_t *index_, *upper_, *highest_;
};

// What is known of codes when the kernels are compiled. EXACT: see `Codes`. SCATTERED: neighbours among the inputs may be in any groups.
// LIFTED: float32 holds (4096 + zero) * scale, too. GRID: codes are chosen from a grid.
template <int BITS_, int LEVELS_, bool ROUNDS_, bool EXACT_ = false, bool SCATTERED_ = false, bool LIFTED_ = false, bool GRID_ = false>
struct Form {
    static constexpr int BITS = BITS_, LEVELS = LEVELS_;
    static constexpr bool ROUNDS = ROUNDS_, EXACT = EXACT_, SCATTERED = SCATTERED_, LIFTED = LIFTED_, GRID = GRID_;
};
struct NoGrid {
    INLINE NoGrid(const Codes&, int64_t, int, int) {}
};

// Unpacks 8 inputs at a time, in LANES columns.
template <class F>
class Unpacker {
   public:
    // `lane`: the first column, of the columns of a panel; `groups`: the numbers of the first group, and `stride` further on those of the next.
    INLINE Unpacker(const Codes& c, int64_t panel, int lane, int columns, const GroupNumbers* groups, int64_t stride)
        : c_(c), columns_(columns), stride_(stride), groups_(groups), divisor_(float(c.divisor)), inverse_(1 / divisor_), grid_(c, panel, lane, columns) {
        for (int plane = 0; plane < 4; plane++) planes_[plane] = c.planes[plane] + (c.inputs >> 5 << (3 - plane)) * panel * columns + lane;
    }

    // Turns to the next group.
    INLINE void turn() {
        if (SCATTERED) return;
        scale_[0] = LOOKED_UP && LEVELS == E4M3 ? groups_->scale * 256.0f : groups_->scale;
        if (WHOLES)
            for (int i = 1; i < 3; i++) scale_[i] = scale_[0] * (1.0f / (1 << i * STEP));
        if (WHOLES) zero_ = EXACT ? groups_->offset : groups_->zero;
        if (F::LIFTED)
            for (int i = 0; i < 3; i++) lifted_[i] = zero_ - scale_[0] * float(4096 >> 4 * i);
        groups_ += stride_;
    }

    // Loads inputs [k, k + 8), which are of one group; k is a multiple of 8.
    INLINE void load(uint64_t k) {
        k_ = k;
        if (BITS == 8)
            for (int i = 0; i < 2; i++) low_[i] = words(0, k / 4 + i);
        if constexpr (F::GRID) low_[0] = grid_.eight(k);
        else if (BITS >= 4 && BITS < 8) low_[0] = words(1, k / 8);
        if (BITS == 6 || BITS < 4) high_ = words(2, k / 16) >> uint32_t(k % 16 * 2);
        if (BITS == 5 || BITS == 3) top_ = words(3, k / 32) >> uint32_t(k % 32);
#if defined(__AVX2__) && !defined(__AVX512F__)
        if constexpr (LEVELS == E4M3)
            for (int i = 0; i < 2; i++) from_two_float8<0>(low_[i], floats_[2 * i]), from_two_float8<2>(low_[i], floats_[2 * i + 1]);
        if constexpr (LOOKED_UP && LEVELS != E4M3) look_up<LEVELS == TABLE>(c_.table, low_[0], levels_);
#endif
    }

    // Returns the number of input i of those that are loaded, or of PER_WORD from i on.
    template <int PER_WORD>
    INLINE uints word(int i) {
#if defined(__AVX512F__)
        if (PER_WORD == 2 && LEVELS == E4M3) {
            const floats low = twice<0>(scale_[0] * 256.0f), high = twice<LANES / 2>(scale_[0] * 256.0f);
            return i % 4 == 0 ? pairs_of_float8<0>(low_[i / 4], low, high) : pairs_of_float8<2>(low_[i / 4], low, high);
        }
#endif
        if (PER_WORD == 2) return in_pairs(number(i), number(i + 1));
#if defined(__AVX512BF16__)
        if (F::ROUNDS) {  // two at a time
            const uints both = word<2>(i & ~1);
            return i % 2 ? both & 0xffff0000u : both << 16;
        }
#endif
        return F::ROUNDS ? rounded_bits(number(i)) & 0xffff0000u : (uints)number(i);
    }

   private:
    INLINE floats number(int i) const {
        if (!WHOLES) return level(i) * scale_[0];
        if (F::LIFTED) {  // the code lies in the mantissa of a power of two; one shift brings three codes of 4 bits there
            const int place = BITS == 4 ? 11 + i % 3 * 4 : 15;
            const uints word = BITS == 4 ? moved(low_[0], 11 - i / 3 * 12) : moved(low_[i / 4], 15 - i % 4 * 8);
            const uints x = (word & ((1u << BITS) - 1) << place) | uint32_t(150 - place) << 23;
            return (floats)x * scale_[0] + lifted_[(place - 11) / 4];
        }
        // The code lies anywhere in a word, so it is a whole number times a power of two.
        const int place = place_of(i);
        const floats x = BITS < 8 ? from_whole(code(i)) : to_floats((ints)code(i));
        if (SCATTERED) {
            const GroupNumbers& group = groups_[c_.group_of[k_ + i] * stride_];
            return (x - group.zero) * group.scale;
        }
        if (!EXACT) return (x - zero_ * float(1 << place)) * scale_[place / STEP];
        const floats y = x * scale_[place / STEP] + zero_;
        if (LEVELS != DIVIDED) return y;
        const floats near = y * inverse_;
        return near + (y - near * divisor_) * inverse_;  // y / divisor, rounded once (Markstein)
    }

    // Returns code i, `place_of` it bits to the left.
    INLINE uints code(int i) const {
        const int place = place_of(i);
        uints code;
        if (BITS == 8) code = moved(low_[i / 4], place - i % 4 * 8);
        if (BITS == 8 && (place > 0 || i % 4 < 3)) code &= 255u << place;
        if (BITS >= 4 && BITS < 8) code = moved(low_[0], place - i * 4);
        if (BITS >= 4 && BITS < 8 && (WHOLES || !LOWEST_BITS_CHOOSE)) code &= 15u << place;
        if (BITS == 6) code |= moved(high_, place + 4 - i * 2) & 48u << place;
        if (BITS < 4) code = moved(high_, place - i * 2) & 3u << place;
        if (BITS == 5) code |= moved(top_, place + 4 - i) & 16u << place;
        if (BITS == 3) code |= moved(top_, place + 2 - i) & 4u << place;
        return code;
    }

    INLINE floats level(int i) const {
        if constexpr (LOOKED_UP && LEVELS == E4M3) return floats_[i / 2][i % 2];
#if defined(__AVX2__)
        if constexpr (LOOKED_UP) {
            const int at = i % 2 + i / 4 * 2;
            const bool upper = i / 2 % 2;
            if (LEVELS == SHORT) return (floats)(upper ? levels_[at] & 0xffff0000u : levels_[at] << 16);
            const __m256i low = (__m256i)levels_[2 * at], high = (__m256i)levels_[2 * at + 1];
            return (floats)(upper ? _mm256_unpackhi_epi16(low, high) : _mm256_unpacklo_epi16(low, high));
        }
#endif
        return LEVELS == E4M3 ? from_float8(code(i)) : level_of(c_.table, code(i));
    }

    static constexpr int BITS = F::BITS, LEVELS = F::LEVELS, STEP = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2;
    static constexpr bool EXACT = F::EXACT, SCATTERED = F::SCATTERED, WHOLES = LEVELS == ITSELF || LEVELS == DIVIDED;
#if defined(__AVX2__) && !defined(__AVX512F__)
    static constexpr bool LOOKED_UP = LEVELS == E4M3 || (!WHOLES && BITS == 4);  // all at once, when inputs are loaded
#else
    static constexpr bool LOOKED_UP = false;
#endif
    static constexpr int place_of(int i) { return !WHOLES || SCATTERED ? 0 : BITS == 8 ? i % 4 % 3 * STEP : i % 2 * STEP; }
#if defined(__AVX512F__)
    static constexpr bool LOWEST_BITS_CHOOSE = true;  // of an index, the number in a table
#else
    static constexpr bool LOWEST_BITS_CHOOSE = false;
#endif
    INLINE uints words(int plane, int64_t word) const {
        __builtin_prefetch(planes_[plane] + (word + 32) * columns_, 0, 2);  // into the second cache: loads do not wait for it
        return ::load<uints>(planes_[plane] + word * columns_);
    }

    const Codes& c_;
    const int64_t columns_, stride_;
    const GroupNumbers* groups_;  // of the next group, or of the first if SCATTERED
    const uint32_t* planes_[4];
    const float divisor_, inverse_;
    const std::conditional_t<F::GRID, GridCodes, NoGrid> grid_;
    uint64_t k_ = 0;
    uints low_[2] = {}, high_ = {}, top_ = {};
    uints levels_[LEVELS == TABLE ? 8 : 4];
    floats floats_[4][2];
    floats scale_[3] = {}, zero_ = {}, lifted_[3] = {};
};

// Calls turn() before each group of inputs [k, end), and body(k) for each eight inputs.
template <class Turn, class Body>
INLINE void by_groups(const Codes& c, int64_t k, int64_t end, const Turn& turn, const Body& body) {
    for (int64_t stop = c.group_of ? end : (quotient(k, c.group) + 1) * c.group; k < end; stop += c.group) {
        turn();
        for (; k < std::min(end, stop); k += 8) body(k);
    }
}

// With AVX-512, `and` and `or` are one instruction, which takes half the time of a conversion. On AVX2 they take longer than the conversion.
#if defined(__AVX512F__)
constexpr bool LIFTS = true;
#else
constexpr bool LIFTS = false;
#endif

// Calls body(form) with the `Form` of codes.
template <int BITS, bool ROUNDS, class Body>
void with_form_of(const Codes& c, const Body& body) {
    if constexpr (BITS == 8)
        if (c.levels == E4M3) return body(Form<8, E4M3, ROUNDS>());
    if constexpr (BITS == 8)
        if (c.levels == DIVIDED) return body(Form<8, DIVIDED, ROUNDS, true>());
    if constexpr (BITS == 4)
        if (c.levels == SHORT) return body(Form<4, SHORT, ROUNDS>());
    if constexpr (BITS == 4)
        if (c.levels == TABLE) return body(Form<4, TABLE, ROUNDS>());
    if constexpr ((BITS == 4 || BITS == 8) && LIFTS)
        if (c.exact && !c.group_of && c.offsets.type == MISSING && c.scales.type > FLOAT32 && c.scales.fine_type == WHOLE)
            return body(Form<BITS, ITSELF, ROUNDS, true, false, true>());
    if constexpr (BITS == 2 || BITS == 4 || BITS == 8) {
        if (c.group_of) return body(Form<BITS, ITSELF, ROUNDS, false, true>());
        if (!c.exact) return body(Form<BITS, ITSELF, ROUNDS>());
    }
    body(Form<BITS, ITSELF, ROUNDS, true>());
}

// `ROUNDS`: whether single numbers are rounded to bfloat16; pairs of them are.
template <bool ROUNDS, class Body>
void with_form(const Codes& c, const Body& body) {
    if (c.grid) return body(Form<4, SHORT, ROUNDS, false, false, false, true>());
    if (c.planes[0]) return with_form_of<8, ROUNDS>(c, body);
    if (c.planes[1] && c.planes[2]) return with_form_of<6, ROUNDS>(c, body);
    if (c.planes[1] && c.planes[3]) return with_form_of<5, ROUNDS>(c, body);
    if (c.planes[1]) return with_form_of<4, ROUNDS>(c, body);
    if (c.planes[3]) return with_form_of<3, ROUNDS>(c, body);
    with_form_of<2, ROUNDS>(c, body);
}

// The same, for words of PER_WORD numbers.
template <int PER_WORD, class Body>
void with_form_of_words(const Codes& c, const Body& body) {
    if constexpr (PER_WORD == 1)
        if (c.rounds) return with_form<true>(c, body);
    with_form<false>(c, body);
}

// Unpacks inputs [k, end) of a panel of WIDTH columns as `pack` of linear.h does: [WIDTH / SIDE][words][SIDE], PER_WORD inputs in a word.
// `groups`: of `PanelGroups`, from k on.
template <int PER_WORD, int WIDTH, int SIDE>
__attribute__((noinline)) void unpack(const Codes& c, int64_t panel, int64_t k, int64_t end, const GroupNumbers* groups, uint32_t* to) {
    with_form_of_words<PER_WORD>(c, [&](auto form) {
        for (int lane = 0; lane < WIDTH; lane += LANES) {
            Unpacker<decltype(form)> some(c, panel, lane, WIDTH, groups + lane / LANES, WIDTH / LANES);
            uint32_t* part = to + lane / SIDE * SIDE * ((end - k) / PER_WORD) + lane % SIDE;
            by_groups(c, k, end, [&] { some.turn(); }, [&](int64_t i) {
                some.load(i);
#pragma GCC unroll 8
                for (int j = 0; j < 8; j += PER_WORD, part += SIDE) store(part, some.template word<PER_WORD>(j));
            });
        }
    });
}

}  // namespace
