// Linear layers with weights packed once: y = x W^T + bias, or y = act(x G^T) * (x U^T) for a gated one.
//
// W is stored as [panels][words of the inner dimension][WIDTH] (if E::side is less, as [panels][WIDTH / side][words][side]), so a product
// reads WIDTH words that lie side by side. A panel of a gated layer holds WIDTH / 2 rows of G and the same rows of U. A block of up to
// ROWS rows by WIDTH columns is summed in registers, in float32 or in integers; results are rounded where the modules of transformers
// round. ops.py and int8.py pack the weights. Those of a few products (`ops.linear`) stay as they are, and are packed on the way into the
// cache. Weights in codes (codes.h) are unpacked on that way.
//
// A row's sums do not depend on the rows beside it, nor on threads: each is one chain of products over the inner dimension, in its
// order, whatever block of rows it is computed in.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "activation.h"
#include "codes.h"
#include "pool.h"
#include "vec.h"

namespace {

constexpr int WIDTH = VECTORS * LANES;  // columns of a panel, summed at a time
// Words of the inner dimension that are summed at a time: their part of a panel stays in the cache.
#if defined(__AVX512F__)
constexpr int DEPTH = 512;
#else
constexpr int DEPTH = 256;
#endif
// Rows of a task. Each task widens its panel, unless matrix units read it as it is.
#if defined(__AVX512F__) && !defined(BATCHGEN_AMX)
constexpr int MAX_ROWS = 86 * ROWS;
#else
constexpr int MAX_ROWS = 288;
#endif
// Tasks of at least so many rows widen weights once for all of their rows; in smaller tasks, each block of rows widens them in registers.
#if defined(__AVX512F__)
template <class E>
constexpr int WIDENED_ROWS = 9 * ROWS;
#else
template <class E>
constexpr int WIDENED_ROWS = (E::scaled ? 3 : 5) * ROWS;
#endif
template <>
constexpr int WIDENED_ROWS<WidenedFloat16> = 2 * ROWS;  // which takes longer to widen
// The rows of a block. On AVX2 and NEON, weights that a block widens take registers from its sums: 6 rows would have some of theirs in memory.
#if !defined(__AVX512F__)
template <class E>
constexpr int BLOCK_ROWS = E::a_words == 2 ? 5 : ROWS;
#else
template <class E>
constexpr int BLOCK_ROWS = ROWS;
#endif
// Blocks of rows that widen weights of 16 bits prefetch them so many words before their use (2 KB). With AVX-512 and with 8 bits this gains nothing.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int PREFETCHED = 32;
#else
constexpr int PREFETCHED = 0;
#endif
// Numbers of x that are widened at a time; MAX_ROWS rows at least.
constexpr int64_t WIDE_NUMBERS = 1 << 21;
constexpr int64_t MIN_WIDENED = 1 << 15;  // numbers to widen that are worth a thread
constexpr int CODED_WORDS = 4096 / WIDTH;  // words of codes that are unpacked at a time: they stay in the smallest cache
constexpr int CODED_INPUTS = 256;  // inputs that are unpacked in registers before the numbers of the next groups are made
// One or two rows, and on AVX2 four, unpack codes in registers. On AVX2 a single row needs the sums of two panels not to wait for each other.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool FOUR_IN_REGISTERS = true;
constexpr int PANELS_OF_A_ROW = 2;
#else
constexpr bool FOUR_IN_REGISTERS = false;
constexpr int PANELS_OF_A_ROW = 1;
#endif
constexpr int RANKS = 4;  // inputs of an adapter's second product at a time
constexpr int64_t MIN_WORK = 1500;  // words of panels times blocks of rows, about 12 cycles each, that are worth a thread

struct Product {  // `Product` in ops.py is the same
    int64_t rows, columns, words;  // columns of y; words of the inner dimension
    int64_t x_row, y_row;          // words of x, elements of y, from one row to the next
    int64_t activation;            // none for a plain layer; else the layer is gated
    int64_t threads;
    const uint32_t* x;
    const uint32_t* weights;
    const float* bias;  // [panels][WIDTH], or null
    void* y;
    // For 8 bits only: the scales of x and of the weights, and the values that sums begin with.
    const float* x_scales;      // [rows][groups]
    const float* scales;        // [panels][WIDTH]
    const int32_t* beginnings;  // [panels][WIDTH]
    int64_t inner;  // elements of the inner dimension
    int64_t group;  // words from the first E::side columns of a panel to the next ones
    int64_t w_row;  // words from one row of W [columns][words] to the next; 0 where W is packed
    const Codes* codes;  // the weights, or null where they are numbers
    // The experts of a mixture have weights of their own, whose panels follow each other. Rows [starts[e], starts[e + 1]) belong to expert e.
    int64_t experts;        // 0 if all rows have the same weights
    const int64_t* starts;  // [experts + 1]
    int64_t first_panel;    // of the weights of an expert; 0 outside of a task
    double alpha, limit;    // of the activation
    const int64_t* chosen;  // the panels that are computed, where not all of them are; null with experts
    int64_t chosen_panels;
    // An adapter of low rank: `low` (up)^T is added to the products. Null without one.
    const void* low;  // [rows][rank], in the type of y
    const void* up;   // [panels][rank][WIDTH], in the type of y
    int64_t rank;     // a multiple of RANKS
};

INLINE int64_t panels_of(const Product& p) { return (p.columns * (p.activation == NONE ? 1 : 2) + WIDTH - 1) / WIDTH; }
INLINE int64_t computed_panels(const Product& p) { return p.chosen ? p.chosen_panels : panels_of(p); }

// The tasks of a product: each is some rows times a panel.
class ProductTasks {
   public:
    struct Task {
        int64_t expert, panel, begin, end;  // a panel of the expert's, and rows
    };

