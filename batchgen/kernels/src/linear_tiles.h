// Linear layers on matrix units, in bfloat16 and in 8 bits. linear.h describes the products and the layout of the weights; tiles add in
// another order.
#pragma once
#include "amx.h"
#include "linear.h"
#if defined(BATCHGEN_AMX)

namespace {

constexpr int64_t TILE_DEPTH = 512;    // words of the inner dimension that are summed at a time
constexpr int64_t MIN_TILES = 150;  // products of 16 rows, 16 words and a panel, about 0.2 us each, that are worth a thread

// One thread's tasks: each is some rows of x times a panel.
template <class E, class T>
class TileTask {
   public:
    explicit TileTask(const Product& p) : all_(p), p_(p) {
        const int64_t last = p.words - (p.words - 1) / TILE_DEPTH * TILE_DEPTH;
        rows_at_a_time_ = (SIDE - 1) / std::max<int64_t>(1, last / TILE * (WIDTH / SIDE)) + 1;
    }

    // Computes a task, and prefetches the weights of panel `next` of all experts, unless it is -1. Vectors finish a row while the matrix unit works
    // on the rows after it.
    void run(const ProductTasks::Task& task, int64_t next) {
        const int64_t panel = task.panel, begin = task.begin, end = task.end;
        plan_fetching(end - begin, next);
        p_ = of_expert(all_, task.expert, panels_of(all_));
        panel_ = panel, begin_ = finished_ = summed_ = begin, end_ = end;
        for (int64_t k = 0; k < p_.words; k += TILE_DEPTH) {
            const int64_t words = std::min(TILE_DEPTH, p_.words - k);
            const uint32_t* weights = p_.weights + panel * p_.words * WIDTH + k * SIDE;
            int64_t from_side = p_.words * SIDE;
            if (p_.w_row) pack<SIDE>(p_, panel, k, words, packed_), weights = packed_, from_side = words * SIDE;
            if constexpr (!E::scaled)
                if (p_.codes) {
                    const GroupNumbers* numbers = groups_.take(*p_.codes, p_.first_panel + panel, 1, WIDTH, 2 * k, 2 * words);
                    unpack<2, WIDTH, SIDE>(*p_.codes, p_.first_panel + panel, 2 * k, 2 * (k + words), numbers, packed_);
                    weights = packed_, from_side = words * SIDE;
                }
            for (int64_t row = begin; row < end; row += SIDE) {
                add(row, k, words, weights, from_side);
                if (k + words == p_.words) summed_ = std::min(end, row + SIDE);
            }
        }
        while (finished_ < summed_) finish_row();
    }

   private:
    void plan_fetching(int64_t rows, int64_t next) {
        if (next < 0 || p_.w_row || p_.codes) return void(ahead_ = ahead_end_ = nullptr);
        const int64_t words = p_.words * WIDTH, steps = (rows + SIDE - 1) / SIDE * (WIDTH / SIDE) * ((p_.words + TILE - 1) / TILE);
        ahead_ = all_.weights + next * words;
        ahead_end_ = ahead_ + words;
        ahead_at_a_time_ = ((words + TILE - 1) / TILE + steps - 1) / steps * TILE;
    }

    void fetch() {
        for (const uint32_t* end = std::min(ahead_end_, ahead_ + ahead_at_a_time_); ahead_ < end; ahead_ += TILE) __builtin_prefetch(ahead_, 0, 2);
    }

    // Multiplies the rows from `row` on, SIDE at most, by `words` words of the panel from word k on.
    void add(int64_t row, int64_t k, int64_t words, const uint32_t* weights, int64_t from_side) {
        const int64_t whole = words / TILE * TILE, rest = words - whole;
        const uint32_t* x = p_.x + row * p_.x_row + k;
        for (int side = 0; side < WIDTH / SIDE && whole > 0; side++) multiply(row, x, p_.x_row, weights + side * from_side, whole, side, k > 0);
        if (!rest) return;
        // The last words are filled up to a tile with zeros.
        for (int64_t r = 0; r < std::min<int64_t>(SIDE, end_ - row); r++) std::memcpy(x_rest_ + r * TILE, x + whole + r * p_.x_row, rest * sizeof(uint32_t));
        for (int side = 0; side < WIDTH / SIDE; side++) {
            std::memcpy(w_rest_, weights + side * from_side + whole * SIDE, rest * SIDE * sizeof(uint32_t));
            multiply(row, x_rest_, TILE, w_rest_, TILE, side, k + whole > 0);
        }
    }

