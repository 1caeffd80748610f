// Linear layers on matrix units, in bfloat16 and in 8 bits. linear.h describes the products and the layout of the weights; tiles add in
// another order.
#pragma once
#include "amx.h"
#include "linear.h"
#if defined(BATCHGEN_AMX)

namespace {

constexpr int64_t TILE_DEPTH = 256;  // words of the inner dimension that are summed at a time: those of 32 rows of x stay in the first-level cache
constexpr int64_t MIN_TILES = 150;  // products of 16 rows, 16 words and a panel, about 0.04 us each, that are worth a thread
// Rows of x that are a multiple of so many words apart (2 KB) share a part of the first-level cache, so they are copied.
constexpr int64_t CROWDED_ROW = 512, COPIED_ROW = TILE_DEPTH + TILE;
constexpr int64_t MAX_PANELS = 4;  // of a task, which read the same rows of x one after the other

// One thread's tasks: each is some rows of x times `at_once` panels.
template <class E, class T>
class TileTask {
   public:
    typedef ProductTasks::Task Task;
    TileTask(const Product& p, int64_t at_once) : all_(p), p_(p), at_once_(at_once), panels_(panels_of(p)) {
        const int64_t last = p.words - (p.words - 1) / TILE_DEPTH * TILE_DEPTH;
        rows_at_a_time_ = (SIDE - 1) / std::max<int64_t>(1, last / TILE * (WIDTH / SIDE)) + 1;
    }

    // Computes a task, and prefetches the first weights of the next one unless that is null. Vectors finish a row while the matrix unit works on
    // later rows or panels.
    void run(const Task& task, const Task* next) {
        p_ = of_expert(all_, task.expert, panels_);
        first_ = task.panel * at_once_, count_ = std::min(at_once_, panels_ - first_);
        begin_ = row_ = task.begin, end_ = task.end, panel_ = finished_ = blocks_ = waiting_ = 0;
        for (int64_t k = 0; k < p_.words; k += TILE_DEPTH) {
            const int64_t words = std::min(TILE_DEPTH, p_.words - k);
            const bool last = k + words == p_.words;
            plan_fetching(words, last ? next : &task, last ? 0 : k + words);
            const uint32_t* weights[MAX_PANELS];
            int64_t from_side = p_.words * SIDE;
            for (int64_t i = 0; i < count_; i++) weights[i] = p_.weights + (first_ + i) * p_.words * WIDTH + k * SIDE;
            if (p_.w_row) pack<SIDE>(p_, first_, k, words, packed_), weights[0] = packed_, from_side = words * SIDE;
            if constexpr (!E::scaled)
                if (p_.codes) {
                    const int64_t panel = p_.first_panel + first_;
                    const GroupNumbers* numbers = groups_.take(*p_.codes, panel, 1, WIDTH, 2 * k, 2 * words);
                    unpack<2, WIDTH, SIDE>(*p_.codes, panel, 2 * k, 2 * (k + words), numbers, packed_);
                    weights[0] = packed_, from_side = words * SIDE;
                }
            for (int64_t row = begin_; row < end_; row += SIDE) {
                const uint32_t* x = p_.x + row * p_.x_row + k;
                int64_t x_row = p_.x_row;
                if (x_row % CROWDED_ROW == 0) x = copied(x, std::min<int64_t>(SIDE, end_ - row), words), x_row = COPIED_ROW;
                for (int64_t i = 0; i < count_; i++) {
                    while (waiting_ > 1) finish_row();
                    add(row, x, x_row, words, weights[i], from_side, sums_of(row, i, blocks_), k > 0);
                    if (last) blocks_++, waiting_++;
                }
            }
        }
        while (waiting_ > 0) finish_row();
    }

   private:
    // Sums that are made in one go are finished soon, so two blocks of them are kept.
    uint32_t* sums_of(int64_t row, int64_t i, int64_t block) {
        return sums_ + (p_.words <= TILE_DEPTH ? block % 2 * SIDE : i * MAX_ROWS + row - begin_) * WIDTH;
    }

    // The weights of a task from word k on are prefetched while `words` words of the present one are multiplied.
    void plan_fetching(int64_t words, const Task* task, int64_t k) {
        ahead_.clear();
        if (!task || p_.w_row || p_.codes) return;
        const int64_t first = task->panel * at_once_, end = std::min(first + at_once_, panels_);
        for (int64_t panel = task->expert * panels_ + first; panel < task->expert * panels_ + end; panel++)
            for (int64_t side = 0; side < WIDTH / SIDE; side++)
                ahead_.add(all_.weights + (panel * WIDTH + side * SIDE) * p_.words + k * SIDE, std::min(TILE_DEPTH, p_.words - k) * SIDE);
        ahead_.divide((end_ - begin_ + SIDE - 1) / SIDE * count_ * (WIDTH / SIDE) * ((words + TILE - 1) / TILE));
    }

    const uint32_t* copied(const uint32_t* x, int64_t rows, int64_t words) {
        for (int64_t r = 0; r < rows; r++) std::memcpy(copied_ + r * COPIED_ROW, x + r * p_.x_row, words * sizeof(uint32_t));
        return copied_;
    }

