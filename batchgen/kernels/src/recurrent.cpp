// Recurrent layers: the causal convolution, the gated delta rule, Mamba2's recurrence and Mamba's scan of a step's spans, and gates with and
// without norms.
// A span reads its state from one slot and writes it to a slot, which may be the same; each state is read once and written once.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "activation.h"
#include "pool.h"
#include "vec.h"

namespace {

struct Convolution {  // `Convolution` in recurrent.py is the same
    int64_t spans, channels, taps, x_token, activation, threads;  // taps: inputs before the token's own
    const int64_t *starts, *lengths, *read, *write;               // by span: first token, tokens, slots
    const void *x, *weight, *bias;  // [T][channels], x_token elements apart; [taps + 1][channels]; [channels] or null
    void *states, *out;             // [slots][taps][channels]; [T][channels]
};

// So many tokens run through a group of channels before the next group. So a few rows at a time are read and written from the first channel
// to the last, which the processor prefetches; a column of many rows would touch a page for each row.
constexpr int64_t STRETCH = 16;

// Tokens [begin, end) of a span through PART vectors of channels. The TAPS inputs before a token stay in registers from token to token.
template <class T, int TAPS, int PART>
INLINE void convolve_channels(const Convolution& c, int64_t span, int64_t i, int64_t begin, int64_t end) {
    const int64_t n = c.channels, start = c.starts[span];
    const T *x = (const T*)c.x + start * c.x_token + i, *weight = (const T*)c.weight + i, *bias = (const T*)c.bias;
    const T* before = (const T*)c.states + c.read[span] * TAPS * n + i;
    T* out = (T*)c.out + start * n + i;
    floats w[TAPS + 1][PART], past[TAPS][PART], bias_[PART];
    for (int j = 0; j < PART; j++) {
        bias_[j] = bias ? load_floats(bias + i + j * LANES) : floats{};
        for (int tap = 0; tap <= TAPS; tap++) w[tap][j] = load_floats(weight + tap * n + j * LANES);
        for (int tap = 0; tap < TAPS; tap++) {
            const int64_t t = begin - TAPS + tap;
            past[tap][j] = load_floats((t < 0 ? before + (t + TAPS) * n : x + t * c.x_token) + j * LANES);
        }
    }
    for (int64_t t = begin; t < end; t++)
        for (int j = 0; j < PART; j++) {
            const floats now = load_floats(x + t * c.x_token + j * LANES);
            floats sum = bias_[j];
            for (int tap = 0; tap < TAPS; tap++) sum += past[tap][j] * w[tap][j];
            sum = rounded<T>(sum + now * w[TAPS][j]);
            store_floats(out + t * n + j * LANES, c.activation ? activate<T>(c.activation, sum) : sum);
            for (int tap = 0; tap + 1 < TAPS; tap++) past[tap][j] = past[tap + 1][j];
            past[TAPS - 1][j] = now;
        }
}

// The same from channel `first` on, for any number of taps, and for channels that do not fill a vector.
template <class T>
void convolve_some(const Convolution& c, int64_t span, int64_t first, int64_t begin, int64_t end) {
    const int64_t n = c.channels, taps = c.taps, start = c.starts[span];
    const T *x = (const T*)c.x, *weight = (const T*)c.weight, *bias = (const T*)c.bias;
    const T* before = (const T*)c.states + c.read[span] * taps * n;
    const auto row = [&](int64_t t) { return t < 0 ? before + (t + taps) * n : x + (start + t) * c.x_token; };
    for (int64_t t = begin; t < end; t++)
        for (int64_t i = first; i < n; i += LANES) {
            floats sum = bias ? load_at(bias, i, n) : floats{};
            for (int64_t tap = 0; tap <= taps; tap++)
                sum += load_at(row(t - taps + tap), i, n) * load_at(weight + tap * n, i, n);
            sum = rounded<T>(sum);
            store_at((T*)c.out + (start + t) * n, i, n, c.activation ? activate<T>(c.activation, sum) : sum);
        }
}

// Tokens [begin, end) of a span.
template <class T>
void convolve_stretch(const Convolution& c, int64_t span, int64_t begin, int64_t end) {
    constexpr int PART = 2;
    int64_t i = 0;
    if (c.taps == 3)
        for (; i + PART * LANES <= c.channels; i += PART * LANES) convolve_channels<T, 3, PART>(c, span, i, begin, end);
    else if (c.taps == 2)
        for (; i + PART * LANES <= c.channels; i += PART * LANES) convolve_channels<T, 2, PART>(c, span, i, begin, end);
    convolve_some<T>(c, span, i, begin, end);
}

// Puts the last inputs of a span into its slot.
template <class T>
void keep_last(const Convolution& c, int64_t span) {
    const int64_t n = c.channels, taps = c.taps, length = c.lengths[span];
    const T *before = (const T*)c.states + c.read[span] * taps * n, *x = (const T*)c.x + c.starts[span] * c.x_token;
    T* after = (T*)c.states + c.write[span] * taps * n;
    // If the slot is both read and written, each row is overwritten from a later one, so this order loses none.
    for (int64_t tap = 0; tap < taps; tap++) {
        const int64_t t = length - taps + tap;
        const T* from = t < 0 ? before + (t + taps) * n : x + t * c.x_token;
        std::copy(from, from + n, after + tap * n);
    }
}

template <class T>
void convolve(const Convolution& c) {
    struct Stretch {
        int64_t span, begin;
    };
    std::vector<Stretch> stretches;
    int64_t tokens = 0;
    for (int64_t span = 0; span < c.spans; tokens += c.lengths[span++])
        for (int64_t begin = 0; begin < c.lengths[span]; begin += STRETCH) stretches.push_back({span, begin});
    const int64_t threads = tokens * c.channels > 16384 ? c.threads : 1;
    for_each(stretches.size(), threads, [&](int64_t i) {
        const auto [span, begin] = stretches[i];
        convolve_stretch<T>(c, span, begin, std::min(begin + STRETCH, c.lengths[span]));
        if (c.lengths[span] <= STRETCH) keep_last<T>(c, span);
    });
    // A longer span may write the slot that its first stretch reads, so this waits for all stretches.
    for (int64_t span = 0; span < c.spans; span++)
        if (c.lengths[span] > STRETCH) keep_last<T>(c, span);
}

struct Rule {  // `Rule` in recurrent.py is the same: the gated delta rule, or Mamba2's recurrence with k, q, v for its B, C, x
    int64_t spans, heads, groups, rows, columns, row_decays, normalize, q_token, k_token, v_token, threads;
    const int64_t *starts, *lengths, *read, *write;  // by span: first token, tokens, slots
    const float *decay, *strength;                   // [T][heads], or with row_decays decay is [T][heads][rows]; [T][heads]
    const float* skip;                               // [heads]: the multiple of v that is added to the output; or null
    const void *q, *k, *v;                           // of a token: [groups][rows] of q and k, [heads][columns] of v; tokens are q_token, k_token, v_token apart
    void* out;                                       // [T][heads][columns]; of Mamba2 always float
    float* states;                                   // [slots][heads][rows][columns]
    float scale;                                     // of queries
};

template <class T, bool DELTA>
using Output = std::conditional_t<DELTA, T, float>;

constexpr int BLOCK = 4;  // vectors of columns

// Reads and writes a vector of columns. The last one of a row may not be FULL.
template <bool FULL, class T>
INLINE floats load_column(const T* p, int64_t count) { return FULL ? load_floats(p) : load_some(p, count); }
template <bool FULL, class T>
INLINE void store_column(T* p, floats v, int64_t count) {
    if (FULL)
        store_floats(p, v);
    else
        store_some(p, v, count);
}

// The key and the query of a token in float32, and the decays of a state's rows.
struct Token {
    float *k, *q;              // [rows]
    float *decay, *ka, *qa;    // [rows] decays, and keys and queries times them
    float both;                // q k
};

template <class T>
void prepare(const Rule& s, int64_t t, int64_t head, Token& to) {
    const int64_t rows = s.rows, group = head / (s.heads / s.groups);
    const T *q = (const T*)s.q + t * s.q_token + group * rows, *k = (const T*)s.k + t * s.k_token + group * rows;
    const float* decay = s.decay + (t * s.heads + head) * (s.row_decays ? rows : 1);
    floats qq{}, kk{}, qk{};
    for (int64_t r = 0; r < rows; r += LANES) {
        const floats x = load_at(q, r, rows), y = load_at(k, r, rows);
        qq = multiply_add(x, x, qq), kk = multiply_add(y, y, kk), qk = multiply_add(x, y, qk);
        store_at(to.q, r, rows, x), store_at(to.k, r, rows, y);
    }
    const float q_by = s.normalize ? s.scale / std::sqrt(sum(qq) + 1e-6f) : s.scale;
    const float k_by = s.normalize ? 1 / std::sqrt(sum(kk) + 1e-6f) : 1;
    to.both = sum(qk) * q_by * k_by;
    for (int64_t r = 0; r < rows; r += LANES) {
        const floats x = load_at(to.q, r, rows) * q_by, y = load_at(to.k, r, rows) * k_by;
        const floats a = s.row_decays ? load_at(decay, r, rows) : splat(decay[0]);
        store_at(to.k, r, rows, y), store_at(to.decay, r, rows, a);
        store_at(to.ka, r, rows, y * a), store_at(to.qa, r, rows, x * a);
    }
}

// A state's rows are keys, its columns values. S <- a S + k d; out = q S = q a S + (q k) d. With DELTA d = b (v - k a S), otherwise d = b v.
// One pass over the columns of a state applies the update of one token and computes the sums that the next token reads.
template <class T, bool DELTA, int B, bool FULL>
void run_columns(const Rule& s, int64_t span, int64_t head, int64_t first, int64_t count, float* local, Token now, Token next) {
    const int64_t rows = s.rows, n = s.columns, length = s.lengths[span], start = s.starts[span], wide = B * LANES;
    const float* before = s.states + (s.read[span] * s.heads + head) * rows * n + first;
    float* after = s.states + (s.write[span] * s.heads + head) * rows * n + first;
    floats known[B] = {}, seen[B] = {};
    prepare<T>(s, start, head, now);
    for (int64_t r = 0; r < rows; r++)
        for (int j = 0; j < B; j++) {
            const floats x = load_column<FULL>(before + r * n + j * LANES, count);
            if (DELTA) known[j] = multiply_add(x, splat(now.ka[r]), known[j]);
            seen[j] = multiply_add(x, splat(now.qa[r]), seen[j]);
        }
    for (int64_t i = 0; i < length; i++) {
        const int64_t t = start + i;
        const bool last = i + 1 == length;
        const T* v = (const T*)s.v + t * s.v_token + head * n + first;
        auto* out = (Output<T, DELTA>*)s.out + (t * s.heads + head) * n + first;
        const float b = s.strength[t * s.heads + head];
        floats d[B];
        for (int j = 0; j < B; j++) {
            const floats value = load_column<FULL>(v + j * LANES, count);
            d[j] = (DELTA ? value - known[j] : value) * b;
            floats y = multiply_add(d[j], splat(now.both), seen[j]);
            if (s.skip) y = multiply_add(value, splat(s.skip[head]), y);
            store_column<FULL>(out + j * LANES, y, count);
            known[j] = seen[j] = floats{};
        }
        const float* from = i ? local : before;
        float* to = last ? after : local;
        const int64_t apart = i ? wide : n, onto = last ? n : wide;
        if (last) {
            for (int64_t r = 0; r < rows; r++) {
                const floats decay = splat(now.decay[r]), k = splat(now.k[r]);
                for (int j = 0; j < B; j++) {
                    const floats x = multiply_add(load_column<FULL>(from + r * apart + j * LANES, count), decay, d[j] * k);
                    store_column<FULL>(to + r * onto + j * LANES, x, count);
                }
            }
            return;
        }
        prepare<T>(s, t + 1, head, next);
        for (int64_t r = 0; r < rows; r++) {  // a row's numbers are read here: for the compiler, each store below may change them
            const floats decay = splat(now.decay[r]), k = splat(now.k[r]), ka = splat(next.ka[r]), qa = splat(next.qa[r]);
            for (int j = 0; j < B; j++) {
                const floats x = multiply_add(load_column<FULL>(from + r * apart + j * LANES, count), decay, d[j] * k);
                store_column<FULL>(to + r * onto + j * LANES, x, count);
                if (DELTA) known[j] = multiply_add(x, ka, known[j]);
                seen[j] = multiply_add(x, qa, seen[j]);
            }
        }
        std::swap(now, next);
    }
}

template <class T, bool DELTA>
void run(const Rule& s) {
    constexpr int64_t WIDE = BLOCK * LANES;
    const int64_t blocks = (s.columns + WIDE - 1) / WIDE;
    int64_t tokens = 0;
    for (int64_t span = 0; span < s.spans; span++) tokens += s.lengths[span];
    const int64_t threads = tokens * s.heads * s.rows * s.columns > 16384 ? s.threads : 1;
    // A head's state is one task where there are enough heads. Rows of two blocks of columns are neighbours in memory: if two threads have
    // one block each, the prefetcher of one core fetches lines that the other core is writing. Two threads were slower than one.
    const int64_t parts = s.spans * s.heads >= 4 * threads ? 1 : blocks, tasks = s.spans * s.heads * parts;
    in_parallel(tasks, threads, [&](Tasks& queue) {
        std::vector<floats> scratch(s.rows * (WIDE + 10) / LANES + 1);
        float* const local = (float*)scratch.data();
        float* at = local + s.rows * WIDE;
        const auto token = [&] {
            Token made{at, at + s.rows, at + 2 * s.rows, at + 3 * s.rows, at + 4 * s.rows, 0};
            at += 5 * s.rows;
            return made;
        };
        const Token now = token(), next = token();
        for (int64_t task; (task = queue.take()) >= 0;) {
            const int64_t state = task % (s.spans * s.heads), span = state / s.heads, head = state % s.heads;
            int64_t i = task / (s.spans * s.heads) * WIDE;
            const int64_t end = parts == 1 ? s.columns : std::min(i + WIDE, s.columns);
            if (LANES == 16 && s.lengths[span] == 1)  // one token needs one pass over the state, so registers suffice for longer pieces of rows
                for (; i + 2 * WIDE <= end; i += 2 * WIDE)
                    run_columns<T, DELTA, 2 * BLOCK, true>(s, span, head, i, LANES, local, now, next);
            for (; i + WIDE <= end; i += WIDE) run_columns<T, DELTA, BLOCK, true>(s, span, head, i, LANES, local, now, next);
            for (; i + LANES <= end; i += LANES) run_columns<T, DELTA, 1, true>(s, span, head, i, LANES, local, now, next);
            if (i < end) run_columns<T, DELTA, 1, false>(s, span, head, i, end - i, local, now, next);
        }
    });
}

struct Scan {  // `_Scan` in recurrent.py is the same
    int64_t spans, channels, size, threads;          // a state is [size][channels]
    const int64_t *starts, *lengths, *read, *write;  // by span: first token, tokens, slots
    const float *x, *dt;                             // [T][channels] both
    const float *a;                                  // [size][channels], or null: dt is the decay, and size is 1
    const float *b, *c;                              // [T][size], where there is `a`
    float *out, *states;                             // [T][channels]; [slots][size][channels]
};

// Mamba: S <- e^(dt a) S + dt b x; out = c S. Without a: S <- dt S + x; out = S. Channels do not depend on one another: those of a vector
// run through all of a span's tokens.
void scan_channels(const Scan& s, int64_t span, int64_t i, floats* state) {
    const int64_t n = s.channels, start = s.starts[span];
    const float* before = s.states + s.read[span] * s.size * n;
    float* after = s.states + s.write[span] * s.size * n;
    for (int64_t j = 0; j < s.size; j++) state[j] = load_at(before + j * n, i, n);
    for (int64_t t = start; t < start + s.lengths[span]; t++) {
        const floats x = load_at(s.x + t * n, i, n), dt = load_at(s.dt + t * n, i, n);
        floats y{};
        if (s.a) {
            const floats input = x * dt;
            for (int64_t j = 0; j < s.size; j++) {
                state[j] = multiply_add(exp(dt * load_at(s.a + j * n, i, n)), state[j], input * s.b[t * s.size + j]);
                y = multiply_add(state[j], splat(s.c[t * s.size + j]), y);
            }
        } else {
            y = state[0] = multiply_add(state[0], dt, x);
        }
        store_at(s.out + t * n, i, n, y);
    }
    for (int64_t j = 0; j < s.size; j++) store_at(after + j * n, i, n, state[j]);
}

void scan(const Scan& s) {
    const int64_t vectors = (s.channels + LANES - 1) / LANES, count = s.spans * vectors;
    // Neighbours run in one thread, so that no other core writes the lines that this one's prefetcher fetches.
    const int64_t threads = count > 8 ? s.threads : 1, pieces = threads > 1 ? std::min(count, 8 * threads) : 1;
    in_parallel(pieces, threads, [&](Tasks& queue) {
        std::vector<floats> state(s.size);
        for (int64_t piece; (piece = queue.take()) >= 0;)
            for (int64_t i = count * piece / pieces; i < count * (piece + 1) / pieces; i++)
                scan_channels(s, i / vectors, i % vectors * LANES, state.data());
    });
}

struct GatedNorm {  // `GatedNorm` in recurrent.py is the same
    int64_t rows, groups, size;  // each row has `groups` groups of `size` elements, each with its own norm
    int64_t x_row, gate_row;     // elements from one row to the next
    int64_t gate_first;          // the gate comes before the norm, else after it
    int64_t sigmoid;             // the gate is a sigmoid, else SiLU
    int64_t rounds;              // rounds to the type of x after the norm and, if the gate comes last, also after the weight
    int64_t threads;
    double eps;
    const float* weight;  // [groups][size]
    const void *x, *gate;
    void* y;  // [rows][groups][size]
};

INLINE floats gated(const GatedNorm& n, floats x) { return n.sigmoid ? 1.0f / (1.0f + exp(-x)) : activate<float>(SILU, x); }

// X, G and Y are the types of x, the gate and y. `scratch` has room for a group.
template <class X, class G, class Y>
void gated_norm_group(const GatedNorm& n, const float* weight, const X* x, const G* gate, Y* y, float* scratch) {
    floats squares{};
    for (int64_t i = 0; i < n.size; i += LANES) {
        floats v = load_at(x, i, n.size);
        if (n.gate_first) v *= gated(n, load_at(gate, i, n.size));
        store_at(scratch, i, n.size, v);
        squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / float(n.size) + float(n.eps));
    for (int64_t i = 0; i < n.size; i += LANES) {
        floats v = load_at(scratch, i, n.size) * scale;
        if (n.rounds) v = rounded<X>(v);
        v *= load_at(weight, i, n.size);
        if (!n.gate_first) {
            if (n.rounds) v = rounded<X>(v);
            v *= gated(n, load_at(gate, i, n.size));
        }
        store_at(y, i, n.size, v);
    }
}

template <class X, class G, class Y = X>
void gated_norm(const GatedNorm& n) {
    const int64_t width = n.groups * n.size, threads = n.rows * width > 8192 ? n.threads : 1;
    const int64_t pieces = threads > 1 ? std::min(n.rows, 4 * threads) : 1;
    in_parallel(pieces, threads, [&](Tasks& tasks) {
        std::vector<float> scratch(n.size);
        for (int64_t piece; (piece = tasks.take()) >= 0;)
            for (int64_t row = n.rows * piece / pieces; row < n.rows * (piece + 1) / pieces; row++)
                for (int64_t at = 0; at < width; at += n.size)
                    gated_norm_group(n, n.weight + at, (const X*)n.x + row * n.x_row + at, (const G*)n.gate + row * n.gate_row + at,
                                     (Y*)n.y + row * width + at, scratch.data());
    });
}

struct Gate {  // `Gate` in recurrent.py is the same
    int64_t rows, inner, size;          // each row has `inner` parts of `size` elements
    int64_t x_row, gate_row, gate_inner;  // elements from one part of x to the next, and from one row and part of the gates to the next
    int64_t activation;  // of the gate; NONE: it is multiplied as it is
    int64_t threads;
    const void *x, *gate;
    void* y;  // [rows][inner][size]; may be x or the gate
};

// y = x * activation(gate), both rounded.
template <class T>
void gate(const Gate& g) {
    for_each(g.rows * g.inner, g.rows * g.inner * g.size > 8192 ? g.threads : 1, [&](int64_t row) {
        const T *x = (const T*)g.x + row * g.x_row, *by = (const T*)g.gate + row / g.inner * g.gate_row + row % g.inner * g.gate_inner;
        for (int64_t i = 0; i < g.size; i += LANES) {
            floats open = load_at(by, i, g.size);
            if (g.activation == SIGMOID)
                open = rounded<T>(1.0f / (1.0f + exp(-open)));
            else if (g.activation != NONE)
                open = rounded<T>(activate<T>(g.activation, open));
            store_at((T*)g.y + row * g.size, i, g.size, load_at(x, i, g.size) * open);
        }
    });
}

struct RecurrentGates {  // `RecurrentGates` in recurrent.py is the same
    int64_t tokens, heads, token, threads;  // elements from one token of b and a to the next
    const void *b, *a;                      // [heads] of a token; b is null in Mamba2
    const float *rate, *bias;               // [heads]
    const bool* prompt;                     // [tokens]: Mamba2's steps have these limits
    float *decay, *strength;                // [tokens][heads]
    float least, most;
};

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// The gated delta rule: strength = sigmoid(b), rounded to T; decay = e^(rate * softplus(a + bias)).
// Mamba2: strength = softplus(a + bias), both rounded to T, and within limits; decay = e^(rate * strength). One by one: there are few.
template <class T>
void recurrent_gates(const RecurrentGates& g) {
    const auto round = [](float x) { return rounded<T>(splat(x))[0]; };
    for_each(g.tokens, g.tokens * g.heads > 1024 ? g.threads : 1, [&](int64_t t) {
        const T *b = g.b ? (const T*)g.b + t * g.token : nullptr, *a = (const T*)g.a + t * g.token;
        for (int64_t h = 0; h < g.heads; h++) {
            const float x = to_float(a[h]) + g.bias[h];
            float step = b ? softplus(x) : round(softplus(round(x)));
            if (!b && g.prompt[t]) step = std::min(std::max(step, g.least), g.most);
            g.decay[t * g.heads + h] = std::exp(g.rate[h] * step);
            g.strength[t * g.heads + h] = b ? round(1 / (1 + std::exp(-to_float(b[h])))) : step;
        }
    });
}

}  // namespace

