// From rows of logits to tokens and their log-probabilities: penalties, the tokens that a grammar allows, and the likeliest token or one sampled
// after temperature, top-k, top-p and min-p.
//
// No row is sorted. A row is cut into blocks; what a filter can leave is above some bound, which the blocks' maxima or the sum of all
// weights give, so only a few tokens of a few blocks are looked at one by one. Their k-th largest, and the one at which their sum reaches
// top-p, are found by partitions (Hoare, Algorithm 65: Find, 1961).
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "activation.h"
#include "pool.h"

namespace {

typedef float half_floats __attribute__((vector_size(2 * LANES)));
typedef double doubles __attribute__((vector_size(4 * LANES)));

constexpr int64_t BLOCK = 128;

struct Sampling {  // `_Sampling` in ops.py is the same
    int64_t rows, columns, x_row, threads;
    const void* x;
    void* best;       // [rows] the largest logit, of the type of x
    int64_t* tokens;  // [rows]
    // What each row asks for; no pointer where all rows take their likeliest token.
    const float* temperature;  // 0: the likeliest token
    const int64_t* top_k;      // 0: off
    const double* top_p;       // above 1: off
    const float* min_p;
    const double* u;
};

struct Token {
    float x;  // (logit - largest logit) / temperature
    float weight;
    int32_t id;
};

// Returns the place of a row's largest number, the first of equal ones; of the first NaN if there is one.
template <class T>
int64_t place_of_maximum(const T* x, int64_t size) {
    constexpr int64_t PIECE = 16 * LANES;
    const int64_t whole = size / LANES * LANES;
    floats most = splat(-INFINITY);
    ints nan = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        const floats v = load_floats(x + i);
        most = max(most, v);
        nan |= v != v;
    }
    bool some_nan = any(nan);
    float value = largest(most);
    for (int64_t i = whole; i < size; i++) {
        some_nan |= std::isnan(to_float(x[i]));
        value = std::max(value, to_float(x[i]));
    }
    for (int64_t from = 0; from < size; from += PIECE) {
        const int64_t to = std::min(size, from + PIECE);
        ints here = {};
        for (int64_t i = from; i + LANES <= to; i += LANES) {
            const floats v = load_floats(x + i);
            here |= some_nan ? v != v : v == splat(value);
        }
        if (to % LANES || any(here))
            for (int64_t i = from; i < to; i++)
                if (some_nan ? std::isnan(to_float(x[i])) : to_float(x[i]) == value) return i;
    }
    return 0;
}

// A row of logits over a temperature.
template <class T>
struct Row {
    const T* logits;
    int64_t columns;
    float best, temperature;

    int64_t blocks() const { return (columns + BLOCK - 1) / BLOCK; }

    // Calls body(first column, x) for each vector of a block. A last vector that is not full ends with -inf.
    template <class Body>
    INLINE void each(int64_t block, const Body& body) const {
        const int64_t end = std::min(columns, (block + 1) * BLOCK);
        int64_t i = block * BLOCK;
        for (; i + LANES <= end; i += LANES) body(i, (load_floats(logits + i) - best) / temperature);
        if (i == end) return;
        floats x = (load_some(logits + i, end - i) - best) / temperature;
        for (int64_t j = end - i; j < LANES; j++) x[j] = -INFINITY;
        body(i, x);
    }
    float maximum(int64_t block) const {
        floats most = splat(-INFINITY);
        each(block, [&](int64_t, floats x) { most = max(most, x); });
        return largest(most);
    }
    double weight(int64_t block) const {
        doubles sums[2] = {};
        each(block, [&](int64_t, floats x) {
            const floats weights = exp(x);
            half_floats halves[2];
            std::memcpy(halves, &weights, sizeof halves);
            for (int half = 0; half < 2; half++) sums[half] += __builtin_convertvector(halves[half], doubles);
        });
        const doubles both = sums[0] + sums[1];
        double sum = 0;
        for (int i = 0; i < LANES / 2; i++) sum += both[i];
        return sum;
    }
    // Adds the tokens of a block from `bound` on, without those of -inf, in the vocabulary's order.
    void add(int64_t block, float bound, std::vector<Token>& tokens) const {
        each(block, [&](int64_t first, floats x) {
            if (!any(x >= bound)) return;
            const floats weights = exp(x);
            for (int j = 0; j < LANES; j++)
                if (x[j] >= bound && x[j] > -INFINITY) tokens.push_back({x[j], weights[j], int32_t(first + j)});
        });
    }
};

