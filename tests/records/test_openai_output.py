"""Results become records of OpenAI's Batch output."""

import math
from dataclasses import replace

import pytest

from batchgen.config import JobConfig, ModelConfig
from batchgen.errors import RowError, UsageError
from batchgen.records import Row, row_form
from batchgen.records.output import RowForm, output_row
from batchgen.result import Completion, Result, TokenLogprob

MODEL = ModelConfig(model="tiny/llama")
CHAT = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}
RAW = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}
DONE = Result(row=4, text="Yes.", finish_reason="stop", prompt_tokens=9, completion_tokens=3, token_ids=(5, 6, 7))
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
TOP = (TokenLogprob("é", 7, -0.5), TokenLogprob("\ufffd", 8, -1.5), TokenLogprob("\ufffd", 9, -2.5))
SAMPLED = (
    TokenLogprob("é", 7, -0.5, TOP),
    TokenLogprob("\ufffd", 9, -math.inf, TOP[:1]),
    TokenLogprob("</s>", 2, -1.0, TOP[2:]),
)


def form(*, chat=True, output="o.jsonl", **options) -> RowForm:
    config = JobConfig(inputs=("in.jsonl",), model=MODEL, output_format="openai", **options)
    return row_form(config, output, chat=chat)


def made(columns, result=DONE, **options):
    return output_row(Row(4, columns, None, "x.jsonl:5"), result, form(**options))


def body_of(columns, result=DONE, **options):
    return made(columns, result, **options)["response"]["body"]


def test_a_chat_request_is_answered_with_a_chat_completion():
    out = made(CHAT)
    message = {"role": "assistant", "content": "Yes.", "refusal": None}
    body = {
        "id": "chatcmpl-4", "object": "chat.completion", "created": 0, "model": "tiny/llama",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}], "usage": USAGE,
    }  # fmt: skip
    response = {"status_code": 200, "request_id": "req_4", "body": body}
    assert out == {"id": "batch_req_4", "custom_id": "c", "response": response, "error": None}
    assert list(out) == ["id", "custom_id", "response", "error"]


@pytest.mark.parametrize(
    ("columns", "chat", "kind"),
    [
        (CHAT, False, "chat.completion"),
        (RAW, True, "text_completion"),
        ({**CHAT, "url": "https://api.example.org/v1/chat/completions/"}, False, "chat.completion"),
        ({"custom_id": "1", "body": {"messages": []}}, False, "chat.completion"),
        ({"custom_id": "1", "body": {"prompt": "p", "messages": None}}, True, "text_completion"),
        ({"url": "/v1/completions", "body": '{"prompt": "p"}'}, True, "text_completion"),
        ({"prompt": "p"}, True, "chat.completion"),
        ({"prompt": "p"}, False, "text_completion"),
        ({"url": "http://x/y", "body": "Dear all", "prompt": "p"}, False, "text_completion"),
    ],
)
def test_the_url_decides_the_kind_of_answer_or_else_the_kind_of_job(columns, chat, kind):
    assert body_of(columns, chat=chat)["object"] == kind


@pytest.mark.parametrize(
    ("columns", "id_column", "custom_id"),
    [
        ({"custom_id": "c", "id": "i", "n": "n"}, None, "c"),
        ({"custom_id": "c", "n": "n"}, "n", "n"),
        ({"custom_id": None, "id": 7}, None, "7"),
        ({"id": 1.5}, None, "1.5"),
        ({"id": ["a", 1]}, None, '["a", 1]'),
        ({}, None, "4"),
    ],
)
def test_the_custom_id_is_the_requests_own_or_else_the_rows_id(columns, id_column, custom_id):
    assert made(columns, id_column=id_column)["custom_id"] == custom_id


