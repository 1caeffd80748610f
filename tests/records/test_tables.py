"""CSV and Parquet as rows."""

import datetime as dt
import io

import pyarrow as pa
import pytest

from batchgen.records.tables import header_hint, read_csv, read_parquet
from support.records import parquet_bytes


def read(data: bytes) -> list[tuple[str, object]]:
    return [(place, columns) for place, columns, _ in read_csv(io.BytesIO(data))]


def test_malformed_csv_records_have_a_reason_and_later_ones_are_read():
    data = b'a,b\n1\n1,2,3\n"x"y,2\n\xff,2\nq\x00,3\n4,5\n"open,\n6,7\n'
    assert read(data) == [
        (":2", "1 field where the header has 2"),
        (":3", "3 fields where the header has 2"),
        (":4", "not CSV: ',' expected after '\"'"),
        (":5", "column 'a' is not UTF-8 (if the file is in Latin-1 or Windows-1252: --encoding cp1252)"),
        (":6", {"a": "q\x00", "b": "3"}),
        (":7", {"a": "4", "b": "5"}),
        (":8", "not CSV: unexpected end of data"),
    ]


def test_empty_or_repeated_csv_column_names_are_made_unique():
    assert read(b"a,,a,a_2,a\n1,2,3,4,5\n") == [(":2", {"a": "1", "column_2": "2", "a_3": "3", "a_2": "4", "a_4": "5"})]


def test_a_header_that_looks_wrong_has_a_hint():
    wrong = "is the delimiter: save the file with commas, or with tabs as .tsv"
    assert header_hint(["id;prompt"]) == f"it looks as if ';' {wrong}"
    assert header_hint(["id\tprompt"]) == f"it looks as if '\\t' {wrong}"
    assert header_hint(["sep=;"]) == "delete the first line ('sep=;') of the file"
    assert header_hint(["id", " prompt"]) == "remove the spaces around the names in the header"
    assert header_hint(["id", "text"]) == header_hint([]) == ""


def test_parquet_times_that_python_cannot_hold_become_text():
    table = pa.table(
        {
            "ns": pa.array([1_577_836_800_000_000_001, 1_577_836_800_000_000_000], pa.timestamp("ns")),
            "zone": pa.array([1, 2], pa.timestamp("ns", "Asia/Kolkata")),
            "span": pa.array([1, 1000], pa.duration("ns")),
            "far": pa.array([300_000_000_000_000, 0], pa.timestamp("ms")),
            "beyond": pa.array([9_000_000_000_000_000_000, None], pa.timestamp("ms")),
            "deep": pa.array([[{"t": 1}], [{"t": None}]], pa.list_(pa.struct([("t", pa.timestamp("ns"))]))),
        }
    )
    first, second = (columns for _, columns, _ in read_parquet(io.BytesIO(parquet_bytes(table))))
    assert first["ns"] == "2020-01-01T00:00:00.000000001"
    assert (second["ns"], type(second["ns"])) == (dt.datetime(2020, 1, 1), dt.datetime)  # and not one of pandas
    assert first["zone"] == "1970-01-01T05:30:00.000000001+05:30"
    assert first["span"] == dt.timedelta(0)  # a duration stays one: it becomes seconds
    assert (second["span"], type(second["span"])) == (dt.timedelta(microseconds=1), dt.timedelta)
    assert first["far"] == "11476-08-15T05:20:00.000"
    assert first["beyond"] == "9000000000000000000"
    assert second["far"] == dt.datetime(1970, 1, 1)
    assert first["deep"] == [{"t": "1970-01-01T00:00:00.000000001"}]
    assert second["deep"] == [{"t": None}]


def test_parquet_times_in_a_zone_that_the_machine_does_not_know_are_in_utc():
    table = pa.table(
        {
            "t": pa.array([1_000_000], pa.timestamp("us", "Nowhere/Unknown")),
            "deep": pa.array([[{"t": 1}]], pa.list_(pa.struct([("t", pa.timestamp("ns", "Nowhere/Unknown"))]))),
        }
    )
    ((_, columns, _),) = read_parquet(io.BytesIO(parquet_bytes(table)))
    assert columns == {
        "t": dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC),
        "deep": [{"t": "1970-01-01T00:00:00.000000001+00:00"}],
    }


@pytest.mark.parametrize("ordered", [False, True])
def test_a_large_dictionary_is_neither_counted_nor_held_with_every_row(ordered):
    texts = [f"{i:04}" * 500 for i in range(1000)]
    codes = pa.array(range(0, 1000, 2), pa.int16())
    column = pa.DictionaryArray.from_arrays(codes, pa.array(texts), ordered=ordered)
    rows = [*read_parquet(io.BytesIO(parquet_bytes(pa.table({"t": column}))), batch_rows=100)]
    assert [columns["t"] for _, columns, _ in rows] == texts[::2]
    assert {size for *_, size in rows} == {2004}  # and four bytes for its end
    batches = [columns.batch["t"] for _, columns, _ in rows]
    assert {batch.type for batch in batches} == {column.type}
    assert {len(batch.dictionary) for batch in batches} == {1000 if ordered else 100}


def test_parquet_text_that_is_not_utf8_fails_only_its_row():
    bad = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"\xff\xfeok"))
    rows = [
        (place, columns) for place, columns, _ in read_parquet(io.BytesIO(parquet_bytes(pa.table({"prompt": bad}))))
    ]
    assert rows == [(":row 0", "column 'prompt' is not UTF-8"), (":row 1", {"prompt": "ok"})]
