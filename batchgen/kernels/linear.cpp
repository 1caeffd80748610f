// Linear layers whose weights are float32 or bfloat16.
#include "linear.h"

EXPORT int64_t batchgen_linear_panel() { return WIDTH; }
EXPORT void batchgen_linear_float32(const Product* p) { run<Float, float>(*p); }
EXPORT void batchgen_linear_float32_by_bfloat16(const Product* p) { run<Widened, float>(*p); }
// x is float32 where no instruction multiplies bfloat16.
EXPORT void batchgen_linear_bfloat16(const Product* p) { run<Bfloat, bf16>(*p); }
EXPORT int64_t batchgen_linear_widens() { return Bfloat::a_words == 2; }
