// Linear layers with weights packed once: y = x W^T + bias, or y = act(x G^T) * (x U^T) for a gated one.
//
// W is [panels][words of the inner dimension][64], so that what a product reads is 64 words that lie side by side; a panel of a
// gated layer holds 32 rows of G and the same 32 of U. A block of 6 rows by 64 columns is summed in registers (the shape of
// Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008), in float32; results are rounded where the
// modules of transformers round. linear.py packs the weights.
#include <algorithm>
#include <vector>

#include "activation.h"
#include "vec.h"

namespace {

constexpr int WIDTH = 64;   // columns of a panel
constexpr int ROWS = 6;     // of a block
constexpr int DEPTH = 512;  // words of the inner dimension that are summed at a time: 128 KiB of a panel, in the second cache
constexpr int MOST_ROWS = 288;  // of a task
constexpr int64_t LEAST = 1500;  // words of panels times blocks of rows, 12 cycles or so each, that are worth a thread
#if defined(__AVX512F__)
constexpr int VECTORS = 4;  // of 16 columns, summed at a time: 24 registers of sums
#else
constexpr int VECTORS = 1;
#endif

struct Product {  // `_Product` in linear.py is the same
    int64_t rows, columns, words;  // columns of y; words of the inner dimension
    int64_t x_row, y_row;          // elements from one row to the next
    int64_t activation;            // none for a plain layer; else the layer is gated
    int64_t threads;
    const void* x;
    const uint32_t* weights;
    const float* bias;  // [panels][64], or null
    void* y;
};

// Sums [R][64] of R rows of x with a panel, over `words` words; onto what is there where `more`.
template <class E, int R>
void block(const typename E::type* x, int64_t x_row, const uint32_t* panel, int64_t words, float* sums, bool more) {
    for (int first = 0; first < WIDTH; first += 16 * VECTORS) {
        f16v acc[R][VECTORS];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) acc[r][v] = more ? load<f16v>(sums + r * WIDTH + first + v * 16) : f16v{};
        for (int64_t k = 0; k < words; k++) {
            u16v b[VECTORS];
            for (int v = 0; v < VECTORS; v++) b[v] = load<u16v>(panel + k * WIDTH + first + v * 16);
            for (int r = 0; r < R; r++) {
                uint32_t word;
                std::memcpy(&word, x + r * x_row + k * E::per_word, 4);
                for (int v = 0; v < VECTORS; v++) acc[r][v] = E::dot(acc[r][v], b[v], word);
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) store(sums + r * WIDTH + first + v * 16, acc[r][v]);
    }
}

template <class E>
void block(int64_t rows, const typename E::type* x, int64_t x_row, const uint32_t* panel, int64_t words, float* sums, bool more) {
    switch (rows) {
        case 1: return block<E, 1>(x, x_row, panel, words, sums, more);
        case 2: return block<E, 2>(x, x_row, panel, words, sums, more);
        case 3: return block<E, 3>(x, x_row, panel, words, sums, more);
        case 4: return block<E, 4>(x, x_row, panel, words, sums, more);
        case 5: return block<E, 5>(x, x_row, panel, words, sums, more);
        default: return block<E, ROWS>(x, x_row, panel, words, sums, more);
    }
}

// The sums of one row and panel, finished, to y.
template <class T>
void finish(const Product& p, float* sums, int64_t panel, T* y_row) {
    if (p.bias)
        for (int i = 0; i < WIDTH; i += 16) store(sums + i, load<f16v>(sums + i) + load<f16v>(p.bias + panel * WIDTH + i));
    const int width = p.activation == NONE ? WIDTH : WIDTH / 2;
    const int64_t left = p.columns - panel * width;
    T* y = y_row + panel * width;
    for (int i = 0; i < width && i < left; i += 16) {
        f16v value = load<f16v>(sums + i);
        if (p.activation != NONE) {
            const f16v up = rounded<T>(load<f16v>(sums + width + i));
            value = rounded<T>(activate(p.activation, rounded<T>(value))) * up;
        }
        if (left - i >= 16)
            store_floats(y + i, value);
        else
            store_some(y + i, value, left - i);
    }
}

template <class E>
void run(const Product& p) {
    typedef typename E::type T;
    const int64_t panels = (p.columns * (p.activation == NONE ? 1 : 2) + WIDTH - 1) / WIDTH;
    if (p.rows == 0) return;
    const int64_t work = panels * p.words * ((p.rows + ROWS - 1) / ROWS);
    const int64_t threads = std::max<int64_t>(1, std::min(p.threads, work / LEAST));
    // Enough tasks for every thread to have several, but no smaller than that needs: each reads its panel anew.
    const int64_t wanted = threads == 1 ? 1 : std::max<int64_t>(1, 4 * threads / panels);
    const int64_t share = (p.rows + wanted - 1) / wanted;
    const int64_t task_rows = std::min<int64_t>((share + ROWS - 1) / ROWS * ROWS, MOST_ROWS);
    const int64_t tasks = (p.rows + task_rows - 1) / task_rows * panels;
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
        float sums[MOST_ROWS * WIDTH];
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t panel = task % panels, begin = task / panels * task_rows, end = std::min(p.rows, begin + task_rows);
            for (int64_t k = 0; k < p.words; k += DEPTH) {
                const int64_t words = std::min<int64_t>(DEPTH, p.words - k);
                for (int64_t row = begin; row < end; row += ROWS) {
                    const int64_t rows = std::min<int64_t>(ROWS, end - row);
                    const T* x = (const T*)p.x + row * p.x_row + k * E::per_word;
                    float* here = sums + (row - begin) * WIDTH;
                    block<E>(rows, x, p.x_row, p.weights + (panel * p.words + k) * WIDTH, words, here, k > 0);
                    if (k + words == p.words)
                        for (int64_t r = 0; r < rows; r++) finish<T>(p, here + r * WIDTH, panel, (T*)p.y + (row + r) * p.y_row);
                }
            }
        }
    }
}

}  // namespace

EXPORT void batchgen_linear_float32(const Product* p) { run<Float>(*p); }
EXPORT void batchgen_linear_bfloat16(const Product* p) { run<Bfloat>(*p); }
