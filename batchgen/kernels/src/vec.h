// What all kernels share: vectors as wide as the processor's registers in the compiler's own notation, bfloat16 in pairs, and exp.
// Accuracy is the same on every processor; the order of sums is not.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX2__) && !defined(__AVX512F__) && defined(__GNUC__) && __GNUC__ <= 14 && !defined(__clang__)
// <immintrin.h> without the later instruction sets. GCC reads these whatever it compiles for, which takes a second for each file. The name
// of the guard is internal to GCC, so versions later than those that are known read everything.
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#if defined(__AVXVNNI__)
#include <avxvnniintrin.h>
#endif
#elif defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
// A product keeps a block of ROWS x VECTORS sums in registers, beside VECTORS operands and a broadcast one: 24 of 32 registers, or 12
// of AVX2's 16 (Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008).
constexpr int ROWS = 6;
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int VECTORS = 2;
#else
constexpr int VECTORS = 4;
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t uints __attribute__((vector_size(4 * LANES)));   // floats, or pairs of bfloat16
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));  // bfloat16
typedef uint16_t bf16;

template <class V, class P>
INLINE V load(const P* p) {  // from any address
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V, class P>
INLINE void store(P* p, V v) { std::memcpy(p, &v, sizeof v); }

// One by one: on Zen 3 the instruction for all lanes is no faster, and on many of Intel's it was slowed down for safety.
INLINE uints gather(const uint32_t* table, uints at) {
    alignas(4 * LANES) uint32_t from[LANES];
    store(from, at);
    uints y;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) y[i] = table[from[i]];
    return y;
}

INLINE floats to_floats(floats x) { return x; }
INLINE floats to_floats(ints x) { return __builtin_convertvector(x, floats); }
INLINE floats splat(float x) { return x - floats{}; }

INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
INLINE float to_float(float x) { return x; }
INLINE float float_of_float16(uint16_t x) {
#if defined(__AVX2__)
    return _cvtsh_ss(x);
#else
    __fp16 half;
    std::memcpy(&half, &x, sizeof half);
    return half;
#endif
}

INLINE floats load_floats(const float* p) { return load<floats>(p); }
INLINE floats load_floats(const bf16* p) {
#if defined(__AVX512F__)
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16);
#elif defined(__AVX2__)
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(p)), 16);
#else
    return (floats)(__builtin_convertvector(load<halves>(p), uints) << 16);
#endif
}

// a b + c, rounded once. A compiler may round x * y + z once or twice, and of v * w + x * y it may fuse either product, in each copy of a loop
// as it likes; so this is for what several loops compute and must be equal to the last bit.
INLINE floats multiply_add(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

INLINE floats select(ints where, floats yes, floats no) { return (floats)((where & (ints)yes) | (~where & (ints)no)); }

// To nearest, ties to even, as torch rounds; NaN stays NaN.
INLINE halves to_bf16(floats x) {
#if defined(__AVX512BF16__)
    // vcvtneps2bf16 flushes denormals to zero; torch does not, but such values are below 1e-38.
    __m256bh r = _mm512_cvtneps_pbh((__m512)x);
    halves h;
    std::memcpy(&h, &r, sizeof h);
    return h;
#else
    const uints bits = (uints)x;
    const uints nan = (uints)((bits & 0x7fffffffu) > 0x7f800000u);
    const uints rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uints all = (nan & ((bits >> 16) | 0x40u)) | (~nan & rounded);
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)all, (__m256i)all), 0x08);
    return (halves)_mm256_castsi256_si128(packed);
#else
    return __builtin_convertvector(all, halves);
#endif
#endif
}

INLINE void store_floats(float* p, floats v) { store(p, v); }
INLINE void store_floats(bf16* p, floats v) { store(p, to_bf16(v)); }
template <class T>
INLINE void store_pair(T* p, floats first, floats second) {
    store_floats(p, first);
    store_floats(p + LANES, second);
}
#if defined(__AVX512BF16__)
INLINE void store_pair(bf16* p, floats first, floats second) { store(p, _mm512_cvtne2ps_pbh((__m512)second, (__m512)first)); }
#endif