    // Cuts the rows of each expert into `wanted` parts if they have so many times `step` rows, and into more if a part has more than `most`.
    ProductTasks(const Product& p, int64_t panels, int64_t threads, int64_t step, int64_t most) : panels_(panels), chosen_(p.chosen) {
        const int64_t experts = std::max<int64_t>(1, p.experts);
        int64_t busy = 0;
        for (int64_t e = 0; e < experts; e++) busy += rows_of(p, e) > 0;
        // Enough tasks for every thread to have several, but no more than that, because each task reads its panel.
        const int64_t wanted = threads == 1 ? 1 : std::max<int64_t>(1, 4 * threads / std::max<int64_t>(1, panels * busy));
        for (int64_t e = 0; e < experts; e++) {
            const int64_t rows = rows_of(p, e);
            if (rows == 0) continue;
            const int64_t parts = std::max(wanted, (rows + most - 1) / most), share = (rows + parts - 1) / parts;
            const int64_t task_rows = (share + step - 1) / step * step;
            shares_.push_back({count_, e, p.experts ? p.starts[e] : 0, rows, task_rows});
            count_ += (rows + task_rows - 1) / task_rows * panels;
        }
    }
    int64_t count() const { return count_; }
    Task at(int64_t task) const {
        const Share& s = *std::prev(std::upper_bound(shares_.begin(), shares_.end(), task, [](int64_t t, const Share& share) { return t < share.first; }));
        const int64_t i = task - s.first, begin = i / panels_ * s.task_rows, panel = i % panels_;
        return {s.expert, chosen_ ? chosen_[panel] : panel, s.row + begin, s.row + std::min(s.rows, begin + s.task_rows)};
    }
    static int64_t rows_of(const Product& p, int64_t expert) { return p.experts ? p.starts[expert + 1] - p.starts[expert] : p.rows; }
    // Returns the blocks of `size` rows of all experts.
    static int64_t blocks(const Product& p, int64_t size) {
        int64_t found = 0;
        for (int64_t e = 0; e < std::max<int64_t>(1, p.experts); e++) found += (rows_of(p, e) + size - 1) / size;
        return found;
    }