    // Multiplies the rows from `row` on, SIDE at most, by `words` words of a panel. With `more`, the products are added to those in `sums`.
    void add(int64_t row, const uint32_t* x, int64_t x_row, int64_t words, const uint32_t* weights, int64_t from_side, uint32_t* sums, bool more) {
        const int64_t whole = words / TILE * TILE, rest = words - whole;
        for (int side = 0; side < WIDTH / SIDE && whole > 0; side++) multiply(row, x, x_row, weights + side * from_side, whole, sums + side * SIDE, more);
        if (!rest) return;
        // The last words are filled up to a tile with zeros.
        for (int64_t r = 0; r < std::min<int64_t>(SIDE, end_ - row); r++) std::memcpy(x_rest_ + r * TILE, x + whole + r * x_row, rest * sizeof(uint32_t));
        for (int side = 0; side < WIDTH / SIDE; side++) {
            std::memcpy(w_rest_, weights + side * from_side + whole * SIDE, rest * SIDE * sizeof(uint32_t));
            multiply(row, x_rest_, TILE, w_rest_, TILE, sums + side * SIDE, more || whole > 0);
        }
    }

    void multiply(int64_t row, const uint32_t* x, int64_t x_row, const uint32_t* weights, int64_t words, uint32_t* sums, bool more) {
        shapes_.set(std::min<int64_t>(TILE, end_ - row), std::min<int64_t>(TILE, std::max<int64_t>(0, end_ - row - TILE)));
        end_ - row > TILE ? tiles<true>(x, x_row, weights, words, sums, more) : tiles<false>(x, x_row, weights, words, sums, more);
    }

    // Multiplies 16 rows of x (32 with LOWER) by one side of a panel.
    template <bool LOWER>
    void tiles(const uint32_t* x, int64_t x_row, const uint32_t* weights, int64_t words, uint32_t* sums, bool more) {
        typedef Sums<LOWER, true> Block;
        more ? Block::load(sums, sums + TILE, WIDTH) : Block::zero();
        for (int64_t k = 0; k < words; k += TILE) {
            Block::template add<E::scaled>(x + k, x_row, weights + k * SIDE, weights + k * SIDE + TILE, SIDE);
            ahead_.fetch();
            for (int64_t i = 0; i < rows_at_a_time_ && waiting_ > 0; i++) finish_row();
        }
        Block::store(sums, sums + TILE, WIDTH);
    }

    __attribute__((noinline)) void finish_row() {
        const int64_t panel = first_ + panel_;
        uint32_t* sums = sums_of(row_, panel_, blocks_ - waiting_) + finished_ * WIDTH;
        if constexpr (E::scaled)
            for (int i = 0; i < WIDTH; i += LANES) store(sums + i, load<ints>(sums + i) + load<ints>(p_.beginnings + panel * WIDTH + i));
        finish<E, T>(p_, sums, panel, row_ + finished_);
        if (++finished_ < std::min<int64_t>(SIDE, end_ - row_)) return;
        finished_ = 0, waiting_--;
        if (++panel_ == count_) panel_ = 0, row_ += SIDE;
    }

    const Product& all_;
    Product p_;  // of the task's expert
    const int64_t at_once_, panels_;
    int64_t rows_at_a_time_;
    int64_t first_ = 0, count_ = 0, begin_ = 0, end_ = 0;  // panels and rows of the task
    int64_t blocks_ = 0, waiting_ = 0;  // blocks of rows of a panel that are summed, and those of them that are not finished
    int64_t row_ = 0, panel_ = 0, finished_ = 0;  // the first of these, and how many of its rows are finished
    Ahead ahead_;
    Tiles shapes_;
    PanelGroups groups_;
    alignas(64) uint32_t packed_[TILE_DEPTH * WIDTH];
    alignas(64) uint32_t copied_[SIDE * COPIED_ROW];
    alignas(64) uint32_t sums_[MAX_PANELS * MAX_ROWS * WIDTH];
    alignas(64) uint32_t x_rest_[SIDE * TILE] = {}, w_rest_[SIDE * TILE] = {};
};

// `run` of linear.h by tiles, for any number of rows.
template <class E, class T>
void run_tiles(const Product& p) {
    if (p.rows == 0) return;
    const int64_t computed = computed_panels(p);
    const int64_t work = computed * ((p.words + TILE - 1) / TILE) * ProductTasks::blocks(p, TILE);
    const int64_t threads = std::max<int64_t>(1, std::min(p.threads, work / MIN_TILES));
    const bool apart = p.w_row || p.codes || p.chosen;
    // Panels of nearly equal number for each task, as long as there are four tasks for each thread.
    const int64_t most = std::max<int64_t>(1, std::min(MAX_PANELS, computed * ProductTasks::blocks(p, MAX_ROWS) / (4 * threads)));
    const int64_t groups = (computed + most - 1) / most;
    const int64_t at_once = apart ? 1 : (computed + groups - 1) / groups;
    const ProductTasks all(p, (computed + at_once - 1) / at_once, threads, SIDE, MAX_ROWS);
    in_parallel(all.count(), threads, [&](Tasks& some) {
        TileTask<E, T> task(p, at_once);
        for (int64_t i = some.take(), next; i >= 0; i = next) {
            next = some.take();
            const auto after = all.at(next < 0 ? i : next);
            task.run(all.at(i), next < 0 ? nullptr : &after);
        }
    });
}

}  // namespace
#endif
