"""`LLM.generate_table` takes the tables of Python programs and returns the same kind of table."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchgen import LLM, PromptConfig
from batchgen.errors import UsageError
from batchgen.records.frames import frame_of
from batchgen.records.output import RowForm
from batchgen.result import Result, ToolCall
from support.columns import COLUMNS
from support.late import late

datasets, pd, pl = late("datasets"), late("pandas"), late("polars")
OWN = {
    "prompt": pa.array(["The same beginning, one", None, "The same beginning, two"]),
    "number": pa.array([1, None, 3], pa.int32()),
    "when": pa.array([dt.datetime(2020, 1, 1, tzinfo=dt.UTC), None, None], pa.timestamp("ns", "UTC")),
    "nested": pa.array([[{"a": 1, "b": ["x"]}], [], None]),
    "text": pa.array(["a column of the user's"] * 3),
}
TABLE = pa.table(OWN)
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


def test_columns_of_pandas_that_arrow_has_no_type_for_reach_the_template_as_values(llm):
    sparse = pd.arrays.SparseArray([0, 7])
    table = pd.DataFrame({"sparse": sparse, "complex": [1 + 2j, 3j], "long": np.array([1, 2], dtype=np.longdouble)})
    template = PromptConfig(template="{{ sparse }} {{ complex }} {{ long }}")
    out = llm.generate_table(table, {"max_tokens": 3}, prompt_options=template)
    assert out["sparse"].dtype == table["sparse"].dtype
    texts = [result.text for result in llm.generate(["0 (1+2j) 1.0", "7 3j 2.0"], {"max_tokens": 3})]
    assert out["text"].tolist() == texts


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


@pytest.mark.parametrize(
    ("params", "name"),
    [({"choices": ["a", "b"]}, "choice_probs"), ({"n": 2}, "choices"), ({"json_schema": {"type": "boolean"}}, "valid")],
    ids=["labels", "several", "schema"],
)
def test_columns_depend_on_the_parameters_and_not_on_which_rows_fail(llm, params, name):
    tables = [pa.table({"prompt": pa.array(prompts, pa.string())}) for prompts in (["x", None], [None], [])]
    found = [llm.generate_table(table, {"max_tokens": 2} | params) for table in tables]
    found.append(llm.generate_table(tables[1], [{"max_tokens": 2} | params]))
    assert all(out.schema.equals(found[0].schema) for out in found)
    assert name in found[0].column_names


def test_columns_depend_on_the_types_of_parameters_of_rows(llm):
    typed = pa.struct([("max_tokens", pa.int64()), ("choices", pa.list_(pa.string()))])
    own = [{"max_tokens": 2, "choices": ["a", "b"]}, {"max_tokens": 2, "choices": None}]
    columns = {tuple(llm.generate_table(_with_params([one], typed)).column_names) for one in own}
    assert len(columns) == 1
    assert "choice_probs" in columns.pop()


def test_a_column_called_valid_has_one_name_whichever_rows_fail(llm):
    typed = pa.struct([("max_tokens", pa.int64()), ("json_schema", pa.string())])
    own = [{"max_tokens": 2, "json_schema": '{"type": "boolean"}'}]
    tables = [_with_params(own, typed), _with_params(own, typed).set_column(0, "prompt", pa.array([None], pa.string()))]
    found = [llm.generate_table(table.append_column("valid", pa.array([7]))) for table in tables]
    assert found[0].column_names == found[1].column_names
    assert found[1]["input_valid"].to_pylist() == [7]


def _with_params(own, typed):
    return pa.table({"prompt": pa.array(["x"] * len(own)), "sampling_params": pa.array(own, typed)})


def test_a_column_whose_chunks_have_different_dictionaries_is_returned_whole(llm):
    pieces = [pa.array(texts, pa.string()).dictionary_encode() for texts in (["a", "b"], [], ["c", "a", None])]
    table = pa.table({"prompt": pa.chunked_array(pieces)})
    for out in (
        llm.generate_table(table, {"max_tokens": 1}),
        llm.generate_table(pl.from_arrow(table), {"max_tokens": 1}).to_arrow(),
    ):
        assert out["prompt"].to_pylist() == ["a", "b", "c", "a", None]
        assert [error is None for error in out["error"].to_pylist()] == [True] * 4 + [False]


def test_a_table_without_prompts_is_a_usage_error(llm):
    with pytest.raises(UsageError, match="question"):
        llm.generate_table(pa.table({"question": ["a"]}))


# -- columns of any type


FORM = RowForm(reasoning=True, tool_calls=True, token_ids=True)


def results_for(count: int) -> list[Result]:
    call = ToolCall("1", "look", '{"at": 1}')
    return [
        Result(row=i, text=f"t{i}", finish_reason="stop", choice_probs={"x": 1.0}, tool_calls=(call,))
        for i in range(count)
    ]


def joined(table: Any) -> tuple[Any, list[Any]]:
    frame = frame_of(table)
    rows = frame.rows()
    assert [row.columns["prompt"] for row in rows] == [f"prompt {i}" for i in range(len(rows))]
    assert not any(row.error for row in rows)
    return frame.with_results(rows, results_for(len(rows)), FORM), rows


FRAMES: dict[str, Callable[[pa.Table], Any]] = {
    "arrow": lambda table: table,
    "polars": lambda table: pl.from_arrow(table),
    "pandas": lambda table: table.to_pandas(),
    "pandas with types of Arrow": lambda table: table.to_pandas(types_mapper=pd.ArrowDtype),
    "datasets": lambda table: datasets.Dataset(table),
}


def contents(frame: Any, names: list[str]) -> Any:
    """The types and values of columns, whatever their names are."""
    if isinstance(frame, pd.DataFrame):
        columns = frame[names]
        return (
            list(columns.dtypes),
            frame.index.tolist(),
            [repr(columns.iloc[:, i].tolist()) for i in range(len(names))],
        )
    types: Any = None
    if isinstance(frame, pl.DataFrame):
        types, frame = frame.select(names).dtypes, frame.to_arrow()
    elif isinstance(frame, datasets.Dataset):
        types, frame = [frame.features[name] for name in names], frame.with_format("arrow")[:]
    return types, frame.select(names).rename_columns([str(i) for i in range(len(names))])


@pytest.mark.parametrize("kind", FRAMES)
def test_a_table_keeps_its_columns_of_any_type(kind):
    polars = pl.exceptions
    no_such_type = (
        pa.ArrowException,
        polars.PolarsError,
        polars.PanicException,
        NotImplementedError,
        OverflowError,
        ValueError,
        TypeError,
    )
    converted = []
    for name, column in COLUMNS.items():
        table = pa.table({"prompt": [f"prompt {i}" for i in range(len(column))], "id": column, "usage": column})
        try:
            frame = FRAMES[kind](table)
            if kind.startswith("pandas"):
                frame.index = pd.Index(range(10, 10 + len(frame)), name="place")
            before = contents(frame, table.column_names)
        except no_such_type:
            continue
        out, _ = joined(frame)
        assert contents(out, ["prompt", "id", "input_usage"]) == before, name
        assert [str(text) for text in out["text"]] == [f"t{i}" for i in range(table.num_rows)]
        converted.append(name)
    assert len(converted) > 25


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


@pytest.mark.parametrize("typed", [[], ["b"]])
def test_rows_of_pandas_have_the_columns_of_the_table_in_its_order(typed):
    table = pd.DataFrame({"c": ["x"], "b": ["y"], "a": ["z"]}, dtype=object).astype(dict.fromkeys(typed, "string"))
    assert [list(row.columns.items()) for row in frame_of(table).rows()] == [[("c", "x"), ("b", "y"), ("a", "z")]]


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


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
def test_a_table_with_two_columns_of_one_name_is_refused(kind):
    table = pa.table([["a"], ["b"], ["c"]], names=["prompt", "prompt", "x"])
    if kind == "pandas":
        table = pd.DataFrame([["a", "b", "c"]], columns=["prompt", "prompt", "x"])
    with pytest.raises(UsageError, match=r"^the table has more than one column 'prompt'; rename or drop all but one$"):
        frame_of(table)
