// Attention of one step over the paged KV pool, and the writing of the step's KV into it.
//
// The step's queries are cut into tiles of neighbouring tokens. A tile reads its keys in groups of GROUP x 16 keys, which lie at fixed
// positions of the sequences, in rising order, with a running softmax (online softmax: Milakov and Gimelshein, arXiv:1805.02867; tiles:
// FlashAttention, arXiv:2205.14135). Keys that several rows share are read once for all of these rows; a row's own keys are read for it alone.
// A row is a query head of a token; the heads that share a key/value head are neighbouring rows.
//
// Results do not depend on what else is in the step. For one row the order of all sums follows from the positions of its keys alone:
// a score is one chain of products over the head, the largest score and the weights are those of whole groups, and the weighted values
// are added key by key. Whether keys are read as a shared part or as a row's own only changes which rows are computed side by side.
// A key that a row does not see has the weight 0, which changes no sum.
//
// On matrix units (Tiled), tiles of up to 32 rows compute both products, and the unit orders the sums over the head and over 32 keys (over
// 16 keys if the block size is an odd multiple of 16). Everything else is the same.
//
// In the pool a block of keys is [words of D][block_size] and a block of values [words of block_size][V rounded up to 16]: whatever the
// products read is 16 words that lie side by side. See `vec.h` for words, cpu_backend.py for the same layout in Python.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "amx.h"
#include "pool.h"
#include "vec.h"

#define NOINLINE __attribute__((noinline))  // compiled once instead of for each caller: a third less compile time, and as fast

namespace {

// Attention multiplies bfloat16 by vectors (Bfloat) or by matrix units (Tiled).
#if defined(BATCHGEN_AMX)
struct Tiled : Bfloat {};
#else
typedef Bfloat Tiled;
#endif

template <class T>
struct WholeLines {  // allocates memory that begins at a cache line
    typedef T value_type;
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const WholeLines&) const { return true; }
    bool operator!=(const WholeLines&) const { return false; }
};

constexpr int GROUP = 32;  // times 16 keys, whose scores are computed at a time; with fewer, finding largest scores and rescaling sums take longer
constexpr int64_t SPAN = GROUP * 16;  // positions of a group
constexpr int64_t ROW = SPAN + 16;  // floats from one row of scores to the next: if it were a power of two, rows would share a few sets of the cache
constexpr double LOG2E = 1.44269504088896340736;
constexpr int TILED_ROWS = 32;  // rows whose products are made at a time on matrix units
constexpr int FETCHED = 8;  // times 16 keys of the next sequence that are prefetched
constexpr int PIECES = 16 / LANES;  // vectors for 16 keys
constexpr int CHUNK = 4;  // times 16 keys that are widened at a time; all rows of a part read them, in the first-level cache, before the next ones are widened

struct Plan {  // a step; `_Plan` in cpu_backend.py is the same
    int64_t num_tokens, block_size, num_shared, num_chunks, tile;
    const int32_t* positions;  // [num_tokens]
    const int32_t* ends;       // [num_tokens] the last position that each token sees: its own, or a later one inside of an image
    const int32_t* kv_indices;  // [num_tokens] where in the pool each token's KV goes: block * block_size + offset
    const int32_t* shared;     // [num_shared][5] first block, blocks, first query, end of the queries, position of the first key; by position
    const int32_t* chunks;     // [num_chunks + 1][2] first query, first place in `blocks`; each query is in one chunk, whose keys come after all shared ones
    const int32_t* blocks;     // of all chunks, one after the other
    const int32_t* starts;     // position of each of these blocks' first key, rising within a chunk
};

struct Layer {  // a layer's attention in a step; `_Layer` in cpu_backend.py is the same
    const Plan* plan;
    int64_t threads;
    int64_t heads, kv_heads, size, v_size, num_blocks, sliding_window;  // sliding_window: 0 for none
    int64_t q_head, q_token, k_head, k_token, v_head, v_token;  // elements from one head, one token, to the next
    double scale, softcap;  // softcap 0: none
    const float* sinks;     // [heads] or null
    const void *q, *k, *v;  // the step's; k and v may be null: they are in the pool already
    void *keys, *values;    // the layer's pool
    void* out;              // [rows][heads][v_size]
    const int32_t* rows;    // [num_tokens] each query's row of q and of `out`, -1 if it is not wanted; null: all are, in their order
};

INLINE int64_t words_of(int64_t n, int64_t per_word) { return (n + per_word - 1) / per_word; }
INLINE int64_t width_of(int64_t v_size) { return (v_size + 15) / 16 * 16; }

struct Keys {  // 16 keys of a block
    const uint32_t *keys, *values;
    int place;         // among the GROUP of its group
};

