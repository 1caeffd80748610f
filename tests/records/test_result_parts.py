"""Completions, log-probabilities, probabilities of choices and scores are written to the database and the output, and read back."""

import json
import math
import zlib
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchgen.jobs.files.results import decode, encode
from batchgen.jobs.reuse_output import is_held_whole, results_of_output
from batchgen.records import Row, RowForm
from batchgen.records.output import TASK_NAMES, output_row
from batchgen.records.result_values import embedding_of
from batchgen.records.writers import GroupLimits
from batchgen.result import Completion, Result, Score, TokenLogprob, ToolCall
from support.records import write_output

KEY = bytes(range(16))
LOGPROBS = (
    TokenLogprob("é", 7, -0.1, (TokenLogprob("é", 7, -0.1), TokenLogprob("\ufffd", 8, -2.5))),
    TokenLogprob("", 2, -1e-300),
)
SEVERAL = Result(
    row=-1, text="é", finish_reason="stop", prompt_tokens=9, completion_tokens=3, token_ids=(7, 2),
    completions=(
        Completion(text="é", finish_reason="stop", token_ids=(7, 2), logprobs=LOGPROBS),
        Completion(text="b", finish_reason="length", token_ids=(5,)),
    ),
)  # fmt: skip
LABEL = Result(row=-1, text="no", finish_reason="stop", prompt_tokens=4, choice_probs={"yes": 0.1, "no": 0.7, "-": 0.2})
SCORED = Result(row=-1, text=None, finish_reason=None, prompt_tokens=4, score=Score(-12.25, 5, False))
TOKENS = [
    {"token": "é", "token_id": 7, "logprob": -0.1, "top": [
        {"token": "é", "token_id": 7, "logprob": -0.1}, {"token": "\ufffd", "token_id": 8, "logprob": -2.5},
    ]},
    {"token": "", "token_id": 2, "logprob": -1e-300, "top": []},
]  # fmt: skip
CHOICES = [
    {"index": 0, "text": "é", "finish_reason": "stop", "logprobs": TOKENS},
    {"index": 1, "text": "b", "finish_reason": "length", "logprobs": None},
]
ROW = Row(4, {}, None, "x.jsonl:5")


def row_of(result, *, token_ids=False, columns=None):
    row = Row(4, columns or {}, None, "x.jsonl:5")
    return output_row(row, result, RowForm(token_ids=token_ids))


def written(folder, name, results, **options):
    return write_output(folder / name, ((ROW, result) for result in results), **options)


def taken_back(folder, name, results, *, token_ids=True):
    """Writes results to an output and reads them back, by place. Checks that exactly those that `is_held_whole` names come back."""
    path = written(folder, name, results, token_ids=token_ids)
    keys = [bytes([i + 1]) * 16 for i in range(len(results))]
    (folder / "keys").write_bytes(b"".join(keys))
    back = {}
    for key, found in results_of_output(
        str(path), folder / "keys", TASK_NAMES
    ):  # results, and lines that a job decodes later
        result = found if isinstance(found, Result) else decode(key, found, zlib.crc32(key + found))
        if result is not None:
            back[keys.index(key)] = result
    form, kind = RowForm(token_ids=token_ids), name.rpartition(".")[2]
    assert list(back) == [i for i, result in enumerate(results) if is_held_whole(result, form, kind)]
    return back


def test_an_embedding_is_read_back_from_numbers_alone():
    numbers = [0.1, -3, 1e-30, True]
    np.testing.assert_array_equal(embedding_of(numbers), np.array(numbers, dtype=np.float32))
    for wrong in ([0.1, "3"], [0.1, None], [[0.1]], "12"):
        with pytest.raises(TypeError):
            embedding_of(wrong)


def test_token_ids_of_completions_are_null_if_an_earlier_output_had_none():
    without = replace(
        SEVERAL, token_ids=(), completions=tuple(replace(c, token_ids=(), logprobs=None) for c in SEVERAL.completions)
    )
    out = row_of(without, token_ids=True)
    assert ([c["token_ids"] for c in out["choices"]], out["token_ids"]) == ([None, None], None)


