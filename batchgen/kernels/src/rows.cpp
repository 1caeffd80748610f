// Rows of a table, such as an embedding. A table of codes may be that of a linear layer (linear.h), whose panels hold it.
#include "linear.h"

namespace {

struct RowTable {  // `RowTable` in ops.py is the same
    int64_t rows, table_rows, bytes, threads;  // bytes of a row of y
    const char* table;                         // or Codes
    const int64_t* indices;
    char* y;
};

// Calls body(index, where to write) for each row. Returns whether the table has a row for every index; if not, nothing is written.
template <class Body>
int32_t take(const RowTable& r, const Body& body) {
    for (int64_t i = 0; i < r.rows; i++)
        if (r.indices[i] < 0 || r.indices[i] >= r.table_rows) return 0;
    for_each(r.rows, r.rows * r.bytes / 4 < MIN_WIDENED ? 1 : r.threads, [&](int64_t i) { body(r.indices[i], r.y + i * r.bytes); });
    return 1;
}

template <int PER_WORD>
int32_t take_coded(const RowTable& r) {
    const Codes& c = *(const Codes*)r.table;
    return take(r, [&](int64_t row, char* y) {
        const int column = int(row % WIDTH), lane = column % LANES;
        ScatteredGroups groups;
        const ScatteredGroup* scattered = groups.take(c, row / WIDTH, WIDTH);
        with_form(c, [&](auto form) {
            Unpacker<decltype(form), PER_WORD> some(c, row / WIDTH, column - lane, WIDTH, 0, scattered);
            for (int64_t k = 0; k < c.inputs; k += 8) {
                uints words[8 / PER_WORD];
                some.unpack(k, words);
                for (int j = 0; j < 8 / PER_WORD; j++, y += sizeof(uint32_t)) {
                    const uint32_t word = words[j][lane];
                    std::memcpy(y, &word, sizeof word);
                }
            }
        });
    });
}

}  // namespace

EXPORT int32_t batchgen_take_rows(const RowTable* r) {
    return take(*r, [&](int64_t row, char* y) { std::memcpy(y, r->table + row * r->bytes, r->bytes); });
}
EXPORT int32_t batchgen_take_coded_rows_float32(const RowTable* r) { return take_coded<1>(*r); }
EXPORT int32_t batchgen_take_coded_rows_bfloat16(const RowTable* r) { return take_coded<2>(*r); }
