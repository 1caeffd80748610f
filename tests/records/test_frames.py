"""`LLM.generate_table` takes the tables of Python programs and returns the same kind of table."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchgen import LLM
from batchgen.errors import UsageError
from support.late import late

datasets, pd, pl = late("datasets"), late("pandas"), late("polars")
COLUMNS = {
    "prompt": pa.array(["The same beginning, one", None, "The same beginning, two"]),
    "number": pa.array([1, None, 3], pa.int32()),
    "when": pa.array([dt.datetime(2020, 1, 1, tzinfo=dt.UTC), None, None], pa.timestamp("ns", "UTC")),
    "nested": pa.array([[{"a": 1, "b": ["x"]}], [], None]),
    "text": pa.array(["a column of the user's"] * 3),
}
TABLE = pa.table(COLUMNS)
RESULTS = ["text", "finish_reason", "usage", "truncated", "error"]


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_model_dir) as model:
        yield model


def pandas_frame() -> pd.DataFrame:
    return TABLE.to_pandas().set_index(pd.Index([10, 10, 30], name="place")).astype({"number": "Int32"})


KINDS: dict[str, Callable[[], Any]] = {
    "arrow": lambda: TABLE,
    "pandas": pandas_frame,
    "polars": lambda: pl.from_arrow(TABLE),
    "datasets": lambda: datasets.Dataset(TABLE),
}
ARROW: dict[str, Callable[[Any], pa.Table]] = {
    "arrow": lambda t: t,
    "pandas": lambda t: pa.Table.from_pandas(t, preserve_index=False),
    "polars": lambda t: t.to_arrow(),
    "datasets": lambda t: t.with_format("arrow")[:],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_returned_as_the_same_kind_with_its_columns_unchanged(llm, kind):
    table = KINDS[kind]()
    out = llm.generate_table(table, {"max_tokens": 3})
    assert type(out) is type(table)
    before, after = ARROW[kind](table), ARROW[kind](out)
    own = ["prompt", "number", "when", "nested", "input_text"]
    assert after.column_names == [*own, *RESULTS]
    for old, new in zip(before.column_names, own, strict=True):
        assert after.schema.field(new).type == before.schema.field(old).type, old
        assert after[new].to_pylist() == before[old].to_pylist(), old
    texts = [r.text for r in llm.generate([p for p in TABLE["prompt"].to_pylist() if p], {"max_tokens": 3})]
    assert after["text"].to_pylist() == [texts[0], None, texts[1]]
    assert [error and error["type"] for error in after["error"].to_pylist()] == [None, "invalid_row", None]


def test_rows_of_a_table_have_their_own_parameters_and_share_prefixes(llm):
    table = pa.table({"prompt": ["a", "b"], "sampling_params": [{"max_tokens": 1}, {"max_tokens": 4}]})
    before = llm.stats.prefill_tokens
    out = llm.generate_table(table, {"ignore_eos": True})
    assert [usage["completion_tokens"] for usage in out["usage"].to_pylist()] == [1, 4]
    assert llm.stats.prefill_tokens - before <= sum(usage["prompt_tokens"] for usage in out["usage"].to_pylist())


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_table_has_the_same_columns(llm, kind):
    whole = KINDS[kind]()
    none = whole.select([]) if kind == "datasets" else whole[:0]
    out = llm.generate_table(none)
    assert (type(out), len(out)) == (type(whole), 0)
    some = llm.generate_table(whole, {"max_tokens": 1})
    if kind == "datasets":
        assert out.features == some.features
    assert ARROW[kind](out).column_names == ARROW[kind](some).column_names
    if kind != "pandas":  # without rows, its columns of objects have no type
        assert ARROW[kind](out).schema.equals(ARROW[kind](some).schema)


def test_a_column_whose_chunks_have_different_dictionaries_is_returned_whole(llm):
    pieces = [pa.array(texts, pa.string()).dictionary_encode() for texts in (["a", "b"], [], ["c", "a", None])]
    table = pa.table({"prompt": pa.chunked_array(pieces)})
    for out in (
        llm.generate_table(table, {"max_tokens": 1}),
        llm.generate_table(pl.from_arrow(table), {"max_tokens": 1}).to_arrow(),
    ):
        assert out["prompt"].to_pylist() == ["a", "b", "c", "a", None]
        assert [error is None for error in out["error"].to_pylist()] == [True] * 4 + [False]


def test_a_list_is_a_type_error_and_a_table_without_prompts_a_usage_error(llm):
    with pytest.raises(TypeError, match=r"a DataFrame of pandas or polars, or a datasets.Dataset, not builtins.list"):
        llm.generate_table([{"prompt": "a"}])
    with pytest.raises(UsageError, match="question"):
        llm.generate_table(pa.table({"question": ["a"]}))
