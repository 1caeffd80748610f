// Linear layers in 8 bits: y = (q x_scale) (W scale)^T + bias. q (int8.h) and W are whole numbers, x_scale belongs to a row, and scale to a column.
// Sums over a row are exact, in 32 bits, so a row's result depends only on it.
//
// A word of W holds four values that are neighbours along the inner dimension.
//
// W may be codes of 4 bits (codes.h) that are whole numbers, or levels that are. What is all of one group, of W and, where x has groups (int8.h), of
// x, is multiplied and summed as whole numbers; the sums times the scales of the groups are added in float32, one after the other, whatever the
// rows beside a row.
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
#else
        const int8x16_t values = (int8x16_t)b, row = vreinterpretq_s8_u32(vdupq_n_u32(x));
        const int32x4_t first = vpaddlq_s16(vmull_s8(vget_low_s8(values), vget_low_s8(row)));
        const int32x4_t second = vpaddlq_s16(vmull_high_s8(values, row));
        return sum + (ints)vpaddq_s32(first, second);
#endif
    }
    template <int R, int N>
    static INLINE void multiply(ints (&sums)[R][N], const uints (&b)[N], const uint32_t* a, int64_t a_row) {
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sums[r][n] = add(sums[r][n], b[n], a[r * a_row]);
    }
};
#endif

constexpr int64_t MAX_PART = GROUPED ? GROUP : 256;  // inputs that are summed as whole numbers
constexpr int64_t PART_ROWS = 16 * ROWS;  // of a task: their sums and a part of unpacked codes stay in the smallest cache

struct Part {  // inputs of a panel of codes, as bytes, that are all of one group
    alignas(64) uint32_t words[MAX_PART / 4 * WIDTH];  // [inputs / 4][WIDTH]
    alignas(64) int32_t beginnings[WIDTH];
    alignas(64) float scales[WIDTH];
};
struct PartSums {
    typedef floats sum;
    static constexpr bool scaled = !GROUPED;
};

// Four codes of 4 bits in the lower half of each word, as the bytes of a word.
INLINE uints four_bytes(uints x) {
    if (Bytes::a_words == 2) return (x & 0x0f0fu) | (x & 0xf0f0u) << 12;
    x = (x | x << 8) & 0x00ff00ffu;
    return (x | x << 4) & 0x0f0f0f0fu;
}

// The levels of four codes, as signed bytes.
INLINE uints levels_of(const int8_t* table, uints codes) {
#if defined(__AVX512F__)
    return (uints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)codes);
#elif defined(__AVX2__)
    return (uints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)codes);
#else
    int8_t values[4 * LANES];
    store(values, codes);
    for (int8_t& value : values) value = table[value];
    return load<uints>(values);
#endif
}

// Unpacks inputs [k, k + depth) of a panel of codes, all of one group. `table`: the levels of codes; null if codes stand for themselves.
inline void unpack(const Codes& c, const int8_t* table, int64_t panel, int64_t k, int64_t depth, Part& to) {
    constexpr int PER_WORD = 8;
    const int64_t group = k / c.group, coarse_groups = (c.groups + c.scales.per_coarse - 1) / c.scales.per_coarse;
    for (int lane = 0; lane < WIDTH; lane += LANES) {
        const uint32_t* plane = c.planes[1] + (panel * c.inputs + k) / PER_WORD * WIDTH + lane;
        const int64_t row = panel * c.groups + group, coarse_row = panel * coarse_groups + group / c.scales.per_coarse;
        const uints zero = (c.zeros ? load_bytes(c.zeros + row * WIDTH + lane) : uints{} + uint32_t(c.zero)) * 0x01010101u;
        ints sums = {};
        uint32_t* words = to.words + lane;
        for (int64_t i = 0; i < depth / PER_WORD; i++) {
            const uints codes = load<uints>(plane + i * WIDTH);
            __builtin_prefetch(plane + (i + 32) * WIDTH, 0, 2);
            for (int half = 0; half < 2; half++, words += WIDTH) {
                uints values = four_bytes(half ? codes >> 16 : codes & 0xffffu);
                values = table ? levels_of(table, values) : ((values | 0x80808080u) - zero) ^ 0x80808080u;
                store(words, values);
#if defined(UNSIGNED_BYTES)
                sums = Bytes::add(sums, values, 0x80808080u);  // x is read as x + 128
#endif
            }
        }
        store(to.beginnings + lane, -sums);
        store(to.scales + lane, numbers_of(c.scales, row, coarse_row, WIDTH, lane));
    }
}

// Adds the products of R rows of x and a part, of `words` words, times its scales to their sums [R][WIDTH]. `x_scales`: of the rows' groups, `groups`
// apart.
template <int R>
void add_part(const uint32_t* x, int64_t x_row, const float* x_scales, int64_t groups, const Part& part, int64_t words, float* sums) {
    ints acc[R][VECTORS];
    const uint32_t* b[VECTORS];
    for (int v = 0; v < VECTORS; v++) b[v] = part.words + v * LANES;
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = load<ints>(part.beginnings + v * LANES);
    product<Bytes>(acc, x, x_row, b, WIDTH, words);
    for (int v = 0; v < VECTORS; v++) {
        const floats scale = load<floats>(part.scales + v * LANES);
        for (int r = 0; r < R; r++) {
            float* to = sums + r * WIDTH + v * LANES;
            store(to, load<floats>(to) + to_floats(acc[r][v]) * (GROUPED ? scale * x_scales[r * groups] : scale));
        }
    }
}

