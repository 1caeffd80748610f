// Attention of one step over the paged KV pool, and the writing of the step's KV into it.
//
// The step's queries are cut into tiles of neighbours. A tile meets its keys in pieces: the shared parts above it, each read once
// for all of its rows, then every block's own pages. The softmax goes along (online softmax: Milakov and Gimelshein,
// arXiv:1805.02867; tiles: FlashAttention, arXiv:2205.14135), so that scores never leave the cache and nothing is merged through
// memory. A row is a query head of a token; the heads that share a key/value head are neighbouring rows.
//
// In the pool a page of keys is [words of D][page_size] and a page of values [words of page_size][V rounded up to 16]: whatever the
// products read is 16 words that lie side by side. See `vec.h` for words, packed.py for the same layout in Python.
#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace {

constexpr int GROUP = 32;  // times 16 keys, whose scores a row has in hand at a time: fewer cost more in largest scores and sums
constexpr double LOG2E = 1.44269504088896340736;
constexpr int FETCHED = 4;  // pages of the next block that are asked for ahead
constexpr int PIECES = 16 / LANES;  // vectors to 16 keys

struct Plan {  // a step; `_Plan` in packed.py is the same
    int64_t num_tokens, page_size, num_shared, num_blocks, tile;
    const int32_t* positions;  // [num_tokens]
    const int32_t* slots;      // [num_tokens] place in the pool of each token's KV: page * page_size + offset
    const int32_t* shared;     // [num_shared][5] first page, pages, first query, end of the queries, position of the first key
    const int32_t* blocks;     // [num_blocks + 1][2] first query, first of its pages
    const int32_t* pages;      // of all blocks, one after the other
    const int32_t* starts;     // position of each of these pages' first key
};

struct Layer {  // `_Layer` in packed.py is the same
    int64_t heads, kv_heads, size, v_size, num_pages, window;  // window 0: none
    int64_t q_head, q_token, k_head, k_token, v_head, v_token;  // elements from one head, one token, to the next
    double scale, softcap;  // softcap 0: none
    const float* sinks;     // [heads] or null
    const void *q, *k, *v;  // the step's
    void *keys, *values;    // the layer's pool
    void* out;              // [num_tokens][heads][v_size]
};

INLINE int64_t words_of(int64_t n, int64_t per_word) { return (n + per_word - 1) / per_word; }
INLINE int64_t width_of(int64_t v_size) { return (v_size + 15) / 16 * 16; }

struct Keys {  // 16 keys of a page
    const uint32_t *keys, *values;
    int64_t position;  // of the first
};

template <class E>
class Tile {
   public:
    Tile(const Plan& plan, const Layer& layer)
        : plan_(plan), layer_(layer), group_(layer.heads / layer.kv_heads), words_(words_of(layer.size, E::per_word)),
          width_(width_of(layer.v_size)) {
        int64_t rows = plan.tile * group_;
        q_.assign(rows * words_ * E::a_words, 0);
        scores_.resize(ROWS * GROUP * 16);
        sums_.resize(rows * width_);
        top_.resize(rows);
        total_.resize(rows);
    }

    void run(int64_t tile, int64_t head) {
        begin_ = tile * plan_.tile;
        end_ = std::min(begin_ + plan_.tile, plan_.num_tokens);
        head_ = head;
        take_queries();
        for (int64_t i = 0; i < plan_.num_shared; i++) {
            const int32_t* part = plan_.shared + 5 * i;
            read(part[2], part[3], part[1], [=](int64_t i) { return part[0] + i; }, [=](int64_t i) { return part[4] + i * plan_.page_size; });
        }
        for (int64_t i = first_block(); i < plan_.num_blocks && plan_.blocks[2 * i] < end_; i++) {
            const int32_t* block = plan_.blocks + 2 * i;
            const int32_t *pages = plan_.pages + block[1], *starts = plan_.starts + block[1];
            if (i + 1 < plan_.num_blocks && block[2] < end_) fetch(block[3], std::min(block[5], block[3] + FETCHED));
            read(block[0], block[2], block[3] - block[1], [=](int64_t i) { return pages[i]; }, [=](int64_t i) { return starts[i]; });
        }
        give();
    }