INLINE floats max(floats a, floats b) {  // b where either is NaN
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}

// Natural exponential to about 1 unit in the last place; 0 below -87.3, infinite above 88.3, NaN of NaN.
// 2^n * 2^r by a minimax polynomial of degree 6 for |r| <= 1/2 (Muller, Elementary Functions, ch. 3, for the method).
INLINE floats exp(floats x) {
    const floats low = splat(-87.3f), high = splat(88.73f);
    floats inside = select(x < low, low, select(x > high, high, x));
    floats n = inside * 1.44269504088896341f + 12582912.0f;  // rounds to an integer in the low bits
    ints whole = (ints)n - 0x4b400000;
    n -= 12582912.0f;
    floats r = inside - n * 0.693359375f;  // ln 2 in two parts (Cody and Waite)
    r -= n * -2.12194440e-4f;
    floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    floats y = p * (floats)((whole + 127) << 23);
    y = select(x < low, floats{}, y);
    return select(x > high, splat(__builtin_inff()), select(x != x, x, y));
}

// 2 to the power of r for |r| <= 1/2, to about 2 units in the last place: a minimax polynomial of degree 5.
INLINE floats exp2_of_fraction(floats r) {
    floats p = splat(1.326472731e-3f);
    p = p * r + 9.671512991e-3f;
    p = p * r + 5.550733581e-2f;
    p = p * r + 2.402224243e-1f;
    p = p * r + 6.931470037e-1f;
    return p * r + 1.0f;
}

// 2 to the power of x <= 0; 0 below -127, NaN of NaN. For float32 to about 2 units in the last place; for bfloat16 to 2^-13.
#if defined(__AVX512DQ__)
template <class T>
INLINE floats exp2_of_negative(floats x) {
    const floats r = (floats)_mm512_reduce_ps((__m512)x, 9);  // less its floor; a minimax polynomial of degree 3 or 5 follows
    floats p;
    if (sizeof(T) == 2) {
        p = splat(7.706704607e-2f);
        p = p * r + 2.276449868e-1f;
        p = p * r + 6.951167874e-1f;
    } else {
        p = splat(1.867130186e-3f);
        p = p * r + 9.017030066e-3f;
        p = p * r + 5.579991330e-2f;
        p = p * r + 2.401644501e-1f;
        p = p * r + 6.931513118e-1f;
    }
    p = p * r + 1.0f;
    const __mmask16 not_zero = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-127.0f), _CMP_NLT_UQ);
    return (floats)_mm512_maskz_scalef_ps(not_zero, (__m512)p, (__m512)x);
}
#else
template <class T>
INLINE floats exp2_of_negative(floats x) {
    const floats t = max(splat(-127.0f), x);
    const floats shifted = t + (12582912.0f + 127.0f);  // rounds to an integer in the low bits
    const floats r = t - (shifted - (12582912.0f + 127.0f));
    return exp2_of_fraction(r) * (floats)((ints)shifted << 23);
}
#endif

#if defined(__AVX512F__)
// 2 to the power of x to about 2 units in the last place, x limited to -100 to 100; NaN of NaN.
INLINE floats exp2_of_bounded(floats x) {
    const floats t = (floats)_mm512_min_ps(_mm512_set1_ps(100.0f), _mm512_max_ps(_mm512_set1_ps(-100.0f), (__m512)x));
    const floats whole = (floats)_mm512_roundscale_ps((__m512)t, 0);
    return (floats)_mm512_scalef_ps((__m512)exp2_of_fraction(t - whole), (__m512)whole);
}

// 1 / x to about 1 unit in the last place, where x and 1 / x are far from the ends of float32.
INLINE floats reciprocal(floats x) {
    const floats near = (floats)_mm512_rcp14_ps((__m512)x);
    return near * (2.0f - near * x);  // a step of Newton's method
}
#endif

INLINE float sum(floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s[LANES];
    store(s, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
#endif
}
// Whether a comparison holds in some lane.
INLINE bool any(ints where) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)where, (__m512i)where) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)where) != 0;
#else
    return vmaxvq_u32((uint32x4_t)where) != 0;
