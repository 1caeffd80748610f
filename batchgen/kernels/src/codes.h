// Weights that are packed as codes: what a code means, and panels of the numbers that codes stand for (codes.py has the same in torch).
// A number is level * scale [/ divisor] [+ offset], each operation rounded to float32, and the result rounded to the type of the weights.
//
// A scale of 16 bits, also times a fine one of 8, has so few bits that its products are exact in float32 where something is added to them. So it
// does not matter whether they are rounded before, and (2^k + code) * scale - (2^k + zero) * scale is the number, in one operation.
#pragma once
#include <vector>

#include "vec.h"

namespace {

enum Levels { ITSELF = 0, TABLE = 1, E4M3 = 2 };
enum Numbers { MISSING = 0, FLOAT32 = 1, FLOAT16 = 2, BFLOAT16 = 3 };
enum Fine { WHOLE = 0, UNSIGNED = 1, SIGNED = 2, FLOAT8 = 3, POWER = 4 };

struct Groups {  // a number for each group of inputs, [panels][groups][columns of a panel]: a coarse one, times (or below) a fine one
    const void* coarse;
    const uint8_t* fine;
    int64_t type, fine_type, per_coarse, divides;  // groups that have one coarse number
};
struct Codes {  // `CodesArguments` in coded.py is the same
    const uint32_t* planes[4];  // of 8, 4, 2 and 1 bits, [panels][words][columns of a panel]; the first inputs are in the lowest bits of a word
    const float* table;         // of 16 levels
    const uint8_t* zeros;       // [panels][groups][columns], or null
    const int32_t* group_of;    // [inputs]; null if groups have `group` inputs, a multiple of 8
    Groups scales, offsets;
    int64_t inputs, groups, group, levels, zero, rounds;
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

// The numbers of a group in LANES columns.
INLINE floats numbers_of(const Groups& g, int64_t at, int64_t coarse_at) {
    floats coarse = splat(1.0f);
    if (g.type == FLOAT32) coarse = load<floats>((const float*)g.coarse + coarse_at);
    if (g.type == FLOAT16) coarse = from_float16((const uint16_t*)g.coarse + coarse_at);
    if (g.type == BFLOAT16) coarse = load_floats((const bf16*)g.coarse + coarse_at);
    if (g.fine_type == WHOLE) return coarse;
    const uints code = load_bytes(g.fine + at);
    floats fine;
    if (g.fine_type == UNSIGNED) fine = to_floats((ints)code);
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
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)code);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)code);
    return (floats)_mm256_blendv_ps(low, high, (__m256)(code << 28));
#else
    floats y;
    for (int i = 0; i < LANES; i++) y[i] = table[code[i]];
    return y;
#endif
}

INLINE uints rounded_bits(floats x) {  // to bfloat16, in the upper half; no NaN
    const uints bits = (uints)x;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

#if defined(__AVX2__)
// Of words of two float16 each, LANES / 2 words and the others.
INLINE void from_halves(uints words, floats (&to)[2]) {
#if defined(__AVX512F__)
    to[0] = (floats)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)words));
    to[1] = (floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)words, 1));
#else
    to[0] = (floats)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)words));
    to[1] = (floats)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)words, 1));
#endif
}

// Bytes FIRST and FIRST + 1 of each word, each in the upper half of 16 bits.
template <int FIRST>
INLINE uints two_bytes(uints words) {
    constexpr int order = (FIRST + 1) << 24 | 0x80 << 16 | FIRST << 8 | 0x80;  // 0x80: a zero
#if defined(__AVX512F__)
    const __m512i all = _mm512_or_si512(_mm512_set1_epi32(order), _mm512_broadcast_i32x4(_mm_set_epi32(0x0c000c00, 0x08000800, 0x04000400, 0)));
    return (uints)_mm512_shuffle_epi8((__m512i)words, all);
#else
    const __m256i lanes = _mm256_broadcastsi128_si256(_mm_set_epi32(0x0c000c00, 0x08000800, 0x04000400, 0));
    return (uints)_mm256_shuffle_epi8((__m256i)words, _mm256_or_si256(_mm256_set1_epi32(order), lanes));
#endif
}

#if !defined(__AVX512F__)
// Byte FIRST of each word, then byte FIRST + 1 of each, each in the upper half of 16 bits.
template <int FIRST>
INLINE uints bytes_of_two(uints words) {
    constexpr int first = 0x04800080 + 0x01000100 * FIRST, second = first + 0x01000100, next = 0x08000800;  // 0x80: a zero
    const __m256i order = _mm256_broadcastsi128_si256(_mm_set_epi32(second + next, second, first + next, first));
    return (uints)_mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)words, order), 0xd8);
}
#endif