struct Part {  // keys of one group that a run of queries reads
    int64_t from, to;  // queries
    int first, count;  // of the group's keys
    bool own;          // of one sequence
};

template <class E>
class Tile {
   public:
    explicit Tile(const Layer& layer)
        : plan_(*layer.plan), layer_(layer), group_(layer.heads / layer.kv_heads), words_(words_of(layer.size, E::per_word)),
          width_(width_of(layer.v_size)), unit_(is_tiled && plan_.block_size % 32 == 0 ? 32 : 16) {
        int64_t rows = plan_.tile * group_;
        q_.assign(rows * words_ * E::a_words, 0);
        scores_.resize(rows * ROW);
        sums_.resize(rows * width_);
        top_.resize(rows);
        total_.resize(rows);
        if (is_widened) wide_.resize(CHUNK * 16 * std::max(words_ * E::a_words, width_));
    }

    void run(int64_t tile, int64_t head) {
        head_ = head;
        const int64_t end = std::min((tile + 1) * plan_.tile, plan_.num_tokens);
        for (begin_ = tile * plan_.tile; begin_ < end; begin_ = end_) {  // neighbours that are all wanted, or all not wanted
            for (end_ = begin_ + 1; end_ < end && wanted(end_) == wanted(begin_);) end_++;
            if (wanted(begin_)) attend();
        }
    }

   private:
    bool wanted(int64_t token) const { return !layer_.rows || layer_.rows[token] >= 0; }
    int64_t place(int64_t token) const { return layer_.rows ? layer_.rows[token] : token; }

    // The queries from begin_ to end_.
    void attend() {
        take_queries();
        const int64_t high = *std::max_element(plan_.ends + begin_, plan_.ends + end_);
        own_.clear();
        for (int64_t i = first_chunk(); i < plan_.num_chunks && plan_.chunks[2 * i] < end_; i++) {
            const int32_t* chunk = plan_.chunks + 2 * i;
            own_.push_back({std::max<int64_t>(chunk[0], begin_), std::min<int64_t>(chunk[2], end_), chunk[1], chunk[3]});
        }
        for (start_ = 0; start_ <= high; start_ += SPAN) {
            gather(start_);
            if constexpr (is_tiled) plan_fetching(start_ + SPAN, high);
            for (size_t i = 0; i < parts_.size();) {
                // Parts that have queries in common: usually one part, or shared parts together with the sequences' own.
                size_t next = i + 1;
                int64_t to = parts_[i].to;
                bool same = true;
                for (; next < parts_.size() && parts_[next].from < to; next++) {
                    same = same && parts_[next].from == parts_[i].from && parts_[next].to == to;
                    to = std::max(to, parts_[next].to);
                }
                if (next < parts_.size() && parts_[next].own) fetch(parts_[next]);
                same ? together(&parts_[i], &parts_[0] + next) : apart(&parts_[i], &parts_[0] + next, to);
                i = next;
            }
        }
        give();
    }

#if defined(BATCHGEN_AMX)
    static constexpr bool is_tiled = E::per_word == 2;
    Tiles tiles_;
#else
    static constexpr bool is_tiled = false;
#endif
    static constexpr bool is_widened = E::a_words == 2;  // keys and values that many rows read are widened once for all of them
    struct Run {  // neighbouring places in a row of scores
        int begin, end;
    };
    struct Own {  // queries of one chunk, and its blocks that have not been read yet
        int64_t from, to, block, end;
    };

