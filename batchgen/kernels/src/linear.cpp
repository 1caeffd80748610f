// Linear layers whose weights are float32, bfloat16 or float16.
#include "linear_tiles.h"

EXPORT int64_t batchgen_linear_panel() { return WIDTH; }
EXPORT void batchgen_linear_float32(const Product* p) { run<Float, float>(*p); }
EXPORT void batchgen_linear_float32_by_bfloat16(const Product* p) { run<Widened, float>(*p); }
EXPORT void batchgen_linear_float32_by_float16(const Product* p) { run<WidenedFloat16, float>(*p); }
EXPORT void batchgen_linear_bfloat16(const Product* p) {
#if defined(BATCHGEN_AMX)
    run_tiles<Bfloat, bf16>(*p);
#else
    run<Bfloat, bf16>(*p);
#endif
}
// How many columns of a panel of bfloat16 weights lie side by side.
EXPORT int64_t batchgen_linear_side_bfloat16() {
#if defined(BATCHGEN_AMX)
    return SIDE;
#else
    return WIDTH;
#endif
}