EXPORT void batchgen_recurrent_gates_float32(const RecurrentGates* g) { recurrent_gates<float>(*g); }
EXPORT void batchgen_recurrent_gates_bfloat16(const RecurrentGates* g) { recurrent_gates<bf16>(*g); }
EXPORT void batchgen_gate_float32(const Gate* g) { gate<float>(*g); }
EXPORT void batchgen_gate_bfloat16(const Gate* g) { gate<bf16>(*g); }
EXPORT void batchgen_gated_norm_float32(const GatedNorm* n) { gated_norm<float, float>(*n); }
EXPORT void batchgen_gated_norm_bfloat16(const GatedNorm* n) { gated_norm<bf16, bf16>(*n); }
EXPORT void batchgen_gated_norm_float32_by_bfloat16(const GatedNorm* n) { gated_norm<float, bf16>(*n); }
EXPORT void batchgen_gated_norm_float32_to_bfloat16(const GatedNorm* n) { gated_norm<float, bf16, bf16>(*n); }
EXPORT void batchgen_scan_float32(const Scan* s) { scan(*s); }
EXPORT void batchgen_convolve_float32(const Convolution* c) { convolve<float>(*c); }
EXPORT void batchgen_convolve_bfloat16(const Convolution* c) { convolve<bf16>(*c); }
EXPORT void batchgen_delta_rule_float32(const Rule* s) { run<float, true>(*s); }
EXPORT void batchgen_delta_rule_bfloat16(const Rule* s) { run<bf16, true>(*s); }
EXPORT void batchgen_mamba2_float32(const Rule* s) { run<float, false>(*s); }
EXPORT void batchgen_mamba2_bfloat16(const Rule* s) { run<bf16, false>(*s); }
