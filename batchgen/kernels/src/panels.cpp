// Weights in the order in which linear layers read them (linear.h).
#include "linear.h"

namespace {

struct Panels {  // `PanelsArguments` in ops.py is the same
    int64_t experts, rows, size, bytes;  // of x: [experts, rows, size], and of a number
    int64_t parts, part;                 // how many weights share a panel, and which of them x is
    int64_t side;                        // columns that lie side by side
    int64_t halves, threads;
    const char* x;
    char* y;
};

constexpr int64_t PIECE = 256;  // bytes that are read of a row at a time; rows may compete for places in the cache, so they are copied

// Writes a number with put(number in its column, column of the side, number).
template <class T, class Put>
void write_in_panels(const Panels& p, const Put& put) {
    const int64_t width = WIDTH / p.parts, group = std::min(p.side, width), per_panel = width / group;
    const int64_t panels = (p.rows + width - 1) / width;
    constexpr int64_t step = PIECE / sizeof(T);
    for_each(p.experts * panels * per_panel, threads_for(p.experts * p.rows * p.size, p.threads), [&](int64_t i) {
        const int64_t panel = i / per_panel, in_panel = i % per_panel * group, column = p.part * width + in_panel;
        const int64_t row = panel % panels * width + in_panel, rows = std::clamp(p.rows - row, int64_t(0), group);
        const T* x = (const T*)p.x + (panel / panels * p.rows + row) * p.size;
        const int64_t beside = column % p.side, size = p.size;
        T* y = (T*)p.y + (panel * WIDTH + column - beside) * size;
        T pieces[WIDTH][step] = {};
        for (int64_t from = 0; from < size; from += step) {
            const int64_t end = std::min(size, from + step);
            for (int64_t r = 0; r < rows; r++) std::copy(x + r * size + from, x + r * size + end, pieces[r]);
            for (int64_t k = from; k < end; k++)
                for (int64_t r = 0; r < group; r++) put(y, k, beside + r, pieces[r][k - from]);
        }
    });
}

template <class T>
void write_whole(const Panels& p) {
    write_in_panels<T>(p, [side = p.side](T* y, int64_t k, int64_t column, T x) { y[k * side + column] = x; });
}

}  // namespace

EXPORT int64_t batchgen_lanes() { return LANES; }
// Columns of x in their places of the panels y. With `halves`, the first halves of a vector's words lie before all second ones.
EXPORT void batchgen_write_in_panels(const Panels* p) {
    if (p->halves)
        return write_in_panels<uint32_t>(*p, [side = p->side](uint32_t* y, int64_t k, int64_t column, uint32_t x) {
            uint16_t* to = (uint16_t*)(y + k * side + column / LANES * LANES) + column % LANES;
            to[0] = uint16_t(x), to[LANES] = uint16_t(x >> 16);
        });
    p->bytes == 1 ? write_whole<uint8_t>(*p) : p->bytes == 2 ? write_whole<uint16_t>(*p) : write_whole<uint32_t>(*p);
}
