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

// Rows of 16 bits, each number of which becomes a float.
template <class Convert>
int32_t take_wide(const RowTable& r, const Convert& convert) {
    return take(r, [&](int64_t row, char* y) {
        const int64_t size = r.bytes / sizeof(float);
        const uint16_t* x = (const uint16_t*)r.table + row * size;
        for (int64_t k = 0; k < size; k++) ((float*)y)[k] = convert(x[k]);
    });
}

template <int PER_WORD>
int32_t take_coded(const RowTable& r) {
    const Codes& c = *(const Codes*)r.table;
    return take(r, [&](int64_t row, char* y) {
        const int column = int(row % WIDTH), lane = column % LANES;
        PanelGroups groups;
        const GroupNumbers* numbers = groups.take(c, row / WIDTH, 1, WIDTH, 0, c.inputs);
        with_form_of_words<PER_WORD>(c, [&](auto form) {
            Unpacker<decltype(form)> some(c, row / WIDTH, column - lane, WIDTH, numbers + column / LANES, VECTORS);
            by_groups(c, 0, c.inputs, [&] { some.turn(); }, [&](int64_t k) {
                some.load(k);
                for (int j = 0; j < 8; j += PER_WORD, y += sizeof(uint32_t)) {
                    const uint32_t word = some.template word<PER_WORD>(j)[lane];
                    std::memcpy(y, &word, sizeof word);
                }
            });
        });
    });
}

}  // namespace

EXPORT int32_t batchgen_take_rows(const RowTable* r) {
    return take(*r, [&](int64_t row, char* y) { std::memcpy(y, r->table + row * r->bytes, r->bytes); });
}
EXPORT int32_t batchgen_take_wide_rows_bfloat16(const RowTable* r) {
    return take_wide(*r, [](bf16 x) { return to_float(x); });
}
EXPORT int32_t batchgen_take_wide_rows_float16(const RowTable* r) { return take_wide(*r, float_of_float16); }
EXPORT int32_t batchgen_take_coded_rows_float32(const RowTable* r) { return take_coded<1>(*r); }
EXPORT int32_t batchgen_take_coded_rows_bfloat16(const RowTable* r) { return take_coded<2>(*r); }