   private:
    struct Share {  // an expert's rows, which begin at `row`
        int64_t first, expert, row, rows, task_rows;  // the number of its first task
    };
    std::vector<Share> shares_;
    int64_t count_ = 0;
    const int64_t panels_;
    const int64_t* chosen_;
};

// Returns the product of one expert's rows, which keep their numbers.
INLINE Product of_expert(Product p, int64_t expert, int64_t panels) {
    p.first_panel = expert * panels;
    if (p.weights) p.weights += p.first_panel * p.words * WIDTH;
    if (p.bias) p.bias += p.first_panel * WIDTH;
    if (p.scales) p.scales += p.first_panel * WIDTH;
    if (p.beginnings) p.beginnings += p.first_panel * WIDTH;
    return p;
}

// Computes the sums [R][WIDTH] of R rows of x times a panel, over `words` words. With `more` they are added to those in `sums`, else to `from`
// if it is given. With each word it prefetches `lines` lines of 64 bytes at `next`: few at a time, or loads would wait for them.
template <class E, int R>
void block(const uint32_t* x, int64_t x_row, const uint32_t* panel, int64_t group, int64_t words, uint32_t* sums, bool more,
           const int32_t* from, const uint32_t* next, int lines) {
    typedef typename E::sum sum;
    sum acc[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++)
            acc[r][v] = more ? load<sum>(sums + r * WIDTH + v * LANES) : from ? load<sum>(from + v * LANES) : sum{};
    const uint32_t* b[VECTORS];
    for (int v = 0; v < VECTORS; v++) b[v] = panel + v * LANES / E::side * group + v * LANES % E::side;
    if (E::a_words == 2 && lines > 0)
        product<E>(acc, x, x_row, b, E::side, words, [&](int64_t i) {
            for (int line = 0; line < lines; line++) __builtin_prefetch(next + (i * lines + line) * 16, 0, 2);
        });
    else
        product<E>(acc, x, x_row, b, E::side, words, [&](int64_t i) {
            if (E::a_words == 2 && !E::scaled && PREFETCHED) __builtin_prefetch(b[0] + (i + PREFETCHED) * E::side, 0, 2);
        });
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * WIDTH + v * LANES, acc[r][v]);
}

template <class E>
INLINE int64_t blocks_of(int64_t rows) { return (rows + BLOCK_ROWS<E> - 1) / BLOCK_ROWS<E>; }

// Returns how many rows the next block takes of those that are left: the blocks are of nearly the same size.
template <class E>
INLINE int64_t rows_of_block(int64_t left) {
    const int64_t blocks = blocks_of<E>(left);
    return (left + blocks - 1) / blocks;
}

// Writes N vectors to y, `columns` columns at most.
template <int N, class T>
INLINE void put(T* y, int64_t columns, const floats (&values)[N]) {
    for (int v = 0; v < N; v++) {
        if (columns - v * LANES >= LANES)
            store_floats(y + v * LANES, values[v]);
        else if (columns > v * LANES)
            store_some(y + v * LANES, values[v], columns - v * LANES);
    }
}

// Finishes the sums of one row and panel (scales, bias, adapter, activation), and writes them to y.
template <class E, class T>
INLINE void finish(const Product& p, const uint32_t* sums, int64_t panel, int64_t row) {
    floats values[VECTORS];
    for (int v = 0; v < VECTORS; v++) values[v] = to_floats(load<typename E::sum>(sums + v * LANES));
    if (p.scales)
        for (int v = 0; v < VECTORS; v++) values[v] *= (E::scaled ? p.x_scales[row] : 1.0f) * load<floats>(p.scales + panel * WIDTH + v * LANES);
    if (p.bias)
        for (int v = 0; v < VECTORS; v++) {
            if (p.experts) values[v] = rounded<T>(values[v]);  // their modules add it to the rounded product
            values[v] += load<floats>(p.bias + panel * WIDTH + v * LANES);
        }
    if (p.low) {
        floats added[RANKS][VECTORS] = {};  // so many sums that none waits for itself
        const T* low = (const T*)p.low + row * p.rank;
        const T* up = (const T*)p.up + panel * p.rank * WIDTH;
        for (int64_t i = 0; i < p.rank; i += RANKS)
            for (int j = 0; j < RANKS; j++)
                for (int v = 0; v < VECTORS; v++) added[j][v] += load_floats(up + (i + j) * WIDTH + v * LANES) * to_float(low[i + j]);
        for (int v = 0; v < VECTORS; v++) values[v] += (added[0][v] + added[1][v]) + (added[2][v] + added[3][v]);
    }
    const int width = p.activation == NONE ? WIDTH : WIDTH / 2;
    T* y = (T*)p.y + row * p.y_row + panel * width;
    const int64_t columns = p.columns - panel * width;
    if (p.activation == NONE) return put(y, columns, values);
    floats gated[VECTORS / 2];
    for (int v = 0; v < VECTORS / 2; v++) {
        const floats gate = rounded<T>(values[v]), up = rounded<T>(values[VECTORS / 2 + v]);
        gated[v] = p.activation == CLAMPED ? clamped_gate<T>(gate, up, float(p.alpha), float(p.limit)) : rounded<T>(activate<T>(p.activation, gate)) * up;
    }
    put(y, columns, gated);
}

struct Next {  // words of a panel that a thread reads next; null if there are none
    const uint32_t* weights;
    int64_t words;
};

