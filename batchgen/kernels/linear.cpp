// Linear layers whose weights are float32 or bfloat16.
#include "amx.h"
#include "linear.h"

#if defined(BATCHGEN_AMX)
namespace {

constexpr int64_t TILE_DEPTH = 512;    // words of the inner dimension that are summed at a time
constexpr int64_t LEAST_TILES = 1500;  // of 16 rows by 16 words by a panel, that are worth a thread

// `run` by tiles, for any number of rows: tiles sum in an order of their own.
void run_tiles(const Product& p) {
    if (p.rows == 0) return;
    const int64_t panels = (p.columns * (p.activation == NONE ? 1 : 2) + WIDTH - 1) / WIDTH;
    const int64_t work = panels * ((p.words + TILE - 1) / TILE) * ((p.rows + TILE - 1) / TILE);
    const int64_t threads = std::max<int64_t>(1, std::min(p.threads, work / LEAST_TILES));
    const int64_t wanted = threads == 1 ? 1 : std::max<int64_t>(1, 4 * threads / panels);
    const int64_t share = (p.rows + wanted - 1) / wanted;
    const int64_t task_rows = std::min<int64_t>((share + SIDE - 1) / SIDE * SIDE, MOST_ROWS);
    const int64_t tasks = (p.rows + task_rows - 1) / task_rows * panels;
    const int64_t whole = p.words / TILE * TILE, rest = p.words - whole;  // the last words are filled up to a tile with zeros
    in_parallel(tasks, threads, [&](Tasks& some) {
        alignas(64) uint32_t sums[MOST_ROWS * WIDTH];
        alignas(64) uint32_t x_rest[SIDE * TILE] = {}, w_rest[SIDE * TILE] = {};
        std::vector<uint32_t> packed(p.w_row ? TILE_DEPTH * WIDTH : 0);
        Tiles shapes;
        for (int64_t task; (task = some.take()) >= 0;) {
            const int64_t panel = task % panels, begin = task / panels * task_rows, end = std::min(p.rows, begin + task_rows);
            const auto multiply = [&](int64_t row, const uint32_t* x, int64_t x_row, const uint32_t* side, int64_t words, int column, bool more) {
                uint32_t* here = sums + (row - begin) * WIDTH + column;
                shapes.set(std::min<int64_t>(TILE, end - row), std::min<int64_t>(TILE, std::max<int64_t>(0, end - row - TILE)));
                end - row > TILE ? tiles<false, WIDTH, true>(x, x_row, side, words, here, more) : tiles<false, WIDTH, false>(x, x_row, side, words, here, more);
            };
            for (int64_t k = 0; k < p.words; k += TILE_DEPTH) {
                const int64_t words = std::min(TILE_DEPTH, p.words - k);
                const uint32_t* weights = p.weights + panel * p.words * WIDTH + k * SIDE;
                int64_t from_side = p.words * SIDE;
                if (p.w_row) pack<SIDE>(p, panel, k, words, packed.data()), weights = packed.data(), from_side = words * SIDE;
                const int64_t now = std::min(words, whole - k);
                for (int64_t row = begin; row < end; row += SIDE) {
                    for (int column = 0; column < WIDTH && now > 0; column += SIDE)
                        multiply(row, p.x + row * p.x_row + k, p.x_row, weights + column / SIDE * from_side, now, column, k > 0);
                    if (now < words) {
                        for (int64_t r = row; r < std::min(end, row + SIDE); r++)
                            std::memcpy(x_rest + (r - row) * TILE, p.x + r * p.x_row + whole, rest * sizeof(uint32_t));
                        for (int column = 0; column < WIDTH; column += SIDE) {
                            std::memcpy(w_rest, weights + column / SIDE * from_side + now * SIDE, rest * SIDE * sizeof(uint32_t));
                            multiply(row, x_rest, TILE, w_rest, TILE, column, whole > 0);
                        }
                    }
                    if (k + words == p.words)
                        for (int64_t r = row; r < std::min(end, row + SIDE); r++)
                            finish<Bfloat, bf16>(p, sums + (r - begin) * WIDTH, panel, r);
                }
            }
        }
    });
}

}  // namespace
#endif

EXPORT int64_t batchgen_linear_panel() { return WIDTH; }
EXPORT void batchgen_linear_float32(const Product* p) { run<Float, float>(*p); }
EXPORT void batchgen_linear_float32_by_bfloat16(const Product* p) { run<Widened, float>(*p); }
// x is float32 where no instruction multiplies bfloat16.
EXPORT void batchgen_linear_bfloat16(const Product* p) {
#if defined(BATCHGEN_AMX)
    run_tiles(*p);
#else
    run<Bfloat, bf16>(*p);
#endif
}
EXPORT int64_t batchgen_linear_widens() { return Bfloat::a_words == 2; }
// Columns of a panel of bfloat16 weights that lie side by side.
EXPORT int64_t batchgen_linear_side_bfloat16() {
#if defined(BATCHGEN_AMX)
    return SIDE;
#else
    return WIDTH;
#endif
}
