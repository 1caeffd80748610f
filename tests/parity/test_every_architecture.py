"""Every architecture of the installed transformers is exact, logits included, or refused by name with the reason."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from batchgen.attention.base import LayerOptions, StepAttention
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
from support.shapes import CORE, SHAPES, prompts_and_lengths

# transformers 5.17 meets torch 2.13 with a warning of its own, where it imports GPTBigCode.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

INSTALLED = ".".join(transformers.__version__.split(".")[:2])
BLOCKS = 8  # of 32 tokens; the longest completion needs 6
ALL_SLIDE = {
    "mistral/sliding_window",
    "mixtral/sliding_window",
    "phi3/sliding_window",
    "starcoder2",
}  # their blocks are given back as they go
TOLERANCE = 5e-5
"""Largest difference of a logit, relative to the largest logit. Float noise is below a fifth of it (a tenth but for Gemma 4);
2% of attention's scale, a sliding window, a soft cap or sinks left out make ten times as much and more."""


PROMPTS, LENGTHS = prompts_and_lengths()
# The first decodes all side by side; the second mixes prefill in slices with decoding, and runs out of blocks.
TELLING = {"all at once": {}, "in slices, memory short": {"max_batch_tokens": 24, "batch_size": 8}}


@cache
def expected_of(name: str) -> list[Expected]:
    model = reference_model(name)
    return [expect(model, p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]


def _params(shapes: list[str], quick: Collection[str] | None = None) -> list[object]:
    """One parameter for each shape. Shapes that are not in `quick` are slow tests."""
    missing = pytest.mark.skip(f"transformers {INSTALLED} does not have it")
    return [
        pytest.param(
            s,
            marks=[
                *([] if s.split("/")[0] in CONFIG_MAPPING else [missing]),
                *([] if quick is None or s in quick else [pytest.mark.slow]),
            ],
        )
        for s in shapes
    ]


@pytest.mark.parametrize("name", _params(sorted(SHAPES), CORE))
def test_tokens_and_logits_are_those_of_generate(name: str) -> None:
    model, expected = packed_model(name), expected_of(name)
    largest = max(float(e.logits.abs().max()) for e in expected)
    requests = make_requests(PROMPTS, LENGTHS)
    for how, options in TELLING.items():
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
        elif name not in ALL_SLIDE and not model.states:  # few state slots let few run, whose blocks suffice
            assert engine.stats.preemptions > 0


# What a backend might get wrong, or a module not pass on.
SPOILT: dict[str, Callable[[LayerOptions], LayerOptions]] = {
    "scale": lambda o: replace(o, scale=o.scale * 1.02),
    "sliding_window": lambda o: replace(o, sliding_window=None),
    "softcap": lambda o: replace(o, softcap=None),
    "sinks": lambda o: replace(o, sinks=None),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", _params(sorted(SHAPES)))
def test_all_that_a_layer_asks_of_attention_shows_in_the_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = packed_model(name), expected_of(name)
    largest = max(float(e.logits.abs().max()) for e in expected)
    attend = StepAttention.__call__
    for what, spoil in SPOILT.items():
        asked: list[bool] = []

        def spoilt(step, layer, q, k, v, options, *, what=what, spoil=spoil, asked=asked):
            asked.append(getattr(options, what) is not None)
            return attend(step, layer, q, k, v, spoil(options))

        monkeypatch.setattr(StepAttention, "__call__", spoilt)
        with watched(model) as seen:
            run(engine_for(model), make_requests(PROMPTS, LENGTHS))
        if any(asked):
            assert seen.furthest(expected) > 10 * TOLERANCE * largest, what


@pytest.mark.parametrize("name", _params(sorted(VERIFIED)))
def test_no_verified_architecture_is_refused_as_it_comes(name: str) -> None:
    assert refusal(AutoConfig.for_model(name)) is None


def test_what_is_verified_is_what_is_tested_here() -> None:
    assert {name.split("/")[0] for name in SHAPES} == VERIFIED
    assert len(VERIFIED) >= 80
    assert not VERIFIED & set(REFUSED)


@pytest.mark.parametrize("name", _params(sorted(REFUSED)))
def test_what_cannot_be_exact_is_refused_with_the_reason(name: str) -> None:
    config = SimpleNamespace(model_type=name)
    assert not is_verified(config)
    with pytest.raises(ModelError) as e:
        check_architecture(config)
    assert e.value.message == f"models of type {name!r} are not supported: {REFUSED[name]}"


@pytest.mark.slow
def test_no_text_architecture_of_the_installed_transformers_is_forgotten() -> None:
    unknown = candidates() - VERIFIED - set(REFUSED)
    if _number(INSTALLED) > _number(VERIFIED_ON[-1]):
        return  # those that came since check themselves when they are loaded
    assert unknown == set()


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
