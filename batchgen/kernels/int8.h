// Rows of numbers as 8 bits and a scale, each row by itself: x is about q * scale, with q from -127 to 127.
//
// How q lies in memory is what the products of this processor (linear_int8.cpp) read: bytes, from 1 to 255 where an instruction
// multiplies unsigned bytes by signed ones, else signed; or 16 bits.
#pragma once
#include "activation.h"
#include "vec.h"
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define UNSIGNED_BYTES
typedef uint8_t quantized;
#elif defined(__AVX2__)
typedef int16_t quantized;
#else
typedef int8_t quantized;
#endif
constexpr int64_t STEP = 64;  // rows are as long as a multiple of this; what is behind their end is multiplied by zero

// To nearest, ties to even, as torch.round.
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

// Writes a row of `size` numbers and returns its scale: the largest magnitude / 127. Infinite or not a number where one of them is.
template <class T>
INLINE float quantize_row(const T* x, int64_t size, quantized* to) {
    ints most = {};  // magnitudes compare as integers do, and what is not a number is above all
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const ints v = (ints)load_floats(x + i) & 0x7fffffff;
        const ints more = v > most;
        most = (v & more) | (most & ~more);
    }
    if (i < size) {
        const ints v = (ints)load_some(x + i, size - i) & 0x7fffffff;
        const ints more = v > most;
        most = (v & more) | (most & ~more);
    }
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits = most[lane] > bits ? most[lane] : bits;
    float largest;
    std::memcpy(&largest, &bits, 4);
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    for (i = 0; i + LANES <= size; i += LANES) store_quantized(to + i, to_ints(load_floats(x + i) * inverse));
    if (i < size) store_quantized(to + i, to_ints(load_some(x + i, size - i) * inverse));
    return largest / 127.0f;
}
