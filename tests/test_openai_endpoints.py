"""Batch files of /v1/embeddings and /v1/responses: how requests are read or refused, answered, and read back."""

import base64

import numpy as np
import pytest

from batchgen import LLM
from batchgen.config import JobConfig, ModelConfig
from batchgen.errors import RowError
from batchgen.prompts.openai import read_body
from batchgen.records import Row, row_form
from batchgen.records.output import output_row
from batchgen.result import Result
from support.embedders import save_embedder
from support.records import json_rows
from support.tokenizers_by_hand import asks

EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
VECTOR = np.array([0.1, -0.25, 3e-7], dtype=np.float32)


def record(columns, result, **model):
    config = JobConfig(inputs="i", model=ModelConfig(model="tiny", **model), output_format="openai")
    return output_row(Row(4, columns, None, "x:5"), result, row_form(config, "o.jsonl", chat=True))


def refused(columns):
    with pytest.raises(RowError) as e:
        read_body(columns)
    return e.value.type, e.value.message


def test_an_embeddings_request_is_answered_with_a_list_of_one():
    result = Result(row=4, text=None, finish_reason=None, prompt_tokens=7, embedding=VECTOR)
    body = record(asks(EMBEDDINGS, input="a"), result, embed=True)["response"]["body"]
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.100000001, -0.25, 3.00000011e-07]}],
        "model": "tiny",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    coded = record(asks(EMBEDDINGS, input="a", encoding_format="base64"), result, embed=True)
    assert base64.b64decode(coded["response"]["body"]["data"][0]["embedding"]) == VECTOR.astype("<f4").tobytes()
    in_a_table = asks(EMBEDDINGS) | {"body": '{"input": "a", "encoding_format": "base64"}'}
    assert record(in_a_table, result, embed=True) == coded
    assert record({"prompt": "a"}, result, embed=True)["response"]["body"] == body


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (asks(EMBEDDINGS), ("invalid_row", "body has no input")),
        (asks(EMBEDDINGS, input="a", dimensions=8), ("unsupported_parameter", "dimensions is not supported: 8")),
        (asks(EMBEDDINGS, input="a", encoding_format="int8"), ("unsupported_parameter", "encoding_format must be float or base64, not 'int8'")),
        (asks(RESPONSES), ("invalid_row", "body has no input")),
        (asks(RESPONSES, input="a", previous_response_id="resp_1"), ("unsupported_parameter", "previous_response_id is not supported in /v1/responses")),
        (asks(RESPONSES, input="a", background=True), ("unsupported_parameter", "background is not supported in /v1/responses")),
        (asks(RESPONSES, input="a", stream=True), ("unsupported_parameter", "stream is not supported: true")),
        (asks(RESPONSES, input="a", tools=[{"type": "web_search"}]), ("unsupported_parameter", 'tools is not supported: [{"type": "web_search"}]')),
        (asks(RESPONSES, input="a", text={"form": 1}), ("unsupported_parameter", "text.form is not supported")),
        (asks(RESPONSES, input="a", text="json"), ("invalid_row", "body.text must be an object, not text")),
        (asks(RESPONSES, input="a", instructions=["x"]), ("invalid_row", "body.instructions must be text, not a list")),
        (asks(RESPONSES, input=[{"type": "function_call_output", "output": "x"}]), ("unsupported_content", "body.input[0] has type 'function_call_output'; only messages can be sent")),
    ],
)  # fmt: skip
def test_an_unsupported_field_is_refused_by_name(columns, error):
    assert refused(columns) == error


def test_a_responses_request_becomes_a_chat():
    body = read_body(
        asks(
            RESPONSES,
            input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, {"type": "message", "role": "user", "content": "you"}],
            instructions="Be brief.",
            max_output_tokens=5,
            temperature=0.5,
            reasoning={"effort": "low"},
            text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
            metadata={"a": "b"},
            store=False,
            truncation="disabled",
            tools=[],
        )
    )  # fmt: skip
    assert body.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "user", "content": "you"},
    ]
    assert body.params == {"max_tokens": 5, "temperature": 0.5, "json_schema": {"type": "object"}}
    assert (body.chat, body.variables, body.where) == (True, {"reasoning_effort": "low"}, "body.input")


def test_a_responses_request_may_have_the_parameters_of_a_chat():
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert read_body(asks(RESPONSES, input="a", max_tokens=5, response_format=schema)).params == {
        "max_tokens": 5,
        "json_schema": {"type": "object"},
    }
    both = read_body(asks(RESPONSES, input="a", max_output_tokens=4, max_tokens=5))
    assert both.params == {"max_tokens": 4}


