"""The output row, and the name and format of the output."""

import math
from dataclasses import replace

import pytest

from batchgen import JobConfig, PromptConfig, SamplingParams
from batchgen.errors import RowError, UsageError
from batchgen.records import Row, RowForm, output_of, row_form
from batchgen.records.output import output_row
from batchgen.result import Result

DONE = Result(row=4, text="Yes.", finish_reason="stop", prompt_tokens=9, completion_tokens=3, token_ids=(5, 6, 7))
USAGE = {"prompt_tokens": 9, "completion_tokens": 3}
TAIL = {"text": "Yes.", "finish_reason": "stop", "usage": USAGE, "error": None}


def made(columns, result=DONE, *, keep=None, id_column=None, token_ids=False):
    row = Row(4, columns, None, "x.jsonl:5")
    return output_row(row, result, RowForm(keep=keep, id_column=id_column, token_ids=token_ids))


MINE = {"text": "t", "error": "e", "score": 1, "token_ids": 2, "input_text": "i"}
RENAMED = {"input_input_text": "t", "input_error": "e", "input_score": 1, "input_token_ids": 2, "input_text": "i"}
LABELLED = {"id": "a", "prompt": "p", "label": "l", "text": "t"}


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        # The id is that of the id column, or the column id or custom_id, or the number.
        ({"name": "x", "id": 1, "custom_id": "c"}, {"id_column": "name"}, {"id": "x", "name": "x", "input_id": 1, "custom_id": "c"}),
        ({"name": None, "id": 1}, {"id_column": "name"}, {"id": 1, "name": None, "input_id": 1}),
        ({"id": 1, "custom_id": "c"}, {}, {"id": 1, "custom_id": "c"}),
        ({"id": 1}, {"id_column": "id"}, {"id": 1}),
        ({"id": None, "custom_id": "c"}, {}, {"id": "c", "custom_id": "c"}),
        ({"id": math.nan, "custom_id": "c"}, {}, {"id": "c", "custom_id": "c"}),
        ({"prompt": "p"}, {}, {"id": 4, "prompt": "p"}),
        ({"id": 0}, {}, {"id": 0}),
        # Columns with the name of a result's field get a prefix.
        (MINE, {}, {"id": 4} | RENAMED),
        # `keep` selects the columns.
        (LABELLED, {"keep": ()}, {"id": "a"}),
        (LABELLED, {"keep": ("text", "label", "missing")}, {"id": "a", "label": "l", "input_text": "t"}),
    ],
)  # fmt: skip
def test_a_row_is_its_id_its_columns_and_the_results_fields(columns, options, expected):
    assert made(columns, **options) == expected | TAIL


def test_valid_is_the_results_unless_only_some_rows_have_it_and_this_one_has_such_a_column():
    valid = replace(DONE, valid=True)
    assert made({}, valid) == {"id": 4, "valid": True} | TAIL
    assert made({"valid": "x"}, valid) == made({"valid": "x"}) == {"id": 4, "valid": "x"} | TAIL
    form = RowForm(asked=("valid",))
    assert (
        output_row(Row(4, {"valid": "x"}, None, ""), valid, form) == {"id": 4, "valid": True, "input_valid": "x"} | TAIL
    )


def test_token_ids_are_written_on_request_and_null_if_unknown():
    assert made({}, token_ids=True)["token_ids"] == [5, 6, 7]
    assert made({}, Result(row=4, text="", finish_reason="length"), token_ids=True)["token_ids"] == []
    assert (
        made({}, Result(row=4, text="a", finish_reason="stop", completion_tokens=1), token_ids=True)["token_ids"]
        is None
    )
    failed = Result.from_error(4, RowError("invalid_row", "m"))
    assert made({}, failed, token_ids=True)["token_ids"] is None
    assert "token_ids" not in made({})


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("a/prompts.jsonl", None, "a/prompts.out.jsonl"),
        ("a/prompts.v1.csv.gz", None, "a/prompts.v1.out.jsonl"),
        ("a/prompts.parquet", None, "a/prompts.out.parquet"),
        ("a/prompts.parquet.zst", None, "a/prompts.out.parquet"),
        ("a/prompts.txt", "jsonl", "a/prompts.out.jsonl"),
        ("a/prompts.data", "parquet", "a/prompts.out.parquet"),
        ("-", None, "-"),
    ],
)
def test_the_output_is_beside_the_input_by_default(tmp_path, monkeypatch, name, format, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / name).touch()
    assert output_of(JobConfig(inputs=(name,), model="M", input_format=format)) == expected


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["a.jsonl", "b.jsonl"], "several inputs need an output; name it with -o"),
        (["."], "the folder . needs an output; name it with -o"),
        (["*.jsonl"], "the glob *.jsonl needs an output; name it with -o"),
        (["s3://b/a.jsonl"], "the remote input s3://b/a.jsonl needs an output; name it with -o"),
    ],
)
def test_other_inputs_need_a_named_output(inputs, message):
    with pytest.raises(UsageError) as caught:
        output_of(JobConfig(inputs=tuple(inputs), model="M"))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ()),
        ({"prompts": PromptConfig(score=True)}, ("score",)),
        ({"sampling": SamplingParams(choices=("a", "b"))}, ("choice_probs",)),
        ({"sampling": SamplingParams(n=2, temperature=1.0)}, ("choices",)),
        ({"sampling": SamplingParams(logprobs=0)}, ("choices",)),
    ],
)
def test_a_failed_row_has_null_for_the_fields_that_the_command_asks_for(options, names):
    form = row_form(JobConfig(inputs="i.jsonl", model="m", **options), "o.jsonl", chat=False)
    failed = output_row(
        Row(0, {"prompt": 5}, None, "i.jsonl:1"), Result.from_error(0, RowError("invalid_row", "no")), form
    )
    assert {name: failed.get(name, "absent") for name in ("choices", "choice_probs", "score")} == dict.fromkeys(
        ("choices", "choice_probs", "score"), "absent"
    ) | dict.fromkeys(names)