#endif
}
INLINE float largest(floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float s[LANES];
    store(s, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] = s[i] > s[i + half] ? s[i] : s[i + half];
    return s[0];
#endif
}

// The kinds of products. `multiply` adds to sums[r][n] the product of a word of B (32 bits of one column) and the numbers of row r of A that
// belong to it. A word of B is one float or two bfloat16 (`type`) that are neighbours along the summed dimension. For each word of B, A has
// `a_words` words of 32 bits, of `a_type`.
struct Float {
    typedef float type, a_type;
    typedef floats sum;
    static constexpr int per_word = 1, a_words = 1;
    static constexpr int side = VECTORS * LANES;  // columns whose words lie side by side (linear.h)
    static constexpr bool scaled = false;
    template <int R, int N>
    static INLINE void multiply(floats (&sums)[R][N], const uints (&b)[N], const uint32_t* a, int64_t a_row) {
        for (int r = 0; r < R; r++) {
            const float x = load<float>(a + r * a_row);
            for (int n = 0; n < N; n++) sums[r][n] += (floats)b[n] * x;
        }
    }
};
// The two float32 of a word's halves in each lane of a vector.
struct PairOfBfloat16 {
    static INLINE uints low(uints b) { return b << 16; }
    static INLINE uints high(uints b) { return b & 0xffff0000u; }
};
// All first halves of float16 lie before all second ones, as they are converted (ops.py).
struct PairOfFloat16 {
#if defined(__AVX512F__)
    static INLINE uints low(uints b) { return (uints)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)b)); }
    static INLINE uints high(uints b) { return (uints)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)b, 1)); }
#elif defined(__AVX2__)
    static INLINE uints low(uints b) { return (uints)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)b)); }
    static INLINE uints high(uints b) { return (uints)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)b, 1)); }
#else
    static INLINE uints low(uints b) { return (uints)vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u32((uint32x4_t)b))); }
    static INLINE uints high(uints b) { return (uints)vcvt_f32_f16(vget_high_f16(vreinterpretq_f16_u32((uint32x4_t)b))); }
#endif
};
template <class Pair>
struct WidenedPair : Pair {  // B in 16 bits, A in float32: exact products
    using Pair::low, Pair::high;
    typedef bf16 type;
    typedef float a_type;
    typedef floats sum;
    typedef Float wide;  // the kind of product after the two numbers of a word are widened
    static constexpr int per_word = 2, a_words = 2;
    static constexpr int side = VECTORS * LANES;
    static constexpr bool scaled = false;
    template <int R, int N>
    static INLINE void multiply(floats (&sums)[R][N], const uints (&b)[N], const uint32_t* a, int64_t a_row) {
        floats some[N];
        for (int n = 0; n < N; n++) some[n] = (floats)low(b[n]);
        for (int r = 0; r < R; r++) {
            const float x = load<float>(a + r * a_row);
            for (int n = 0; n < N; n++) sums[r][n] += some[n] * x;
        }
        for (int n = 0; n < N; n++) some[n] = (floats)high(b[n]);
        for (int r = 0; r < R; r++) {
            const float x = load<float>(a + r * a_row + 1);
            for (int n = 0; n < N; n++) sums[r][n] += some[n] * x;
        }
    }
};
typedef WidenedPair<PairOfBfloat16> Widened;
typedef WidenedPair<PairOfFloat16> WidenedFloat16;
// BATCHGEN_WIDENS: the processor has an instruction for pairs of bfloat16, which is slower than two multiplications of float32 (isa.py).
#if (defined(__AVX512BF16__) && !defined(BATCHGEN_WIDENS)) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Adds to each lane the products of its two bfloat16 and those of x.
INLINE floats add_pairs(floats sum, uints b, uint32_t x) {
    const uints a = x - uints{};
#if defined(__AVX512BF16__)
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)b, (__m512bh)(__m512i)a);
#else
    return (floats)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_u32((uint32x4_t)b), vreinterpretq_bf16_u32((uint32x4_t)a));