def test_a_response_has_its_message_its_status_and_its_usage():
    done = Result(row=4, text="Yes.", finish_reason="stop", prompt_tokens=9, completion_tokens=3, token_ids=(5, 6, 7))
    body = record(asks(RESPONSES, input="a"), done)["response"]["body"]
    assert body == {
        "id": "resp_4",
        "object": "response",
        "created_at": 0,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "tiny",
        "output": [
            {
                "id": "msg_4",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
            }
        ],
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
        "usage": {
            "input_tokens": 9,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 12,
        },
    }


@pytest.mark.parametrize(
    ("result", "status", "kinds"),
    [
        (Result(row=-1, text="a", finish_reason="stop", prompt_tokens=1, completion_tokens=1), "completed", ["message"]),
        (Result(row=-1, text="a", finish_reason="length", completion_tokens=1, truncated=True), "incomplete", ["message"]),
        (Result(row=-1, text="a", finish_reason="timeout", completion_tokens=1), "incomplete", ["message"]),
        (Result(row=-1, text="a", finish_reason="stop", reasoning="so", reasoning_tokens=2), "completed", ["reasoning", "message"]),
        (Result(row=-1, text=None, finish_reason="length", reasoning="so", reasoning_tokens=2), "incomplete", ["reasoning"]),
        (Result(row=-1, text="a", finish_reason="stop", choice_probs={"a": 0.75, "b": 0.25}), "completed", ["message"]),
    ],
)  # fmt: skip
def test_a_response_says_whether_it_is_whole(result, status, kinds):
    answer = record(asks(RESPONSES, input="a"), result)
    body = answer["response"]["body"]
    assert (body["status"], [item["type"] for item in body["output"]]) == (status, kinds)
    assert (body["incomplete_details"] is None) == (status == "completed")


def test_a_file_of_embeddings_requests_is_answered(cli, write_jsonl, tmp_path):
    model = save_embedder(tmp_path / "m")
    rows = [
        asks(EMBEDDINGS, input="Hello"),
        asks(EMBEDDINGS, input=["Hello"], encoding_format="base64"),
        asks(EMBEDDINGS, input=["Hello", "you"]),
        asks("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}]),
        asks(EMBEDDINGS, input=[72, 101]),
    ]
    path, out = write_jsonl(rows), tmp_path / "o.jsonl"
    command = ["run", path, "-m", model, "--embed", "--output-format", "openai", "-o", out]
    assert cli(*command).code == 3
    answers = json_rows(out)
    errors = [a["error"] and a["error"]["message"] for a in answers]
    assert errors == [
        None,
        None,
        "body.input holds 2 prompts; a row can have only one",
        "url is /v1/chat/completions; with --embed it must be /v1/embeddings",
        None,
    ]
    with LLM(model, task="embed") as llm:
        want, ids = llm.embed(["Hello", [72, 101]])
    first, second = (answers[i]["response"]["body"]["data"][0]["embedding"] for i in (0, 1))
    np.testing.assert_allclose(first, want.embedding, atol=1e-6)
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(second), "<f4"), np.float32(first))
    np.testing.assert_allclose(answers[4]["response"]["body"]["data"][0]["embedding"], ids.embedding, atol=1e-6)
    write_jsonl([*rows, asks(EMBEDDINGS, input="More")])
    assert "o.jsonl was finished: 2 of its results are used again" in cli(*command).err


def test_a_file_of_responses_requests_is_answered(cli, tiny_chat_model_dir, write_jsonl, tmp_path):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rows = [
        asks(RESPONSES, input="Hello", instructions="Be brief.", max_output_tokens=6),
        asks("/v1/chat/completions", messages=talk, max_tokens=6),
        asks(RESPONSES, input="Hello", n=2, temperature=1.0),
    ]
    out = tmp_path / "o.jsonl"
    command = ["run", write_jsonl(rows), "-m", tiny_chat_model_dir, "--output-format", "openai", "-o", out, "-q"]
    assert cli(*command).code == 3
    one, other, several = json_rows(out)
    text = one["response"]["body"]["output"][0]["content"][0]["text"]
    assert text == other["response"]["body"]["choices"][0]["message"]["content"]
    assert one["response"]["body"]["usage"]["input_tokens"] == other["response"]["body"]["usage"]["prompt_tokens"]
    assert several["error"]["message"] == "n and logprobs cannot be combined with /v1/responses"
