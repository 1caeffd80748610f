"""Rows in the OpenAI Batch form are accepted unchanged."""

from __future__ import annotations

import json

import pytest

from batchgen.sampling_params import SamplingParams

USER = {"role": "user", "content": "a"}
CHAT = "/v1/chat/completions"
RAW = "/v1/completions"


def row(url, **body):
    return {"custom_id": "r1", "method": "POST", "url": url, "body": body}


def test_a_chat_request_goes_through_the_chat_template_with_its_parameters(tools):
    draft = tools.one(
        row(CHAT, model="m", messages=[USER], max_completion_tokens=9, temperature=0.5, top_p=1, stop=["x"], seed=3,
            frequency_penalty=1, presence_penalty=-1, n=1, stream=False, logprobs=False, top_logprobs=None, user="u",
            response_format={"type": "text"}, tool_choice="none"),
        chat_template=tools.CHATML,
    )  # fmt: skip
    assert tools.text_of(draft) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert draft.params == SamplingParams(
        max_tokens=9, temperature=0.5, stop=("x",), seed=3, frequency_penalty=1.0, presence_penalty=-1.0
    )


def test_parameters_missing_from_the_body_take_the_commands_values(tools):
    draft = tools.one(
        row(CHAT, messages=[USER], temperature=None),
        chat_template=tools.CHATML,
        system="S",
        sampling=SamplingParams(temperature=0.7, max_tokens=5),
    )
    assert draft.params == SamplingParams(temperature=0.7, max_tokens=5)
    assert tools.text_of(draft).startswith("<|im_start|>system\nS<|im_end|>")


@pytest.mark.parametrize(
    ("url", "asked", "params"),
    [
        (CHAT, {"n": 3}, {"n": 3}),
        (CHAT, {"logprobs": True}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, {}),
        (RAW, {"logprobs": 2}, {"logprobs": 2}),
        (CHAT, {"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}}}},
            {"json_schema": '{"b": 1, "a": 2}'},
        ),
        (CHAT, {"guided_json": {"type": "null"}}, {"json_schema": '{"type": "null"}'}),
        (RAW, {"guided_regex": "a+", "guided_choice": None}, {"regex": "a+"}),
        (RAW, {"guided_choice": ["a", "b"]}, {"choices": ("a", "b")}),
        (RAW, {"structured_outputs": {"choice": ["a", "b"], "json": None}}, {"choices": ("a", "b")}),
        (RAW, {"structured_outputs": {"json": {}, "json_object": False}}, {"json_schema": "{}"}),
        (RAW, {"structured_outputs": None}, {}),
    ],
)
def test_completions_logprobs_and_formats_are_read_under_their_openai_names(tools, url, asked, params):
    content = {"messages": [USER]} if url == CHAT else {"prompt": "a"}
    assert tools.one(row(url, **content, **asked), chat_template=tools.CHATML).params == SamplingParams(**params)


def test_the_newer_name_of_max_tokens_wins_over_the_older(tools):
    draft = tools.one(row(RAW, prompt="a", max_tokens=5, max_completion_tokens=6))
    assert draft.params.max_tokens == 6


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


def test_vllm_parameters_that_ask_for_nothing_are_accepted(tools):
    draft = tools.one(
        row(RAW, prompt="a", top_k=-1, min_tokens=0, skip_special_tokens=True, include_stop_str_in_output=False,
            use_beam_search=False, length_penalty=1.0, add_generation_prompt=True, continue_final_message=False,
            return_token_ids=None, priority=3, request_id="x"),
        chat_template=tools.CHATML,
        sampling=SamplingParams(top_k=5),
    )  # fmt: skip
    assert draft.params == SamplingParams()
    assert tools.error_of(tools.one(row(RAW, prompt="a", min_tokens=5))) == (
        "unsupported_parameter",
        "min_tokens is not supported: 5",
    )


def test_messages_that_are_null_do_not_make_a_chat(tools):
    columns = {"custom_id": "1", "body": {"messages": None, "prompt": "a"}}  # as a table fills them in
    assert tools.text_of(tools.one(columns, chat_template=tools.CHATML)) == "<s>a"


def test_template_variables_of_a_body_win_over_the_commands(tools):
    template = "{{ a }}{{ b }}"
    draft = tools.one(
        row(CHAT, messages=[USER], chat_template_kwargs={"b": "row"}),
        chat_template=template,
        chat_template_kwargs={"a": "cmd", "b": "cmd"},
    )
    assert tools.text_of(draft) == "cmdrow"


def test_the_reasoning_effort_of_a_chat_goes_to_its_template(tools):
    template = "{{ reasoning_effort }}{{ b }}"
    asked = row(CHAT, messages=[USER], reasoning_effort="low", chat_template_kwargs={"b": "!"})
    assert tools.text_of(tools.one(asked, chat_template=template)) == "low!"
    asked = row(CHAT, messages=[USER], reasoning_effort="low")
    assert tools.text_of(tools.one(asked, chat_template=template)) == "low"


def test_a_different_model_name_is_noted_once(tools):
    b = tools.builder(chat_template=tools.CHATML)
    b.build(tools.rows(row(CHAT, model="gpt-x", messages=[USER]), row(CHAT, model="gpt-y", messages=[USER])))
    assert b.notes == ["rows ask for model 'gpt-x'; all rows are run on ''"]


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


def test_without_a_url_the_body_decides_the_kind_of_request(tools):
    b = tools.builder(chat_template=tools.CHATML)
    chat, raw = b.build(
        tools.rows({"custom_id": "1", "body": {"messages": [USER]}}, {"custom_id": "2", "body": {"prompt": "a"}})
    )
    assert tools.text_of(chat).startswith("<|im_start|>user\na")
    assert tools.text_of(raw) == "<s>a"


def test_a_body_may_be_json_text_as_in_a_table(tools):
    columns = row(RAW, prompt="a", seed=3)
    draft = tools.one(columns | {"body": json.dumps(columns["body"])})
    assert (tools.text_of(draft), draft.params.seed) == ("<s>a", 3)


def test_a_column_that_is_only_named_body_is_not_a_request(tools):
    assert tools.text_of(tools.one({"body": "Dear all", "prompt": "a", "url": "http://x/y"})) == "<s>a"
    assert tools.text_of(tools.one({"body": {"x": 1}, "prompt": "a"})) == "<s>a"
    assert tools.text_of(tools.one({"body": None, "prompt": "a", "url": None, "custom_id": None})) == "<s>a"


def test_the_body_wins_over_sampling_params_beside_it(tools):
    draft = tools.one(row(RAW, prompt="a", seed=3) | {"sampling_params": {"seed": 4, "top_k": 5}})
    assert draft.params == SamplingParams(seed=3, top_k=5)