def test_parquet_has_nested_types_for_choices_probabilities_and_scores(tmp_path):
    results = (SEVERAL, LABEL, SCORED)
    options = {"token_ids": True, "optional": ("choices", "choice_probs", "score")}
    token = [("token", pa.string()), ("token_id", pa.int32()), ("logprob", pa.float64())]
    choice = [
        ("index", pa.int32()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("logprobs", pa.list_(pa.struct([*token, ("top", pa.list_(pa.struct(token)))]))),
        ("token_ids", pa.list_(pa.int32())),
    ]
    for name, schema in (("a.parquet", None), ("b.parquet", pa.schema([("id", pa.int64())]))):
        table = pq.read_table(written(tmp_path, name, results, schema=schema, **options))
        assert table.schema.field("choices").type.equals(pa.list_(pa.struct(choice)))
        assert table.schema.field("choice_probs").type.equals(pa.map_(pa.string(), pa.float64()))
        assert table.schema.field("score").type.equals(
            pa.struct([("logprob", pa.float64()), ("tokens", pa.int64()), ("greedy", pa.bool_())])
        )
        ids = [[7, 2], [5]]
        expected = [c | {"token_ids": i} for c, i in zip(CHOICES, ids, strict=True)]
        assert table["choices"].to_pylist() == [expected, None, None]
        assert table["choice_probs"].to_pylist() == [None, [("yes", 0.1), ("no", 0.7), ("-", 0.2)], None]
        assert table["score"].to_pylist() == [None, None, {"logprob": -12.25, "tokens": 5, "greedy": False}]
        assert table["text"].to_pylist() == ["é", "no", None]
        assert table["finish_reason"].to_pylist() == ["stop", "stop", None]


@pytest.mark.parametrize("schema", [None, pa.schema([])])
def test_parquet_has_columns_for_thoughts_and_calls_if_rows_may_have_them(tmp_path, schema):
    first, second = SEVERAL.completions
    own = {"reasoning": "hm", "tool_calls": (ToolCall("c1", "f", "{}"),)}
    result = replace(SEVERAL, reasoning_tokens=2, completions=(replace(first, **own), second), **own)
    kinds = {"optional": ("choices", "tool_calls", "reasoning"), "reasoning": True, "tool_calls": True}
    (row,) = pq.read_table(written(tmp_path, "o.parquet", [result], schema=schema, **kinds)).to_pylist()
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert (row["reasoning"], row["usage"]["reasoning_tokens"], row["tool_calls"]) == ("hm", 2, calls)
    assert [(c["reasoning"], c["tool_calls"]) for c in row["choices"]] == [("hm", calls), (None, None)]
    assert row_of(result, columns={"reasoning": "the input's own"})["reasoning"] == "the input's own"


def test_labels_that_are_not_utf8_keep_their_probabilities_in_parquet(tmp_path):
    label = replace(LABEL, choice_probs={"\ud800": 0.25, "b": 0.75})
    for name, schema in (("a.parquet", None), ("b.parquet", pa.schema([]))):
        table = pq.read_table(written(tmp_path, name, [label], schema=schema, optional=("choice_probs",)))
        assert table["choice_probs"].to_pylist() == [[("\\ud800", 0.25), ("b", 0.75)]]


@pytest.mark.parametrize("schema", [pa.schema([]), None], ids=["columns of a table", "of other rows"])
def test_rows_with_many_logprobs_are_written_in_small_row_groups(tmp_path, schema):
    results = [SEVERAL] * 5  # four log-probabilities each
    limits = GroupLimits(logprobs=8)
    path = written(tmp_path, "o.parquet", results, schema=schema, optional=("choices",), limits=limits)
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)] == [2, 2, 1]


def stored(result):
    """The result after a round trip through the database's encoding."""
    value = encode(result)
    return decode(KEY, value, zlib.crc32(KEY + value))


def entry_of(values):
    value = json.dumps(values).encode()
    return KEY, value, zlib.crc32(KEY + value)


