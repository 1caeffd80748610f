"""Columns of Parquet input are unchanged in Parquet output: type, nulls, values to the last nanosecond, metadata of the field."""

import decimal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.records.parquet_types import fitted, schema_type, without_maps
from batchgen.records.writers import GroupLimits
from support.columns import COLUMNS, NS, extension
from support.records import opened, with_results, write_output


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def carried(*tables: pa.Table, **options) -> pa.Table:
    """Reads the tables' rows and writes them to an output as a job does, without a model."""
    names = []
    for number, table in enumerate(tables):
        names.append(f"in{number}.parquet")
        pq.write_table(table, names[-1], row_group_size=2)
    source = opened(*names)
    path = write_output(Path("o.parquet"), with_results(source), schema=source.schema, **options)
    return pq.read_table(path, use_threads=False)


def same(column: pa.Array) -> None:
    table = pa.table([column], schema=pa.schema([pa.field("c", column.type, metadata={"unit": "m/s"})]))
    for at_once in (1000, 1):
        out = carried(table, at_once=at_once)
        expected = pq.read_table("in0.parquet", use_threads=False)  # the nearest type, if Parquet has no such type
        assert out.schema.field("c").equals(expected.schema.field("c"), check_metadata=False)
        assert out["c"].combine_chunks().equals(expected["c"].combine_chunks())
        assert out.schema.field("c").metadata[b"unit"] == b"m/s"


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_carried_unchanged(name):
    same(COLUMNS[name])


@pytest.mark.parametrize(
    ("type", "value"),
    [(pa.timestamp("ns"), NS), (pa.time64("ns"), 1), (pa.duration("ns"), 1), (pa.date32(), 10_000_000)],
    ids=str,
)
def test_nested_values_that_python_cannot_hold_are_carried_unchanged(type, value):
    same(pa.array([[value, None], [], None], pa.list_(type)))
    same(pa.array([[value, None], [], None], pa.list_view(type)))
    same(pa.array([[value], [None], None], pa.list_(type, 1)))
    same(pa.array([{"t": value, "n": 1}, {"t": None, "n": 2}, None], pa.struct([("t", type), ("n", pa.int8())])))
    same(pa.array([[("a", value)], [("b", None)], [], None], pa.map_(pa.string(), type)))
    same(pa.array([[(value, 1)], [], None], pa.map_(type, pa.int32())))
    same(pa.array([[{"m": [("k", [value])]}], [], None], pa.large_list(pa.struct([("m", pa.map_(pa.string(), pa.list_(type)))]))))  # fmt: skip


def test_rows_written_in_another_order_keep_their_columns():
    column = pa.array(["a", b"\xff", "c", "d", None, "f"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"s": column, "n": pa.array(range(6), pa.int8())}), "in.parquet", row_group_size=4)
    source = opened("in.parquet")
    rows = [(row, replace(result, text=str(row.number))) for row, result in with_results(source)]
    write_output(Path("o.parquet"), (rows[i] for i in (5, 4, 1, 3, 0, 2)), schema=source.schema)
    out = pq.read_table("o.parquet")
    assert out["text"].to_pylist() == ["5", "4", "1", "3", "0", "2"]
    assert out["s"].to_pylist() == ["f", None, None, "d", "a", "c"]
    assert out["n"].to_pylist() == [5, 4, None, 3, 0, 2]


def test_different_dictionaries_of_row_groups_become_one():
    words = [f"w{i}" for i in range(7)]
    out = carried(
        pa.table({"d": pa.array(words).dictionary_encode()}), pa.table({"d": pa.array(["x", "w1"]).dictionary_encode()})
    )
    assert pa.types.is_dictionary(out.schema.field("d").type)
    assert out["d"].to_pylist() == [*words, "x", "w1"]


def test_a_column_that_one_file_lacks_is_null_in_its_rows():
    out = carried(pa.table({"a": [1], "u": extension(pa.uuid(), [b"a" * 16])}), pa.table({"a": [2.5], "m": [[1]]}))
    assert out["a"].to_pylist() == [1.0, 2.5]
    assert [v and v.bytes for v in out["u"].to_pylist()] == [b"a" * 16, None]
    assert out["m"].to_pylist() == [None, [1]]


