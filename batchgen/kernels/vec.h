// What all kernels share: vectors of 16 floats in the compiler's own notation (one AVX-512 register, two of AVX2, four of
// NEON), bfloat16 in pairs, and exp. Everything is exact in the same way on every processor but for the order of sums.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

typedef float f16v __attribute__((vector_size(64)));     // 16 floats
typedef int32_t i16v __attribute__((vector_size(64)));   // 16 integers
typedef uint32_t u16v __attribute__((vector_size(64)));  // 16 words: floats, or pairs of bfloat16
typedef uint16_t h16v __attribute__((vector_size(32)));  // 16 bfloat16
typedef uint16_t bf16;

template <class V, class P>
INLINE V load(const P* p) {  // from any address
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V, class P>
INLINE void store(P* p, V v) { std::memcpy(p, &v, sizeof v); }

INLINE f16v splat(float x) { return f16v{} + x; }

INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
INLINE float to_float(float x) { return x; }

INLINE f16v load_floats(const float* p) { return load<f16v>(p); }
INLINE f16v load_floats(const bf16* p) { return (f16v)(__builtin_convertvector(load<h16v>(p), u16v) << 16); }

// To nearest, ties to even, as torch rounds; NaN stays NaN.
INLINE h16v to_bf16(f16v x) {
#if defined(__AVX512BF16__)
    // vcvtneps2bf16 flushes denormals to zero; torch does not, but such values are below 1e-38.
    __m256bh r = _mm512_cvtneps_pbh((__m512)x);
    h16v h;
    std::memcpy(&h, &r, 32);
    return h;
#else
    u16v bits = (u16v)x;
    u16v nan = (u16v)((bits & 0x7fffffffu) > 0x7f800000u);
    u16v rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return __builtin_convertvector((nan & ((bits >> 16) | 0x40u)) | (~nan & rounded), h16v);
#endif
}

INLINE void store_floats(float* p, f16v v) { store(p, v); }
INLINE void store_floats(bf16* p, f16v v) { store(p, to_bf16(v)); }

INLINE f16v select(i16v where, f16v yes, f16v no) { return (f16v)((where & (i16v)yes) | (~where & (i16v)no)); }
INLINE f16v max(f16v a, f16v b) {
#if defined(__AVX512F__)
    return (f16v)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}

// Natural exponential to about 1 unit in the last place; 0 below -87.3, infinite above 88.7, NaN of NaN.
// 2^n * 2^r by a minimax polynomial of degree 6 for |r| <= 1/2 (Muller, Elementary Functions, ch. 3, for the method).
INLINE f16v exp(f16v x) {
    const f16v low = splat(-87.3f), high = splat(88.73f);
    f16v inside = select(x < low, low, select(x > high, high, x));
    f16v n = inside * 1.44269504088896341f + 12582912.0f;  // rounds to an integer in the low bits
    i16v whole = (i16v)n - 0x4b400000;
    n -= 12582912.0f;
    f16v r = inside - n * 0.693359375f;  // ln 2 in two parts (Cody and Waite)
    r -= n * -2.12194440e-4f;
    f16v p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    f16v y = p * (f16v)((whole + 127) << 23);
    y = select(x < low, f16v{}, y);
    return select(x > high, splat(__builtin_inff()), select(x != x, x, y));
}

// 2 to the power of x <= 0, to about 1 unit in the last place; 0 below -126, NaN of NaN. Cephes' exp2f.
INLINE f16v exp2_of_negative(f16v x) {
#if defined(__AVX512F__)
    const f16v t = (f16v)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // the second where one is NaN
    const f16v n = (f16v)_mm512_roundscale_ps((__m512)t, 0);
#else
    const f16v t = select(x < splat(-126.0f), splat(-126.0f), x);
    f16v n = t + 12582912.0f;  // rounds to an integer in the low bits
    const i16v whole = (i16v)n - 0x4b400000;
    n -= 12582912.0f;
#endif
    const f16v r = t - n;
    f16v p = splat(1.535336188319500e-4f);
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return (f16v)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return select(x < splat(-126.0f), f16v{}, select(x != x, x, p * (f16v)((whole + 127) << 23)));
#endif
}

INLINE float sum(f16v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s[16];
    store(s, v);
    float a = 0, b = 0;
    for (int i = 0; i < 8; i++) a += s[i], b += s[i + 8];
    return a + b;
#endif
}
INLINE float largest(f16v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float s[16];
    store(s, v);
    float m = s[0];
    for (int i = 1; i < 16; i++) m = s[i] > m ? s[i] : m;
    return m;
#endif
}

// Dot products of words: acc[i] += b[i] . a, a word of A against 16 words of B. A word is one float, or two bfloat16 that
// follow one another along the summed dimension.
struct Float {
    typedef float type;
    static constexpr int per_word = 1;
    static INLINE f16v dot(f16v acc, u16v b, uint32_t a) {
        float x;
        std::memcpy(&x, &a, 4);
        return acc + (f16v)b * x;
    }
};
struct Bfloat {
    typedef bf16 type;
    static constexpr int per_word = 2;
    static INLINE f16v dot(f16v acc, u16v b, uint32_t a) {
#if defined(__AVX512BF16__)
        __m512i x = _mm512_set1_epi32(int(a)), y = (__m512i)b;
        return (f16v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)y, (__m512bh)x);
#else
        u16v x = u16v{} + a;
        acc += (f16v)(b << 16) * (f16v)(x << 16);
        return acc + (f16v)(b & 0xffff0000u) * (f16v)(x & 0xffff0000u);
#endif
    }
};
