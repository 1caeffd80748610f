// Several kernels in one call: no Python runs between them, so that the pool's threads do not fall asleep.
#include <cstdint>

#include "export.h"

namespace {

struct Call {  // made by `Calls` in ops.py
    void (*kernel)(const void*);
    const void* argument;
};

}  // namespace

EXPORT void batchgen_run(const Call* calls, int32_t count) {
    for (int32_t i = 0; i < count; i++) calls[i].kernel(calls[i].argument);
}