SMALL, LARGE = 2**53, 2**62 + 1


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.array([SMALL, -SMALL, None]), pa.array([0.5]), pa.array([float(SMALL), float(-SMALL), None, 0.5])),
        (pa.array([LARGE]), pa.array([3, None]), pa.array([LARGE, 3, None])),
        (pa.array([LARGE, None]), pa.array([0.5]), pa.array([str(LARGE), None, "0.5"])),
        (pa.array([1, 2, 3, -LARGE]), pa.array([0.5]), pa.array(["1", "2", "3", str(-LARGE), "0.5"])),
        (pa.array([0.5]), pa.array([LARGE]), pa.array(["0.5", str(LARGE)])),
        (pa.array([2**64 - 1], pa.uint64()), pa.array([0.5]), pa.array([str(2**64 - 1), "0.5"])),
        (pa.array([5], pa.uint64()), pa.array([-1]), pa.array([5, -1])),
        (pa.array([2**63], pa.uint64()), pa.array([-1]), pa.array([str(2**63), "-1"])),
        (pa.array([[1], [LARGE]]), pa.array([[0.5]]), pa.array([["1"], [str(LARGE)], ["0.5"]])),
        (pa.array([[1], [SMALL]]), pa.array([[0.5]]), pa.array([[1.0], [float(SMALL)], [0.5]])),
        (pa.array([{"a": LARGE}]), pa.array([{"a": 0.5}]), pa.array([{"a": str(LARGE)}, {"a": "0.5"}])),
        (pa.array([{"a": SMALL}]), pa.array([{"a": 0.5}]), pa.array([{"a": float(SMALL)}, {"a": 0.5}])),
        (pa.array([2**31 - 1], pa.int32()), pa.array([0.5], pa.float32()), pa.array([2.0**31 - 1, 0.5])),
    ],
)
def test_no_number_changes_in_a_column_whose_files_have_different_types(first, second, expected):
    out = carried(pa.table({"a": first}), pa.table({"a": second}))
    assert out["a"].combine_chunks().equals(expected)


def test_numbers_whose_file_does_not_say_how_large_they_are_do_not_change():
    for name, column in (("a", pa.array([7, 2**62 + 1])), ("b", pa.array([0.5]))):
        pq.write_table(pa.table({"a": column}), f"{name}.parquet", write_statistics=False)
    source = opened("a.parquet", "b.parquet")
    out = pq.read_table(write_output(Path("o.parquet"), with_results(source), schema=source.schema))
    assert out["a"].to_pylist() == ["7", str(2**62 + 1), "0.5"]


def test_decimals_among_floats_keep_their_digits():
    out = carried(pa.table({"a": [decimal.Decimal("0.1000000000000000000001")]}), pa.table({"a": [0.5]}))
    assert out["a"].to_pylist() == ['"0.1000000000000000000001"', "0.5"]


def test_ids_that_are_hashes_of_64_bits_stay_numbers():
    hashes = pa.array([2**64 - 1, None, 3], pa.uint64())
    prompts = {"prompt": ["a", "b", "c"]}
    for columns, kind, ids in (
        ({"id": hashes}, pa.uint64(), [2**64 - 1, 1, 3]),
        ({"id": hashes, "custom_id": pa.array([4, 5, 6], pa.uint8())}, pa.uint64(), [2**64 - 1, 5, 3]),
        ({"id": hashes, "custom_id": [-4, -5, -6]}, pa.string(), [str(2**64 - 1), "-5", "3"]),
        ({"id": pa.array([1, 2, 3], pa.uint32())}, pa.int64(), [1, 2, 3]),
    ):
        out = carried(pa.table(prompts | columns))
        assert (out.schema.field("id").type, out["id"].to_pylist()) == (kind, ids)


def test_ids_of_files_that_fit_no_one_type_of_number_are_text():
    large, small = pa.array([2**63 + 1], pa.uint64()), pa.array([-1], pa.int32())
    out = carried(pa.table({"id": large, "prompt": ["a"]}), pa.table({"id": small, "prompt": ["b"]}))
    assert out["id"].to_pylist() == [str(2**63 + 1), "-1"]
    out = carried(pa.table({"id": [LARGE], "prompt": ["a"]}), pa.table({"id": [0.5], "prompt": ["b"]}))
    assert out["id"].to_pylist() == [str(LARGE), "0.5"]


def test_a_repeated_column_gets_another_name_and_a_note():
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array([1])], ["prompt", "prompt", "prompt_2"])
    pq.write_table(table, "in.parquet")
    source = opened("in.parquet")
    (row,) = source.rows()
    assert row.columns == {"prompt": "a", "prompt_3": "b", "prompt_2": 1}
    assert source.schema.names == ["prompt", "prompt_3", "prompt_2"]
    assert source.notes == ["in.parquet has more than one column 'prompt': another one is read as 'prompt_3'"]
    list(source.rows())
    assert len(source.notes) == 1


