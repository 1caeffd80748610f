"""Whether a prompt fits the context, and what is done where it does not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.errors import UsageError
from batchgen.sampling_params import SamplingParams


def build(tools, length, *, context=8, max_tokens=3, bos=False, **options):
    b = tools.builder(context=context, bos=bos, sampling=SamplingParams(max_tokens=max_tokens), **options)
    (out,) = b.build(tools.rows({"prompt": "abcdefghijklmnopqrstuvwxyz"[:length]}))
    return out


@pytest.mark.parametrize(("length", "max_tokens"), [(1, 3), (5, 3), (6, 2), (7, 1)])
def test_a_prompt_that_leaves_less_room_gets_a_shorter_completion(tools, length, max_tokens):
    draft = build(tools, length)
    assert (len(draft.tokens), draft.max_tokens, draft.params.max_tokens, draft.truncated) == (
        length,
        max_tokens,
        3,
        False,
    )


@pytest.mark.parametrize("length", [8, 9, 26])
def test_a_prompt_as_long_as_the_context_is_an_error_with_the_figures(tools, length):
    result = build(tools, length)
    assert tools.error_of(result) == (
        "prompt_too_long",
        f"the prompt has {length} tokens, and the model's context of 8 tokens must hold it and a completion",
    )
    assert result.prompt_tokens == length


def test_a_cut_prompt_leaves_room_for_the_completion(tools):
    left = build(tools, 26, on_long_prompt="truncate-left")
    assert (tools.text_of(left), left.max_tokens, left.truncated) == ("vwxyz", 3, True)
    right = build(tools, 26, on_long_prompt="truncate-right")
    assert (tools.text_of(right), right.max_tokens, right.truncated) == ("abcde", 3, True)


def test_a_cut_prompt_keeps_half_of_the_context_however_long_the_completion(tools):
    draft = build(tools, 26, max_tokens=100, on_long_prompt="truncate-left")
    assert (tools.text_of(draft), draft.max_tokens) == ("wxyz", 4)


def test_a_prompt_that_fits_is_not_cut(tools):
    draft = build(tools, 7, on_long_prompt="truncate-left")
    assert (tools.text_of(draft), draft.max_tokens, draft.truncated) == ("abcdefg", 1, False)


def test_the_bos_stays_when_the_left_is_cut(tools):
    draft = build(tools, 26, bos=True, on_long_prompt="truncate-left")
    assert (tools.text_of(draft), draft.max_tokens) == ("<s>wxyz", 3)


def test_a_context_of_one_token_has_no_room_at_all(tools):
    result = build(tools, 3, context=1, on_long_prompt="truncate-left")
    assert result.error_type == "prompt_too_long"


def test_an_unknown_way_is_refused(tools):
    with pytest.raises(
        UsageError, match="--on-long-prompt 'cut' is unknown; use error, truncate-left or truncate-right"
    ):
        tools.builder(on_long_prompt="cut")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 26),
    context=st.integers(1, 30),
    max_tokens=st.integers(1, 40),
    bos=st.booleans(),
    way=st.sampled_from(["error", "truncate-left", "truncate-right"]),
)
def test_prompt_and_completion_always_fit_and_nothing_is_cut_in_vain(tools, length, context, max_tokens, bos, way):
    out = build(tools, length, context=context, max_tokens=max_tokens, bos=bos, on_long_prompt=way)
    whole = length + bos
    if whole >= context and (way == "error" or context < 2):
        assert out.error_type == "prompt_too_long"
        return
    assert out.truncated == (whole >= context)
    assert 1 <= len(out.tokens) <= whole
    assert 1 <= out.max_tokens <= max_tokens
    assert len(out.tokens) + out.max_tokens <= context
    assert out.max_tokens == max_tokens or len(out.tokens) + out.max_tokens == context
