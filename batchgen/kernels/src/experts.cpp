// Around the products of a mixture's experts: rows in the order of their experts, and the weighted sum of what the experts of a token give.
#include <algorithm>

#include "activation.h"
#include "pool.h"

namespace {

struct Route {  // `_Route` in experts.py is the same
    int64_t tokens, chosen, experts, bytes, x_row, threads;  // experts of a token; bytes of a row of x, and from one row to the next
    const int64_t* indices;  // [tokens][chosen]
    const char* x;
    int64_t* starts;  // [experts + 1]
    int64_t* places;  // [tokens][chosen], of each pair of a token and an expert among the rows in order
    char* rows;       // [tokens * chosen][bytes]
};

struct Combine {  // `_Combine` in experts.py is the same
    int64_t tokens, chosen, size, threads;
    const void* rows;     // [tokens * chosen][size]
    const void* weights;  // [tokens][chosen]
    const int64_t* places;
    void* y;  // [tokens][size]
};

constexpr int64_t MIN_NUMBERS = 1 << 14;  // that are worth a thread

// y = sum of a token's rows times their weights, in float32; each product is rounded to the type that torch gives it.
template <class T, class W>
void combine(const Combine& c) {
    const int64_t numbers = c.tokens * c.chosen * c.size;
    for_each(c.tokens, numbers < MIN_NUMBERS ? 1 : c.threads, [&](int64_t token) {
        const W* weights = (const W*)c.weights + token * c.chosen;
        const int64_t* places = c.places + token * c.chosen;
        for (int64_t i = 0; i < c.size; i += LANES) {
            floats sum = {};
            for (int64_t k = 0; k < c.chosen; k++) {
                const floats product = load_at((const T*)c.rows + places[k] * c.size, i, c.size) * to_float(weights[k]);
                sum += sizeof(W) == 4 ? product : rounded<W>(product);
            }
            store_at((T*)c.y + token * c.size, i, c.size, sum);
        }
    });
}

}  // namespace

// Returns whether each index names an expert. If not, nothing is written to `rows`.
EXPORT int32_t batchgen_route(const Route* r) {
    const int64_t pairs = r->tokens * r->chosen;
    std::fill(r->starts, r->starts + r->experts + 1, 0);
    for (int64_t i = 0; i < pairs; i++) {
        if (r->indices[i] < 0 || r->indices[i] >= r->experts) return 0;
        r->starts[r->indices[i] + 1]++;
    }
    for (int64_t e = 0; e < r->experts; e++) r->starts[e + 1] += r->starts[e];
    for (int64_t i = 0; i < pairs; i++) r->places[i] = r->starts[r->indices[i]]++;
    for (int64_t e = r->experts; e > 0; e--) r->starts[e] = r->starts[e - 1];
    r->starts[0] = 0;
    for_each(pairs, pairs * r->bytes < 4 * MIN_NUMBERS ? 1 : r->threads, [&](int64_t i) {
        std::memcpy(r->rows + r->places[i] * r->bytes, r->x + i / r->chosen * r->x_row, r->bytes);
    });
    return 1;
}
EXPORT void batchgen_combine_float32(const Combine* c) { combine<float, float>(*c); }
EXPORT void batchgen_combine_bfloat16(const Combine* c) { combine<bf16, bf16>(*c); }
EXPORT void batchgen_combine_bfloat16_by_float32(const Combine* c) { combine<bf16, float>(*c); }