// Each of LANES / 2 numbers twice, from number FIRST on.
template <int FIRST>
INLINE floats twice(floats x) {
#if defined(__AVX512F__)
    const __m512i order = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return (floats)_mm512_permutexvar_ps(_mm512_add_epi32(order, _mm512_set1_epi32(FIRST)), (__m512)x);
#else
    const __m256i order = _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0);
    return (floats)_mm256_permutevar8x32_ps((__m256)x, _mm256_add_epi32(order, _mm256_set1_epi32(FIRST)));
#endif
}

// LANES numbers, then LANES others, as bfloat16.
INLINE uints in_order(floats a, floats b) {
#if defined(__AVX512BF16__)
    return (uints)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#elif defined(__AVX512F__)
    return (uints)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)to_bf16(a)), (__m256i)to_bf16(b), 1);
#else
    return (uints)_mm256_set_m128i((__m128i)to_bf16(b), (__m128i)to_bf16(a));
#endif
}
#endif

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

struct ScatteredGroup {  // the scale and the zero of a group in LANES columns
    floats scale, zero;
};

// The groups of a panel whose inputs may be in any groups, [columns / LANES][groups]. They are made once for a panel, because the group
// changes with almost every input.
class ScatteredGroups {
   public:
    // Takes those of a panel. Returns null, and takes none, if groups have neighbouring inputs.
    const ScatteredGroup* take(const Codes& c, int64_t panel, int64_t columns) {
        if (!c.group_of) return nullptr;
        groups_.clear();
        const int64_t coarse_groups = (c.groups + c.scales.per_coarse - 1) / c.scales.per_coarse;
        for (int64_t lane = 0; lane < columns; lane += LANES)
            for (int64_t group = 0; group < c.groups; group++) {
                const int64_t at = (panel * c.groups + group) * columns + lane;
                const floats scale = numbers_of(c.scales, at, (panel * coarse_groups + group / c.scales.per_coarse) * columns + lane);
                groups_.push_back({scale, zeros_of(c, at) + 0x1p23f});
            }
        return groups_.data();
    }

   private:
    std::vector<ScatteredGroup> groups_;
};

// What is known of codes when the kernels are compiled. SCATTERED: neighbours among the inputs may be in any groups. EXACT: codes of 4 or 8 bits
// whose products with scales are exact.
template <int BITS_, int LEVELS_, bool OFFSET_ = false, bool SCATTERED_ = false, bool EXACT_ = false>
struct Form {
    static constexpr int BITS = BITS_, LEVELS = LEVELS_;
    static constexpr bool OFFSET = OFFSET_, SCATTERED = SCATTERED_, EXACT = EXACT_;
};

// Unpacks 8 inputs at a time, in LANES columns, to words of PER_WORD numbers.
template <class F, int PER_WORD>
class Unpacker {
   public:
    static constexpr int WORDS = 8 / PER_WORD;

    // `lane`: the first column, of the columns of a panel; `k`: the first input; `scattered`: see `ScatteredGroups`.
    INLINE Unpacker(const Codes& c, int64_t panel, int lane, int64_t columns, int64_t k, const ScatteredGroup* scattered)
        : c_(c), columns_(columns), lane_(lane), groups_(panel * c.groups), scattered_(SCATTERED ? scattered + c.groups * (lane / LANES) : nullptr) {
        for (int plane = 0; plane < 4; plane++) planes_[plane] = c.planes[plane] + (c.inputs >> 5 << (3 - plane)) * panel * columns + lane;
        scales_ = panel * coarse_groups(c.scales), offsets_ = panel * coarse_groups(c.offsets);
        if (!SCATTERED) group_ = k / c.group - 1, end_ = (group_ + 1) * c.group;
    }

    // Unpacks inputs [k, k + 8), which follow those before; k is a multiple of 8.
    INLINE void unpack(int64_t k, uints (&to)[WORDS]) {
        if constexpr (IN_PAIRS) return unpack_pairs(k, to);
        if constexpr (FROM_HALVES) return unpack_halves(k, to);
        floats x[8];
        numbers(k, x);
        for (int i = 0; i < WORDS; i++) {
            if (PER_WORD == 2)
                to[i] = in_pairs(x[2 * i], x[2 * i + 1]);
            else
                to[i] = c_.rounds ? rounded_bits(x[i]) & 0xffff0000u : (uints)x[i];
        }
    }