#endif
}
struct Bfloat {
    typedef bf16 type, a_type;
    typedef floats sum;
    static constexpr int per_word = 2, a_words = 1;
    static constexpr int side = VECTORS * LANES;
    static constexpr bool scaled = false;
    template <int R, int N>
    static INLINE void multiply(floats (&sums)[R][N], const uints (&b)[N], const uint32_t* a, int64_t a_row) {
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sums[r][n] = add_pairs(sums[r][n], b[n], a[r * a_row]);
    }
};
#else
typedef Widened Bfloat;
#endif

// Whether a loop over words is unrolled. Words that are widened in registers (two vectors for each of N) beside R x N sums leave hardly any free,
// and an unrolled loop would move some sums to memory.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int REGISTERS = 16;
#else
constexpr int REGISTERS = 32;
#endif
template <class E, int R, int N>
constexpr bool UNROLLED = E::a_words == 1 || (R + 2) * N + 2 < REGISTERS;

// Memory that is read next, and is prefetched in parts while other work runs.
class Ahead {
   public:
    void clear() { ranges_.clear(), lines_ = 0; }
    void add(const uint32_t* from, int64_t words) {
        ranges_.push_back({from, from + words});
        lines_ += (words + 15) / 16;
    }
    void divide(int64_t parts) { part_ = (lines_ + parts - 1) / parts; }
    INLINE void fetch() {  // a part
        for (int64_t lines = part_; lines > 0 && !ranges_.empty();) {
            Range& some = ranges_.back();
            for (; lines > 0 && some.begin < some.end; some.begin += 16, lines--) __builtin_prefetch(some.begin, 0, 2);
            if (some.begin >= some.end) ranges_.pop_back();
        }
    }

   private:
    struct Range {
        const uint32_t *begin, *end;
    };
    std::vector<Range> ranges_;
    int64_t lines_ = 0, part_ = 0;  // of 64 bytes
};

// Transposes LANES vectors of LANES words: each step exchanges halves, then quarters, ... of two vectors.
template <int HALF = LANES / 2>
INLINE void transpose(uints (&v)[LANES]) {
    for (int i = 0; i < LANES; i++) {
        if (i & HALF) continue;
        const uints a = v[i], b = v[i + HALF];
#if defined(__GNUC__) && !defined(__clang__)
        uints low, high;
        for (int j = 0; j < LANES; j++) low[j] = j & HALF ? LANES + j - HALF : j, high[j] = j & HALF ? LANES + j : j + HALF;
        v[i] = __builtin_shuffle(a, b, low);
        v[i + HALF] = __builtin_shuffle(a, b, high);
#else
        for (int j = 0; j < LANES; j++) {
            v[i][j] = j & HALF ? b[j - HALF] : a[j];
            v[i + HALF][j] = j & HALF ? b[j] : a[j + HALF];
        }
#endif
    }
    if constexpr (HALF > 1) transpose<HALF / 2>(v);
}

struct NoFetch {
    INLINE void operator()(int64_t) const {}
};

// Adds row r of A times the vectors at b[n] to sums[r][n], over `count` words. B's next word is `step` words further on. Calls fetch(i) before word i.
template <class E, int R, int N, class S, class Fetch = NoFetch>
INLINE void product(S (&sums)[R][N], const uint32_t* a, int64_t a_row, const uint32_t* const (&b)[N], int64_t step, int64_t count, const Fetch& fetch = {}) {
    const auto add = [&](int64_t i) {
        fetch(i);
        uints some[N];
        for (int n = 0; n < N; n++) some[n] = load<uints>(b[n] + i * step);
        E::template multiply<R, N>(sums, some, a + i * E::a_words, a_row);
    };
    if constexpr (UNROLLED<E, R, N>) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < count; i++) add(i);
    } else {
#pragma GCC unroll 1
        for (int64_t i = 0; i < count; i++) add(i);
    }
}

// Calls body(rows) with the number of a block's rows, MOST at most, as a constant.
template <int MOST, class Body>
INLINE void with_rows(int64_t rows, const Body& body) {
    if constexpr (MOST > 1)
        if (rows < MOST) return with_rows<MOST - 1>(rows, body);
    body(std::integral_constant<int, MOST>());
}
