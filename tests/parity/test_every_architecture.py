"""Every architecture of the installed transformers is exact, logits included, or is refused by name and with the reason."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import transformers

from batchgen.attention.base import LayerOptions
from batchgen.attention.torch_backend import StepAttention
from batchgen.errors import ModelError
from batchgen.model.architectures import REFUSED, VERIFIED, VERIFIED_ON, check_architecture, is_verified, refusal
from support.features import candidates
from support.models import (
    Expected,
    engine_for,
    expect,
    make_requests,
    memory_for,
    packed_model,
    reference_model,
    run,
    watched,
)
from support.params import slow_but
from support.shapes import CORE, SHAPES, family_config, prompts_and_lengths

# Importing GPTBigCode from transformers 5.17 with torch 2.13 gives this warning.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

INSTALLED = ".".join(transformers.__version__.split(".")[:2])
BLOCKS = 8  # of 32 tokens; the longest completion needs 6
ALL_LAYERS_SLIDE = {"mistral/sliding_window", "mixtral/sliding_window", "phi3/sliding_window", "starcoder2"}
"""Their sequences free blocks as they advance, so they are not preempted."""
TOLERANCE = 5e-5
"""Largest difference of a logit, relative to the largest logit. Rounding stays below a fifth of it (below a tenth except for Gemma 4).
A scale of attention that is 2% off, or a missing sliding window, soft cap or sink, makes a difference of at least ten times as much."""


PROMPTS, LENGTHS = prompts_and_lengths()
# The first decodes all rows together; the second mixes slices of prefill with decoding, and runs out of blocks.
ENGINES = {"all at once": {}, "in slices, memory short": {"max_batch_tokens": 24, "batch_size": 8}}


@cache
def expected_of(name: str) -> list[Expected]:
    model = reference_model(name)
    return [expect(model, p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]


@pytest.mark.parametrize("name", slow_but(CORE, sorted(SHAPES)))
def test_tokens_and_logits_equal_those_of_generate(name):
    model, expected = packed_model(name), expected_of(name)
    largest = max(float(e.logits.abs().max()) for e in expected)
    requests = make_requests(PROMPTS, LENGTHS)
    for how, options in ENGINES.items():
        engine = engine_for(model, **options)
        if how != "all at once":
            engine = engine_for(model, kv_memory=memory_for(engine, BLOCKS), **options)
        with watched(model) as seen:
            results = run(engine, requests)
        assert [r.error_message for r in results] == [None] * len(requests), how
        assert [list(r.token_ids) for r in results] == [e.tokens for e in expected], how
        assert seen.furthest(expected) < TOLERANCE * largest, how
        if how == "all at once":
            assert engine.stats.preemptions == 0
        elif name not in ALL_LAYERS_SLIDE and not model.states:  # few state slots let few run, whose blocks suffice
            assert engine.stats.preemptions > 0


# Options that a backend might ignore or a module might not pass on.
WRONG_OPTIONS: dict[str, Callable[[LayerOptions], LayerOptions]] = {
    "scale": lambda o: replace(o, scale=o.scale * 1.02),
    "sliding_window": lambda o: replace(o, sliding_window=None),
    "softcap": lambda o: replace(o, softcap=None),
    "sinks": lambda o: replace(o, sinks=None),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_leaving_out_an_option_of_attention_changes_the_logits(name, monkeypatch):
    model, expected = packed_model(name), expected_of(name)
    largest = max(float(e.logits.abs().max()) for e in expected)
    attend = StepAttention.__call__
    for option, change in WRONG_OPTIONS.items():
        asked: list[bool] = []

        def wrong(step, layer, q, k, v, options, *, option=option, change=change, asked=asked):
            asked.append(getattr(options, option) is not None)
            return attend(step, layer, q, k, v, change(options))

        monkeypatch.setattr(StepAttention, "__call__", wrong)
        with watched(model) as seen:
            run(engine_for(model), make_requests(PROMPTS, LENGTHS))
        if any(asked):
            assert seen.furthest(expected) > 10 * TOLERANCE * largest, option


@pytest.mark.parametrize("name", sorted(VERIFIED))
def test_no_verified_architecture_is_refused_with_its_default_config(name):
    assert refusal(family_config(name)) is None


def test_exactly_the_verified_architectures_are_tested_here():
    assert {name.split("/")[0] for name in SHAPES} == VERIFIED
    assert len(VERIFIED) >= 80
    assert not VERIFIED & set(REFUSED)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_architecture_that_cannot_be_exact_is_refused_with_the_reason(name):
    config = SimpleNamespace(model_type=name)
    assert not is_verified(config)
    with pytest.raises(ModelError) as e:
        check_architecture(config)
    assert e.value.message == f"models of type {name!r} are not supported: {REFUSED[name]}"


@pytest.mark.slow
def test_every_text_architecture_of_transformers_is_verified_or_refused():
    unknown = candidates() - VERIFIED - set(REFUSED)
    if _number(INSTALLED) > _number(VERIFIED_ON[-1]):
        return  # newer architectures check themselves when they are loaded
    assert unknown == set()


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
