// Advanced Matrix Extensions: tiles of up to 16 rows of 64 bytes. The instructions are written out, since compilers that know all the
// rest do not know these. (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter 20.)
#pragma once
#if defined(BATCHGEN_AMX)
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "vec.h"

namespace {

constexpr int TILE = 16;        // most rows of a tile, and words of one of its rows
constexpr int SIDE = 2 * TILE;  // columns of two tiles

// The kernel lets a process use tiles that has asked for it.
const bool has_tiles = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;

#define TILE_LOAD(tile, from, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(tile, to, stride) asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(int64_t(stride)) : "memory")
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TILE_OPERATION(name, sum, x, w) asm volatile(name " %%tmm" #w ", %%tmm" #x ", %%tmm" #sum ::)

// The tiles of a thread, for as long as this lives: sums in 0 to 3, two rows of two; rows of x in 4 and 5; columns of weights in 6 and 7.
class Tiles {
   public:
    ~Tiles() {
        if (shapes_.rows[4]) asm volatile("tilerelease" ::);
    }
    // So many rows in the upper and in the lower tiles.
    void set(int64_t upper, int64_t lower) {
        if (shapes_.rows[4] == upper && shapes_.rows[5] == lower) return;
        shapes_.rows[0] = shapes_.rows[1] = shapes_.rows[4] = uint8_t(upper);
        shapes_.rows[2] = shapes_.rows[3] = shapes_.rows[5] = uint8_t(lower);
        for (int tile = 0; tile < 8; tile++) shapes_.bytes[tile] = shapes_.rows[tile] ? 64 : 0;
        asm volatile("ldtilecfg %0" ::"m"(shapes_));
    }

   private:
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {0, 0, 0, 0, 0, 0, TILE, TILE};
    } shapes_;
};

// The rows of x in the tiles, 16 or (TWO) 32, by one side of a panel, over `words` words; onto what is there where `more`. Words are two
// bfloat16 and sums float32, or (INTEGERS) words are four bytes, unsigned of x and signed of W, and sums of 32 bits. Sums are WIDTH apart.
#define TILE_MULTIPLY(sum, x, w)              \
    if (INTEGERS)                             \
        TILE_OPERATION("tdpbusd", sum, x, w); \
    else                                      \
        TILE_OPERATION("tdpbf16ps", sum, x, w)
template <bool INTEGERS, int WIDTH, bool TWO>
INLINE void tiles(const uint32_t* x, int64_t x_row, const uint32_t* side, int64_t words, void* sums_, bool more) {
    constexpr int64_t wide = WIDTH * 4, below = TILE * WIDTH, across = SIDE * 4;
    uint32_t* sums = static_cast<uint32_t*>(sums_);
    if (more) {
        TILE_LOAD(0, sums, wide);
        TILE_LOAD(1, sums + TILE, wide);
        if (TWO) TILE_LOAD(2, sums + below, wide);
        if (TWO) TILE_LOAD(3, sums + below + TILE, wide);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (TWO) TILE_ZERO(2);
        if (TWO) TILE_ZERO(3);
    }
    for (int64_t k = 0; k < words; k += TILE) {
        TILE_LOAD(6, side + k * SIDE, across);
        TILE_LOAD(4, x + k, 4 * x_row);
        TILE_MULTIPLY(0, 4, 6);
        TILE_LOAD(7, side + k * SIDE + TILE, across);
        TILE_MULTIPLY(1, 4, 7);
        if (TWO) {
            TILE_LOAD(5, x + TILE * x_row + k, 4 * x_row);
            TILE_MULTIPLY(2, 5, 6);
            TILE_MULTIPLY(3, 5, 7);
        }
    }
    TILE_STORE(0, sums, wide);
    TILE_STORE(1, sums + TILE, wide);
    if (TWO) TILE_STORE(2, sums + below, wide);
    if (TWO) TILE_STORE(3, sums + below + TILE, wide);
}

#undef TILE_MULTIPLY

}  // namespace
#endif
