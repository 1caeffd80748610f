// What linear layers and elementwise kernels share: activations, rounding, and vectors that are not full.
#pragma once
#include "vec.h"

enum Activation : int64_t { NONE = 0, SILU = 1, GELU_TANH = 2 };

INLINE f16v activate(int64_t which, f16v x) {
    f16v power = -x;
    if (which == GELU_TANH) {  // x * (1 + tanh u) / 2 = x / (1 + e^-2u)
        const f16v u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        power = -2.0f * u;
    }
    return x / (1.0f + exp(power));
}

// As if written in T and read again.
template <class T>
INLINE f16v rounded(f16v x) {
    if (sizeof(T) == 4) return x;
    T kept[16];
    store_floats(kept, x);
    return load_floats(kept);
}

// The first `count` of 16, the rest zero.
template <class T>
INLINE f16v load_some(const T* p, int64_t count) {
    T all[16] = {};
    std::memcpy(all, p, count * sizeof(T));
    return load_floats(all);
}
template <class T>
INLINE void store_some(T* p, f16v v, int64_t count) {
    T all[16];
    store_floats(all, v);
    std::memcpy(p, all, count * sizeof(T));
}
