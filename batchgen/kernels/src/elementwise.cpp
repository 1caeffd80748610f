// Norms, sums and rotary embedding in the arithmetic of transformers' modules: float32, rounded where they round.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "activation.h"
#include "int8.h"
#include "pool.h"
#include "vec.h"

namespace {

struct Norm {  // `NormArguments` in ops.py is the same
    int64_t outer, inner, size;       // rows [outer][inner] of so many elements
    int64_t x_outer, x_inner;         // elements from one to the next
    int64_t rounds_first;             // x / rms is rounded before it is multiplied by the weight
    int64_t threads;
    double eps;
    const float* weight;
    const void* x;
    void* y;  // [outer][inner][size]; nullptr: the sum alone is wanted
    // If `more` [outer][inner][size] is given, (x + more * by) * times is written to `sum`, which has the same shape, and the norm is that of `sum`.
    const void* more;
    void* sum;
    // If `q` is given, y is also quantized to 8 bits (int8.h).
    quantized* q;
    float* scales;
    int64_t q_row, rounding;  // elements of q from one row to the next
    double by, times;
    // If given, x is centered first, and the result is moved by these numbers (LayerNorm).
    const float* shift;
    const float* each;  // [size] If given, `more` is multiplied by these numbers, too.
};

template <class T>
void layer_norm_row(const Norm& n, const T* x, T* y) {
    floats total = {}, squares = {};
    for (int64_t i = 0; i < n.size; i += LANES) total += load_at(x, i, n.size);
    const float mean = sum(total) / float(n.size);
    int64_t i = 0;
    for (; i + LANES <= n.size; i += LANES) {
        const floats v = load_floats(x + i) - mean;
        squares += v * v;
    }
    float rest = 0;
    for (; i < n.size; i++) rest += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
    const float scale = 1.0f / std::sqrt((sum(squares) + rest) / float(n.size) + float(n.eps));
    for (i = 0; i < n.size; i += LANES)
        store_at(y, i, n.size, (load_at(x, i, n.size) - mean) * scale * load_at(n.weight, i, n.size) + load_at(n.shift, i, n.size));
}

template <class T>
void norm_row(const Norm& n, const T* x, T* y) {
    if (n.shift) return layer_norm_row(n, x, y);
    floats squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n.size; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            const floats v = load_floats(x + i + j * LANES);
            squares[j] += v * v;
        }
    for (; i < n.size; i += LANES) {
        const floats v = load_at(x, i, n.size);
        squares[0] += v * v;
    }
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(n.size);
    const float scale = 1.0f / std::sqrt(mean + float(n.eps));
    for (i = 0; i < n.size; i += LANES) {
        floats v = load_at(x, i, n.size) * scale;
        if (n.rounds_first) v = rounded<T>(v);
        store_at(y, i, n.size, v * load_at(n.weight, i, n.size));
    }
}

template <class T>
INLINE void add_row(const T* x, const T* more, float by, const float* each, T* sum, int64_t size) {
    if (each)
        for (int64_t i = 0; i < size; i += LANES)
            store_at(sum, i, size, load_at(x, i, size) + rounded<T>(load_at(more, i, size) * load_at(each, i, size) * by));
    else if (by == 1)
        for (int64_t i = 0; i < size; i += LANES) store_at(sum, i, size, load_at(x, i, size) + load_at(more, i, size));
    else
        for (int64_t i = 0; i < size; i += LANES) store_at(sum, i, size, load_at(x, i, size) + rounded<T>(load_at(more, i, size) * by));
}

template <class T>
void norm(const Norm& n) {
    const int64_t rows = n.outer * n.inner;
    for_each(rows, threads_for(rows * n.size, n.threads), [&](int64_t row) {
        const T* x = (const T*)n.x + row / n.inner * n.x_outer + row % n.inner * n.x_inner;
        if (n.more) {
            T* sum = (T*)n.sum + row * n.size;
            add_row(x, (const T*)n.more + row * n.size, float(n.by), n.each, sum, n.size);
            if (n.times != 1)
                for (int64_t i = 0; i < n.size; i += LANES) store_at(sum, i, n.size, load_at(sum, i, n.size) * float(n.times));
            x = sum;
        }
        if (!n.y) return;
        T* y = (T*)n.y + row * n.size;
        norm_row<T>(n, x, y);
        if (n.q) quantize_row<T>(y, n.size, n.rounding, n.q + row * n.q_row, n.scales + row * groups_of(n.size, n.rounding));
    });
}

struct Activated {  // `ActivationArguments` in ops.py is the same
    int64_t rows, size, activation, threads;
    void* y;  // [rows][size], changed in place
};

template <class T>
INLINE floats activated(int64_t which, floats x) {
    if (which == QUICK_GELU) return x / (1.0f + exp(-1.702f * x));
    if (which != GELU) return activate<T>(which, x);
    // x * (1 + erf(x / sqrt 2)) / 2, with erf to 2e-7 (Abramowitz and Stegun, 7.1.26)
    const floats size = max(x, -x), z = size * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
    const floats sum = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    return 0.5f * (x + size * (1.0f - sum * exp(-z * z)));
}

