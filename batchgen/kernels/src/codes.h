// Weights that are packed as codes: what a code means, and panels of the numbers that codes stand for (codes.py has the same in torch).
// A number is level * scale [/ divisor] [+ offset], each operation rounded to float32, and the result rounded to the type of the weights.
#pragma once
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

// Hides from the compiler how x was computed: a product must be rounded before something is added to it.
INLINE floats settled(floats x) {
#if defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#else
    asm("" : "+m"(x));
#endif
    return x;
}

INLINE uints load_bytes(const uint8_t* p) { return __builtin_convertvector(load<bytes>(p), uints); }

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

// The numbers of 8 inputs at a time, in LANES columns. SCATTERED: neighbours among the inputs may be in any groups.
template <int BITS, int LEVELS, bool OFFSET, bool SCATTERED>
class Unpacker {
   public:
    // `lane`: the first column, of the columns of a panel.
    Unpacker(const Codes& c, int64_t panel, int lane, int64_t columns) : c_(c), columns_(columns), lane_(lane), groups_(panel * c.groups) {
        for (int plane = 0; plane < 4; plane++) planes_[plane] = c.planes[plane] + (c.inputs >> 5 << (3 - plane)) * panel * columns + lane;
        scales_ = panel * coarse_groups(c.scales), offsets_ = panel * coarse_groups(c.offsets);
    }

    // Unpacks inputs [k, k + 8); k is a multiple of 8.
    INLINE void unpack(int64_t k, floats (&to)[8]) {
        if (!SCATTERED && k >= end_) turn_to(k / c_.group), end_ = (group_ + 1) * c_.group;
        uints low[2] = {}, high = {}, top = {};
        if (BITS == 8)
            for (int i = 0; i < 2; i++) low[i] = words(0, k / 4 + i);
        if (BITS >= 4 && BITS < 8) low[0] = words(1, k / 8);
        if (BITS == 6 || BITS < 4) high = words(2, k / 16) >> uint32_t(k % 16 * 2);
        if (BITS == 5 || BITS == 3) top = words(3, k / 32) >> uint32_t(k % 32);
        for (int i = 0; i < 8; i++) {
            uints code;
            if (BITS == 8) code = low[i / 4] >> uint32_t(i % 4 * 8) & 255u;
            if (BITS >= 4 && BITS < 8) code = low[0] >> uint32_t(i * 4) & 15u;
            if (BITS == 6) code |= (high >> uint32_t(i * 2) & 3u) << 4;
            if (BITS < 4) code = high >> uint32_t(i * 2) & 3u;
            if (BITS == 5) code |= (top >> uint32_t(i) & 1u) << 4;
            if (BITS == 3) code |= (top >> uint32_t(i) & 1u) << 2;
            if (SCATTERED && c_.group_of[k + i] != group_) turn_to(c_.group_of[k + i]);
            to[i] = number(code);
        }
    }

   private:
    INLINE uints words(int plane, int64_t word) const {
        __builtin_prefetch(planes_[plane] + (word + 32) * columns_);
        return load<uints>(planes_[plane] + word * columns_);
    }
    INLINE floats number(uints code) const {
        floats x = LEVELS == TABLE ? level_of(c_.table, code) : LEVELS == E4M3 ? from_float8(code) : (floats)(code | 0x4b000000u) - zero_;
        x *= scale_;
        if (LEVELS == ITSELF && !OFFSET && BITS == 8 && c_.divisor != 1) x /= float(c_.divisor);
        return OFFSET ? settled(x) + offset_ : x;
    }
    void turn_to(int64_t group) {
        group_ = group;
        const int64_t at = (groups_ + group) * columns_ + lane_;
        scale_ = numbers_of(c_.scales, at, (scales_ + group / c_.scales.per_coarse) * columns_ + lane_);
        if (OFFSET) offset_ = numbers_of(c_.offsets, at, (offsets_ + group / c_.offsets.per_coarse) * columns_ + lane_);
        // Added to 2^23, a whole number is the lowest bits of a float.
        zero_ = (c_.zeros ? to_floats((ints)load_bytes(c_.zeros + at)) : splat(float(c_.zero))) + 8388608.0f;
    }
    int64_t coarse_groups(const Groups& g) const { return (c_.groups + g.per_coarse - 1) / g.per_coarse; }

