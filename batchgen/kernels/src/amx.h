// Advanced Matrix Extensions: tiles of up to 16 rows of 64 bytes. The instructions are written in assembly, because some compilers that
// know all other instructions do not know these. isa.py has asked the system to let this process use them.
// (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter 20.)
#pragma once
#if defined(BATCHGEN_AMX)
#include <cstdint>

#include "vec.h"

namespace {

constexpr int TILE = 16;        // rows of a tile at most, and words in a row
constexpr int SIDE = 2 * TILE;  // columns of two tiles

#if !defined(TILE_LOAD)  // tests emulate these: tests/kernels/emulated_instructions.h
#define TILE_CONFIGURE(shapes) asm volatile("ldtilecfg %0" ::"m"(shapes))
#define TILE_RELEASE() asm volatile("tilerelease" ::)
#define TILE_LOAD(tile, from, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(int64_t(stride)) : "memory")
#define TILE_LOAD_ONCE(tile, from, stride) asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(tile, to, stride) asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(int64_t(stride)) : "memory")
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TILE_OPERATION(name, sum, x, w) asm volatile(name " %%tmm" #w ", %%tmm" #x ", %%tmm" #sum ::)
#endif

// The tiles of a thread while this object lives: 0 to 3 are sums, in two rows of two; 4 and 5 are rows of x; 6 and 7 are columns of weights.
class Tiles {
   public:
    ~Tiles() {
        if (shapes_.rows[4]) TILE_RELEASE();
    }
    // Sets the rows of the upper and of the lower tiles, and the words of the inner dimension in x and in the weights.
    void set(int64_t upper, int64_t lower, int64_t words = TILE) {
        if (shapes_.rows[4] == upper && shapes_.rows[5] == lower && shapes_.rows[6] == words) return;
        shapes_.rows[0] = shapes_.rows[1] = shapes_.rows[4] = uint8_t(upper);
        shapes_.rows[2] = shapes_.rows[3] = shapes_.rows[5] = uint8_t(lower);
        shapes_.rows[6] = shapes_.rows[7] = uint8_t(words);
        for (int tile = 0; tile < 8; tile++) shapes_.bytes[tile] = shapes_.rows[tile] ? 64 : 0;
        shapes_.bytes[4] = uint16_t(4 * words);
        shapes_.bytes[5] = uint16_t(lower ? 4 * words : 0);
        TILE_CONFIGURE(shapes_);
    }

   private:
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes_;
};

// The sums of 16 rows (32 with LOWER) by 16 columns on the left and, with RIGHT, 16 on the right.
template <bool LOWER, bool RIGHT>
struct Sums {
    static INLINE void zero() {
        TILE_ZERO(0);
        if (RIGHT) TILE_ZERO(1);
        if (LOWER) TILE_ZERO(2);
        if (LOWER && RIGHT) TILE_ZERO(3);
    }
    // `row`: words from one row to the next.
    static INLINE void load(const void* left_, const void* right_, int64_t row) {
        const uint32_t *left = static_cast<const uint32_t*>(left_), *right = static_cast<const uint32_t*>(right_);
        TILE_LOAD(0, left, 4 * row);
        if (RIGHT) TILE_LOAD(1, right, 4 * row);
        if (LOWER) TILE_LOAD(2, left + TILE * row, 4 * row);
        if (LOWER && RIGHT) TILE_LOAD(3, right + TILE * row, 4 * row);
    }
    static INLINE void store(void* left_, void* right_, int64_t row) {
        uint32_t *left = static_cast<uint32_t*>(left_), *right = static_cast<uint32_t*>(right_);
        TILE_STORE(0, left, 4 * row);
        if (RIGHT) TILE_STORE(1, right, 4 * row);
        if (LOWER) TILE_STORE(2, left + TILE * row, 4 * row);
        if (LOWER && RIGHT) TILE_STORE(3, right + TILE * row, 4 * row);
    }
    // Adds a tile of x times the weights' columns. Words are two bfloat16 and sums float32, or (INTEGERS) words are four bytes, unsigned
    // of x and signed of the weights, and sums of 32 bits. Weights are not kept in the first-level cache, so that rows of x stay there.
    template <bool INTEGERS>
    static INLINE void add(const uint32_t* x, int64_t x_row, const uint32_t* left, const uint32_t* right, int64_t w_row) {
#define TILE_MULTIPLY(sum, x, w)                  \
    do {                                          \
        if (INTEGERS)                             \
            TILE_OPERATION("tdpbusd", sum, x, w); \
        else                                      \
            TILE_OPERATION("tdpbf16ps", sum, x, w); \
    } while (0)
        TILE_LOAD_ONCE(6, left, 4 * w_row);
        TILE_LOAD(4, x, 4 * x_row);
        if (RIGHT) TILE_LOAD_ONCE(7, right, 4 * w_row);
        if (LOWER) TILE_LOAD(5, x + TILE * x_row, 4 * x_row);
        TILE_MULTIPLY(0, 4, 6);
        if (RIGHT) TILE_MULTIPLY(1, 4, 7);
        if (LOWER) TILE_MULTIPLY(2, 5, 6);
        if (LOWER && RIGHT) TILE_MULTIPLY(3, 5, 7);
#undef TILE_MULTIPLY
    }
};

}  // namespace
#endif