double weight_of(const std::vector<Token>& tokens) {
    double sum = 0;
    for (const Token& token : tokens) sum += token.weight;
    return sum;
}

template <class Leaves>
void keep_if(std::vector<Token>& tokens, const Leaves& stays) {
    tokens.erase(std::remove_if(tokens.begin(), tokens.end(), [&](const Token& token) { return !stays(token); }), tokens.end());
}

// Keeps the k largest, and all that equal the last of them.
void keep_largest(std::vector<Token>& tokens, int64_t k) {
    if (int64_t(tokens.size()) <= k) return;
    std::vector<Token> order = tokens;
    std::nth_element(order.begin(), order.begin() + k - 1, order.end(), [](const Token& a, const Token& b) { return a.x > b.x; });
    const float last = order[k - 1].x;
    keep_if(tokens, [last](const Token& token) { return token.x >= last; });
}

// Keeps the fewest tokens whose weight reaches `goal`, one at least; of equal tokens at the edge the first in the vocabulary.
void keep_nucleus(std::vector<Token>& tokens, double goal) {
    std::vector<Token> order = tokens;
    auto first = order.begin(), last = order.end();
    float edge = -INFINITY;
    double above = 0, room = double(tokens.size());
    while (first != last) {
        const float middle = first[(last - first) / 2].x;
        const auto equal = std::partition(first, last, [=](const Token& token) { return token.x > middle; });
        const auto less = std::partition(equal, last, [=](const Token& token) { return token.x == middle; });
        double more = above;
        for (auto token = first; token != equal; ++token) more += token->weight;
        const double with_equal = more + double(less - equal) * equal->weight;
        if (first != equal && more >= goal) {
            last = equal;
            continue;
        }
        edge = middle;
        if (with_equal >= goal) {
            room = std::max(1.0, std::ceil((goal - more) / equal->weight));
            break;
        }
        above = with_equal;
        first = less;
    }
    keep_if(tokens, [&](const Token& token) { return token.x > edge || (token.x == edge && room-- >= 1); });
}

// Returns the first token at which the sum of weights passes `goal`; the last one if rounding left it a little short, `none` if nothing has weight.
int64_t pick(const std::vector<Token>& tokens, double goal, int64_t none) {
    double sum = 0;
    int64_t picked = none;
    for (const Token& token : tokens)
        if (token.weight > 0) {
            sum += token.weight;
            picked = token.id;
            if (sum > goal) break;
        }
    return picked;
}

// Samples from all tokens: finds the block first.
template <class T>
int64_t sample_from_all(const Row<T>& row, double u, int64_t likeliest, std::vector<double>& sums, std::vector<Token>& tokens) {
    double total = 0;
    for (int64_t b = 0; b < row.blocks(); b++) sums.push_back(total += row.weight(b));
    const double goal = u * total;
    const int64_t block = std::upper_bound(sums.begin(), sums.end(), goal) - sums.begin();
    if (block == row.blocks()) return likeliest;
    row.add(block, -INFINITY, tokens);
    return pick(tokens, block ? goal - sums[block - 1] : goal, likeliest);
}

// The tokens that top-k leaves, or a few more.
template <class T>
void add_largest(const Row<T>& row, int64_t k, std::vector<double>& maxima, std::vector<Token>& tokens) {
    for (int64_t b = 0; b < row.blocks(); b++) maxima.push_back(row.maximum(b));
    float bound = -INFINITY;
    if (k <= row.blocks()) {  // k blocks have a token from here on
        std::vector<double> order = maxima;
        std::nth_element(order.begin(), order.begin() + k - 1, order.end(), std::greater<double>());
        bound = float(order[k - 1]);
    }
    for (int64_t b = 0; b < row.blocks(); b++)
        if (maxima[b] >= bound) row.add(b, bound, tokens);
}

