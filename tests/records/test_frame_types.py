"""Tables of Python programs keep columns of every type unchanged."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.records.frames import frame_of
from batchgen.records.output import RowForm
from batchgen.result import Result, ToolCall
from support.late import late

datasets, pd, pl = late("datasets"), late("pandas"), late("polars")
FORM = RowForm(reasoning=True, tool_calls=True, token_ids=True)
texts = st.text(st.characters(codec="utf-8"), max_size=4)
moments = st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1))

SIMPLE: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    *((kind, st.integers(0, 100)) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64())),
    *((kind, st.sampled_from([0.0, -1.5, 2.0, float("inf")])) for kind in (pa.float16(), pa.float32(), pa.float64())),
    *((kind, texts) for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()))),
    *((kind, st.binary(max_size=4)) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    (pa.binary(2), st.binary(min_size=2, max_size=2)),
    (pa.bool_(), st.booleans()),
    (pa.null(), st.none()),
    (pa.date32(), st.dates()),
    (pa.time64("us"), st.times()),
    (pa.duration("ms"), st.integers(0, 10**9).map(lambda n: dt.timedelta(milliseconds=n))),
    (pa.decimal128(10, 2), st.integers(-999, 999).map(lambda n: decimal.Decimal(n) / 100)),
    *((pa.timestamp(unit, zone), moments) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC", "Europe/Berlin")),
]  # fmt: skip


def _nested(inner: st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]) -> Any:
    def of(kind: tuple[pa.DataType, st.SearchStrategy[Any]]) -> Any:
        of_item, values = kind[0], st.none() | kind[1]
        lists = st.lists(values, max_size=3)
        return st.sampled_from(
            [
                (pa.list_(of_item), lists),
                (pa.large_list(of_item), lists),
                (pa.list_(of_item, 2), st.lists(values, min_size=2, max_size=2)),
                (pa.struct([("a", of_item), ("b", pa.list_(pa.int32()))]), st.fixed_dictionaries({"a": values, "b": st.none()})),
                (pa.map_(pa.string(), of_item), st.lists(st.tuples(texts, values), max_size=2, unique_by=lambda pair: pair[0])),
            ]
        )  # fmt: skip

    return inner.flatmap(of)


kinds = st.recursive(st.sampled_from(SIMPLE), _nested, max_leaves=3)


@st.composite
def tables(draw: Any) -> pa.Table:
    count = draw(st.integers(1, 3))
    columns: dict[str, pa.Array] = {"prompt": pa.array([f"prompt {i}" for i in range(count)])}
    for name in draw(
        st.lists(st.sampled_from(["a", "b", "text", "usage", "reasoning", "id"]), max_size=3, unique=True)
    ):
        kind, values = draw(kinds)
        some = draw(st.lists(st.none() | values, min_size=count, max_size=count))
        columns[name] = _array(some, kind)
    return pa.table(columns)


def _array(values: list[Any], type: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, type)
    except (pa.ArrowException, ValueError, TypeError):  # some nested types can only be made by a cast
        return pa.nulls(len(values), type)


def results_for(count: int) -> list[Result]:
    call = ToolCall("1", "look", '{"at": 1}')
    return [
        Result(row=i, text=f"t{i}", finish_reason="stop", choice_probs={"x": 1.0}, tool_calls=(call,))
        for i in range(count)
    ]


def same(a: pa.Table, b: pa.Table) -> bool:
    return a.rename_columns(b.column_names).equals(b)


def joined(table: Any) -> tuple[Any, list[Any]]:
    frame = frame_of(table)
    rows = frame.rows()
    assert [row.columns["prompt"] for row in rows] == [f"prompt {i}" for i in range(len(rows))]
    assert not any(row.error for row in rows)
    return frame.with_results(rows, results_for(len(rows)), FORM), rows


def own_names(names: list[str]) -> list[str]:
    return [name if name in ("prompt", "a", "b", "id") else f"input_{name}" for name in names]


@given(tables())
def test_an_arrow_table_of_any_type_keeps_its_columns(table):
    out, _ = joined(table)
    own = out.select(own_names(table.column_names))
    assert own.rename_columns(table.column_names).equals(table)
    assert out["text"].to_pylist() == [f"t{i}" for i in range(table.num_rows)]
    assert out["choice_probs"].to_pylist() == [[("x", 1.0)]] * table.num_rows
    assert out.column_names[-1] == "error"


@given(tables())
def test_a_polars_frame_of_any_type_keeps_its_columns(table):
    try:
        frame = pl.from_arrow(table)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, NotImplementedError):
        return  # polars has no such type
    out, _ = joined(frame)
    assert (
        out.select(own_names(frame.columns))
        .rename(dict(zip(own_names(frame.columns), frame.columns, strict=True)))
        .equals(frame)
    )
    assert out["text"].to_list() == [f"t{i}" for i in range(table.num_rows)]


@given(tables(), st.booleans())
def test_a_pandas_frame_of_any_type_keeps_its_columns(table, arrow_types):
    try:
        frame = table.to_pandas(types_mapper=pd.ArrowDtype) if arrow_types else table.to_pandas()
        before = frame.copy(deep=True)
    except (pa.ArrowException, NotImplementedError, ValueError, TypeError):
        return  # pandas has no such type
    frame.index = pd.Index(range(10, 10 + len(frame)), name="place")
    out, _ = joined(frame)
    own = out[own_names(list(frame.columns))]
    assert list(own.dtypes) == list(before.dtypes)
    assert own.index.equals(frame.index)
    for place in range(len(before.columns)):
        assert repr(own.iloc[:, place].tolist()) == repr(before.iloc[:, place].tolist())
    assert out["text"].tolist() == [f"t{i}" for i in range(len(frame))]


@given(tables())
def test_a_dataset_of_any_type_keeps_its_columns(table):
    try:
        dataset = datasets.Dataset(table)
    except (ValueError, TypeError, NotImplementedError, pa.ArrowException):
        return  # datasets has no such type
    out, _ = joined(dataset)
    own = out.select_columns(own_names(table.column_names))
    assert list(own.features.values()) == list(dataset.features.values())
    assert same(own.with_format("arrow")[:], dataset.with_format("arrow")[:])
    assert out["choice_probs"][:] == [[{"key": "x", "value": 1.0}]] * table.num_rows


def test_python_objects_without_an_arrow_type_reach_their_rows_unchanged():
    messages = [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": [{"type": "text", "text": "two"}]}],
        None,
    ]
    frame = pd.DataFrame(
        {"prompt": [f"prompt {i}" for i in range(3)], "messages": messages, "n": [1, 2, 3]}, index=[7, 8, 9]
    )
    out, rows = joined(frame)
    assert [row.columns["messages"] for row in rows] == messages
    assert out["messages"].tolist() == messages
    mixed = pd.DataFrame({"messages": messages})
    assert [row.columns["messages"] for row in frame_of(mixed).rows()] == messages


def test_columns_with_numbers_as_names_keep_them():
    out, rows = joined(pd.DataFrame({0: [1.5, 2.5], "prompt": ["prompt 0", "prompt 1"]}))
    assert list(out.columns)[:2] == [0, "prompt"]
    assert rows[0].columns["0"] == 1.5


def test_a_subclass_of_a_dataframe_is_a_table():
    class Mine(pd.DataFrame):
        pass

    assert len(frame_of(Mine({"prompt": ["prompt 0"]})).rows()) == 1
    with pytest.raises(TypeError, match=r"not datasets\.dataset_dict\.DatasetDict$"):
        frame_of(datasets.DatasetDict())
