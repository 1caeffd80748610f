// Quantizes rows of numbers: x is about q * scale. q has 16 bits, and is as large as sums of 32 bits allow, if no instruction multiplies bytes
// exactly; else it goes from -127 to 127 in signed bytes, or q + 128 in unsigned bytes if an instruction multiplies unsigned by signed ones.
//
// In trained models a few numbers of a row are many times as large as the others, which 8 bits and one scale would leave with few values. So
// neighbours are rotated first: each block of 64 becomes 64 sums of all of them with other signs, over 8 (a Hadamard matrix, which is its own
// inverse). The weights are rotated in the same way, so products stay what they are (QuaRot: Ashkboos et al., arXiv:2404.00456). Weights that
// are a checkpoint's own whole numbers cannot be rotated; where they are codes, bytes have a scale for each group of a row instead.
//
// linear_int8.cpp reads q.
#pragma once
#include "activation.h"
#include "vec.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define UNSIGNED_BYTES
typedef uint8_t quantized;
#elif defined(__AVX2__)
typedef int16_t quantized;
#else
typedef int8_t quantized;
#endif
constexpr int64_t STEP = 64;  // the length of rows is a multiple of this; weights behind their end are zero
enum Rounding : int64_t { ROW, ROTATED, GROUPS };  // of a row as it is, rotated, or of each group; `Rounding` in int8.py is the same
constexpr bool GROUPED = sizeof(quantized) == 1;  // whether GROUPS is more than ROW
constexpr int64_t GROUP = 64;  // numbers
INLINE int64_t groups_of(int64_t size, int64_t rounding) { return GROUPED && rounding == GROUPS ? (size + GROUP - 1) / GROUP : 1; }

// The largest q of a row of `size` numbers: the sum of the products with as many weights, from -128 to 127, has 32 bits.
INLINE float largest_whole(int64_t size) {
    if (sizeof(quantized) == 1) return 127;
    const int64_t most = INT32_MAX / (128 * size);
    return float(most < INT16_MAX ? most : INT16_MAX);
}

// To nearest, ties to even, like torch.round.
INLINE ints to_ints(floats x) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (ints)_mm256_cvtps_epi32((__m256)x);
#else
    return (ints)vcvtnq_s32_f32((float32x4_t)x);
#endif
}

INLINE void store_quantized(quantized* to, ints q) {
#if defined(__AVX512F__) && defined(UNSIGNED_BYTES)
    store(to, _mm_xor_si128(_mm512_cvtepi32_epi8((__m512i)q), _mm_set1_epi8(char(0x80))));
#elif defined(__AVX512F__)
    store(to, _mm512_cvtepi32_epi16((__m512i)q));
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)q, (__m256i)q), 0x08);
#if defined(UNSIGNED_BYTES)
    const __m128i low = _mm256_castsi256_si128(pairs);
    const __m128i bytes = _mm_xor_si128(_mm_packs_epi16(low, low), _mm_set1_epi8(char(0x80)));
    _mm_storel_epi64((__m128i*)to, bytes);
#else
    store(to, _mm256_castsi256_si128(pairs));
#endif
#else
    for (int i = 0; i < LANES; i++) to[i] = quantized(q[i]);
#endif
}

INLINE ints larger(ints a, ints b) {
#if defined(__AVX512F__)
    return (ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    const ints first = a > b;
    return (a & first) | (b & ~first);
#endif
}

// Writes a group of `size` numbers. Returns its scale: the largest magnitude / `most`; infinite or NaN if one of the numbers is.
template <class T>
INLINE float quantize_group(const T* x, int64_t size, float most, quantized* to) {
    ints highest[4] = {};  // bits of magnitudes, which compare like integers; NaN is above all numbers
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int j = 0; j < 4; j++) highest[j] = larger(highest[j], (ints)load_floats(x + i + j * LANES) & 0x7fffffff);
    for (; i < size; i += LANES) {
        const floats v = load_at(x, i, size);
        highest[0] = larger(highest[0], (ints)v & 0x7fffffff);
    }
    const ints all = larger(larger(highest[0], highest[1]), larger(highest[2], highest[3]));
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits = all[lane] > bits ? all[lane] : bits;
    float largest;
    std::memcpy(&largest, &bits, 4);
    const float inverse = largest > 0 ? most / largest : 0.0f;
#pragma GCC unroll 4
    for (i = 0; i + LANES <= size; i += LANES) store_quantized(to + i, to_ints(load_floats(x + i) * inverse));
    if (i < size) store_quantized(to + i, to_ints(load_some(x + i, size - i) * inverse));
    return largest / most;
}

// Returns the sums and differences of numbers whose lanes are HALF apart, then of those of half as much, ...
template <int HALF = LANES / 2>
INLINE floats rotate_lanes(floats v) {
    floats signs, other;
#if defined(__GNUC__) && !defined(__clang__)
    ints partners;
    for (int i = 0; i < LANES; i++) partners[i] = i ^ HALF;
    other = __builtin_shuffle(v, partners);
#else
    for (int i = 0; i < LANES; i++) other[i] = v[i ^ HALF];
#endif
    for (int i = 0; i < LANES; i++) signs[i] = i & HALF ? -1.0f : 1.0f;
    v = v * signs + other;
    if constexpr (HALF > 1) return rotate_lanes<HALF / 2>(v);
    return v;
}

// Rotates the whole blocks of a row of `size` numbers; the others stay. `to` may be x.
template <class T>
INLINE void rotate_blocks(const T* x, int64_t size, float* to) {
    constexpr int64_t BLOCK = 64, PARTS = BLOCK / LANES;
    int64_t i = 0;
    for (; i + BLOCK <= size; i += BLOCK) {
        floats v[PARTS];
        for (int64_t j = 0; j < PARTS; j++) v[j] = load_floats(x + i + j * LANES);
#pragma GCC unroll 4
        for (int64_t half = PARTS / 2; half; half /= 2)
            for (int64_t j = 0; j < PARTS; j++) {
                if (j & half) continue;
                const floats a = v[j], b = v[j + half];
                v[j] = a + b, v[j + half] = a - b;
            }
        for (int64_t j = 0; j < PARTS; j++) store(to + i + j * LANES, rotate_lanes(v[j]) * 0.125f);
    }
    for (; i < size; i += LANES) store_at(to, i, size, load_at(x, i, size));
}

// Writes a row of `size` numbers, and its scale or those of its groups.
template <class T>
INLINE void quantize_row(const T* x, int64_t size, int64_t rounding, quantized* to, float* scales) {
    const float most = largest_whole(size);
    if (rounding == ROTATED) {
        thread_local std::vector<float> rotated;
        rotated.resize(size);
        rotate_blocks(x, size, rotated.data());
        *scales = quantize_group(rotated.data(), size, most, to);
    } else if (GROUPED && rounding == GROUPS) {
        for (int64_t i = 0; i < size; i += GROUP) *scales++ = quantize_group(x + i, size - i < GROUP ? size - i : GROUP, most, to + i);
    } else {
        *scales = quantize_group(x, size, most, to);
    }
}
