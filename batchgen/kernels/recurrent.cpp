// Recurrent layers: the causal convolution of a step's spans, and one step of the gated delta rule or of Mamba2 for many sequences.
// States are read from one slot and written to another, which may be the same; memory is passed over once.
#include <algorithm>
#include <cmath>

#include "activation.h"
#include "pool.h"
#include "vec.h"

namespace {

template <class T>
INLINE floats load_at(const T* p, int64_t i, int64_t size) {
    return i + LANES <= size ? load_floats(p + i) : load_some(p + i, size - i);
}
template <class T>
INLINE void store_at(T* p, int64_t i, int64_t size, floats v) {
    if (i + LANES <= size)
        store_floats(p + i, v);
    else
        store_some(p + i, v, size - i);
}

struct Convolution {  // `_Convolution` in recurrent.py is the same
    int64_t spans, channels, taps, x_token, activation, threads;  // taps: inputs before the token's own
    const int64_t *starts, *lengths, *read, *write;               // by span: first token, tokens, slots
    const void *x, *weight, *bias;  // [T] rows x_token apart; [taps + 1][channels]; [channels] or null
    void *states, *out;             // [slots][taps][channels]; [T][channels]
};

constexpr int64_t CHANNELS = 256;  // of one task

template <class T>
void convolve_part(const Convolution& c, int64_t span, int64_t first, int64_t last) {
    const int64_t n = c.channels, taps = c.taps, start = c.starts[span], length = c.lengths[span];
    const T *x = (const T*)c.x, *weight = (const T*)c.weight, *bias = (const T*)c.bias;
    const T* before = (const T*)c.states + c.read[span] * taps * n;
    T *after = (T*)c.states + c.write[span] * taps * n, *out = (T*)c.out;
    // Row t of the span's inputs; those before its first token are in the state.
    auto row = [&](int64_t t) { return t < 0 ? before + (t + taps) * n : x + (start + t) * c.x_token; };
    for (int64_t t = 0; t < length; t++)
        for (int64_t i = first; i < last; i += LANES) {
            floats sum = bias ? load_at(bias, i, n) : floats{};
            for (int64_t tap = 0; tap <= taps; tap++)
                sum += load_at(row(t - taps + tap), i, n) * load_at(weight + tap * n, i, n);
            sum = rounded<T>(sum);
            store_at(out + (start + t) * n, i, n, c.activation ? activate(c.activation, sum) : sum);
        }
    // Of a slot that is read and written each row comes from a later one, so that in this order none is lost.
    for (int64_t tap = 0; tap < taps; tap++) {
        const T* from = row(length - taps + tap);
        std::copy(from + first, from + std::min(last, n), after + tap * n + first);
    }
}

template <class T>
void convolve(const Convolution& c) {
    const int64_t parts = (c.channels + CHANNELS - 1) / CHANNELS, tasks = c.spans * parts;
    for_each(tasks, tasks > 8 ? c.threads : 1, [&](int64_t task) {
        const int64_t first = task % parts * CHANNELS;
        convolve_part<T>(c, task / parts, first, std::min(first + CHANNELS, c.channels));
    });
}

struct Step {  // `_Step` in recurrent.py is the same
    int64_t sequences, heads, groups, rows, columns, threads;  // a state is [rows][columns]
    const int64_t *read, *write;                               // by sequence: slots
    const float *decay, *strength;                             // [sequences][heads]
    const float *q, *k, *v;
    float *states, *out;  // [slots][heads][rows][columns]
};

constexpr int BLOCK = 4;  // vectors of columns

// A state's rows are keys, its columns values: q, k [sequences][heads][rows], v, out [sequences][heads][columns].
// S <- a S + k d with d = b (v - a k S); out = q S = a q S + (q k) d.
void delta_head(const Step& s, int64_t sequence, int64_t head) {
    const int64_t at = sequence * s.heads + head, rows = s.rows, n = s.columns;
    const float *q = s.q + at * rows, *k = s.k + at * rows, *v = s.v + at * n;
    const float* before = s.states + (s.read[sequence] * s.heads + head) * rows * n;
    float *after = s.states + (s.write[sequence] * s.heads + head) * rows * n, *out = s.out + at * n;
    const float a = s.decay[at], b = s.strength[at];
    float both = 0;
    for (int64_t r = 0; r < rows; r++) both += q[r] * k[r];
    int64_t i = 0;
    for (; i + BLOCK * LANES <= n; i += BLOCK * LANES) {  // of all rows they stay in the first cache from one pass to the next
        floats known[BLOCK] = {}, seen[BLOCK] = {};
        for (int64_t r = 0; r < rows; r++)
            for (int j = 0; j < BLOCK; j++) {
                const floats x = load_floats(before + r * n + i + j * LANES);
                known[j] += x * k[r], seen[j] += x * q[r];
            }
        for (int j = 0; j < BLOCK; j++) {
            known[j] = (load_floats(v + i + j * LANES) - known[j] * a) * b;
            store_floats(out + i + j * LANES, seen[j] * a + known[j] * both);
        }
        for (int64_t r = 0; r < rows; r++)
            for (int j = 0; j < BLOCK; j++) {
                const int64_t at_row = r * n + i + j * LANES;
                store_floats(after + at_row, load_floats(before + at_row) * a + known[j] * k[r]);
            }
    }
    for (; i < n; i += LANES) {
        floats known{}, seen{};
        for (int64_t r = 0; r < rows; r++) {
            const floats x = load_at(before + r * n, i, n);
            known += x * k[r], seen += x * q[r];
        }
        const floats d = (load_at(v, i, n) - known * a) * b;
        store_at(out, i, n, seen * a + d * both);
        for (int64_t r = 0; r < rows; r++) store_at(after + r * n, i, n, load_at(before + r * n, i, n) * a + d * k[r]);
    }
}

// A state's rows are a head's inputs, its columns the state's size: v, out [sequences][heads][rows], k, q (B and C)
// [sequences][groups][columns]. S <- a S + b v k; out = S q.
void mamba2_head(const Step& s, int64_t sequence, int64_t head) {
    const int64_t at = sequence * s.heads + head, n = s.columns;
    const int64_t group = sequence * s.groups + head / (s.heads / s.groups);
    const float *q = s.q + group * n, *k = s.k + group * n, *v = s.v + at * s.rows;
    const float* before = s.states + (s.read[sequence] * s.heads + head) * s.rows * n;
    float *after = s.states + (s.write[sequence] * s.heads + head) * s.rows * n, *out = s.out + at * s.rows;
    const float a = s.decay[at], b = s.strength[at];
    for (int64_t r = 0; r < s.rows; r++) {
        const float x = v[r] * b;
        floats seen{};
        for (int64_t i = 0; i < n; i += LANES) {
            const floats y = load_at(before + r * n, i, n) * a + load_at(k, i, n) * x;
            store_at(after + r * n, i, n, y);
            seen += y * load_at(q, i, n);
        }
        out[r] = sum(seen);
    }
}

template <void (*head_of)(const Step&, int64_t, int64_t)>
void run(const Step& s) {
    const int64_t tasks = s.sequences * s.heads;
    const int64_t threads = tasks * s.rows * s.columns > 16384 ? s.threads : 1;
    for_each(tasks, threads, [&](int64_t task) { head_of(s, task / s.heads, task % s.heads); });
}

}  // namespace

EXPORT void batchgen_convolve_float32(const Convolution* c) { convolve<float>(*c); }
EXPORT void batchgen_convolve_bfloat16(const Convolution* c) { convolve<bf16>(*c); }
EXPORT void batchgen_delta_rule_float32(const Step* s) { run<delta_head>(*s); }
EXPORT void batchgen_mamba2_float32(const Step* s) { run<mamba2_head>(*s); }