   private:
    INLINE void numbers(int64_t k, floats (&to)[8]) {
        follow(k);
        uints low[2] = {}, high = {}, top = {};
        if (BITS == 8)
            for (int i = 0; i < 2; i++) low[i] = words(0, k / 4 + i);
        if (BITS >= 4 && BITS < 8) low[0] = words(1, k / 8);
        if (BITS == 6 || BITS < 4) high = words(2, k / 16) >> uint32_t(k % 16 * 2);
        if (BITS == 5 || BITS == 3) top = words(3, k / 32) >> uint32_t(k % 32);
        const uints shifted[3] = {low[0] << 11, low[0] >> 1, low[0] >> 13};
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            uints code;
            if (BITS == 8) code = low[i / 4] >> uint32_t(i % 4 * 8) & 255u;
            if (BITS >= 4 && BITS < 8) code = low[0] >> uint32_t(i * 4);
            if (BITS >= 4 && BITS < 8 && !(LEVELS == TABLE && LOWEST_BITS_CHOOSE)) code &= 15u;
            if (BITS == 6) code |= moved(high, 4 - i * 2) & 48u;
            if (BITS < 4) code = high >> uint32_t(i * 2) & 3u;
            if (BITS == 5) code |= moved(top, 4 - i) & 16u;
            if (BITS == 3) code |= moved(top, 2 - i) & 4u;
            if (SCATTERED) {
                const ScatteredGroup& group = scattered_[c_.group_of[k + i]];
                scale_ = group.scale, zero_[0] = group.zero;
            }
            if (PLACES == 1 && !EXACT) {
                to[i] = number(code);
                continue;
            }
            // Where a code lies in the mantissa of a power of two: one shift brings three codes of 4 bits there.
            const int place = place_of(i), byte = i % 4 * 8;
            const uints word = BITS == 4 ? shifted[i / 3] : moved(low[i / 4], place - byte);
            const floats x = (floats)((word & uint32_t(((1 << BITS) - 1) << place)) | uint32_t(150 - place) << 23);
            to[i] = EXACT ? x * scale_ - zero_[i % PLACES] : number_of(x - zero_[i % PLACES]);
        }
    }

#if defined(__AVX2__)
    // Unpacks e4m3 to two bfloat16 in each word. The float16 of a code's bits, one to the right, is its number / 256.
    INLINE void unpack_pairs(int64_t k, uints (&to)[4]) {
        follow(k);
        for (int i = 0; i < 2; i++) {
            const uints some = words(0, k / 4 + i);
            to[2 * i] = pairs(two_bytes<0>(some)), to[2 * i + 1] = pairs(two_bytes<2>(some));
        }
    }
#else
    INLINE void unpack_pairs(int64_t, uints (&)[WORDS]) {}
#endif

    // Unpacks e4m3 to floats, as `unpack_pairs` does.
    INLINE void unpack_halves(int64_t k, uints (&to)[WORDS]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
        follow(k);
        for (int i = 0; i < 8; i += 4) {
            const uints some = words(0, (k + i) / 4);
            floats x[2][2];
            from_halves(halves_of(bytes_of_two<0>(some)), x[0]), from_halves(halves_of(bytes_of_two<2>(some)), x[1]);
            for (int j = 0; j < 4; j++) {
                const floats number = x[j / 2][j % 2] * scale_;
                to[i + j] = c_.rounds ? rounded_bits(number) & 0xffff0000u : (uints)number;
            }
        }
#endif
    }

    static constexpr int BITS = F::BITS, LEVELS = F::LEVELS;
    static constexpr bool OFFSET = F::OFFSET, SCATTERED = F::SCATTERED, EXACT = F::EXACT;
#if defined(__AVX2__)
    static constexpr bool IN_PAIRS = PER_WORD == 2 && LEVELS == E4M3;
#else
    static constexpr bool IN_PAIRS = false;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
    static constexpr bool FROM_HALVES = PER_WORD == 1 && LEVELS == E4M3;
#else
    static constexpr bool FROM_HALVES = false;
#endif
    static constexpr bool LIFTED = BITS == 4 && LEVELS == ITSELF && !SCATTERED;
    static constexpr int PLACES = LIFTED ? 3 : 1;
    static constexpr int place_of(int i) { return EXACT && BITS == 8 ? 15 : LIFTED ? 11 + i % 3 * 4 : 0; }
#if defined(__AVX2__)
    static constexpr bool LOWEST_BITS_CHOOSE = true;  // of an index, the number in a table

    INLINE static uints halves_of(uints bytes) {
        typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
        return (uints)((shorts)bytes >> 1) & 0xbf80bf80u;
    }
    INLINE uints pairs(uints bytes) const {
        floats x[2];
        from_halves(halves_of(bytes), x);
        return in_order(x[0] * scale_, x[1] * other_scale_);
    }
#else
    static constexpr bool LOWEST_BITS_CHOOSE = false;