// Multiplies rows [begin, end) of x by `words` words of a panel, from word k on; finishes the rows if these words are the last. Meanwhile each
// block of rows prefetches its share of `next`, and a part of `ahead`.
template <class E, class T>
INLINE void slice(const Product& p, int64_t panel, int64_t begin, int64_t end, const uint32_t* weights, int64_t k, int64_t words, uint32_t* sums,
                  Ahead& ahead, Next next) {
    const bool last = (k + words) * E::per_word == p.inner;
    const int32_t* from = p.beginnings ? p.beginnings + panel * WIDTH : nullptr;
    const int64_t blocks = blocks_of<E>(end - begin), most = next.words * WIDTH;
    const int lines = int((most + 16 * blocks * words - 1) / (16 * blocks * words));
    int64_t fetched = 0;
    for (int64_t row = begin; row < end;) {
        ahead.fetch();
        uint32_t* here = sums + (row - begin) * WIDTH;
        const int64_t rows = rows_of_block<E>(end - row);
        const uint32_t* x = p.x + row * p.x_row + k * E::a_words;
        with_rows<BLOCK_ROWS<E>>(rows, [&](auto constant) {
            block<E, constant>(x, p.x_row, weights, p.group, words, here, k > 0, from, next.weights + fetched, fetched < most ? lines : 0);
        });
        fetched += words * lines * 16;
        if (last)
            for (int64_t r = 0; r < rows; r++) finish<E, T>(p, here + r * WIDTH, panel, row + r);
        row += rows;
    }
}

// Widens the numbers of each row of words to two rows.
template <class E>
INLINE void widen(const uint32_t* weights, int64_t words, uint32_t* to) {
    for (int64_t i = 0; i < words * WIDTH; i += WIDTH)
        for (int v = 0; v < WIDTH; v += LANES) {
            const uints pair = load<uints>(weights + i + v);
            store(to + 2 * i + v, E::low(pair));
            store(to + 2 * i + WIDTH + v, E::high(pair));
        }
}

// Packs words [k, k + words) of a panel's columns from weights that are not packed, as [WIDTH / SIDE][words][SIDE].
template <int SIDE>
void pack(const Product& p, int64_t panel, int64_t k, int64_t words, uint32_t* to) {
    for (int c = 0; c < WIDTH; c += LANES) {
        uint32_t* part = to + c / SIDE * SIDE * words + c % SIDE;
        for (int64_t w = 0; w < words; w += LANES) {
            const int64_t some = std::min<int64_t>(LANES, words - w);
            const uint32_t* from = p.weights + (panel * WIDTH + c) * p.w_row + k + w;
            const int64_t columns = std::min<int64_t>(LANES, p.columns - panel * WIDTH - c);
            uints v[LANES];
            if (some == LANES && columns == LANES)
                for (int i = 0; i < LANES; i++) {
                    v[i] = load<uints>(from + i * p.w_row);
                    __builtin_prefetch(from + i * p.w_row + 4 * 16);
                }
            else
                for (int i = 0; i < LANES; i++) {
                    v[i] = uints{};
                    if (i < columns) std::memcpy(&v[i], from + i * p.w_row, some * sizeof(uint32_t));
                }
            transpose(v);
            for (int i = 0; i < some; i++) store(part + (w + i) * SIDE, v[i]);
        }
    }
}

// Adds the products of R rows of x and inputs [k, end) of V vectors of columns, which are unpacked in registers, to `sums` [panels][R][WIDTH].
template <class E, class F, int R, int V>
void coded_block(const Product& p, int64_t panel, int vector, const uint32_t* x, int64_t k, int64_t end, const GroupNumbers* groups, int64_t stride, uint32_t* sums) {
    const auto at = [&](int n) {
        n = vector + n % V;
        return Unpacker<F>(*p.codes, panel + n / VECTORS, n % VECTORS * LANES, WIDTH, groups + n, stride);
    };
    Unpacker<F> columns[] = {at(0), at(1), at(2), at(3)};
    const auto sum = [&](int r, int n) { return sums + ((vector + n) / VECTORS * R + r) * WIDTH + (vector + n) % VECTORS * LANES; };
    floats acc[R][V];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < V; n++) acc[r][n] = k > 0 ? load<floats>(sum(r, n)) : floats{};
    const auto turn = [&] {
#pragma GCC unroll 4
        for (int n = 0; n < V; n++) columns[n].turn();
    };
    by_groups(*p.codes, k, end, turn, [&](int64_t i) {
#pragma GCC unroll 4
        for (int n = 0; n < V; n++) columns[n].load(i);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j += E::per_word) {
            uints some[V];
#pragma GCC unroll 4
            for (int n = 0; n < V; n++) some[n] = columns[n].template word<E::per_word>(j);
            E::template multiply<R, V>(acc, some, x + i / E::per_word + j / E::per_word, p.x_row);
        }
    });
    for (int r = 0; r < R; r++)
        for (int n = 0; n < V; n++) store(sum(r, n), acc[r][n]);
}

