"""Prompts that do not fit the context are shortened or refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.sampling_params import SamplingParams
from support.params import examples
from support.tokenizers_by_hand import CHAT, OPEN, RAW, asks, says, turn

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def build(tools, length, *, context=8, max_tokens=3, bos=False, **options):
    b = tools.builder(context=context, bos=bos, sampling=SamplingParams(max_tokens=max_tokens), **options)
    (out,) = b.build(tools.rows({"prompt": ALPHABET[:length]}))
    return out


def test_a_prompt_cut_on_the_left_keeps_its_bos(tools):
    draft = build(tools, 26, bos=True, on_long_prompt="truncate-left")
    assert (tools.text_of(draft), draft.max_tokens) == ("<s>vwxyz", 2)


def chat(tools, columns, *, context, way="truncate-left", **options):
    fixed = {"chat_template": tools.CHATML, "bos": False, "sampling": SamplingParams(max_tokens=5)}
    b = tools.builder(context=context, on_long_prompt=way, **fixed, **options)
    (out,) = b.build(tools.rows(columns))
    return out


LONG = [says("user", ALPHABET)]
TALK = [says("system", "Be."), *LONG, says("assistant", "No"), says("user", ALPHABET[:12])]
NESTED = {"text": ALPHABET, "more": [{"name": ALPHABET}], "number": 7}
SYSTEM = turn("system", "Be.")


@pytest.mark.parametrize(
    ("columns", "context", "options", "text"),
    [
        # The text alone is shortened: the tokens of the template, the system message and the prefix stay.
        *(
            ({"prompt": ALPHABET}, 50, {"way": way, "system": "Be.", "prefix": "> "}, SYSTEM + turn("user", f"> {kept}") + OPEN)
            for way, kept in (("truncate-left", "pqrstuvwxyz"), ("truncate-right", "abcdefghijk"))
        ),
        # The longest messages of a conversation are shortened to the same length.
        *(
            ({"messages": TALK}, 72, {"way": way}, SYSTEM + turn("user", long) + turn("assistant", "No") + turn("user", last) + OPEN)
            for way, long, last in (("truncate-left", "uvwxyz", "ghijkl"), ("truncate-right", "abcdef", "abcdef"))
        ),
        ({"messages": [*LONG, says("assistant", "Well, ")]}, 40, {}, turn("user", "qrstuvwxyz") + OPEN + "Well, "),
        (NESTED, 57, {"template": "{{ number }}: {{ text }} / {{ more[0].name }}? Answer:"}, turn("user", "7: rstuvwxyz / rstuvwxyz? Answer:") + OPEN),
        (asks(CHAT, messages=LONG), 34, {}, turn("user", "qrstuvwxyz") + OPEN),
        (asks(RAW, prompt=ALPHABET), 16, {}, "opqrstuvwxyz"),
    ],
)  # fmt: skip
def test_the_texts_of_a_row_are_shortened_until_it_fits(tools, columns, context, options, text):
    draft = chat(tools, columns, context=context, **options)
    assert (tools.text_of(draft), draft.max_tokens, draft.truncated) == (text, 5 if context > 16 else 4, True)


def test_a_prompt_of_token_ids_is_shortened_too(tools):
    b = tools.builder(context=8, chat=False, on_long_prompt="truncate-right", sampling=SamplingParams(max_tokens=3))
    (draft,) = b.build(tools.rows({"prompt": list(range(30, 50))}))
    assert (draft.tokens.tolist(), draft.truncated) == ([30, 31, 32, 33, 34, 35], True)


def test_a_chat_template_that_does_not_fit_without_any_text_is_an_error(tools):
    result = chat(tools, {"prompt": ALPHABET}, context=20)
    assert tools.error_of(result) == (
        "prompt_too_long",
        "the prompt has 45 tokens, and the model's context of 20 tokens must hold it and a completion; "
        "the text around it (template, system message, prefix) alone leaves too little room",
    )


def test_a_long_text_is_tokenized_only_a_few_times(tools, monkeypatch):
    b = tools.builder(context=400, on_long_prompt="truncate-left", sampling=SamplingParams(max_tokens=50))
    limits = []
    shorter = b._shorter
    monkeypatch.setattr(b, "_shorter", lambda row, limit: limits.append(limit) or shorter(row, limit))
    (draft,) = b.build(tools.rows({"prompt": "one, two, three " * 5000 + "€" * 40}))
    assert len(draft.tokens) in (348, 349, 350)
    assert len(limits) <= 12


@settings(max_examples=examples(20, 100))
@given(
    length=st.integers(1, 26),
    context=st.integers(1, 30),
    max_tokens=st.integers(1, 40),
    bos=st.booleans(),
    way=st.sampled_from(["error", "truncate-left", "truncate-right"]),
)
def test_prompt_and_completion_always_fit_and_no_more_is_cut_than_needed(tools, length, context, max_tokens, bos, way):
    out = build(tools, length, context=context, max_tokens=max_tokens, bos=bos, on_long_prompt=way)
    whole = length + bos
    most = context - 1 if way == "error" else context - min(max_tokens, max(1, context // 4))
    if whole > most and (way == "error" or most < 1 + bos or length == 1):
        assert out.error_type == "prompt_too_long"
        return
    assert out.truncated == (whole > most)
    assert 1 <= len(out.tokens) <= whole
    assert 1 <= out.max_tokens <= max_tokens
    assert len(out.tokens) + out.max_tokens <= context
    assert out.max_tokens == max_tokens or len(out.tokens) + out.max_tokens == context
    assert len(out.tokens) == min(whole, most)