#endif
    INLINE uints words(int plane, int64_t word) const {
        __builtin_prefetch(planes_[plane] + (word + 32) * columns_, 0, 2);  // into the second cache: loads do not wait for it
        return load<uints>(planes_[plane] + word * columns_);
    }
    INLINE floats number(uints code) const {
        const floats x = LEVELS == TABLE ? level_of(c_.table, code) : LEVELS == E4M3 ? from_float8(code) : (floats)(code | 0x4b000000u) - zero_[0];
        return number_of(x);
    }
    INLINE floats number_of(floats x) const {
        x *= scale_;
        if (LEVELS == ITSELF && !OFFSET && BITS == 8 && c_.divisor != 1) x /= float(c_.divisor);
        return OFFSET ? x + offset_ : x;
    }
    INLINE void follow(int64_t k) {
        if (!SCATTERED && k >= end_) turn_to(group_ + 1), end_ += c_.group;
    }
    INLINE void turn_to(int64_t group) {
        group_ = group;
        const int64_t at = (groups_ + group) * columns_ + lane_;
        scale_ = numbers_of(c_.scales, at, (scales_ + coarse_of(c_.scales, group)) * columns_ + lane_);
        if (OFFSET) offset_ = numbers_of(c_.offsets, at, (offsets_ + coarse_of(c_.offsets, group)) * columns_ + lane_);
#if defined(__AVX2__)
        if (FROM_HALVES) scale_ *= 256.0f;
        if (IN_PAIRS) other_scale_ = twice<LANES / 2>(scale_ * 256.0f), scale_ = twice<0>(scale_ * 256.0f);
#endif
        if (LEVELS != ITSELF) return;
        const floats zero = zeros_of(c_, at);
        // Added to 2^k, a whole number is in the lower bits of a float.
        for (int i = 0; i < PLACES; i++) zero_[i] = zero + float(1 << (23 - place_of(i)));
        if (EXACT)
            for (int i = 0; i < PLACES; i++) zero_[i] *= scale_;
    }
    INLINE static int64_t coarse_of(const Groups& g, int64_t group) { return g.per_coarse == 1 ? group : uint32_t(group) / uint32_t(g.per_coarse); }
    int64_t coarse_groups(const Groups& g) const { return (c_.groups + g.per_coarse - 1) / g.per_coarse; }

    const Codes& c_;
    const int64_t columns_;
    const int lane_;
    const int64_t groups_;
    const ScatteredGroup* scattered_;
    int64_t scales_, offsets_, group_ = -1, end_ = 0;  // the first input after the group
    const uint32_t* planes_[4];
    floats scale_ = {}, other_scale_ = {}, offset_ = {}, zero_[PLACES] = {};
};

// Calls body(form) with the `Form` of codes.
template <int BITS, class Body>
void with_form_of(const Codes& c, const Body& body) {
    if constexpr (BITS == 8)
        if (c.levels == E4M3) return body(Form<8, E4M3>());
    if constexpr (BITS <= 4)
        if (c.levels == TABLE) return body(Form<BITS, TABLE>());
    if (c.group_of) return body(Form<BITS, ITSELF, false, true>());
    if constexpr (BITS < 6)
        if (c.offsets.type != MISSING) return body(Form<BITS, ITSELF, true>());
    if constexpr (BITS == 4 || BITS == 8)
        if (c.scales.type > FLOAT32 && c.scales.fine_type == WHOLE) return body(Form<BITS, ITSELF, false, false, true>());
    body(Form<BITS, ITSELF>());
}

template <class Body>
void with_form(const Codes& c, const Body& body) {
    if (c.planes[0]) return with_form_of<8>(c, body);
    if (c.planes[1] && c.planes[2]) return with_form_of<6>(c, body);
    if (c.planes[1] && c.planes[3]) return with_form_of<5>(c, body);
    if (c.planes[1]) return with_form_of<4>(c, body);
    if (c.planes[3]) return with_form_of<3>(c, body);
    with_form_of<2>(c, body);
}

// Unpacks inputs [k, k + count) of a panel of WIDTH columns as `pack` of linear.h does: [WIDTH / SIDE][words][SIDE], PER_WORD inputs in a word.
template <int PER_WORD, int WIDTH, int SIDE>
void unpack(const Codes& c, int64_t panel, int64_t k, int64_t count, const ScatteredGroup* scattered, uint32_t* to) {
    with_form(c, [&](auto form) {
        for (int lane = 0; lane < WIDTH; lane += LANES) {
            Unpacker<decltype(form), PER_WORD> some(c, panel, lane, WIDTH, k, scattered);
            uint32_t* part = to + lane / SIDE * SIDE * (count / PER_WORD) + lane % SIDE;
            for (int64_t i = 0; i < count; i += 8) {
                uints words[8 / PER_WORD];
                some.unpack(k + i, words);
                for (int j = 0; j < 8 / PER_WORD; j++, part += SIDE) store(part, words[j]);
            }
        }
    });
}

}  // namespace
