"""The messages column: what it may hold, and how the chat template renders it."""

from __future__ import annotations

import pytest

USER = {"role": "user", "content": "a"}


def test_a_message_that_the_template_changes_cannot_be_continued(tools):
    b = tools.builder(chat_template="{% for m in messages %}{{ m.role }} {{ m.content | length }}{% endfor %}")
    (result,) = b.build(tools.rows({"messages": [USER, {"role": "assistant", "content": "bcd"}]}))
    assert tools.error_of(result) == (
        "template_error",
        "chat template: it changes the last assistant message, so that message cannot be continued",
    )


def test_the_prefix_goes_into_the_first_user_message(tools):
    b = tools.builder(chat_template=tools.CHATML, prefix="P:")
    good, none = b.build(tools.rows(
        {"messages": [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "b"}, USER]},
        {"messages": [{"role": "system", "content": "S"}]},
    ))  # fmt: skip
    assert tools.text_of(good).startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nP:a<|im_end|>\n")
    assert tools.text_of(good).endswith("user\na<|im_end|>\n<|im_start|>assistant\n")
    assert tools.error_of(none) == ("invalid_row", "column 'messages' has no user message, which --prefix needs")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (5, "column 'messages' must be a list of messages, not a number"),
        ("hello", "column 'messages' must be a list of messages, not text"),
        ('{"a": 1}', "column 'messages' must be a list of messages, not text"),
        ({"role": "user"}, "column 'messages' must be a list of messages, not an object"),
        ([], "column 'messages' is an empty list"),
        (["a"], "messages[0] must be an object with role and content, not text"),
        ([USER, {"role": None, "content": "a"}], "messages[1].role must be text, not null"),
        ([{"from": "human", "value": "a"}], "messages[0] has no role: a message has role and content, and this one 'from', 'value'"),
        ([{}], "messages[0] has no role: a message has role and content, and this one no fields"),
        ([{"role": "", "content": "a"}], "messages[0].role must be text, not empty"),
        ([{"role": "user"}], "messages[0].content must be text or a list of text parts, not null"),
        ([{"role": "user", "content": 1.5}], "messages[0].content must be text or a list of text parts, not a number"),
        ([{"role": "user", "content": b"a"}], "messages[0].content must be text or a list of text parts, not bytes"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0] must be an object with type and text, not text"),
        ([{"role": "user", "content": [{"type": 5}]}], "messages[0].content[0] has type 5; only text can be sent"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be text, not null"),
    ],
)  # fmt: skip
def test_any_other_value_fails_the_row_with_an_error_that_names_the_place(tools, messages, message):
    b = tools.builder(chat_template=tools.CHATML)
    bad, good = b.build(tools.rows({"messages": messages}, {"messages": [USER]}))
    assert tools.error_of(bad) == ("invalid_row", message)
    assert tools.text_of(good).startswith("<|im_start|>user\na")


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video", "file"])
def test_a_row_with_an_image_or_sound_fails_alone(tools, kind):
    b = tools.builder(chat_template=tools.CHATML)
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "a.png"}}]
    bad, good = b.build(tools.rows({"messages": [{"role": "user", "content": content}]}, {"messages": [USER]}))
    assert tools.error_of(bad) == (
        "unsupported_content",
        f"messages[0].content[1] has type {kind!r}; only text can be sent",
    )
    assert tools.text_of(good).startswith("<|im_start|>user\na")


def test_a_refusal_by_the_chat_template_is_quoted(tools):
    b = tools.builder(
        chat_template="{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    )
    bad, good = b.build(tools.rows({"messages": [{"role": "tool", "content": "a"}]}, {"messages": [USER]}))
    assert tools.error_of(bad) == ("template_error", "chat template: user first")
    assert tools.text_of(good) == "x"


def test_messages_win_over_a_prompt_and_that_is_said_once(tools):
    b = tools.builder(chat_template=tools.CHATML)
    both = {"prompt": "p", "messages": [USER]}
    drafts = b.build(tools.rows(both, both, {"prompt": "p", "messages": None}))
    assert [tools.text_of(d)[:18] for d in drafts] == [
        "<|im_start|>user\na",
        "<|im_start|>user\na",
        "<|im_start|>user\np",
    ]
    assert b.notes == [
        "rows have both 'messages' and 'prompt': 'messages' is the prompt, 'prompt' is only copied to the output"
    ]


def test_with_raw_prompts_the_prompt_wins_over_messages(tools):
    b = tools.builder(chat_template=tools.CHATML, chat=False)
    both, only = b.build(tools.rows({"prompt": "p", "messages": [USER]}, {"messages": [USER]}))
    assert tools.text_of(both) == "<s>p"
    assert tools.error_of(only) == ("invalid_row", "column 'messages' needs a chat template: --no-chat turns it off")
    assert b.notes == [
        "rows have both 'prompt' and 'messages': 'prompt' is the prompt, 'messages' is only copied to the output"
    ]