    void multiply(int64_t row, const uint32_t* x, int64_t x_row, const uint32_t* weights, int64_t words, int side, bool more) {
        uint32_t* sums = sums_ + (row - begin_) * WIDTH + side * SIDE;
        shapes_.set(std::min<int64_t>(TILE, end_ - row), std::min<int64_t>(TILE, std::max<int64_t>(0, end_ - row - TILE)));
        end_ - row > TILE ? tiles<true>(x, x_row, weights, words, sums, more) : tiles<false>(x, x_row, weights, words, sums, more);
    }

    // Multiplies 16 rows of x (32 with LOWER) by one side of a panel. With `more`, the products are added to those in `sums`.
    template <bool LOWER>
    void tiles(const uint32_t* x, int64_t x_row, const uint32_t* weights, int64_t words, uint32_t* sums, bool more) {
        typedef Sums<LOWER, true> Block;
        more ? Block::load(sums, sums + TILE, WIDTH) : Block::zero();
        for (int64_t k = 0; k < words; k += TILE) {
            Block::template add<E::scaled>(x + k, x_row, weights + k * SIDE, weights + k * SIDE + TILE, SIDE);
            fetch();
            for (int64_t i = 0; i < rows_at_a_time_ && finished_ < summed_; i++) finish_row();
        }
        Block::store(sums, sums + TILE, WIDTH);
    }

    __attribute__((noinline)) void finish_row() {
        uint32_t* sums = sums_ + (finished_ - begin_) * WIDTH;
        if constexpr (E::scaled)
            for (int i = 0; i < WIDTH; i += LANES) store(sums + i, load<ints>(sums + i) + load<ints>(p_.beginnings + panel_ * WIDTH + i));
        finish<E, T>(p_, sums, panel_, finished_++);
    }

    const Product& all_;
    Product p_;  // of the task's expert
    int64_t rows_at_a_time_;
    int64_t panel_ = 0, begin_ = 0, end_ = 0;
    int64_t summed_ = 0, finished_ = 0;  // the rows before these are summed, and finished
    const uint32_t *ahead_ = nullptr, *ahead_end_ = nullptr;  // weights of the next task that have not been prefetched
    int64_t ahead_at_a_time_ = 0;
    Tiles shapes_;
    PanelGroups groups_;
    alignas(64) uint32_t packed_[TILE_DEPTH * WIDTH];
    alignas(64) uint32_t sums_[MAX_ROWS * WIDTH];
    alignas(64) uint32_t x_rest_[SIDE * TILE] = {}, w_rest_[SIDE * TILE] = {};
};

// `run` of linear.h by tiles, for any number of rows.
template <class E, class T>
void run_tiles(const Product& p) {
    if (p.rows == 0) return;
    const int64_t panels = panels_of(p), computed = computed_panels(p);
    const int64_t work = computed * ((p.words + TILE - 1) / TILE) * ProductTasks::blocks(p, TILE);
    const int64_t threads = std::max<int64_t>(1, std::min(p.threads, work / MIN_TILES));
    const ProductTasks all(p, computed, threads, SIDE, MAX_ROWS);
    in_parallel(all.count(), threads, [&](Tasks& some) {
        TileTask<E, T> task(p);
        for (int64_t i = some.take(), next; i >= 0; i = next) {
            next = some.take();
            const auto there = all.at(next < 0 ? i : next);
            task.run(all.at(i), next < 0 ? -1 : there.expert * panels + there.panel);
        }
    });
}

}  // namespace
#endif