   private:
    int64_t first_block() const {  // the one that the tile's first query is in
        int64_t low = 0, high = plan_.num_blocks;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            (plan_.blocks[2 * middle] <= begin_ ? low : high) = middle;
        }
        return low;
    }

    void take_queries() {
        typedef typename E::type T;
        for (int64_t t = begin_; t < end_; t++)
            for (int64_t g = 0; g < group_; g++) {
                const T* from = static_cast<const T*>(layer_.q) + (head_ * group_ + g) * layer_.q_head + t * layer_.q_token;
                put_query(reinterpret_cast<typename E::a_type*>(&q_[row(t, g) * words_ * E::a_words]), from);
            }
        std::fill(sums_.begin(), sums_.end(), 0.0f);
        std::fill(top_.begin(), top_.end(), -INFINITY);
        std::fill(total_.begin(), total_.end(), 0.0f);
    }

    template <class T>
    void put_query(T* to, const T* from) { std::memcpy(to, from, layer_.size * sizeof(T)); }
    void put_query(float* to, const bf16* from) {
        for (int64_t i = 0; i < layer_.size; i++) to[i] = to_float(from[i]);
    }

    int64_t row(int64_t token, int64_t g) const { return (token - begin_) * group_ + g; }

    // A decoding sequence's own pages are read once a step, and so come from memory: asked for while another's are worked on.
    void fetch(int64_t from, int64_t to) const {
        const int64_t key_words = plan_.page_size * words_, value_words = plan_.page_size / E::per_word * width_;
        const uint32_t* keys = static_cast<const uint32_t*>(layer_.keys) + head_ * layer_.num_pages * key_words;
        const uint32_t* values = static_cast<const uint32_t*>(layer_.values) + head_ * layer_.num_pages * value_words;
        for (int64_t i = from; i < to; i++) {
            const uint32_t *k = keys + plan_.pages[i] * key_words, *v = values + plan_.pages[i] * value_words;
            for (int64_t at = 0; at < key_words; at += 16) __builtin_prefetch(k + at, 0, 2);
            for (int64_t at = 0; at < value_words; at += 16) __builtin_prefetch(v + at, 0, 2);
        }
    }

    // Queries [from, to), as far as they are in the tile, against `num_pages` pages.
    template <class Page, class Start>
    INLINE void read(int64_t from, int64_t to, int64_t num_pages, Page page, Start start) {
        from = std::max(from, begin_), to = std::min(to, end_);
        if (from >= to) return;
        auto [lowest, highest] = std::minmax_element(plan_.positions + from, plan_.positions + to);
        const int64_t low = *lowest, high = *highest, size = plan_.page_size;
        const int64_t key_words = size * words_, value_words = size / E::per_word * width_;
        const uint32_t* keys = static_cast<const uint32_t*>(layer_.keys) + head_ * layer_.num_pages * key_words;
        const uint32_t* values = static_cast<const uint32_t*>(layer_.values) + head_ * layer_.num_pages * value_words;
        Keys some[GROUP];
        int n = 0;
        for (int64_t i = 0; i < num_pages; i++) {
            const int64_t p = page(i), position = start(i);
            for (int64_t at = 0; at < size; at += 16) {
                if (position + at > high || (layer_.window && position + at + 15 <= low - layer_.window)) continue;
                some[n++] = {keys + p * key_words + at, values + p * value_words + at / E::per_word * width_, position + at};
                if (n == GROUP) meet(from, to, some, n), n = 0;
            }
        }
        if (n) meet(from, to, some, n);
    }

    void meet(int64_t from, int64_t to, const Keys* keys, int n) {
        const int64_t first = row(from, 0), end = row(to, 0);
        in_blocks(first, end, [&](auto rows, int64_t r) {
            score<rows()>(r, keys, n);
            for (int i = 0; i < rows(); i++) weigh(r + i, &scores_[i * GROUP * 16], keys, n);
            add<rows()>(r, keys, n);
        });
    }

    // Vectors of sums that R rows have in registers: with few rows more, so that enough sums are under way at once.
    static constexpr int vectors_of(int rows) { return rows >= 4 ? VECTORS : 4; }

    // Calls do_rows(R, r) for blocks of R rows, as large as they can be.
    template <class F>
    INLINE void in_blocks(int64_t r, int64_t end, F do_rows) {
        for (; r + ROWS <= end; r += ROWS) do_rows(std::integral_constant<int, ROWS>(), r);
        if (r + 4 <= end) do_rows(std::integral_constant<int, 4>(), r), r += 4;
        if (r + 2 <= end) do_rows(std::integral_constant<int, 2>(), r), r += 2;
        if (r < end) do_rows(std::integral_constant<int, 1>(), r);
    }

    // Scores of rows r to r + R against 16 n keys.
    template <int R>
    void score(int64_t r, const Keys* keys, int n) {
        constexpr int N = vectors_of(R);
        int v = 0;
        for (; v + N <= n * PIECES; v += N) score<R, N>(r, keys, v);
        for (; v < n * PIECES; v++) score<R, 1>(r, keys, v);
    }

    template <int R, int N>
    INLINE void score(int64_t r, const Keys* keys, int v) {
        floats sums[R][N] = {};
        const uint32_t* b[N];
        for (int i = 0; i < N; i++) b[i] = keys[(v + i) / PIECES].keys + (v + i) % PIECES * LANES;
        const int64_t a_row = words_ * E::a_words;
        product<E, R, N>(sums, &q_[r * a_row], a_row, b, plan_.page_size, words_);
        for (int i = 0; i < R; i++)
            for (int j = 0; j < N; j++) store(&scores_[i * GROUP * 16 + (v + j) * LANES], sums[i][j]);
    }

    // A row's scores become its weights, in place, as words; what it had is scaled to the new largest score. Scores are in powers
    // of 2.
    void weigh(int64_t r, float* row, const Keys* keys, int n) {
        const int64_t position = plan_.positions[begin_ + r / group_];
        const int vectors = n * PIECES;
        float factor = float(layer_.scale * LOG2E);
        if (layer_.softcap != 0) {
            for (int v = 0; v < vectors; v++) store(row + v * LANES, capped(load<floats>(row + v * LANES) * float(layer_.scale)) * float(LOG2E));
            factor = 1;
        }
        for (int g = 0; g < n; g++)
            if (keys[g].position + 15 > position || (layer_.window && keys[g].position <= position - layer_.window))
                for (int v = g * PIECES; v < (g + 1) * PIECES; v++) {
                    const ints where = seen(keys[g].position + v % PIECES * LANES, position);
                    store(row + v * LANES, select(where, load<floats>(row + v * LANES), splat(-INFINITY)));
                }
        floats most[2] = {splat(-INFINITY), splat(-INFINITY)};
        for (int v = 0; v < vectors; v += 2) {
            most[0] = max(most[0], load<floats>(row + v * LANES));
            if (v + 1 < vectors) most[1] = max(most[1], load<floats>(row + (v + 1) * LANES));
        }
        const float top = std::max(top_[r], largest(max(most[0], most[1])) * factor);
        const float shift = top == -INFINITY ? 0 : top;  // all masked so far: the weights are 0
        floats total = {};
        for (int v = 0; v < vectors; v++) {
            const floats weight = exp2_of_negative(load<floats>(row + v * LANES) * factor - shift);
            total += weight;
            store_floats(reinterpret_cast<typename E::a_type*>(row) + v * LANES, weight);
        }
        if (top != top_[r]) {
            const float scale = top_[r] == -INFINITY ? 0.0f : std::exp2(top_[r] - top);
            total_[r] *= scale;
            for (int64_t c = 0; c < width_; c += LANES) store(&sums_[r * width_ + c], load<floats>(&sums_[r * width_ + c]) * scale);
            top_[r] = top;
        }
        total_[r] += sum(total);
    }

    INLINE floats capped(floats s) const {  // cap tanh(s / cap)
        const float cap = float(layer_.softcap);
        return cap - 2.0f * cap / (exp(s * (2.0f / cap)) + 1.0f);
    }

    INLINE ints seen(int64_t key, int64_t query) const {
        static const int32_t first[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const ints at = load<ints>(first) + int32_t(key);
        const ints yes = at <= ints{} + int32_t(query);
        return layer_.window ? yes & (at > ints{} + int32_t(query - layer_.window)) : yes;
    }

    // Weights times values of rows r to r + R.
    template <int R>
    void add(int64_t r, const Keys* keys, int n) {
        constexpr int N = vectors_of(R);
        int64_t c = 0;
        for (; c + N * LANES <= width_; c += N * LANES) add<R, N>(r, keys, n, c);
        for (; c < width_; c += LANES) add<R, 1>(r, keys, n, c);
    }

    template <int R, int N>
    INLINE void add(int64_t r, const Keys* keys, int n, int64_t c) {
        floats sums[R][N];
        for (int i = 0; i < R; i++)
            for (int j = 0; j < N; j++) sums[i][j] = load<floats>(&sums_[(r + i) * width_ + c + LANES * j]);
        const uint32_t* weights = reinterpret_cast<const uint32_t*>(scores_.data());
        constexpr int count = 16 / E::per_word;
        for (int g = 0; g < n; g++) {
            const uint32_t* b[N];
            for (int j = 0; j < N; j++) b[j] = keys[g].values + c + LANES * j;
            product<E, R, N>(sums, weights + g * count * E::a_words, GROUP * 16, b, width_, count);
        }
        for (int i = 0; i < R; i++)
            for (int j = 0; j < N; j++) store(&sums_[(r + i) * width_ + c + LANES * j], sums[i][j]);
    }

    void give() {
        typedef typename E::type T;
        for (int64_t t = begin_; t < end_; t++)
            for (int64_t g = 0; g < group_; g++) {
                const int64_t r = row(t, g), head = head_ * group_ + g;
                float total = total_[r];
                if (layer_.sinks) total += std::exp2(layer_.sinks[head] * float(LOG2E) - top_[r]);
                T* to = static_cast<T*>(layer_.out) + (t * layer_.heads + head) * layer_.v_size;
                const float* from = &sums_[r * width_];
                for (int64_t c = 0; c < layer_.v_size; c += LANES) {
                    T some[LANES];
                    store_floats(some, load<floats>(from + c) / total);
                    std::memcpy(to + c, some, std::min<int64_t>(LANES, layer_.v_size - c) * sizeof(T));
                }
            }
    }

    const Plan& plan_;
    const Layer& layer_;
    const int64_t group_, words_, width_;
    std::vector<uint32_t> q_;    // [rows][words of D]
    std::vector<float> scores_;  // [ROWS][GROUP * 16], then weights in their place
    std::vector<float> sums_;    // [rows][V], unnormalised
    std::vector<float> top_;     // [rows] largest score yet, as a power of 2
    std::vector<float> total_;   // [rows] sum of the weights relative to it
    int64_t begin_ = 0, end_ = 0, head_ = 0;
};