template <class T>
void activate_rows(const Activated& a) {
    for_each(a.rows, threads_for(a.rows * a.size, a.threads), [&](int64_t row) {
        T* y = (T*)a.y + row * a.size;
        for (int64_t i = 0; i < a.size; i += LANES) store_at(y, i, a.size, activated<T>(a.activation, load_at(y, i, a.size)));
    });
}

struct Rotary {  // `RotaryArguments` in ops.py is the same
    int64_t tokens, q_heads, k_heads, size, turned;  // the first `turned` elements of each head are rotated
    int64_t q_token, q_head, k_token, k_head, cos_token;  // elements from one to the next; sin has the layout of cos
    int64_t pairs;  // not 0: neighbours are rotated together, and cos of a pair is so many elements behind that of the pair before
    int64_t threads;
    const void *q, *k, *cos, *sin;
    void *q_out, *k_out;  // [tokens][heads][size]
};

// y = x cos + rotate_half(x) sin. T is the type of the heads, C that of cos and sin; products are rounded to C.
template <class T, class C>
INLINE void turn(const T* x, const C* cos, const C* sin, T* y, int64_t size, int64_t turned) {
    const int64_t half = turned / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const floats a = load_at(x, i, half), b = load_at(x + half, i, half);
        const floats ac = rounded<C>(a * load_at(cos, i, half)), bs = rounded<C>(b * load_at(sin, i, half));
        const floats bc = rounded<C>(b * load_at(cos + half, i, half)), as = rounded<C>(a * load_at(sin + half, i, half));
        store_at(y, i, half, ac - bs);
        store_at(y + half, i, half, bc + as);
    }
    std::copy(x + turned, x + size, y + turned);
}

// The same for neighbours: (a, b) become (a cos - b sin, b cos + a sin). cos and sin are those of each element, and sin has the sign of its product.
template <class T, class C>
void turn_pairs(const T* x, const float* cos, const float* sin, T* y, T* swapped, int64_t size, int64_t turned) {
    for (int64_t i = 0; i < turned; i++) swapped[i] = x[i ^ 1];
    for (int64_t i = 0; i < turned; i += LANES) {
        const floats xc = rounded<C>(load_at(x, i, turned) * load_at(cos, i, turned));
        store_at(y, i, turned, xc + rounded<C>(load_at(swapped, i, turned) * load_at(sin, i, turned)));
    }
    std::copy(x + turned, x + size, y + turned);
}

template <class T, class C>
void rotary(const Rotary& r) {
    const int64_t elements = r.tokens * (r.q_heads + r.k_heads) * r.size;
    for_each(r.tokens, threads_for(elements, r.threads), [&](int64_t t) {
        const C *cos = (const C*)r.cos + t * r.cos_token, *sin = (const C*)r.sin + t * r.cos_token;
        std::vector<float> cosines(r.pairs ? r.turned : 0), sines(cosines.size());
        std::vector<T> swapped(cosines.size());
        for (size_t i = 0; i < cosines.size(); i++) {
            cosines[i] = to_float(cos[i / 2 * r.pairs]);
            sines[i] = to_float(sin[i / 2 * r.pairs]) * (i % 2 ? 1 : -1);
        }
        const auto turn_heads = [&](int64_t heads, const void* x, int64_t token, int64_t head, void* y) {
            for (int64_t h = 0; h < heads; h++) {
                const T* from = (const T*)x + t * token + h * head;
                T* to = (T*)y + (t * heads + h) * r.size;
                if (r.pairs)
                    turn_pairs<T, C>(from, cosines.data(), sines.data(), to, swapped.data(), r.size, r.turned);
                else
                    turn<T, C>(from, cos, sin, to, r.size, r.turned);
            }
        };
        turn_heads(r.q_heads, r.q, r.q_token, r.q_head, r.q_out);
        turn_heads(r.k_heads, r.k, r.k_token, r.k_head, r.k_out);
    });
}

}  // namespace

EXPORT void batchgen_norm_float32(const Norm* n) { norm<float>(*n); }
EXPORT void batchgen_norm_bfloat16(const Norm* n) { norm<bf16>(*n); }
EXPORT void batchgen_activate_float32(const Activated* a) { activate_rows<float>(*a); }
EXPORT void batchgen_activate_bfloat16(const Activated* a) { activate_rows<bf16>(*a); }
EXPORT void batchgen_rotary_float32(const Rotary* r) { rotary<float, float>(*r); }
EXPORT void batchgen_rotary_bfloat16(const Rotary* r) { rotary<bf16, bf16>(*r); }
EXPORT void batchgen_rotary_bfloat16_by_float32(const Rotary* r) { rotary<bf16, float>(*r); }