    const Codes& c_;
    const int64_t columns_;
    const int lane_;
    const int64_t groups_;
    int64_t scales_, offsets_, group_ = -1, end_ = 0;  // the first input after the group
    const uint32_t* planes_[4];
    floats scale_ = {}, offset_ = {}, zero_ = {};
};

// Unpacks inputs [k, k + count) of a panel of WIDTH columns as `pack` of linear.h does: [WIDTH / SIDE][words][SIDE], PER_WORD inputs in a word.
template <int PER_WORD, int WIDTH, int SIDE, int BITS, int LEVELS, bool OFFSET, bool SCATTERED = false>
void unpack_panel(const Codes& c, int64_t panel, int64_t k, int64_t count, uint32_t* to) {
    for (int lane = 0; lane < WIDTH; lane += LANES) {
        Unpacker<BITS, LEVELS, OFFSET, SCATTERED> some(c, panel, lane, WIDTH);
        uint32_t* part = to + lane / SIDE * SIDE * (count / PER_WORD) + lane % SIDE;
        for (int64_t i = 0; i < count; i += 8) {
            floats x[8];
            some.unpack(k + i, x);
            for (int j = 0; j < 8; j += PER_WORD, part += SIDE) {
                if (PER_WORD == 2)
                    store(part, in_pairs(x[j], x[j + PER_WORD - 1]));
                else
                    store(part, c.rounds ? rounded_bits(x[j]) & 0xffff0000u : (uints)x[j]);
            }
        }
    }
}

template <int PER_WORD, int WIDTH, int SIDE, int BITS>
void unpack_bits(const Codes& c, int64_t panel, int64_t k, int64_t count, uint32_t* to) {
    const bool offset = c.offsets.type != MISSING;
    if (BITS == 8 && c.levels == E4M3) return unpack_panel<PER_WORD, WIDTH, SIDE, 8, E4M3, false>(c, panel, k, count, to);
    if (BITS <= 4 && c.levels == TABLE) return unpack_panel<PER_WORD, WIDTH, SIDE, BITS, TABLE, false>(c, panel, k, count, to);
    if (c.group_of) return unpack_panel<PER_WORD, WIDTH, SIDE, BITS, ITSELF, false, true>(c, panel, k, count, to);
    if (offset) return unpack_panel<PER_WORD, WIDTH, SIDE, BITS, ITSELF, true>(c, panel, k, count, to);
    unpack_panel<PER_WORD, WIDTH, SIDE, BITS, ITSELF, false>(c, panel, k, count, to);
}

template <int PER_WORD, int WIDTH, int SIDE>
void unpack(const Codes& c, int64_t panel, int64_t k, int64_t count, uint32_t* to) {
    if (c.planes[0]) return unpack_bits<PER_WORD, WIDTH, SIDE, 8>(c, panel, k, count, to);
    if (c.planes[1] && c.planes[2]) return unpack_bits<PER_WORD, WIDTH, SIDE, 6>(c, panel, k, count, to);
    if (c.planes[1] && c.planes[3]) return unpack_bits<PER_WORD, WIDTH, SIDE, 5>(c, panel, k, count, to);
    if (c.planes[1]) return unpack_bits<PER_WORD, WIDTH, SIDE, 4>(c, panel, k, count, to);
    if (c.planes[3]) return unpack_bits<PER_WORD, WIDTH, SIDE, 3>(c, panel, k, count, to);
    unpack_bits<PER_WORD, WIDTH, SIDE, 2>(c, panel, k, count, to);
}

}  // namespace