def test_a_failed_row_has_an_error_and_no_response():
    failed = Result.from_error(4, RowError("prompt_too_long", "too long"), prompt_tokens=7)
    assert made(CHAT, failed) == {
        "id": "batch_req_4",
        "custom_id": "c",
        "response": None,
        "error": {"code": "prompt_too_long", "message": "too long"},
    }
    assert (
        made({"url": 7, "body": {}}, Result.from_error(4, RowError("invalid_row", "m")))["error"]["code"]
        == "invalid_row"
    )


def test_a_timeout_or_a_repetition_has_finish_reason_length_and_a_stop_reason():
    for reason in ("timeout", "repetition"):
        (choice,) = body_of(RAW, replace(DONE, finish_reason=reason))["choices"]
        assert choice == {
            "index": 0, "text": "Yes.", "logprobs": None, "finish_reason": "length", "stop_reason": reason
        }  # fmt: skip


def several(*completions):
    return replace(DONE, text=completions[0].text, completions=completions, token_ids=completions[0].token_ids)


def test_several_completions_become_choices():
    both = several(
        Completion(text="a", finish_reason="stop", token_ids=(5,)),
        Completion(text="b", finish_reason="length", token_ids=(6, 7)),
    )
    assert body_of(RAW, both)["choices"] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"},
        {"index": 1, "text": "b", "logprobs": None, "finish_reason": "length"},
    ]
    assert [c["token_ids"] for c in body_of(CHAT, both, token_ids=True)["choices"]] == [[5], [6, 7]]


def test_logprobs_of_a_chat_are_a_list_of_tokens():
    result = several(Completion(text="é", finish_reason="stop", token_ids=(7, 9, 2), logprobs=SAMPLED))
    (choice,) = body_of(CHAT, result)["choices"]
    e = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    parts = [{"token": "\ufffd", "logprob": p, "bytes": None} for p in (-1.5, -2.5)]
    assert choice["logprobs"] == {
        "content": [
            {**e, "top_logprobs": [e, *parts]},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": None, "top_logprobs": [e]},
            {"token": "</s>", "logprob": -1.0, "bytes": [60, 47, 115, 62], "top_logprobs": parts[1:]},
        ],
        "refusal": None,
    }


def test_logprobs_of_a_completion_are_parallel_lists():
    result = several(Completion(text="é", finish_reason="stop", token_ids=(7, 9, 2), logprobs=SAMPLED))
    (choice,) = body_of(RAW, result)["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 1],
        "token_logprobs": [-0.5, -9999.0, -1.0],
        "tokens": ["é", "\ufffd", "</s>"],
        # Of several tokens with the same text, the likeliest; the sampled token is always included.
        "top_logprobs": [{"é": -0.5, "\ufffd": -1.5}, {"é": -0.5, "\ufffd": -9999.0}, {"\ufffd": -2.5, "</s>": -1.0}],
    }
    alone = tuple(replace(t, top=()) for t in SAMPLED)
    result = several(Completion(text="é", finish_reason="stop", token_ids=(7, 9, 2), logprobs=alone))
    assert body_of(RAW, result)["choices"][0]["logprobs"]["top_logprobs"] is None


def test_fields_that_openai_does_not_have_are_written_only_if_the_result_has_them():
    label = replace(DONE, text="no", truncated=True, choice_probs={"yes": 0.25, "no": 0.75}, token_ids=())
    body = body_of(RAW, label)
    assert list(body) == ["id", "object", "created", "model", "choices", "usage", "truncated", "choice_probs"]
    assert (body["truncated"], body["choice_probs"]) == (True, {"yes": 0.25, "no": 0.75})
    assert body["choices"][0]["text"] == "no"


# Options that cannot be combined.


def test_the_openai_format_needs_a_jsonl_output():
    with pytest.raises(UsageError) as caught:
        form(output="a.out.parquet")
    assert str(caught.value) == (
        "--output-format openai is JSON lines, and a.out.parquet is not; name a .jsonl output with -o"
    )
    for output in ("-", "o.jsonl.gz", "o.jsonl.zst"):
        assert form(output=output, keep=()) == form()
