// Linear layers in 8 bits: y = (q x_scale) (W scale)^T + bias. q and W are whole numbers from -127 to 127, x_scale belongs to a row and
// scale to a column. Sums are exact, in 32 bits, so a row's result depends only on the row.
//
// A word of W holds four values that are neighbours along the inner dimension.
#include "int8.h"
#include "linear_tiles.h"

namespace {

#if !defined(BATCHGEN_AMX)
constexpr int SIDE = WIDTH;
#endif

#if defined(__AVX2__) && !defined(UNSIGNED_BYTES)
// No instruction sums four products of bytes exactly (vpmaddubsw saturates), so both factors are widened to 16 bits. The four values of a
// word are in the order 0, 2, 1, 3, so that its even bytes are two neighbours, and so are its odd bytes.
struct Pairs {  // words of two values of 16 bits
    typedef ints sum;
    static constexpr int per_word = 2, a_words = 1;
    static constexpr int side = SIDE;
    static constexpr bool scaled = true;
    static INLINE ints add(ints sum, uints b, int x) {
#if defined(__AVX512F__)
        return sum + (ints)_mm512_madd_epi16((__m512i)b, _mm512_set1_epi32(x));
#else
        return sum + (ints)_mm256_madd_epi16((__m256i)b, _mm256_set1_epi32(x));
#endif
    }
    template <int R, int N>
    static INLINE void multiply(ints (&sums)[R][N], const uints (&b)[N], const uint32_t* a, int64_t a_row) {
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sums[r][n] = add(sums[r][n], b[n], int(a[r * a_row]));
    }
};
struct Bytes {
    typedef ints sum;
    typedef Pairs wide;
    static constexpr int per_word = 4, a_words = 2;
    static constexpr int side = SIDE;
    static constexpr bool scaled = true;
#if defined(__AVX512F__)
    static INLINE uints low(uints b) { return (uints)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)b, 8), 8); }
    static INLINE uints high(uints b) { return (uints)_mm512_srai_epi16((__m512i)b, 8); }
#else
    static INLINE uints low(uints b) { return (uints)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)b, 8), 8); }
    static INLINE uints high(uints b) { return (uints)_mm256_srai_epi16((__m256i)b, 8); }
#endif
    template <int R, int N>
    static INLINE void multiply(ints (&sums)[R][N], const uints (&b)[N], const uint32_t* a, int64_t a_row) {
        uints some[N];
        for (int n = 0; n < N; n++) some[n] = low(b[n]);
        Pairs::multiply<R, N>(sums, some, a, a_row);
        for (int n = 0; n < N; n++) some[n] = high(b[n]);
        Pairs::multiply<R, N>(sums, some, a + 1, a_row);
    }
};
#else
struct Bytes {
    typedef ints sum;
    static constexpr int per_word = 4, a_words = 1;
    static constexpr int side = SIDE;
    static constexpr bool scaled = true;
    static INLINE ints add(ints sum, uints b, uint32_t x) {
#if defined(__AVX512VNNI__)
        return (ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(int(x)), (__m512i)b);
#elif defined(__AVXVNNI__)
        return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32(int(x)), (__m256i)b);
#elif defined(__ARM_FEATURE_DOTPROD)
        return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)b, vreinterpretq_s8_u32(vdupq_n_u32(x)));
#elif defined(__ARM_NEON)
        const int8x16_t values = (int8x16_t)b, row = vreinterpretq_s8_u32(vdupq_n_u32(x));
        const int32x4_t first = vpaddlq_s16(vmull_s8(vget_low_s8(values), vget_low_s8(row)));
        const int32x4_t second = vpaddlq_s16(vmull_high_s8(values, row));
        return sum + (ints)vpaddq_s32(first, second);
#else
        for (int i = 0; i < LANES; i++)
            for (int k = 0; k < 4; k++) sum[i] += int8_t(b[i] >> 8 * k) * int8_t(x >> 8 * k);
        return sum;
#endif
    }
    template <int R, int N>
    static INLINE void multiply(ints (&sums)[R][N], const uints (&b)[N], const uint32_t* a, int64_t a_row) {
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sums[r][n] = add(sums[r][n], b[n], a[r * a_row]);
    }
};
#endif

#if defined(BATCHGEN_AMX)
constexpr int AMX_ROWS = ROWS + 1;  // with this many rows or more, tiles are faster than vectors
#endif

template <class T>
void linear(const Product& p) {
#if defined(BATCHGEN_AMX)
    if (p.rows >= AMX_ROWS) return run_tiles<Bytes, T>(p);
#endif
    run<Bytes, T>(p);
}

struct Rows {  // `QuantizeArguments` in int8.py is the same
    int64_t rows, size, x_row, q_row;  // x_row, q_row: elements of x and of q from one row to the next
    int64_t threads;
    const void* x;
    quantized* q;
    float* scales;
};

template <class T>
void quantize(const Rows& r) {
    constexpr int64_t worth = 8192;  // elements for each thread
    for_each(r.rows, std::max<int64_t>(1, std::min(r.threads, r.rows * r.size / worth)), [&](int64_t row) {
        r.scales[row] = quantize_row<T>((const T*)r.x + row * r.x_row, r.size, r.q + row * r.q_row);
    });
}

}  // namespace

EXPORT void batchgen_linear_int8_float32(const Product* p) { linear<float>(*p); }
EXPORT void batchgen_linear_int8_bfloat16(const Product* p) { linear<bf16>(*p); }
EXPORT void batchgen_quantize_float32(const Rows* r) { quantize<float>(*r); }
EXPORT void batchgen_quantize_bfloat16(const Rows* r) { quantize<bf16>(*r); }
// Bytes of a quantized value of x: with 2, the values of a word of the weights are in the order 0, 2, 1, 3.
EXPORT int64_t batchgen_int8_bytes() { return sizeof(quantized); }
EXPORT int64_t batchgen_int8_side() { return SIDE; }
EXPORT int64_t batchgen_int8_is_unsigned() { return quantized(-1) > 0; }