def test_a_row_group_of_large_rows_has_fewer_rows():
    table = pa.table({"prompt": ["x" * 300] * 10, "tags": [["y" * 100, "z"]] * 10})
    carried(table, limits=GroupLimits(bytes=1000))
    metadata = pq.read_metadata("o.parquet")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [3, 3, 3, 1]


def test_a_map_is_a_list_of_pairs_at_any_depth():
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.int8())]))
    a_map = pa.map_(pa.string(), pa.int8())
    assert without_maps(a_map) == pairs
    assert without_maps(pa.list_(a_map)) == pa.list_(pairs)
    assert without_maps(pa.large_list(a_map)) == pa.large_list(pairs)
    assert without_maps(pa.list_(a_map, 3)) == pa.list_(pairs, 3)
    assert without_maps(pa.struct([("m", a_map), ("n", pa.int8())])) == pa.struct([("m", pairs), ("n", pa.int8())])


POINT = pa.struct([("x", pa.float64())])
PROPERTIES: dict[str, tuple[Any, ...]] = {
    "s": ({"type": ["string", "null"]}, pa.string(), None, None),
    "i": ({"type": "integer", "maximum": 7}, pa.int64()),
    "large": ({"type": "integer", "maximum": 2**63}, pa.string()),
    "f": ({"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]}, pa.float64(), 1, 1.0),
    "b": ({"type": "boolean"}, pa.bool_()),
    "e": ({"enum": ["a", None]}, pa.string()),
    "many": ({"enum": ["a", 1]}, pa.string(), 1, "1"),
    "points": ({"type": "array", "items": {"$ref": "#/$defs/point"}}, pa.list_(POINT), [{"x": 1}], [{"x": 1.0}]),
    "one": ({"allOf": [{"$ref": "#/$defs/point"}]}, POINT),
    "lists": ({"enum": [[1], []]}, pa.list_(pa.int64())),
    "open": ({"type": "object", "properties": {"a": {}}}, pa.string(), {"b": [2]}, '{"b": [2]}'),
    "either": ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, pa.string(), "\ud800", "\\ud800"),
    "any": ({}, pa.string(), {"a": 1}, '{"a": 1}'),
}
"""The schema of each property and its type, and of some a value and what the column holds of it."""


def test_a_schema_has_the_arrow_type_of_its_values():
    point = {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}
    properties = {name: schema for name, (schema, *_) in PROPERTIES.items()}
    properties["tree"] = {"type": "array", "items": {"$ref": "#/properties/tree"}}
    schema = {"$defs": {"point": point}, "type": "object", "additionalProperties": False, "properties": properties}
    fields = {f.name: f.type for f in schema_type(schema)}
    assert str(fields.pop("tree")).count("list") > 5
    assert fields == {name: kind for name, (_, kind, *_) in PROPERTIES.items()}
    given = {name: values for name, (_, _, *values) in PROPERTIES.items() if values}
    kept = pa.struct(list(fields.items()))
    held = fitted({name: value for name, (value, _) in given.items()}, kept)
    expected = dict.fromkeys(fields) | {name: written for name, (_, written) in given.items()}
    assert pa.array([held], kept).to_pylist() == [expected]


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (True, {"type": "integer"}),
        (1.5, {"type": "integer"}),
        (2**70, {"type": "integer"}),
        ("1", {"type": "number"}),
        (1, {"type": "boolean"}),
        ([1], {"type": "boolean"}),
        (False, {"type": "object", "properties": {"a": {}}, "additionalProperties": False}),
        ({"b": 1}, {"type": "object", "properties": {"a": {}}, "additionalProperties": False}),
        ([1, "a"], {"type": "array", "items": {"type": "integer"}}),
    ],
)
def test_a_value_that_does_not_fit_the_schemas_type_is_null(value, schema):
    """A row may have a schema of its own."""
    assert fitted(value, schema_type(schema)) is None


def test_a_whole_number_written_as_a_fraction_fits():
    assert fitted(2.0, schema_type({"type": "integer"})) == 2


def test_keys_of_patterns_are_not_left_out():
    schema = {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}, "additionalProperties": False}
    assert fitted({"a": 1, "x": 2}, schema_type(schema)) == '{"a": 1, "x": 2}'
