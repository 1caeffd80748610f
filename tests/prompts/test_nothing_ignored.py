"""Every input besides the prompt is either used or reported as unused."""

from __future__ import annotations

import pytest

from batchgen.errors import UsageError
from batchgen.sampling_params import SamplingParams

USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS = "{# answers may have <tool_call> #}{% if tools %}[{{ tools|length }}:{{ tools[0].function.name }}]{% endif %}"
DOCUMENTS = "{% for d in documents %}<{{ d.title }}={{ d.text }}>{% endfor %}"
TEMPLATE = TOOLS + "{% if documents %}" + DOCUMENTS + "{% endif %}{{ messages[-1].content }}"


def one(tools, columns, **options):
    b = tools.builder(**{"chat_template": TEMPLATE, "bos": False} | options)
    (out,) = b.build(tools.rows(columns))
    return out, b.notes


def test_an_unknown_format_of_tool_calls_is_noted_once(tools):
    unknown = TEMPLATE.replace("<tool_call>", "calls")
    draft, notes = one(tools, {"prompt": "a", "tools": [TOOL]}, chat_template=unknown)
    assert (tools.text_of(draft), draft.tools) == ("[1:add]a", "")
    assert notes == ["rows have tools, but batchgen does not know how this model writes calls: they stay in the text"]


def test_variables_that_the_chat_template_does_not_use_are_noted(tools):
    template = "{{ messages[0].content }}{% if enable_thinking %}!{% endif %}"
    b = tools.builder(chat_template=template, chat_template_kwargs={"enable_thinking": True, "thinking_budget": 3})
    assert b.notes == [
        "--chat-template-kwargs sets 'thinking_budget', which the chat template does not use: it has no effect"
    ]
    b = tools.builder(chat_template=template)
    body = {"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}
    for _ in range(2):
        b.build(tools.rows({"url": "/v1/chat/completions", "body": body}))
    assert b.notes == ["rows set 'reasoning_effort', which the chat template does not use: it has no effect"]


def test_images_beside_a_prompt_are_noted_once_as_unseen_unless_the_template_uses_them(tools):
    b = tools.builder(chat_template=TEMPLATE, bos=False)
    for _ in range(2):
        b.build(
            tools.rows(
                {"prompt": "a", "images": ["x.png"], "audio": None}, {"prompt": "b", "image": b"png", "video": ""}
            )
        )
    assert b.notes == [
        "columns 'image', 'images' are only copied to the output: the model sees text alone, no images, sound or video"
    ]
    assert tools.builder(template="{{ image }}").build(tools.rows({"image": "a cat"}))
    b = tools.builder(template="{{ image }}")
    b.build(tools.rows({"image": "a cat"}))
    assert b.notes == []


def test_documents_of_a_row_reach_the_chat_template_and_are_shortened_like_messages(tools):
    columns = {"messages": [USER], "documents": [{"title": "T", "text": "abcdefgh"}]}
    draft, notes = one(tools, columns)
    assert (tools.text_of(draft), notes) == ("<T=abcdefgh>a", [])
    options = {"context": 12, "on_long_prompt": "truncate-left", "sampling": SamplingParams(max_tokens=2)}
    draft, _ = one(tools, columns, **options)
    assert (tools.text_of(draft), draft.truncated) == ("<T=defgh>a", True)


@pytest.mark.parametrize(
    ("columns", "options", "note"),
    [
        ({"prompt": "a", "tools": [TOOL]}, {"chat_template": "{{ messages[-1].content }}"}, "rows have tools, which the chat template does not use: the model does not see them"),
        ({"prompt": "a", "tools": [TOOL]}, {"chat_template": None}, "column 'tools' is only copied to the output, not sent to the model: prompts are raw"),
        ({"prompt": "a", "tools": "hammer, saw"}, {}, "column 'tools' is only copied to the output, not sent to the model: it is not a list of objects"),
        ({"prompt": "a", "documents": [5]}, {}, "column 'documents' is only copied to the output, not sent to the model: it is not a list of objects"),
    ],
)  # fmt: skip
def test_input_that_the_model_does_not_see_is_noted_once(tools, columns, options, note):
    b = tools.builder(**{"chat_template": TEMPLATE, "bos": False} | options)
    for draft in b.build(tools.rows(columns, columns)):
        assert tools.text_of(draft) == "a"
    assert b.notes == [note]


def test_stop_token_ids_beyond_the_vocabulary_are_refused(tools):
    with pytest.raises(
        UsageError, match=r"^--stop-token-id 260 is beyond the model's 260 tokens; give ids of the model's"
    ):
        tools.builder(sampling=SamplingParams(stop_token_ids=[5, 260]))
    result, _ = one(tools, {"prompt": "a", "sampling_params": {"stop_token_ids": [999]}})
    assert tools.error_of(result) == ("unsupported_parameter", "stop_token_ids: 999 is beyond the model's 260 tokens")


def test_several_completions_at_temperature_0_are_noted_once(tools):
    b = tools.builder(sampling=SamplingParams(n=3))
    b.build(tools.rows({"prompt": "a"}, {"prompt": "b"}))
    note = "the 3 completions of a prompt are identical at temperature 0; use --temperature above 0"
    assert b.notes == [note]
    b = tools.builder(sampling=SamplingParams(n=3, temperature=0.5))
    b.build(tools.rows({"prompt": "a"}))
    assert b.notes == []


@pytest.mark.parametrize(
    ("sampling", "options", "note"),
    [
        ({"max_tokens": 3}, {"score": True}, "--max-tokens has no effect with --score, which generates nothing"),
        (
            {"top_p": 0.5, "stop": "x", "temperature": 1.0, "seed": 3},
            {"prompt_logprobs": True},
            "--temperature, --top-p and --stop have no effect with --prompt-logprobs, which generates nothing",
        ),
        (
            {"choices": ("a", "b"), "temperature": 1.0, "ignore_eos": True, "max_tokens": 3},
            {},
            "--max-tokens and --ignore-eos have no effect with --choices, which generates nothing",
        ),
        ({"choices": ("a", "b"), "temperature": 1.0}, {}, None),
        ({"max_tokens": 3, "top_p": 0.5}, {}, None),
        ({"seed": 3}, {"score": True}, None),
        (
            {"reasoning_budget": 5},
            {},
            "--reasoning-budget has no effect: batchgen does not know how this model marks thoughts",
        ),
    ],
)
def test_sampling_options_without_an_effect_are_named(tools, sampling, options, note):
    b = tools.builder(sampling=SamplingParams(**sampling), bos=False, **options)
    assert b.notes == ([] if note is None else [note])


@pytest.mark.parametrize("calls", ["add", [1], {"function": {"name": "add"}}])
def test_tool_calls_that_are_not_a_list_of_objects_fail_the_row(tools, calls):
    result, _ = one(tools, {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}]})
    assert tools.error_of(result) == ("invalid_row", "messages[1].tool_calls must be a list of objects")