// All tokens lighter than the mean of what top-p leaves out weigh less than that together, so the others are enough for top-p. In most
// rows those that are so many times heavier are enough, which are far fewer.
constexpr double HEAVIER = 8;

// Adds the tokens that have at least this weight, and some that have a little less, because of rounding.
template <class T>
void add_heavier(const Row<T>& row, double least, std::vector<Token>& tokens) {
    for (int64_t b = 0; b < row.blocks(); b++) row.add(b, float(std::log(least) - 1e-3), tokens);
}

template <class T>
int64_t sample_from_some(const Sampling& s, int64_t at, const Row<T>& row, int64_t likeliest, std::vector<double>& numbers, std::vector<Token>& tokens) {
    const int64_t k = s.top_k[at];
    const double top_p = s.top_p[at];
    double total = 0;
    if (k) {
        add_largest(row, k, numbers, tokens);
        keep_largest(tokens, k);
        total = weight_of(tokens);
    } else {
        double goal = 0, least = s.min_p[at];
        if (top_p < 1) {
            for (int64_t b = 0; b < row.blocks(); b++) total += row.weight(b);
            goal = top_p * total;
            least = HEAVIER * (total - goal) / double(row.columns);
        }
        add_heavier(row, least, tokens);
        if (weight_of(tokens) < goal * 1.000001) {
            tokens.clear();
            add_heavier(row, least / HEAVIER, tokens);
        }
    }
    if (top_p < 1) keep_nucleus(tokens, top_p * total);
    keep_if(tokens, [&](const Token& token) { return token.weight >= s.min_p[at]; });
    return pick(tokens, s.u[at] * weight_of(tokens), likeliest);
}

template <class T>
void sample(const Sampling& s) {
    in_parallel(s.rows, threads_for(s.rows * s.columns, s.threads), [&](Tasks& tasks) {
        std::vector<double> numbers;  // of a row's blocks
        std::vector<Token> tokens;
        for (int64_t at; (at = tasks.take()) >= 0;) {
            const T* logits = (const T*)s.x + at * s.x_row;
            const int64_t likeliest = place_of_maximum(logits, s.columns);
            s.tokens[at] = likeliest;
            ((T*)s.best)[at] = logits[likeliest];
            const float best = to_float(logits[likeliest]);
            if (!s.temperature || s.temperature[at] == 0 || !std::isfinite(best)) continue;
            const Row<T> row = {logits, s.columns, best, s.temperature[at]};
            numbers.clear();
            tokens.clear();
            const bool all = !s.top_k[at] && s.top_p[at] >= 1 && s.min_p[at] <= 0;
            s.tokens[at] = all ? sample_from_all(row, s.u[at], likeliest, numbers, tokens) : sample_from_some(s, at, row, likeliest, numbers, tokens);
        }
    });
}

struct Mask {  // `_Mask` in ops.py is the same
    int64_t rows, columns, words, x_row, allowed_row, threads;  // elements and words from one row to the next
    const void* x;
    const uint32_t* allowed;  // [rows][words]: a bit for each column, the first in the lowest bit; columns beyond them are not allowed
    void* y;                  // [rows][columns]
};

// T is an integer of the size of an element, `minus_infinity` has its bits.
template <class T>
void mask(const Mask& m, T minus_infinity) {
    for_each(m.rows, threads_for(m.rows * m.columns, m.threads), [&](int64_t row) {
        const T* x = (const T*)m.x + row * m.x_row;
        T* y = (T*)m.y + row * m.columns;
        const uint32_t* allowed = m.allowed + row * m.allowed_row;
        for (int64_t first = 0; first < m.columns; first += 32) {
            const int64_t count = std::min<int64_t>(32, m.columns - first);
            const uint32_t bits = first / 32 < m.words ? allowed[first / 32] : 0;
            if (bits == 0xFFFFFFFF)
                std::copy(x + first, x + first + count, y + first);
            else if (!bits)
                std::fill(y + first, y + first + count, minus_infinity);
            else
                for (int64_t i = 0; i < count; i++) y[first + i] = bits >> i & 1 ? x[first + i] : minus_infinity;
        }
    });
}