    int64_t first_chunk() const {  // the one that the tile's first query is in
        int64_t low = 0, high = plan_.num_chunks;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            (plan_.chunks[2 * middle] <= begin_ ? low : high) = middle;
        }
        return low;
    }

    void take_queries() {
        typedef typename E::type T;
        for (int64_t t = begin_; t < end_; t++)
            for (int64_t g = 0; g < group_; g++) {
                const T* from = static_cast<const T*>(layer_.q) + (head_ * group_ + g) * layer_.q_head + place(t) * layer_.q_token;
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

    // Collects the parts of the group that begins at position `start`, sorted by first query and then by position.
    void gather(int64_t start) {
        keys_.clear();
        parts_.clear();
        const int64_t size = plan_.block_size;
        for (int64_t i = 0; i < plan_.num_shared; i++) {
            const int32_t* part = plan_.shared + 5 * i;
            const int64_t from = std::max<int64_t>(part[2], begin_), to = std::min<int64_t>(part[3], end_), at = part[4];
            if (from >= to || at >= start + SPAN || at + part[1] * size <= start) continue;
            const int first = int(keys_.size());
            const auto [low, high] = seen_by(from, to);
            for (int64_t p = std::max<int64_t>(0, (start - at) / size); p < part[1] && at + p * size < start + SPAN; p++)
                take(part[0] + p, at + p * size, start, low, high);
            put({from, to, first, int(keys_.size()) - first, false});
        }
        for (Own& own : own_) {
            if (own.block == own.end || plan_.starts[own.block] >= start + SPAN) continue;
            const int first = int(keys_.size());
            const auto [low, high] = seen_by(own.from, own.to);
            for (; own.block < own.end && plan_.starts[own.block] < start + SPAN; own.block++) {
                take(plan_.blocks[own.block], plan_.starts[own.block], start, low, high);
                if (plan_.starts[own.block] + size > start + SPAN) break;  // the next group reads the rest of this block
            }
            put({own.from, own.to, first, int(keys_.size()) - first, true});
        }
    }

    void put(Part part) {
        if (!part.count) return;
        size_t at = parts_.size();
        while (at > 0 && parts_[at - 1].from > part.from) at--;
        parts_.insert(parts_.begin() + at, part);
    }

    // Positions of the first and the last key that any of these queries sees.
    std::pair<int64_t, int64_t> seen_by(int64_t from, int64_t to) const {
        const int32_t low = *std::min_element(plan_.positions + from, plan_.positions + to);
        return {layer_.sliding_window ? low - layer_.sliding_window + 1 : 0, *std::max_element(plan_.ends + from, plan_.ends + to)};
    }

    int64_t key_words() const { return plan_.block_size * words_; }  // of a block
    int64_t value_words() const { return plan_.block_size / E::per_word * width_; }
    const uint32_t* keys_of(int64_t block) const {
        return static_cast<const uint32_t*>(layer_.keys) + (head_ * layer_.num_blocks + block) * key_words();
    }
    const uint32_t* values_of(int64_t block) const {
        return static_cast<const uint32_t*>(layer_.values) + (head_ * layer_.num_blocks + block) * value_words();
    }

    // Collects the keys of a block that are in the group and between `low` and `high`.
    void take(int64_t block, int64_t position, int64_t start, int64_t low, int64_t high) {
        const int64_t size = plan_.block_size;
        const uint32_t *keys = keys_of(block), *values = values_of(block);
        for (int64_t unit = 0; unit < size; unit += unit_) {
            const int64_t p = position + unit;
            if (p < start || p >= start + SPAN || p > high || p + unit_ - 1 < low) continue;
            for (int64_t at = unit; at < unit + unit_; at += 16)
                keys_.push_back({keys + at, values + at / E::per_word * width_, int(position + at - start) / 16});
        }
    }

    // A decoding sequence's own blocks are read once in a step, so they come from memory: they are prefetched during the work on other keys.
    void fetch(const Part& part) const {
        for (int i = part.first; i < part.first + std::min(part.count, FETCHED); i++) {
            const Keys& some = keys_[i];
            for (int64_t w = 0; w < words_; w++) __builtin_prefetch(some.keys + w * plan_.block_size, 0, 2);
            for (int64_t at = 0; at < 16 / E::per_word * width_; at += 16) __builtin_prefetch(some.values + at, 0, 2);
        }
    }

    // Keys of the next group that many rows read: they are prefetched while the rows of this group are weighed.
    void plan_fetching(int64_t start, int64_t high) {
        ahead_.clear();
        const int64_t size = plan_.block_size, last = std::min(start + SPAN, high + 1);
        for (int64_t i = 0; i < plan_.num_shared; i++) {
            const int32_t* part = plan_.shared + 5 * i;
            const int64_t at = part[4], first = std::max<int64_t>(0, (start - at) / size), end = std::min<int64_t>(part[1], words_of(last - at, size));
            if (part[2] < end_ && part[3] > begin_ && first < end) fetch_later(part[0] + first, end - first);
        }
        if (own_.size() == 1)  // part of a prompt
            for (int64_t i = own_[0].block; i < own_[0].end && plan_.starts[i] < last; i++)
                if (plan_.starts[i] >= start) fetch_later(plan_.blocks[i], 1);
        ahead_.divide(row(end_, 0));
    }

    void fetch_later(int64_t block, int64_t count) {
        ahead_.add(values_of(block), count * value_words());
        ahead_.add(keys_of(block), count * key_words());
    }
    NOINLINE void fetch_ahead() { ahead_.fetch(); }  // inlined, it makes `weigh` 1.03 to 1.05 slower

    // Processes parts that the same queries read, a few rows at a time, so that scores stay in the first-level cache.
    void together(const Part* part, const Part* end) {
        const Keys* keys = &keys_[part->first];
        int n = 0;
        for (const Part* p = part; p < end; p++) n += p->count;
        if (end - part > 1) {  // side by side
            some_.clear();
            for (const Part* p = part; p < end; p++) some_.insert(some_.end(), &keys_[p->first], &keys_[p->first] + p->count);
            keys = some_.data();
        }
        find_runs(part, end, part->from, part->to);
        const int64_t first = row(part->from, 0), last = row(part->to, 0);
        if (by_chunks(first, last)) {
            score_rows(first, last, keys, n);
            for (int64_t r = first; r < last; r++) weigh(r, &scores_[r * ROW]);
            return add_rows(first, last, keys, n);
        }
        by_rows(first, last, [&](auto rows, int64_t r) {
            score(rows, r, &scores_[0], keys, n);
            for (int i = 0; i < rows; i++) weigh(r + i, &scores_[i * ROW]);
            add(rows, r, &scores_[0], keys, n);
        });
    }

    // Processes parts whose queries overlap but differ: the scores of all parts, then each row's weights over all of its keys, then the values.
    void apart(const Part* parts, const Part* end, int64_t to) {
        for (const Part* p = parts; p < end; p++) {
            if (p + 1 < end && p[1].own) fetch(p[1]);
            score_rows(row(p->from, 0), row(p->to, 0), &keys_[p->first], p->count);
        }
        for (const Own& own : own_) {
            if (own.to <= parts->from || own.from >= to) continue;
            find_runs(parts, end, own.from, own.to);
            for (int64_t r = row(own.from, 0); r < row(own.to, 0); r++) weigh(r, &scores_[r * ROW]);
        }
        for (const Part* p = parts; p < end; p++) add_rows(row(p->from, 0), row(p->to, 0), &keys_[p->first], p->count);
    }

    static bool by_chunks(int64_t r, int64_t end) { return is_widened && end - r > ROWS; }

    // Scores of rows r to `end` against 16 n keys, to their places in `scores_`.
    void score_rows(int64_t r, int64_t end, const Keys* keys, int n) {
        if constexpr (is_widened)
            if (by_chunks(r, end)) {
                for (int i = 0; i < n; i += CHUNK) {
                    const int count = std::min(CHUNK, n - i);
                    widen_keys(keys + i, count);
                    by_rows(r, end, [&](auto rows, int64_t row) { score<true>(rows, row, &scores_[row * ROW], keys + i, count); });
                }
                return;
            }
        by_rows(r, end, [&](auto rows, int64_t row) { score(rows, row, &scores_[row * ROW], keys, n); });
    }

    // Adds 16 n values times the weights in `scores_` to the sums of rows r to `end`.
    void add_rows(int64_t r, int64_t end, const Keys* keys, int n) {
        if constexpr (is_widened)
            if (by_chunks(r, end)) {
                for (int i = 0; i < n; i += CHUNK) {
                    const int count = std::min(CHUNK, n - i);
                    widen_values(keys + i, count);
                    by_rows(r, end, [&](auto rows, int64_t row) { add<true>(rows, row, &scores_[row * ROW], keys + i, count); });
                }
                return;
            }
        by_rows(r, end, [&](auto rows, int64_t row) { add(rows, row, &scores_[row * ROW], keys, n); });
    }

    // Writes 16 `count` keys to `wide_` as float32 [D][CHUNK * 16].
    void widen_keys(const Keys* keys, int count) {
        for (int i = 0; i < count; i++)
            for (int64_t w = 0; w < words_; w++) widen(keys[i].keys + w * plan_.block_size, 16, &wide_[(2 * w * CHUNK + i) * 16], CHUNK * 16);
    }

    // Writes 16 `count` values to `wide_` as float32 [CHUNK * 16][V].
    void widen_values(const Keys* keys, int count) {
        for (int i = 0; i < count; i++)
            for (int64_t w = 0; w < 8; w++) widen(keys[i].values + w * width_, width_, &wide_[(16 * i + 2 * w) * width_], width_);
    }

    // Writes the two numbers of each word to two rows.
    static INLINE void widen(const uint32_t* words, int64_t count, float* to, int64_t row) {
        for (int64_t c = 0; c < count; c += LANES) {
            const uints pair = load<uints>(words + c);
            store(to + c, Widened::low(pair));
            store(to + row + c, Widened::high(pair));
        }
    }

    // Vectors of sums that each of R rows has in registers: more if the rows are few, so that enough sums are under way at once.
    static constexpr int vectors_of(int rows) { return rows >= 4 ? VECTORS : 4; }

    // Calls do_rows(R, r) for R rows at a time, as many as fit into registers.
    template <class F>
    INLINE void by_rows(int64_t r, int64_t end, F do_rows) {
        if constexpr (is_tiled) {
            for (; r < end; r += TILED_ROWS) do_rows(int(std::min<int64_t>(TILED_ROWS, end - r)), r);
        } else {
            for (; r + ROWS <= end; r += ROWS) do_rows(std::integral_constant<int, ROWS>(), r);
            if (r < end) with_rows<ROWS - 1>(end - r, [&](auto rows) { do_rows(rows, r); });
        }
    }

    // Scores of rows r to r + R against 16 n keys, to their places in `scores` [R][ROW]. With WIDE, the keys are those in `wide_`.
    template <bool WIDE = false, int R>
    NOINLINE void score(std::integral_constant<int, R>, int64_t r, float* scores, const Keys* keys, int n) {
        constexpr int N = vectors_of(R);
        int v = 0;
        for (; v + N <= n * PIECES; v += N) score<WIDE, R, N>(r, scores, keys, v);
        if constexpr (N > PIECES)
            for (; v < n * PIECES; v += PIECES) score<WIDE, R, PIECES>(r, scores, keys, v);
    }

    template <bool WIDE, int R, int N>
    INLINE void score(int64_t r, float* scores, const Keys* keys, int v) {
        floats sums[R][N] = {};
        const uint32_t* b[N];
        const int64_t a_row = words_ * E::a_words;
        if constexpr (WIDE) {
            for (int i = 0; i < N; i++) b[i] = reinterpret_cast<const uint32_t*>(&wide_[(v + i) * LANES]);
            product<Float>(sums, &q_[r * a_row], a_row, b, CHUNK * 16, a_row);
        } else {
            for (int i = 0; i < N; i++) b[i] = keys[(v + i) / PIECES].keys + (v + i) % PIECES * LANES;
            product<E>(sums, &q_[r * a_row], a_row, b, plan_.block_size, words_);
        }
        for (int j = 0; j < N; j++) {
            float* to = scores + keys[(v + j) / PIECES].place * 16 + (v + j) % PIECES * LANES;
            for (int i = 0; i < R; i++) store(to + i * ROW, sums[i][j]);
        }
    }

    // Turns a row's scores of a group into weights, in place, as words, and rescales its sums so far to the new largest score. Scores are
    // exponents of 2. Reads and writes only the places in `runs_`.
    NOINLINE void weigh(int64_t r, float* row) {
        const int64_t position = plan_.positions[begin_ + r / group_], end = plan_.ends[begin_ + r / group_];
        float factor = float(layer_.scale * LOG2E);
        floats most[2] = {splat(-INFINITY), splat(-INFINITY)};
        for (const Run& run : runs_) {
            if (layer_.softcap != 0) {
                for (int at = run.begin; at < run.end; at += LANES) store(row + at, capped(load<floats>(row + at) * float(layer_.scale)) * float(LOG2E));
                factor = 1;
            }
            // Vectors before `low` have keys before the query's sliding window, and those from `high` on have keys that come after it.
            const int64_t low = layer_.sliding_window ? std::min<int64_t>(run.end, position + 1 - layer_.sliding_window - start_) : 0;
            const int64_t high = std::max<int64_t>(run.begin, end < start_ ? 0 : (end + 1 - start_) / LANES * LANES);
            for (int64_t at = run.begin; at < low; at += LANES) mask(row, at, position, end);
            for (int64_t at = high; at < run.end; at += LANES) mask(row, at, position, end);
            int at = run.begin;
            for (; at + 2 * LANES <= run.end; at += 2 * LANES) {
                most[0] = max(most[0], load<floats>(row + at));
                most[1] = max(most[1], load<floats>(row + at + LANES));
            }
            if (at < run.end) most[0] = max(most[0], load<floats>(row + at));
        }
        if constexpr (is_tiled) fetch_ahead();
        const float top = std::max(top_[r], largest(max(most[0], most[1])) * factor);
        const float shift = top == -INFINITY ? 0 : top;  // all masked so far: the weights are 0
        floats total = {};
        typedef typename E::a_type T;
        T* to = reinterpret_cast<T*>(row);
        for (const Run& run : runs_) {
            const auto weight = [&](int at) {
                const floats w = exp2_of_negative<T>(load<floats>(row + at) * factor - shift);
                total += w;
                return w;
            };
            int at = run.begin;
            for (; at + 2 * LANES <= run.end; at += 2 * LANES) {
                const floats first = weight(at), second = weight(at + LANES);
                store_pair(to + at, first, second);
            }
            if (at < run.end) store_floats(to + at, weight(at));
        }
        if (top != top_[r]) {
            const float scale = top_[r] == -INFINITY ? 0.0f : std::exp2(top_[r] - top);
            total_[r] *= scale;
            for (int64_t c = 0; c < width_; c += LANES) store(&sums_[r * width_ + c], load<floats>(&sums_[r * width_ + c]) * scale);
            top_[r] = top;
        }
        total_[r] += sum(total);
    }

    // Finds the places that these keys have in a row of scores, in as few runs as possible.
    NOINLINE void find_runs(const Part* part, const Part* end, int64_t from, int64_t to) {
        runs_.clear();
        for (const Part* p = part; p < end; p++)
            if (p->from <= from && to <= p->to)
                for (int i = p->first; i < p->first + p->count; i++) {
                    const int at = keys_[i].place * 16;
                    if (!runs_.empty() && runs_.back().end == at)
                        runs_.back().end += 16;
                    else
                        runs_.push_back({at, at + 16});
                }
    }

    INLINE floats capped(floats s) const {  // cap tanh(s / cap)
        const float cap = float(layer_.softcap);
        return cap - 2.0f * cap / (exp(s * (2.0f / cap)) + 1.0f);
    }

    INLINE void mask(float* row, int64_t at, int64_t position, int64_t end) const {
        store(row + at, select(seen(start_ + at, position, end), load<floats>(row + at), splat(-INFINITY)));
    }

    INLINE ints seen(int64_t key, int64_t query, int64_t end) const {
        static const int32_t first[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const ints at = load<ints>(first) + int32_t(key);
        const ints yes = at <= ints{} + int32_t(end);
        return layer_.sliding_window ? yes & (at > ints{} + int32_t(query - layer_.sliding_window)) : yes;
    }

    // Adds values times the weights in `scores` [R][ROW] to the sums of rows r to r + R. With WIDE, the values are those in `wide_`.
    template <bool WIDE = false, int R>
    NOINLINE void add(std::integral_constant<int, R>, int64_t r, const float* scores, const Keys* keys, int n) {
        constexpr int N = vectors_of(R);
        int64_t c = 0;
        for (; c + N * LANES <= width_; c += N * LANES) add<WIDE, R, N>(r, scores, keys, n, c);
        if constexpr (N > PIECES)
            for (; c < width_; c += PIECES * LANES) add<WIDE, R, PIECES>(r, scores, keys, n, c);
    }

    template <bool WIDE, int R, int N>
    INLINE void add(int64_t r, const float* scores, const Keys* keys, int n, int64_t c) {
        floats sums[R][N];
        for (int i = 0; i < R; i++)
            for (int j = 0; j < N; j++) sums[i][j] = load<floats>(&sums_[(r + i) * width_ + c + LANES * j]);
        const uint32_t* weights = reinterpret_cast<const uint32_t*>(scores);
        constexpr int count = 16 / E::per_word;
        for (int g = 0; g < n; g++) {
            const uint32_t* values = WIDE ? reinterpret_cast<const uint32_t*>(&wide_[g * 16 * width_]) : keys[g].values;
            const uint32_t* b[N];
            for (int j = 0; j < N; j++) b[j] = values + c + LANES * j;
            const uint32_t* a = weights + keys[g].place * count * E::a_words;
            if constexpr (WIDE)
                product<Float>(sums, a, ROW, b, width_, 16);
            else
                product<E>(sums, a, ROW, b, width_, count);
        }
        for (int i = 0; i < R; i++)
            for (int j = 0; j < N; j++) store(&sums_[(r + i) * width_ + c + LANES * j], sums[i][j]);
    }

#if defined(BATCHGEN_AMX)
    // `score` and `add` by tiles, for up to TILED_ROWS rows.
    void score(int rows, int64_t r, float* scores, const Keys* keys, int n) {
        const int64_t depth = std::min<int64_t>(TILE, words_ & -words_);  // the largest power of 2 up to TILE that divides the words of a head
        tiles_.set(std::min(rows, TILE), std::max(0, rows - TILE), depth);
        rows > TILE ? score_tiles<true>(r, scores, keys, n, depth) : score_tiles<false>(r, scores, keys, n, depth);
    }

    template <bool LOWER>
    INLINE void score_tiles(int64_t r, float* scores, const Keys* keys, int n, int64_t depth) {
        const uint32_t* q = &q_[r * words_];
        int i = 0;
        for (; i + 2 <= n; i += 2) score_columns<LOWER, true>(q, scores, keys[i], keys[i + 1], depth);
        if (i < n) score_columns<LOWER, false>(q, scores, keys[i], keys[i], depth);
    }

    template <bool LOWER, bool RIGHT>
    INLINE void score_columns(const uint32_t* q, float* scores, const Keys& left, const Keys& right, int64_t depth) {
        typedef Sums<LOWER, RIGHT> Scores;
        const int64_t row = plan_.block_size;
        Scores::zero();
        for (int64_t k = 0; k < words_; k += depth) Scores::template add<false>(q + k, words_, left.keys + k * row, right.keys + k * row, row);
        Scores::store(scores + left.place * 16, scores + right.place * 16, ROW);
    }

    void add(int rows, int64_t r, const float* scores, const Keys* keys, int n) {
        tiles_.set(std::min(rows, TILE), std::max(0, rows - TILE), unit_ / 2);
        const uint32_t* weights = reinterpret_cast<const uint32_t*>(scores);
        int64_t c = 0;
        for (; c + SIDE <= width_; c += SIDE)
            rows > TILE ? add_columns<true, true>(r, weights, keys, n, c) : add_columns<false, true>(r, weights, keys, n, c);
        if (c < width_) rows > TILE ? add_columns<true, false>(r, weights, keys, n, c) : add_columns<false, false>(r, weights, keys, n, c);
    }

    template <bool LOWER, bool RIGHT>
    INLINE void add_columns(int64_t r, const uint32_t* weights, const Keys* keys, int n, int64_t c) {
        typedef Sums<LOWER, RIGHT> Some;
        float* sums = &sums_[r * width_ + c];
        Some::load(sums, sums + TILE, width_);
        for (int i = 0; i < n; i += unit_ / 16) {
            const uint32_t* values = keys[i].values + c;
            Some::template add<false>(weights + keys[i].place * 8, ROW, values, values + TILE, width_);
        }
        Some::store(sums, sums + TILE, width_);
    }
#endif

    void give() {
        typedef typename E::type T;
        for (int64_t t = begin_; t < end_; t++)
            for (int64_t g = 0; g < group_; g++) {
                const int64_t r = row(t, g), head = head_ * group_ + g;
                float total = total_[r];
                if (layer_.sinks) total += std::exp2(layer_.sinks[head] * float(LOG2E) - top_[r]);
                T* to = static_cast<T*>(layer_.out) + (place(t) * layer_.heads + head) * layer_.v_size;
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
    const int64_t unit_;  // keys that are read together or skipped together
    std::vector<uint32_t, WholeLines<uint32_t>> q_;    // [rows][words of D]
    std::vector<float, WholeLines<float>> scores_;  // [rows][ROW], then weights in their place
    std::vector<float, WholeLines<float>> sums_;    // [rows][V], unnormalised
    std::vector<float, WholeLines<float>> wide_;    // keys or values of a chunk
    std::vector<float> top_;     // [rows] largest score so far, as an exponent of 2
    std::vector<float> total_;   // [rows] sum of the weights relative to it
    std::vector<Own> own_;
    std::vector<Part> parts_;  // of the group
    std::vector<Keys> keys_;   // of all its parts
    std::vector<Keys> some_;   // of several parts, side by side
    std::vector<Run> runs_;
    Ahead ahead_;
    int64_t start_ = 0;  // position of the group's first key
    int64_t begin_ = 0, end_ = 0, head_ = 0;
};

template <class E>
void attend(const Layer& layer) {
    const int64_t tiles = words_of(layer.plan->num_tokens, layer.plan->tile);
    in_parallel(tiles * layer.kv_heads, layer.threads, [&](Tasks& tasks) {
        Tile<E> tile(layer);
        // Head by head, so that a part's keys of one head stay in the cache for the tiles below it.
        for (int64_t i; (i = tasks.take()) >= 0;) tile.run(i % tiles, i / tiles);
    });
}

// Returns whether all numbers are finite.
template <class T>
INLINE bool finite(const T* v, int64_t count) {
    floats zeros = {};
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) zeros += load_floats(v + c) * 0.0f;
    float rest = sum(zeros);
    for (; c < count; c++) rest += to_float(v[c]) * 0.0f;
    return rest == 0;
}

// Writes a token's values into its block. A word holds the value of one token (float32) or of two neighbouring tokens (bfloat16).
INLINE void put_values(float* row, const float* v, int64_t count, int64_t) { std::memcpy(row, v, count * sizeof(float)); }
INLINE void put_values(bf16* row, const bf16* v, int64_t count, int64_t half) {
    uint32_t* words = reinterpret_cast<uint32_t*>(row);
    const uint32_t shift = half ? 16 : 0, other = half ? 0xffffu : 0xffff0000u;
    for (int64_t c = 0; c < count; c++) words[c] = (words[c] & other) | uint32_t(v[c]) << shift;
}

// Writes the values of all tokens that share words; the second token's are `next` behind the first one's.
INLINE void put_words(float* row, const float* v, int64_t count, int64_t) { std::memcpy(row, v, count * sizeof(float)); }
INLINE void put_words(bf16* row, const bf16* v, int64_t count, int64_t next) {
    uint32_t* words = reinterpret_cast<uint32_t*>(row);
    for (int64_t c = 0; c < count; c++) words[c] = v[c] | uint32_t(v[next + c]) << 16;
}

// Writes tokens' keys and values into the pool. One that has a value that is not finite gets a NaN key and values of 0. Then a query that
// attends to it gets NaN, and a query that masks it does not (0 * NaN would be NaN), such as one of a later sequence in the same block.
template <class E>
class Writer {
    typedef typename E::type T;

   public:
    explicit Writer(const Layer& layer)
        : layer_(layer), plan_(*layer.plan), words_(words_of(layer.size, U)), width_(width_of(layer.v_size)), key_(words_ * U),
          nan_(words_ * U, sizeof(T) == 2 ? T(0x7fc0) : T(NAN)), zeros_(layer.v_size) {}

    void run(int64_t head, int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end;) {
            const int64_t block = head * layer_.num_blocks + plan_.kv_indices[t] / plan_.block_size, at = plan_.kv_indices[t] % plan_.block_size;
            const T* k = static_cast<const T*>(layer_.k) + head * layer_.k_head + t * layer_.k_token;
            const T* v = static_cast<const T*>(layer_.v) + head * layer_.v_head + t * layer_.v_token;
            T* keys = static_cast<T*>(layer_.keys) + (block * words_ * plan_.block_size + at) * U;
            T* values = static_cast<T*>(layer_.values) + (block * plan_.block_size + at / U * U) * width_;
            const bool many = neighbours(t, end) && numbers(v, LANES);
            many ? put_many(k, v, keys, values) : put(k, v, keys, values, at % U);
            t += many ? LANES : 1;
        }
    }

   private:
    static constexpr int64_t U = E::per_word;

    // Whether LANES tokens from t on lie side by side in a block, in whole words.
    bool neighbours(int64_t t, int64_t end) const {
        const int64_t first = plan_.kv_indices[t];
        if (t + LANES > end || first % U || first % plan_.block_size + LANES > plan_.block_size) return false;
        for (int i = 1; i < LANES; i++)
            if (plan_.kv_indices[t + i] != first + i) return false;
        return true;
    }

    bool numbers(const T* v, int64_t tokens) const {
        for (int64_t i = 0; i < tokens; i++)
            if (!finite(v + i * layer_.v_token, layer_.v_size)) return false;
        return true;
    }

    void put(const T* k, const T* v, T* keys, T* values, int64_t half) {
        const bool plain = numbers(v, 1);
        std::memcpy(key_.data(), k, layer_.size * sizeof(T));
        const T* from = plain ? key_.data() : nan_.data();
        for (int64_t w = 0; w < words_; w++) std::memcpy(keys + w * plan_.block_size * U, from + w * U, sizeof(uint32_t));
        put_values(values, plain ? v : zeros_.data(), layer_.v_size, half);
    }

    void put_many(const T* k, const T* v, T* keys, T* values) const {
        for (int64_t i = 0; i < LANES; i += U) put_words(values + i * width_, v + i * layer_.v_token, layer_.v_size, layer_.v_token);
        for (int64_t w = 0; w < words_; w += LANES) {
            uints rows[LANES] = {};
            for (int i = 0; i < LANES; i++)
                std::memcpy(&rows[i], k + i * layer_.k_token + w * U, std::min<int64_t>(LANES * U, layer_.size - w * U) * sizeof(T));
            transpose(rows);
            for (int64_t i = 0; i < std::min<int64_t>(LANES, words_ - w); i++) store(reinterpret_cast<uint32_t*>(keys) + (w + i) * plan_.block_size, rows[i]);
        }
    }

    const Layer& layer_;
    const Plan& plan_;
    const int64_t words_, width_;
    std::vector<T> key_;  // filled up to whole words
    const std::vector<T> nan_, zeros_;
};

template <class E>
void write(const Layer& layer) {
    if (!layer.k) return;
    const Plan& plan = *layer.plan;
    const int64_t pieces = std::min<int64_t>(plan.num_tokens, layer.threads > 1 ? 4 * layer.threads : 1);
    // Neighbours that share words belong to one piece.
    const auto cut = [&](int64_t piece) {
        int64_t t = plan.num_tokens * piece / pieces;
        while (t > 0 && t < plan.num_tokens && plan.kv_indices[t] % E::per_word && plan.kv_indices[t - 1] + 1 == plan.kv_indices[t]) t++;
        return t;
    };
    in_parallel(pieces, layer.threads, [&](Tasks& tasks) {
        Writer<E> writer(layer);
        for (int64_t piece; (piece = tasks.take()) >= 0;)
            for (int64_t head = 0; head < layer.kv_heads; head++) writer.run(head, cut(piece), cut(piece + 1));
    });
}

}  // namespace

// Write the step's KV, then attend.
EXPORT void batchgen_attention_float32(const Layer* layer) { write<Float>(*layer), attend<Float>(*layer); }
EXPORT void batchgen_attention_bfloat16(const Layer* layer) { write<Bfloat>(*layer), attend<Tiled>(*layer); }