@pytest.mark.parametrize(
    "change",
    [
        {"later": 1},
        {"score": {"logprob": None, "tokens": 1, "greedy": True}},
        {"score": {"logprob": -1.0}},
        {"score": 3},
        {"choice_probs": {"a": "b"}},
        {"choice_probs": 1},
        {"completions": [{"index": 0, "text": None, "finish_reason": "stop", "logprobs": None}]},
        {"completions": [{"index": 0, "text": "a"}]},
        {"completions": [{"text": "a", "finish_reason": "stop", "logprobs": [{"token": "a"}]}]},
        {"completions": 1},
    ],
)
def test_a_stored_result_with_unknown_or_incomplete_content_is_damaged(change):
    good = {"text": "a", "finish_reason": "stop"}
    assert decode(*entry_of(good)) == Result(row=-1, text="a", finish_reason="stop")
    assert decode(*entry_of(good | change)) is None


def test_a_row_with_an_infinity_is_read_back_from_parquet_but_not_from_json(tmp_path):
    odd = replace(SCORED, score=Score(-math.inf, 5, False))
    assert taken_back(tmp_path, "o.jsonl", [odd, SCORED]) == {1: SCORED}
    assert taken_back(tmp_path, "o.parquet", [odd, SCORED]) == {0: odd, 1: SCORED}


def test_without_token_ids_those_of_the_logprobs_are_read_back(tmp_path):
    for name in ("o.jsonl", "o.parquet"):
        (back,) = taken_back(tmp_path, name, [SEVERAL], token_ids=False).values()
        assert back.token_ids == (7, 2)
        assert [c.token_ids for c in back.completions] == [(7, 2), ()]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
ids = st.integers(0, 2**31 - 1)
numbers = st.floats(max_value=0, allow_nan=False)
entries = st.builds(TokenLogprob, texts, ids, numbers)
tokens = st.builds(TokenLogprob, texts, ids, numbers, st.lists(entries, max_size=2).map(tuple))


@st.composite
def completions(draw):
    logprobs = draw(st.none() | st.lists(tokens, min_size=1, max_size=3).map(tuple))
    token_ids = draw(st.lists(ids, min_size=1, max_size=3)) if logprobs is None else [t.token_id for t in logprobs]
    reason = draw(st.sampled_from(["stop", "length", "timeout"]))
    return Completion(text=draw(texts), finish_reason=reason, token_ids=tuple(token_ids), logprobs=logprobs)


@st.composite
def results(draw):
    common = {"row": -1, "prompt_tokens": draw(st.integers(1, 9)), "truncated": draw(st.booleans())}
    kind = draw(st.sampled_from(["completions", "choices", "score"]))
    if kind == "score":
        score = Score(draw(numbers), draw(st.integers(1, 9)), draw(st.booleans()))
        return Result(text=None, finish_reason=None, score=score, **common)
    if kind == "choices":
        probs = draw(st.dictionaries(texts, st.floats(0, 1), min_size=2, max_size=3))
        return Result(text=next(iter(probs)), finish_reason="stop", choice_probs=probs, **common)
    several = tuple(draw(st.lists(completions(), min_size=1, max_size=3)))
    first = several[0]
    return Result(
        text=first.text,
        finish_reason=first.finish_reason,
        completion_tokens=sum(len(c.token_ids) for c in several),
        token_ids=first.token_ids,
        completions=several,
        **common,
    )


def exact(result):
    """Also distinguishes signed zeros, the order of choices and types, which `==` does not. A result's own `repr` is cut."""
    return repr(asdict(result))


@settings(max_examples=60)
@given(results())
@example(replace(SEVERAL, completions=(Completion(text=None, finish_reason="length", reasoning="hm", token_ids=(5,)),)))
def test_any_result_is_read_back_from_the_database(result):
    assert exact(stored(replace(result, row=3))) == exact(result)


@settings(max_examples=25)
@given(st.lists(results(), min_size=1, max_size=4))
def test_any_results_are_read_back_from_a_finished_output(tmp_path_factory, made):
    folder = tmp_path_factory.mktemp("o")
    for name in ("o.jsonl", "o.parquet"):
        back = taken_back(folder, name, made)
        assert {i: exact(r) for i, r in back.items()} == {i: exact(made[i]) for i in back}
        assert len(back) == len(made) or name == "o.jsonl"  # JSON has no infinities
