"""Rows in the OpenAI Batch form are accepted unchanged."""

from __future__ import annotations

import pytest

from batchgen.sampling_params import SamplingParams

USER = {"role": "user", "content": "a"}
CHAT = "/v1/chat/completions"
RAW = "/v1/completions"


def row(url, **body):
    return {"custom_id": "r1", "method": "POST", "url": url, "body": body}


def test_a_completion_request_is_raw_even_where_there_is_a_chat_template(tools):
    b = tools.builder(chat_template=tools.CHATML, prefix="P:", system="S")
    drafts = b.build(
        tools.rows(row(RAW, prompt="a"), row(RAW, prompt=["b"]), row("https://api/v1/completions/", prompt="c"))
    )
    assert [tools.text_of(d) for d in drafts] == ["<s>P:a", "<s>P:b", "<s>P:c"]
    assert b.notes == ["--system is not used for rows of /v1/completions, whose prompts are raw"]


def test_token_ids_of_a_completion_request_are_used_unchanged(tools):
    for prompt in ([5, 6], [[5, 6]]):
        assert tools.one(row(RAW, prompt=prompt), chat_template=tools.CHATML).tokens.tolist() == [5, 6]
    assert tools.error_of(tools.one(row(RAW, prompt=[5, 6]), prefix="P")) == (
        "invalid_row",
        "body.prompt is a list of token ids, which cannot be combined with --prefix",
    )
    assert tools.error_of(tools.one(row(RAW, prompt=[]))) == ("empty_prompt", "the prompt has no tokens")


def test_the_model_may_be_named_after_its_folder(tools, tmp_path):
    from batchgen.config import ModelConfig, PromptConfig
    from batchgen.prompts import PromptBuilder, load_tokenizer

    folder = tools.save_model(tmp_path / "tiny")
    b = PromptBuilder(load_tokenizer(ModelConfig(model=folder)), PromptConfig(), SamplingParams())
    b.build(tools.rows(row(RAW, model="tiny", prompt="a"), row(RAW, model=folder, prompt="a")))
    assert b.notes == []
    b.build(tools.rows(row(RAW, model="big", prompt="a")))
    assert b.notes == [f"rows ask for model 'big'; all rows are run on {folder!r}"]


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (row(CHAT, messages=[USER], top_logprobs=3), ("unsupported_parameter", "top_logprobs needs logprobs: true")),
        (row(CHAT, messages=[USER], stream=True), ("unsupported_parameter", "stream is not supported: true")),
        (row(CHAT, messages=[USER], tools="search"), ("invalid_row", "body.tools must be a list of objects, not text")),
        (row(RAW, prompt="a", tools=[{"type": "function"}]), ("unsupported_parameter", 'tools is not supported: [{"type": "function"}]')),
        (row(CHAT, messages=[USER], tool_choice="required"), ("unsupported_parameter", 'tool_choice is not supported: "required"')),
        (row(CHAT, messages=[USER], response_format={"type": "yaml"}), ("unsupported_parameter", "response_format must be text, json_object, or json_schema with its schema")),
        (row(CHAT, messages=[USER], response_format="json"), ("unsupported_parameter", "response_format must be text, json_object, or json_schema with its schema")),
        (row(CHAT, messages=[USER], structured_outputs={"grammar": "root ::= 'a'"}), ("unsupported_parameter", "structured_outputs.grammar is not supported")),
        (row(CHAT, messages=[USER], structured_outputs={"json": {}, "whitespace_pattern": " "}), ("unsupported_parameter", "structured_outputs.whitespace_pattern is not supported")),
        (row(CHAT, messages=[USER], structured_outputs="json"), ("unsupported_parameter", "structured_outputs must be an object, not text")),
        (row(RAW, prompt="a", reasoning_effort="low"), ("unsupported_parameter", "unknown parameter 'reasoning_effort'")),
        (row(CHAT, messages=[USER], max_tokens=0), ("unsupported_parameter", "max_tokens must be at least 1, not 0")),
        (row(CHAT, messages=[USER], chat_template_kwargs=5), ("invalid_row", "body.chat_template_kwargs must be an object, not a number")),
        (row(CHAT, messages=[USER], chat_template_kwargs={"tokenize": True}), ("unsupported_parameter", "body.chat_template_kwargs cannot set tokenize")),
        (row(CHAT, messages=[]), ("invalid_row", "body.messages is an empty list")),
        (row(CHAT, messages=[{"role": "user"}]), ("invalid_row", "body.messages[0].content must be text or a list of text parts, not null")),
        (row(CHAT, prompt="a"), ("invalid_row", "body has no messages; it has prompt, which belongs to /v1/completions")),
        (row(RAW, messages=[USER]), ("invalid_row", "body has no prompt; it has messages, which belongs to /v1/chat/completions")),
        (row(RAW), ("invalid_row", "body has no prompt")),
        (row(RAW, prompt=["a", "b"]), ("unsupported_parameter", "body.prompt holds 2 prompts; a row can have only one")),
        (row(RAW, prompt=5), ("invalid_row", "body.prompt must be text or token ids, not a number")),
        (row(RAW, prompt=[5, None]), ("invalid_row", "body.prompt must be token ids from 0 to 259; one is null")),
        (row(RAW, prompt="a", echo=True), ("unsupported_parameter", "echo is not supported: true")),
        (row("/v1/embeddings", input="a"), ("invalid_row", "url is /v1/embeddings; add --embed for it")),
        (row("/v1/score", input="a"), ("invalid_row", "url is '/v1/score'; use /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses")),
        (row(7, prompt="a"), ("invalid_row", "url is a number; use /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses")),
        (row(RAW, prompt="a") | {"method": "GET"}, ("invalid_row", "method is 'GET'; it must be POST")),
        ({"url": RAW, "body": "{"}, ("invalid_row", "body is text that is not JSON")),
        ({"url": RAW, "body": "[1]"}, ("invalid_row", "body must be an object, not a list")),
        ({"url": RAW, "body": []}, ("invalid_row", "body must be an object, not a list")),
        ({"url": RAW, "body": None, "custom_id": "a"}, ("invalid_row", "body must be an object, not null")),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_served_fails_its_row_with_the_reason(tools, columns, error):
    assert tools.error_of(tools.one(columns, chat_template=tools.CHATML)) == error


def test_a_chat_request_without_a_chat_template_fails(tools):
    assert tools.error_of(tools.one(row(CHAT, messages=[USER]))) == (
        "invalid_row",
        "/v1/chat/completions needs a chat template: the model has none",
    )
