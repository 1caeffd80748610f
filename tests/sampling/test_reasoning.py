"""Thoughts are split from answers in every known format, whatever tokens the marks consist of and wherever a completion is cut."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.parsers.thinking import FORMATS, HARMONY, ThoughtStream, thinking_format, thinking_off
from support.marked import EOS, HARMONY_TOKENS, make, run

TAGS = [f for f in FORMATS if not f.always]
KINDS = ["special", "plain", "none"]
"""The marks are special tokens, plain tokens, or no tokens at all: then they are spelled in bytes and known only from the template."""


def of_kind(format: Any, kind: str) -> Any:
    """A tokenizer whose marks are of this kind."""
    marks = (format.open.rstrip("\n"), format.close)
    marks = tuple(m.removesuffix("thought\n").removesuffix("thought") for m in marks)
    if kind == "none":
        return make(template=f"x{format.open}y{format.close}")
    return make(special=marks) if kind == "special" else make(plain=marks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", TAGS, ids=lambda f: f.close)
@pytest.mark.parametrize("opened", [True, False])
def test_thoughts_and_answer_are_split_for_any_kind_of_marks(format, kind, opened):
    if kind == "none" and not format.open.isascii():
        return
    tokenizer = of_kind(format, kind)
    assert thinking_format(tokenizer) == format
    prompt, begins = (f"user: 1+1?{format.open}", "\n") if opened else ("user: 1+1?", f"{format.open}\n")
    whole = f"{begins}Two, é 🙂.\n{format.close}\n\nIt is 2 🙂."
    text, reasoning, tokens, reason = run(tokenizer, prompt, whole + EOS)
    assert (text, reasoning, reason) == ("It is 2 🙂.", "Two, é 🙂.", "stop")
    marked = begins + f"Two, é 🙂.\n{format.close}"
    assert tokens == len(tokenizer.encode(marked, add_special_tokens=False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", TAGS, ids=lambda f: f.close)
def test_a_cut_completion_has_text_only_after_the_end_of_its_thoughts(format, kind):
    if kind == "none" and not format.open.isascii():
        return
    tokenizer = of_kind(format, kind)
    prompt, whole = f"q{format.open}", f"Hm é.{format.close}\n\nYes 🙂."
    ids = tokenizer.encode(whole, add_special_tokens=False)
    inside = len(tokenizer.encode(f"Hm é.{format.close}", add_special_tokens=False))
    for most in range(1, len(ids) + 1):
        text, reasoning, tokens, reason = run(tokenizer, prompt, whole, max_tokens=most)
        assert reason == "length"
        if most < inside:
            assert (text, tokens) == (None, most)
            assert "Hm é.".startswith(reasoning.rstrip("\ufffd")) or reasoning.startswith("Hm é.")
        else:
            assert (reasoning, tokens) == ("Hm é.", inside)
            assert "Yes 🙂.".startswith(text.rstrip("\ufffd"))


@pytest.mark.parametrize("kind", ["plain", "special"])
@pytest.mark.parametrize(
    ("prompt", "written", "options", "found"),
    [
        ("q", f"Yes.{EOS}", {}, ("Yes.", None, 0, "stop")),
        ("q<think>\n\n</think>\n\n", f"Yes.{EOS}", {}, ("Yes.", None, 0, "stop")),
        ("q", "<thin air>", {"max_tokens": 6}, ("<thin ", None, 0, "length")),
        # Empty thoughts are none unless they are cut.
        ("q", f"<think>\n\n</think>\n\nYes.{EOS}", {}, ("Yes.", None, 4, "stop")),
        ("q<think>", f"</think>Yes.{EOS}", {}, ("Yes.", None, 1, "stop")),
        ("q", "<think>Hm.</think>Yes.", {"max_tokens": 1}, (None, "", 1, "length")),
        # Marks earlier in the prompt or in its text do not open thoughts.
        ("<think>a</think>b" + "x" * 40, f"Yes.{EOS}", {}, ("Yes.", None, 0, "stop")),
        ("What does <think> mean?\n", f"It opens.{EOS}", {}, ("It opens.", None, 0, "stop")),
    ],
)
def test_thoughts_are_found_only_where_the_model_thinks(kind, prompt, written, options, found):
    tokenizer = make(**{kind: ("<think>", "</think>")})
    assert run(tokenizer, prompt, written, **options) == found


def test_unopened_thoughts_and_thoughts_begun_by_the_prompt_are_found_by_their_end():
    for tokenizer in (make(plain=("<think>", "</think>")), make(special=("<think>", "</think>"))):
        assert run(tokenizer, "q", f"Hm.</think>\n\nYes.{EOS}")[:2] == ("Yes.", "Hm.")
        assert run(tokenizer, "q<think>I should", f" look.</think>Yes.{EOS}")[:2] == ("Yes.", "look.")
    closed = make(plain=("<think>", "</think>"))
    assert run(closed, "q", "Hm.</think>Yes. No.", stop=(" No",))[:2] == ("Yes.", "Hm.")
    said = f"The mark is </think>.{EOS}"
    assert run(closed, "q<think>\n\n</think>\n\n", said)[:2] == ("The mark is </think>.", None)


def test_reasoning_off_leaves_the_thoughts_in_the_text():
    tokenizer = make(plain=("<think>", "</think>"))
    assert run(tokenizer, "q<think>", f"a</think>b{EOS}", reasoning="off") == ("a</think>b", None, 0, "stop")


def test_stop_strings_count_only_in_the_answer():
    for tokenizer in (make(plain=("<think>", "</think>")), make(template="<think></think>")):
        found = run(tokenizer, "q<think>", f"one. two.</think>three. four.{EOS}", stop=(". ",))
        assert found[:2] == ("three", "one. two.")
        assert found[3] == "stop"
        assert run(tokenizer, "q<think>", "a</think>b</s>c", stop=("</s>",), max_tokens=99)[:2] == ("b", "a")
        assert run(tokenizer, "q", "no thoughts. here", stop=(". ",))[:2] == ("no thoughts", None)
    tokenizer = make(special=("<turn>", "</think>"), template="<think></think>")
    assert run(tokenizer, "q<think>", "a<turn>b</think>c<turn>d", stop=("<turn>", "</think>"))[:2] == ("c", "ab")


PROMPT = "<|start|>user<|message|>q<|end|><|start|>assistant"


def test_all_harmony_channels_except_the_final_one_are_thoughts():
    tokenizer = make(special=HARMONY_TOKENS)
    assert thinking_format(tokenizer) is HARMONY
    whole = (
        "<|channel|>analysis<|message|>Think é 🙂.<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 2.<|return|>"
    )
    text, reasoning, tokens, reason = run(tokenizer, PROMPT, whole)
    assert (text, reasoning, reason) == ("It is 2.", "Think é 🙂.\nI will look.", "stop")
    assert tokens == len(tokenizer.encode(whole.partition("It is")[0], add_special_tokens=False))
    assert run(tokenizer, PROMPT, "<|channel|>final<|message|>Hi.<|return|>")[:2] == ("Hi.", None)
    coded = '<|channel|>final <|constrain|>json<|message|>{"a":1}<|return|>'
    assert run(tokenizer, PROMPT, coded)[0] == '{"a":1}'


def test_harmony_cut_before_its_final_channel_has_no_text():
    tokenizer = make(special=HARMONY_TOKENS)
    whole = "<|channel|>analysis<|message|>Think 🙂.<|end|><|start|>assistant<|channel|>final<|message|>2."
    ids = tokenizer.encode(whole, add_special_tokens=False)
    for most in range(1, len(ids) + 1):
        text, reasoning, tokens, _ = run(tokenizer, PROMPT, whole, max_tokens=most)
        if most < len(ids) - 2:
            assert (text, tokens) == (None, most)
            assert "Think 🙂.".startswith(reasoning.rstrip("\ufffd"))
        else:
            assert (text, reasoning, tokens) == ("2."[: most - len(ids) + 2], "Think 🙂.", len(ids) - 2)


@pytest.mark.parametrize(
    ("written", "text", "reasoning"),
    [
        ("<|channel|>analysis I think.<|end|><|start|>assistant<|channel|>final<|message|>2.<|return|>", "2.", "analysis I think."),
        ("<|channel|>final It is 2.<|return|>", None, "final It is 2."),
        ("<|channel|>analysis<|message|>Hm.<|end|>It is 2.<|return|>", None, "Hm.\nIt is 2."),
        ("Well, then<|start|>assistant<|channel|>final<|message|>2.<|return|>", "2.", "Well, then"),
        ("<|channel|>commentary to=functions.f <|constrain|>json", None, ""),
    ],
)  # fmt: skip
def test_text_whose_harmony_header_is_broken_is_kept_with_the_thoughts(written, text, reasoning):
    tokenizer = make(special=HARMONY_TOKENS)
    tokens = len(tokenizer.encode(written, add_special_tokens=False))
    assert run(tokenizer, PROMPT, written, max_tokens=tokens)[:2] == (text, reasoning)


LONG = "Dear Sir or Madam, I write to you because of the weather. "


@pytest.mark.parametrize("header", ["<|channel|>final", "<|channel|>final <|constrain|>json"])
def test_a_long_answer_that_the_prompt_has_begun_is_continued(header):
    tokenizer = make(special=HARMONY_TOKENS)
    prompt = f"{PROMPT}{header}<|message|>{LONG}"
    assert run(tokenizer, prompt, "It rains.<|return|>")[:3] == ("It rains.", None, 0)
    assert run(tokenizer, prompt, "It rains.", stop=(" ",))[:3] == ("It", None, 0)


def test_long_thoughts_that_the_prompt_has_begun_are_continued():
    tokenizer = make(special=HARMONY_TOKENS)
    prompt = f"{PROMPT}<|channel|>analysis<|message|>{LONG}"
    assert run(tokenizer, prompt, "It rains.", max_tokens=9) == (None, "It rains.", 9, "length")
    whole = "It rains.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert run(tokenizer, prompt, whole)[:2] == ("Yes.", "It rains.")


@pytest.mark.parametrize("prompt", ["q", LONG, PROMPT])
def test_a_harmony_completion_that_begins_no_message_is_the_answer(prompt):
    tokenizer = make(special=HARMONY_TOKENS)
    assert run(tokenizer, prompt, "It rains.<|return|>")[:3] == ("It rains.", None, 0)
    assert run(tokenizer, prompt, "It rains.", max_tokens=4) == ("It r", None, 0, "length")
    assert run(tokenizer, prompt, "It rains.<|return|>", stop=(".",))[0] == "It rains"
    for channels in (
        "<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>",
    ):
        assert run(tokenizer, prompt, f"{channels}It rains.<|return|>")[0] == "It rains."


def test_a_tokenizer_without_marks_has_no_format():
    assert thinking_format(make(template="{{ messages }}")) is None
    assert run(make(), "q<think>", f"a</think>b{EOS}") == ("a</think>b", None, 0, "stop")


@pytest.mark.parametrize(
    ("template", "off"),
    [
        ("{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}", {"enable_thinking": False}),
        ("{% if thinking %}<think>{% endif %}", {"thinking": False}),
        ("{{ message.thinking_text }}", {}),
        ("{{ message.content }}", {}),
    ],
)
def test_the_switch_that_turns_thinking_off_is_found_in_the_template(template, off):
    assert thinking_off(template) == off


@pytest.mark.parametrize(
    ("format", "first", "later"),
    [(HARMONY, HARMONY.close, f"<|end|><|start|>assistant{HARMONY.close}"), (FORMATS[1], "</think>", "</think>")],
)
def test_the_text_that_ends_thoughts_closes_the_message_of_a_channel_that_has_begun(format, first, later):
    stream = ThoughtStream(format, "<|start|>assistant<think>", chr)
    assert stream.ending == first
    stream.append(ord("x"))
    assert stream.ending == later
