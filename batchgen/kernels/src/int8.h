// Quantizes rows of numbers to 8 bits and a scale for each row: x is about q * scale, with q from -127 to 127.
//
// The layout of q in memory is the one that linear_int8.cpp reads on this processor: signed bytes, or q + 128 in unsigned bytes if an
// instruction multiplies unsigned by signed bytes, or 16 bits.
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

// To nearest, ties to even, like torch.round.
INLINE ints to_ints(floats x) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__ARM_NEON)
    return (ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    ints y;
    for (int i = 0; i < LANES; i++) y[i] = int32_t(__builtin_nearbyintf(x[i]));
    return y;
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

// Writes a row of `size` numbers. Returns its scale: the largest magnitude / 127; infinite or NaN if one of the numbers is.
template <class T>
INLINE float quantize_row(const T* x, int64_t size, quantized* to) {
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
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
#pragma GCC unroll 4
    for (i = 0; i + LANES <= size; i += LANES) store_quantized(to + i, to_ints(load_floats(x + i) * inverse));
    if (i < size) store_quantized(to + i, to_ints(load_some(x + i, size - i) * inverse));
    return largest / 127.0f;
}