struct Penalties {  // `_PenaltyArguments` in ops.py is the same
    int64_t rows, columns, x_row, threads;
    const void* x;
    float* y;  // [rows][columns]
    // The tables [..][columns] of marks, and the row of each that a row of logits reads; below 0: none.
    const uint8_t* seen;
    const int32_t* counts;
    const int64_t *seen_row, *counts_row;
    const float *repetition, *presence, *frequency;  // [rows]
};

template <class T>
void penalize(const Penalties& p) {
    for_each(p.rows, threads_for(p.rows * p.columns, p.threads), [&](int64_t row) {
        const T* x = (const T*)p.x + row * p.x_row;
        float* y = p.y + row * p.columns;
        for (int64_t i = 0; i < p.columns; i++) y[i] = to_float(x[i]);
        if (p.seen_row[row] >= 0) {
            const uint8_t* seen = p.seen + p.seen_row[row] * p.columns;
            const float by = p.repetition[row];
            for (int64_t i = 0; i < p.columns; i++) y[i] = !seen[i] ? y[i] : y[i] < 0 ? y[i] * by : y[i] / by;
        }
        if (p.counts_row[row] >= 0) {
            const int32_t* counts = p.counts + p.counts_row[row] * p.columns;
            const float presence = p.presence[row], frequency = p.frequency[row];
            for (int64_t i = 0; i < p.columns; i++) y[i] = !counts[i] ? y[i] : y[i] - frequency * float(counts[i]) - presence;
        }
    });
}

struct Summary {  // `_Summary` in ops.py is the same
    int64_t rows, columns, x_row, k, threads;
    const void* x;
    float *best, *log_weights;  // [rows] the largest logit, and the logarithm of the sum of exp(logit - largest logit)
    int64_t* tokens;            // [rows][k] the likeliest tokens, of equal ones the first in the vocabulary; all are the first NaN, if there is one
};

template <class T>
void summarize(const Summary& s) {
    in_parallel(s.rows, threads_for(s.rows * s.columns, s.threads), [&](Tasks& tasks) {
        std::vector<double> maxima;
        std::vector<Token> tokens;
        for (int64_t at; (at = tasks.take()) >= 0;) {
            const T* logits = (const T*)s.x + at * s.x_row;
            int64_t* found = s.tokens + at * s.k;
            std::fill_n(found, s.k, place_of_maximum(logits, s.columns));
            s.best[at] = to_float(logits[found[0]]);
            const Row<T> row = {logits, s.columns, s.best[at], 1};
            double weights = 0;
            for (int64_t b = 0; b < row.blocks(); b++) weights += row.weight(b);
            s.log_weights[at] = float(std::log(weights));
            if (s.k == 1 || std::isnan(s.best[at])) continue;  // numbers with a NaN among them have no order
            maxima.clear();
            tokens.clear();
            add_largest(Row<T>{logits, s.columns, 0, 1}, s.k, maxima, tokens);
            keep_largest(tokens, s.k);
            std::stable_sort(tokens.begin(), tokens.end(), [](const Token& a, const Token& b) { return a.x > b.x; });
            int64_t count = std::min<int64_t>(tokens.size(), s.k);
            for (int64_t i = 0; i < count; i++) found[i] = tokens[i].id;
            for (int64_t i = 0; count < s.k && i < s.columns; i++)  // then those of -inf
                if (!(to_float(logits[i]) > -INFINITY)) found[count++] = i;
        }
    });
}

}  // namespace

EXPORT void batchgen_sample_float32(const Sampling* s) { sample<float>(*s); }
EXPORT void batchgen_sample_bfloat16(const Sampling* s) { sample<bf16>(*s); }
EXPORT void batchgen_mask_float32(const Mask* m) { mask<uint32_t>(*m, 0xFF800000); }
EXPORT void batchgen_mask_bfloat16(const Mask* m) { mask<uint16_t>(*m, 0xFF80); }
EXPORT void batchgen_penalize_float32(const Penalties* p) { penalize<float>(*p); }
EXPORT void batchgen_penalize_bfloat16(const Penalties* p) { penalize<bf16>(*p); }
EXPORT void batchgen_summarize_float32(const Summary* s) { summarize<float>(*s); }
EXPORT void batchgen_summarize_bfloat16(const Summary* s) { summarize<bf16>(*s); }