// Multiplies R rows of x from row `begin` on by some panels of codes, which are unpacked in registers, and finishes the rows.
template <class E, class T, int R>
void coded_rows(const Product& p, int64_t panel, int64_t panels, int64_t begin, PanelGroups& groups, uint32_t* sums) {
    constexpr int V = R == 1 ? 2 * PANELS_OF_A_ROW : 2;  // vectors of columns at a time: enough for sums not to wait for each other
    const uint32_t* x = p.x + begin * p.x_row;
    const int64_t first = p.first_panel + panel, vectors = panels * VECTORS;
    for (int64_t k = 0; k < p.inner; k += CODED_INPUTS) {
        const int64_t end = std::min<int64_t>(p.inner, k + CODED_INPUTS);
        const GroupNumbers* numbers = groups.take(*p.codes, first, panels, WIDTH, k, end - k);
        with_form_of_words<E::per_word>(*p.codes, [&](auto form) {
            for (int v = 0, more = 0; v < vectors; v += more) {
                more = v + V <= vectors ? V : 2;
                more == V ? coded_block<E, decltype(form), R, V>(p, first, v, x, k, end, numbers, vectors, sums)
                          : coded_block<E, decltype(form), R, 2>(p, first, v, x, k, end, numbers, vectors, sums);
            }
        });
    }
    for (int64_t i = 0; i < panels; i++)
        for (int r = 0; r < R; r++) finish<E, T>(p, sums + (i * R + r) * WIDTH, panel + i, begin + r);
}

// Multiplies rows [begin, end) of x by some panels of codes. `unpacked`: room for CODED_WORDS words of a panel.
template <class E, class T>
void coded(const Product& p, int64_t panel, int64_t panels, int64_t begin, int64_t end, PanelGroups& groups, uint32_t* unpacked, uint32_t* sums) {
    const int64_t rows = end - begin;
    if (rows == 1) return coded_rows<E, T, 1>(p, panel, panels, begin, groups, sums);
    if (rows == 2) return coded_rows<E, T, 2>(p, panel, panels, begin, groups, sums);
    if constexpr (FOUR_IN_REGISTERS)
        if (rows == 4) return coded_rows<E, T, 4>(p, panel, panels, begin, groups, sums);
    Ahead nothing;
    for (int64_t k = 0; k < p.words; k += CODED_WORDS) {
        const int64_t words = std::min<int64_t>(CODED_WORDS, p.words - k), from = k * E::per_word, until = from + words * E::per_word;
        const GroupNumbers* numbers = groups.take(*p.codes, p.first_panel + panel, 1, WIDTH, from, until - from);
        unpack<E::per_word, WIDTH, WIDTH>(*p.codes, p.first_panel + panel, from, until, numbers, unpacked);
        slice<E, T>(p, panel, begin, end, unpacked, k, words, sums, nothing, {nullptr, 0});
    }
}