template <class E>
void attend(const Plan& plan, const Layer& layer, int threads) {
    const int64_t tiles = words_of(plan.num_tokens, plan.tile);
    in_parallel(tiles * layer.kv_heads, threads, [&](Tasks& tasks) {
        Tile<E> tile(plan, layer);
        // Head by head, so that a part's keys of one head stay in the cache for the tiles below it.
        for (int64_t i; (i = tasks.take()) >= 0;) tile.run(i % tiles, i / tiles);
    });
}

// Whether all are finite.
template <class T>
INLINE bool finite(const T* v, int64_t count) {
    floats zeros = {};
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) zeros += load_floats(v + c) * 0.0f;
    float rest = sum(zeros);
    for (; c < count; c++) rest += to_float(v[c]) * 0.0f;
    return rest == 0;
}

// A token's values among those of its page: words that it has for itself, or shares with its neighbour.
INLINE void put_values(float* row, const float* v, int64_t count, int64_t) { std::memcpy(row, v, count * sizeof(float)); }
INLINE void put_values(bf16* row, const bf16* v, int64_t count, int64_t half) {
    uint32_t* words = reinterpret_cast<uint32_t*>(row);
    const uint32_t shift = half ? 16 : 0, other = half ? 0xffffu : 0xffff0000u;
    for (int64_t c = 0; c < count; c++) words[c] = (words[c] & other) | uint32_t(v[c]) << shift;
}

