"""Every input besides the prompt is either used or reported as unused."""

from __future__ import annotations

import json

import numpy as np
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


@pytest.mark.parametrize("prompt", [{"messages": [USER]}, {"prompt": "a"}])
@pytest.mark.parametrize("value", [[TOOL], json.dumps([TOOL]), [TOOL | {"extra": None}]])
def test_tools_of_a_row_reach_the_chat_template(tools, prompt, value):
    draft, notes = one(tools, prompt | {"tools": value})
    assert (tools.text_of(draft), notes) == ("[1:add]a", [])


def test_an_unknown_format_of_tool_calls_is_noted_once(tools):
    unknown = TEMPLATE.replace("<tool_call>", "calls")
    draft, notes = one(tools, {"prompt": "a", "tools": [TOOL]}, chat_template=unknown)
    assert (tools.text_of(draft), draft.tools) == ("[1:add]a", "")
    assert notes == ["rows have tools, but batchgen does not know how this model writes calls: they stay in the text"]


def test_tools_of_an_openai_body_reach_the_chat_template(tools):
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}
    draft, notes = one(tools, {"url": "/v1/chat/completions", "body": body})
    assert (tools.text_of(draft), notes) == ("[1:add]a", [])
    draft, _ = one(tools, {"url": "/v1/chat/completions", "body": body | {"tools": []}})
    assert tools.text_of(draft) == "a"


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


def test_an_image_that_is_an_array_is_noted_like_any_other(tools):
    b = tools.builder(chat_template=TEMPLATE, bos=False)
    b.build(tools.rows({"prompt": "a", "image": np.zeros((2, 2)), "images": [np.zeros(3)], "audio": {}, "video": b""}))
    assert b.notes == [
        "columns 'image', 'images' are only copied to the output: the model sees text alone, no images, sound or video"
    ]


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


def test_a_column_with_another_use_is_not_passed_to_the_chat_template(tools):
    draft, notes = one(tools, {"tools": "hammer"}, template="Use a {{ tools }}")
    assert (tools.text_of(draft), notes) == ("Use a hammer", [])
    draft, notes = one(tools, {"prompt": "a", "tools": None, "documents": ""})
    assert (tools.text_of(draft), notes) == ("a", [])


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
SHOWN = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments|tojson }}{% endfor %};{% endfor %}"


def test_a_message_with_tool_calls_may_have_null_content_and_its_arguments_become_objects(tools):
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
    draft, _ = one(tools, {"messages": messages}, chat_template=SHOWN)
    assert tools.text_of(draft) == 'user:a;assistant:{"x": 1};tool:2;'
    given = {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"x": 2}}}],
    }
    draft, _ = one(tools, {"messages": [USER, given]}, chat_template=SHOWN)
    assert tools.text_of(draft) == 'user:a;assistant:{"x": 2};'


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "user", "content": None}])
def test_any_other_message_needs_content(tools, message):
    result, _ = one(tools, {"messages": [message]})
    assert tools.error_of(result) == (
        "invalid_row",
        "messages[0].content must be text or a list of text parts, not null",
    )


def test_the_developer_role_becomes_system_if_the_template_does_not_know_it(tools):
    messages = {"messages": [{"role": "developer", "content": "Be."}, USER]}
    draft, _ = one(tools, messages, chat_template=SHOWN)
    assert tools.text_of(draft) == "system:Be.;user:a;"
    knows = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.content }}{% endfor %}"
    draft, _ = one(tools, messages, chat_template=knows)
    assert tools.text_of(draft) == "DBe.a"


def test_stop_token_ids_beyond_the_vocabulary_are_refused(tools):
    with pytest.raises(
        UsageError, match=r"^--stop-token-id 260 is beyond the model's 260 tokens; give ids of the model's"
    ):
        tools.builder(sampling=SamplingParams(stop_token_ids=[5, 260]))
    result, _ = one(tools, {"prompt": "a", "sampling_params": {"stop_token_ids": [999]}})
    assert tools.error_of(result) == ("unsupported_parameter", "stop_token_ids: 999 is beyond the model's 260 tokens")


def test_an_empty_list_of_choices_is_refused(tools):
    for name in ("choices", "guided_choice"):
        result, _ = one(tools, {"prompt": "a", "sampling_params": {name: []}})
        assert tools.error_of(result) == (
            "unsupported_parameter",
            "choices must be two or more different texts, not an empty list",
        )


def test_several_completions_at_temperature_0_are_noted_once(tools):
    b = tools.builder(sampling=SamplingParams(n=3))
    b.build(tools.rows({"prompt": "a"}, {"prompt": "b"}))
    note = "the 3 completions of a prompt are identical at temperature 0; use --temperature above 0"
    assert b.notes == [note]
    b = tools.builder(sampling=SamplingParams(n=3, temperature=0.5))
    b.build(tools.rows({"prompt": "a"}))
    assert b.notes == []


def test_every_column_that_the_command_names_must_exist(tools):
    b = tools.builder()
    rows = tools.rows({"prompt": "a", "x": 1})
    b.check_columns(rows, [("--keep", "x")])
    with pytest.raises(UsageError, match=r"^no row has the column 'nope' of --id-column; the input has 'prompt', 'x'$"):
        b.check_columns(rows, [("--id-column", "nope")])


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


def test_arguments_that_are_not_json_stay_text(tools):
    call = {"function": {"name": "add", "arguments": "{x"}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    draft, _ = one(tools, {"messages": messages}, chat_template=SHOWN)
    assert tools.text_of(draft) == 'assistant:"{x";'


def test_bytes_in_place_of_text_fail_the_row(tools):
    result, _ = one(tools, {"messages": [{"role": "user", "content": b"a"}]})
    assert tools.error_of(result) == (
        "invalid_row",
        "messages[0].content must be text or a list of text parts, not bytes",
    )