// The layer where W is codes: y = the sum over the parts of (q W) scale, times the scale of a column. A part's scale is that of the group of W, times
// that of the group of x if it has groups, else the sum is multiplied by it.
template <class T>
void run_parts(const Product& p) {
    const Codes* c = p.codes;
    const int64_t inputs = c->inputs, groups = groups_of(inputs, GROUPS);
    int64_t depth = std::min(c->group, MAX_PART) / 8 * 8;
    while (c->group % depth || (GROUPED && GROUP % depth)) depth -= 8;
    int8_t table[16];  // twice the levels, if some are halves
    if (c->table) {
        const bool halves = std::any_of(c->table, c->table + 16, [](float x) { return x != float(int(x)); });
        for (int i = 0; i < 16; i++) table[i] = int8_t(halves ? 2 * c->table[i] : c->table[i]);
    }
    const int64_t panels = panels_of(p), work = panels * p.words * ProductTasks::blocks(p, ROWS);
    const int64_t threads = std::max<int64_t>(1, std::min(p.threads, work / MIN_WORK));
    const ProductTasks all(p, panels, threads, ROWS, PART_ROWS);
    in_parallel(all.count(), threads, [&](Tasks& some) {
        Part part;
        alignas(64) float sums[PART_ROWS * WIDTH];
        for (int64_t task; (task = some.take()) >= 0;) {
            const auto [expert, panel, begin, end] = all.at(task);
            const Product q = of_expert(p, expert, panels);
            std::memset(sums, 0, (end - begin) * WIDTH * sizeof(float));
            for (int64_t k = 0; k < inputs; k += depth) {
                const int64_t size = std::min(depth, inputs - k);  // the last group of W may be cut
                unpack(*c, c->table ? table : nullptr, q.first_panel + panel, k, size, part);
                for (int64_t row = begin, rows; row < end; row += rows) {
                    rows = rows_of_block<Bytes>(end - row);
                    const uint32_t* x = q.x + row * q.x_row + k / 4 * Bytes::a_words;
                    const float* x_scales = q.x_scales + row * groups + (GROUPED ? k / GROUP : 0);
                    float* to = sums + (row - begin) * WIDTH;
                    with_rows<BLOCK_ROWS<Bytes>>(rows, [&](auto constant) { add_part<constant>(x, q.x_row, x_scales, groups, part, size / 4, to); });
                }
            }
            for (int64_t row = begin; row < end; row++) finish<PartSums, T>(q, (const uint32_t*)(sums + (row - begin) * WIDTH), panel, row);
        }
    });
}

#if defined(BATCHGEN_AMX)
constexpr int AMX_ROWS = ROWS + 1;  // with this many rows or more, tiles are faster than vectors
#endif

template <class T>
void linear(const Product& p) {
    if (p.codes) return run_parts<T>(p);
#if defined(BATCHGEN_AMX)
    if (p.rows >= AMX_ROWS) return run_tiles<Bytes, T>(p);
#endif
    run<Bytes, T>(p);
}

struct Rows {  // `QuantizeArguments` in int8.py is the same
    int64_t rows, size, x_row, q_row;  // x_row, q_row: elements of x and of q from one row to the next
    int64_t threads, rounding;
    const void* x;
    quantized* q;
    float* scales;
};

template <class T>
void quantize(const Rows& r) {
    constexpr int64_t worth = 8192;  // elements for each thread
    for_each(r.rows, std::max<int64_t>(1, std::min(r.threads, r.rows * r.size / worth)), [&](int64_t row) {
        quantize_row<T>((const T*)r.x + row * r.x_row, r.size, r.rounding, r.q + row * r.q_row, r.scales + row * groups_of(r.size, r.rounding));
    });
}

}  // namespace

EXPORT void batchgen_linear_int8_float32(const Product* p) { linear<float>(*p); }
EXPORT void batchgen_linear_int8_bfloat16(const Product* p) { linear<bf16>(*p); }
EXPORT void batchgen_quantize_float32(const Rows* r) { quantize<float>(*r); }
EXPORT void batchgen_quantize_bfloat16(const Rows* r) { quantize<bf16>(*r); }
// Rotates rows x of float32 in place.
EXPORT void batchgen_rotate_blocks(const Rows* r) {
    for_each(r->rows, r->threads, [&](int64_t row) {
        float* x = (float*)r->x + row * r->x_row;
        rotate_blocks(x, r->size, x);
    });
}
// Bytes of a quantized value of x: with 2, the values of a word of the weights are in the order 0, 2, 1, 3.
EXPORT int64_t batchgen_int8_bytes() { return sizeof(quantized); }
EXPORT int64_t batchgen_int8_side() { return SIDE; }
EXPORT int64_t batchgen_int8_has_beginnings() { return quantized(-1) > 0; }
