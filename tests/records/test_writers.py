"""Output rows are written to files and read again."""

import csv
import datetime as dt
import gzip
import io
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.records import Row
from batchgen.records.output import RESULT_NAMES
from batchgen.records.parquet_types import MAX_FIELDS, ColumnType
from batchgen.result import Result
from support.params import examples
from support.records import columns, opened, parquet_bytes, with_results, write_output

RESULT = {"text": "t", "finish_reason": "stop", "usage": {"prompt_tokens": 1, "completion_tokens": 2}, "error": None}
FAILED = RESULT | {"text": None, "finish_reason": "error", "error": {"type": "invalid_row", "message": "m"}}
RESULT_TYPES = [
    ("text", pa.string()),
    ("finish_reason", pa.string()),
    ("usage", pa.struct([("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64())])),
    ("truncated", pa.bool_()),
    ("error", pa.struct([("type", pa.string()), ("message", pa.string())])),
]


def pairs(rows):
    """The rows and results from which `output_row` makes these output rows."""
    for number, row in enumerate(rows):
        own = {name: value for name, value in row.items() if name not in RESULT_NAMES}
        usage, error = row["usage"], row["error"] or {}
        result = Result(
            row=number, text=row["text"], finish_reason=row["finish_reason"], **usage,
            truncated=row.get("truncated", False), token_ids=tuple(row.get("token_ids") or ()),
            error_type=error.get("type"), error_message=error.get("message"),
        )  # fmt: skip
        yield Row(number, own, None, f"in.jsonl:{number + 1}"), result


ABSENT = object()


def two_rows(columns):
    """Two rows of the first and the second values of these columns. A row lacks a column whose value is ABSENT."""
    return [{name: values[i] for name, values in columns.items() if values[i] is not ABSENT} for i in range(2)]


def write(folder: Path, name: str, rows, **options) -> Path:
    return write_output(folder / name, pairs(rows), at_once=1, **options)


@pytest.mark.parametrize(
    ("name", "unpack"),
    [
        ("o.jsonl", bytes),
        ("o.jsonl.gz", gzip.decompress),
        ("o.jsonl.zst", zstandard.ZstdDecompressor().decompressobj().decompress),
    ],
)
def test_jsonl_has_one_object_per_line_plain_or_compressed(tmp_path, name, unpack):
    rows = [{"id": 1, "s": "é\x85\u2028\u2029\ud800", **RESULT}, {"id": 2, "x": math.nan, **RESULT}]
    data = unpack(write(tmp_path, name, rows).read_bytes())
    tail = (
        '"text": "t", "finish_reason": "stop", "usage": {"prompt_tokens": 1, "completion_tokens": 2}, "error": null}\n'
    )
    assert data.decode() == '{"id": 1, "s": "é\\u0085\\u2028\\u2029\\ud800", ' + tail + '{"id": 2, "x": null, ' + tail
    assert len(data.decode().splitlines()) == 2


def test_no_rows_give_an_empty_file_of_the_right_format(tmp_path):
    assert write(tmp_path, "o.jsonl", []).read_bytes() == b""
    table = pq.read_table(write(tmp_path, "o.parquet", []))
    assert (table.num_rows, table.schema) == (0, pa.schema([("id", pa.int64()), *RESULT_TYPES]))
    table = pq.read_table(write(tmp_path, "p.parquet", [], schema=pa.schema([("day", pa.date32())])))
    assert table.schema == pa.schema([("id", pa.int64()), ("day", pa.date32()), *RESULT_TYPES])
    headers = [("prompt", "text"), ("id", "input_text")]  # of two files
    assert write(tmp_path, "o.csv", [], headers=headers).read_text() == (
        "id,prompt,input_text,text,finish_reason,usage,truncated,error\n"
    )
    table = pq.read_table(write(tmp_path, "q.parquet", [], headers=headers))
    assert table.schema.names == ["id", "prompt", "input_text", *dict(RESULT_TYPES)]


@pytest.mark.parametrize(
    ("name", "unpack"),
    [
        ("o.csv", bytes),
        ("o.tsv", bytes),
        ("o.csv.gz", gzip.decompress),
        ("o.tsv.zst", lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data)),
    ],
)
def test_csv_has_a_column_for_every_field_of_any_row(tmp_path, name, unpack):
    columns = {  # the values of two rows, and what is written of them
        "id": (1, "x", "1", "x"),
        "s": ('say "a,\tb"', "", 'say "a,\tb"', ""),
        "line": ("a\rb", None, "a\rb", ""),
        "n": (1.5, math.nan, "1.5", ""),
        "half": ("é\ud800", ABSENT, "é\\ud800", ""),
        "inf": (-math.inf, ABSENT, "", ""),
        "yes": (ABSENT, True, "", "true"),
        "tags": (ABSENT, [{"a": 'q"'}], "", '[{"a": "q\\""}]'),
    }
    first, second = two_rows(columns)
    rows = [first | RESULT | {"token_ids": [1, 2]}, second | FAILED | {"truncated": True}]
    data = unpack(write(tmp_path, name, rows, token_ids=True).read_bytes()).decode()
    mark = "," if ".csv" in name else "\t"
    table = list(csv.DictReader(io.StringIO(data, newline=""), delimiter=mark))
    assert list(table[0]) == [*columns, "text", "finish_reason", "usage", "truncated", "token_ids", "error"]
    usage, error = '{"prompt_tokens": 1, "completion_tokens": 2}', '{"type": "invalid_row", "message": "m"}'
    written = [list(column) for column in zip(*(values[2:] for values in columns.values()), strict=True)]
    assert list(table[0].values()) == [*written[0], "t", "stop", usage, "false", "[1, 2]", ""]
    assert list(table[1].values()) == [*written[1], "", "error", usage, "true", "", error]
    assert [line[-1:] for line in data.split("\n")] == ["r", mark, '"', ""]
    assert f'{mark}""{mark}' in data  # empty text is not null


def test_parquet_columns_from_json_get_a_type_that_fits_all_rows(tmp_path):
    said = lambda content: [{"role": "user", "content": content}]  # noqa: E731
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    columns = {  # the values of two rows, the type of the column and what it holds of them
        "whole": (1, 2.5, pa.float64(), [1.0, 2.5]),
        "mix": (1, "a\ud800", pa.string(), ["1", '"a\\ud800"']),
        "messages": (said("a"), said(["b"]), pa.list_(message), [said('"a"'), said('["b"]')]),
        "none": (None, ABSENT, pa.string(), [None, None]),
        "big": (2**63, ABSENT, pa.string(), ["9223372036854775808", None]),
        "extra": (ABSENT, True, pa.bool_(), [None, True]),
    }
    first, second = two_rows(columns)
    rows = [
        {"id": 1} | first | RESULT,
        {"id": 2} | second | {"nan": math.nan} | RESULT,
        {"id": 3} | FAILED | {"truncated": True},
    ]
    table = pq.read_table(write(tmp_path, "o.parquet", rows))
    carried = [*((name, kind) for name, (_, _, kind, _) in columns.items()), ("nan", pa.float64())]
    assert table.schema == pa.schema([("id", pa.int64()), *carried, *RESULT_TYPES])
    assert table["id"].to_pylist() == [1, 2, 3]
    assert {name: table[name].to_pylist() for name in columns} == {name: [*c[3], None] for name, c in columns.items()}
    assert math.isnan(table["nan"].to_pylist()[1])
    assert table["truncated"].to_pylist() == [False, False, True]
    assert table["error"].to_pylist() == [None, None, {"type": "invalid_row", "message": "m"}]
    assert table["usage"].to_pylist()[0] == {"prompt_tokens": 1, "completion_tokens": 2}


def test_parquet_input_columns_can_be_left_out_and_text_ids_stay_text(tmp_path):
    schema = pa.schema([("name", pa.string()), ("n", pa.int8()), ("day", pa.date32())])
    rows = [{"name": "a", "n": 1, **RESULT}, {"id": 5, "n": None, **FAILED}]
    table = pq.read_table(write(tmp_path, "o.parquet", rows, schema=schema, keep=("n",), id_column="name"))
    assert table.schema == pa.schema([("id", pa.string()), ("n", pa.int8()), *RESULT_TYPES])
    assert table["id"].to_pylist() == ["a", "5"]


def test_a_note_names_every_column_that_is_written_as_json_text(tmp_path):
    rows = [
        {"id": 1, "prompt": "Hi", "meta": {"tags": ["a", {"b": 1}], "n": 1}, "fine": [1, 2.5], **RESULT},
        {"id": "a", "prompt": 5, "meta": {"tags": [], "n": None}, "fine": [], "big": 2**63, **RESULT},
    ]
    why = "has values that no one Parquet type fits (of several kinds, or too large): all of them are written as JSON text"
    notes = [f"column 'prompt' {why}", f"column 'meta.tags[]' {why}", f"column 'big' {why}"]
    path = write(tmp_path, "o.parquet", rows, notes=notes)
    assert pq.read_table(path)["prompt"].to_pylist() == ['"Hi"', "5"]


def test_a_whole_number_beyond_53_bits_keeps_its_digits_with_fractions_and_without(tmp_path):
    large = 2**62 + 1
    rows = [{"id": large, "n": large, "whole": 1, **RESULT}, {"id": 2, "n": 0.5, "whole": large, **RESULT}]
    why = "has values that no one Parquet type fits (of several kinds, or too large): all of them are written as JSON text"
    for number, ordered in enumerate((rows, rows[::-1])):
        path = write(tmp_path, f"{number}.parquet", ordered, notes=[f"column 'n' {why}"])
        table = pq.read_table(path).sort_by("id")
        assert table["id"].to_pylist() == [2, large]
        assert table["n"].to_pylist() == ["0.5", str(large)]
        assert table["whole"].to_pylist() == [large, 1]


def test_an_object_with_too_many_fields_is_json_text():
    column = ColumnType()
    for i in range(MAX_FIELDS):
        column.see({f"k{i}": 1})
    assert pa.types.is_struct(column.arrow())
    column.see({"one more": 1})
    assert column.arrow() == pa.string()
    assert column.convert({"a": 1}) == '{"a": 1}'


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(15, 60))
@given(st.lists(st.dictionaries(st.text(max_size=2), st.text(max_size=4)), min_size=1, max_size=5))
def test_any_text_comes_back_from_csv(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("w")
    rows = [{f"c{name}": text for name, text in row.items()} for row in rows]
    path = write(folder, "o.csv", [{"id": i, **row, **RESULT} for i, row in enumerate(rows)])
    assert [{n: row[n] for n in given} for row, given in zip(columns(path), rows, strict=True)] == rows


@settings(max_examples=examples(15, 60))
@given(st.lists(st.dictionaries(st.sampled_from(["a", "b"]), json_values), min_size=1, max_size=5))
def test_any_json_rows_become_parquet_and_none_is_dropped(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("w")
    table = pq.read_table(write(folder, "o.parquet", [{"id": i, **row, **RESULT} for i, row in enumerate(rows)]))
    assert table["id"].to_pylist() == list(range(len(rows)))
    for name in {name for row in rows for name in row}:
        for value, row in zip(table[name].to_pylist(), rows, strict=True):
            assert (value is None) == (row.get(name) is None)
            if isinstance(row.get(name), str) and value != row[name]:
                assert value in (
                    json.dumps(row[name], ensure_ascii=False).encode("utf-8", "backslashreplace").decode(),
                    row[name].encode("utf-8", "backslashreplace").decode(),
                )


def test_nan_stays_nan_beside_values_that_json_has_not(tmp_path):
    rows = [
        {"id": 1, "x": math.nan, "day": dt.date(2026, 1, 2), **RESULT},
        {"id": 2, "x": math.inf, "day": None, **RESULT},
    ]
    table = pq.read_table(write(tmp_path, "o.parquet", rows))
    assert [str(x) for x in table["x"].to_pylist()] == ["nan", "inf"]
    assert table["day"].to_pylist() == ["2026-01-02", None]


def test_a_column_called_prompt_logprobs_is_carried_to_parquet(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "prompt_logprobs": 1}\n', encoding="utf-8")  # vLLM's parameter
    path = write_output(tmp_path / "o.parquet", with_results(opened(tmp_path / "a.jsonl")))
    assert pq.read_table(path)["prompt_logprobs"].to_pylist() == [1]


def from_parquet(folder: Path, *tables: pa.Table, reverse: bool = False) -> pa.Table:
    """The output of rows of Parquet files with these tables."""
    names = [folder / f"{number}.parquet" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        name.write_bytes(parquet_bytes(table))
    source = opened(*names)
    rows = with_results(source)[:: -1 if reverse else 1]
    return pq.read_table(write_output(folder / "o.parquet", rows, schema=source.schema, in_order=not reverse))


def test_maps_of_files_whose_types_do_not_fit_together_are_lists_in_parquet(tmp_path):
    maps = pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string()))
    table = from_parquet(tmp_path, pa.table({"m": maps, "x": [1]}), pa.table({"m": maps, "x": ["one"]}))
    assert table["m"].to_pylist() == [[["k", "v"]]] * 2


def test_a_struct_with_fields_that_are_never_null_may_be_missing_in_a_row(tmp_path):
    required = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    table = from_parquet(tmp_path, pa.table({"s": pa.array([{"x": 1}], required)}), pa.table({"n": [1]}))
    assert table["s"].type == required
    assert table["s"].to_pylist() == [{"x": 1}, None]


def test_rows_of_any_type_can_be_written_in_another_order(tmp_path):
    texts = pa.array(["a", "b", "c"], pa.string_view())  # of which Arrow cannot take some
    table = from_parquet(tmp_path, pa.table({"t": texts}), reverse=True)
    assert table["t"].type == pa.string_view()
    assert table["t"].to_pylist() == ["c", "b", "a"]


def test_dictionaries_of_several_files_may_have_more_values_than_their_type_has_numbers(tmp_path):
    texts = [[f"{name}{i}" for i in range(100)] for name in "ab"]
    small = pa.dictionary(pa.int8(), pa.string())
    table = from_parquet(tmp_path, *(pa.table({"d": pa.array(one, small)}) for one in texts))
    assert table["d"].type == small
    assert table["d"].to_pylist() == [*texts[0], *texts[1]]