// E says what x and the weights are, T is the type of y.
template <class E, class T>
void multiply(Product p) {
    p.inner = p.words * E::per_word;
    p.group = p.words * E::side;
    const int64_t panels = panels_of(p), computed = computed_panels(p), work = computed * p.words * ProductTasks::blocks(p, ROWS);
    const int64_t threads = std::max<int64_t>(1, std::min(p.threads, work / MIN_WORK));
    const int64_t at_once = p.codes && p.rows == 1 && !p.chosen ? PANELS_OF_A_ROW : 1;  // panels of a task
    const ProductTasks all(p, (computed + at_once - 1) / at_once, threads, ROWS, MAX_ROWS);
    in_parallel(all.count(), threads, [&](Tasks& some) {
        alignas(64) uint32_t sums[MAX_ROWS * WIDTH];
        alignas(64) uint32_t wide[E::a_words == 2 ? DEPTH * WIDTH : 1];
        alignas(64) uint32_t packed[DEPTH * WIDTH];
        PanelGroups groups;
        Ahead ahead;
        // Returns what this thread reads after word `end` of the task's panel: the rest of the panel, or probably the panel of the task after those
        // that other threads take meanwhile.
        const auto after = [&](int64_t task, int64_t end, int64_t depth) -> Next {
            const int64_t from = end < p.words ? end : 0, next = from > 0 ? task : task + threads;
            if (next >= all.count() || p.w_row) return {nullptr, 0};
            const auto there = all.at(next);
            return {p.weights + ((there.expert * panels + there.panel) * p.words + from) * WIDTH, std::min(depth, p.words - from)};
        };
        for (int64_t task; (task = some.take()) >= 0;) {
            const auto [expert, panel, begin, end] = all.at(task);
            const Product q = of_expert(p, expert, panels);
            if constexpr (!E::scaled && E::a_words == 1)
                if (p.codes) {
                    coded<E, T>(q, panel * at_once, std::min(at_once, panels - panel * at_once), begin, end, groups, packed, sums);
                    continue;
                }
            const bool widens = E::a_words == 2 && end - begin >= WIDENED_ROWS<E>;
            const int64_t depth = widens ? DEPTH / 2 : DEPTH;
            for (int64_t k = 0; k < p.words; k += depth) {
                const int64_t words = std::min(depth, p.words - k);
                const uint32_t* weights = q.weights + panel * p.words * WIDTH + k * E::side;
                if (p.w_row) pack<WIDTH>(p, panel, k, words, packed), weights = packed;
                if constexpr (E::a_words == 2)
                    if (widens) {
                        widen<E>(weights, words, wide);
                        const Next next = after(task, k + words, depth);
                        ahead.add(next.weights, next.words * WIDTH);
                        ahead.divide((end - begin) / ROWS);
                        slice<typename E::wide, T>(q, panel, begin, end, wide, 2 * k, 2 * words, sums, ahead, {nullptr, 0});
                        ahead.clear();
                        continue;
                    }
                const Next next = E::a_words == 2 && end - begin > BLOCK_ROWS<E> ? after(task, k + words, depth) : Next{nullptr, 0};
                slice<E, T>(q, panel, begin, end, weights, k, words, sums, ahead, next);
            }
        }
    });
}

// Writes rows of `size` numbers, which lie x_row numbers apart, to `to` as float32, one row after the other.
inline void widen_rows(const bf16* x, int64_t x_row, int64_t rows, int64_t size, float* to, int64_t threads) {
    for_each(rows, rows * size < MIN_WIDENED ? 1 : threads, [&](int64_t row) {
        const bf16* from = x + row * x_row;
        float* here = to + row * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store(here + i, load_floats(from + i));
        for (; i < size; i++) here[i] = to_float(from[i]);
    });
}

// Where bfloat16 is not multiplied as such (`Widened`), x is widened before, once for all panels.
template <class E, class T>
void run(const Product& p) {
    if (p.rows == 0) return;
    if constexpr (std::is_same<E, Widened>::value && std::is_same<T, bf16>::value) {
        thread_local std::vector<float> wide;
        const int64_t size = p.words * E::per_word;
        const int64_t max_rows = std::max<int64_t>(1, WIDE_NUMBERS / size / MAX_ROWS) * MAX_ROWS;
        const int64_t parts = (p.rows + max_rows - 1) / max_rows, share = (p.rows + parts - 1) / parts;
        if (int64_t(wide.size()) < share * size) wide.resize(share * size);
        for (int64_t first = 0; first < p.rows; first += share) {
            Product part = p;
            part.rows = std::min(share, p.rows - first);
            std::vector<int64_t> starts(p.experts ? p.experts + 1 : 0);  // of these rows
            for (size_t e = 0; e < starts.size(); e++) starts[e] = std::min(std::max<int64_t>(0, p.starts[e] - first), part.rows);
            part.starts = starts.data();
            widen_rows((const bf16*)(p.x + first * p.x_row), 2 * p.x_row, part.rows, size, wide.data(), p.threads);
            part.x = (const uint32_t*)wide.data();
            part.x_row = size;
            part.y = (T*)p.y + first * p.y_row;
            if (p.low) part.low = (const T*)p.low + first * p.rank;
            if (!p.codes) {
                multiply<E, T>(part);
                continue;
            }
            part.words = size;  // codes become floats
            multiply<Float, T>(part);
        }
    } else {
        multiply<E, T>(p);
    }
}

}  // namespace