// A token whose values are not all numbers gets a NaN key and values of 0: whoever attends to it gets NaN, but not who masks it
// (0 * NaN is NaN), such as a later sequence in the same page.
template <class E>
void write(const Plan& plan, const Layer& layer, int threads) {
    typedef typename E::type T;
    constexpr int64_t U = E::per_word;
    const int64_t size = plan.page_size, words = words_of(layer.size, U), width = width_of(layer.v_size);
    const int64_t pieces = std::min<int64_t>(plan.num_tokens, threads > 1 ? 4 * threads : 1);
    // Neighbours that share words are of one piece.
    const auto cut = [&](int64_t piece) {
        int64_t t = plan.num_tokens * piece / pieces;
        while (t > 0 && t < plan.num_tokens && plan.slots[t] % U && plan.slots[t - 1] + 1 == plan.slots[t]) t++;
        return t;
    };
    in_parallel(pieces, threads, [&](Tasks& tasks) {
        std::vector<T> key(words * U), zeros(layer.v_size);
        const std::vector<T> nan(words * U, sizeof(T) == 2 ? T(0x7fc0) : T(NAN));
        for (int64_t piece; (piece = tasks.take()) >= 0;)
            for (int64_t head = 0; head < layer.kv_heads; head++)
                for (int64_t t = cut(piece); t < cut(piece + 1); t++) {
                    const int64_t page = plan.slots[t] / size, at = plan.slots[t] % size;
                    const T* v = static_cast<const T*>(layer.v) + head * layer.v_head + t * layer.v_token;
                    const bool numbers = finite(v, layer.v_size);
                    std::memcpy(key.data(), static_cast<const T*>(layer.k) + head * layer.k_head + t * layer.k_token, layer.size * sizeof(T));
                    const T* from = numbers ? key.data() : nan.data();
                    T* to = static_cast<T*>(layer.keys) + ((head * layer.num_pages + page) * words * size + at) * U;
                    for (int64_t w = 0; w < words; w++) std::memcpy(to + w * size * U, from + w * U, sizeof(uint32_t));
                    T* values = static_cast<T*>(layer.values) + ((head * layer.num_pages + page) * size + at / U * U) * width;
                    put_values(values, numbers ? v : zeros.data(), layer.v_size, at % U);
                }
    });
}

}  // namespace

EXPORT void batchgen_attend(const Plan* plan, const Layer* layer, int is_bfloat16, int threads) {
    is_bfloat16 ? attend<Bfloat>(*plan, *layer, threads) : attend<Float>(*plan, *layer, threads);
}

EXPORT void batchgen_write(const Plan* plan, const Layer* layer, int is_bfloat16, int threads) {
    is_bfloat16 ? write<Bfloat>(*plan, *layer, threads) : write<Float>(*plan, *layer, threads);
}
