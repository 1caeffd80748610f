// What linear layers and elementwise kernels share: activations, rounding, and vectors that are not full.
#pragma once
#include "vec.h"

enum Activation : int64_t { NONE = 0, SILU = 1, GELU_TANH = 2, CLAMPED = 3, SIGMOID = 4, QUICK_GELU = 5, GELU = 6 };

// For float32 as exact as a division, for bfloat16 as exact as the result's rounding.
template <class T>
INLINE floats activate(int64_t which, floats x) {
    floats power = -x;
    if (which == GELU_TANH) {  // x * (1 + tanh u) / 2 = x / (1 + e^-2u)
        const floats u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        power = -2.0f * u;
    }
#if defined(__AVX512F__)
    if (sizeof(T) == 2) return x * reciprocal(1.0f + exp2_of_bounded(power * 1.44269504f));
#endif
    return x / (1.0f + exp(power));
}

// The value after it was written in T and read again.
template <class T>
INLINE floats rounded(floats x) {
    if (sizeof(T) == 4) return x;
    T kept[LANES];
    store_floats(kept, x);
    return load_floats(kept);
}

// gpt-oss: g * sigmoid(alpha g) * (u + 1), with g limited from above and u from both sides; each operation is rounded to T.
template <class T>
INLINE floats clamped_gate(floats gate, floats up, float alpha, float limit) {
    const floats most = splat(limit), least = splat(-limit);
    gate = select(gate > most, most, gate);  // NaN stays
    up = select(up > most, most, select(up < least, least, up));
    const floats z = rounded<T>(gate * alpha);
#if defined(__AVX512F__)
    const floats share = sizeof(T) == 2 ? reciprocal(1.0f + exp2_of_bounded(z * -1.44269504f)) : 1.0f / (1.0f + exp(-z));
#else
    const floats share = 1.0f / (1.0f + exp(-z));
#endif
    return rounded<T>(up + 1.0f) * rounded<T>(gate * rounded<T>(share));
}

// The first `count` numbers of a vector; the others are zero.
template <class T>
INLINE floats load_some(const T* p, int64_t count) {
    T all[LANES] = {};
    std::memcpy(all, p, count * sizeof(T));
    return load_floats(all);
}
template <class T>
INLINE void store_some(T* p, floats v, int64_t count) {
    T all[LANES];
    store_floats(all, v);
    std::memcpy(p, all, count * sizeof(T));
}
// A vector at element i of a row of `size` numbers, which may end inside of it.
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
