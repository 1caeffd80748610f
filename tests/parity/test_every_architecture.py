"""Every architecture of the installed transformers is exact, logits included, or is refused by name and with the reason."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from batchgen.attention.base import LayerOptions
from batchgen.attention.torch_backend import StepAttention
from batchgen.errors import ModelError
from batchgen.kernels.ops import PackedLinear
from batchgen.model.architectures import REFUSED, VERIFIED, VERIFIED_ON, check_architecture, is_verified, refusal
from batchgen.model.runner import Runner
from support.features import candidates
from support.models import (
    TOLERANCE,
    Expected,
    check_equal_to_generate,
    engine_for,
    expect,
    make_requests,
    packed_model,
    reference_model,
    run,
    watched,
)
from support.params import slow_but
from support.requests import planned
from support.shapes import CORE, SHAPES, family_config, prompts_and_lengths
from support.wanted import bits, watch_columns

# Importing GPTBigCode from transformers 5.17 with torch 2.13 gives this warning.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

INSTALLED = ".".join(transformers.__version__.split(".")[:2])
ALL_LAYERS_SLIDE = {"mistral/sliding_window", "mixtral/sliding_window", "phi3/sliding_window", "starcoder2"}
"""Their sequences free blocks as they advance, so they are not preempted."""


PROMPTS, LENGTHS = prompts_and_lengths()


@cache
def expected_of(name: str) -> list[Expected]:
    model = reference_model(name)
    return [expect(model, p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]


@pytest.mark.parametrize("name", slow_but(CORE, sorted(SHAPES)))
def test_tokens_and_logits_equal_those_of_generate(name):
    model = packed_model(name)
    preemptions, more = check_equal_to_generate(model, PROMPTS, LENGTHS, expected_of(name))
    assert preemptions == 0
    assert more > 0 or name in ALL_LAYERS_SLIDE or model.states  # few state slots let few run, whose blocks suffice


def first_logits(model: Any, wanted: NDArray[np.bool_] | None, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Returns the logits of the first step that has some. `wanted`: of the vocabulary; None for all."""
    found, run_step = [], Runner.run

    def watched(runner, batch, last, _):
        rows = None if wanted is None else bits(np.tile(wanted, (batch.size.logit_rows, 1)))
        logits = run_step(runner, batch, last, lambda: rows)
        if logits is not None:
            found.append(logits.clone())
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", watched)
        engine = engine_for(model)
        engine.add(*planned(make_requests(PROMPTS, LENGTHS)), lambda result: None)
        while not found:
            engine.step()
    return found[0]


@pytest.mark.parametrize("name", slow_but(CORE, sorted(SHAPES)))
def test_logits_that_are_wanted_do_not_depend_on_the_others(name, monkeypatch):
    """Models may limit or scale their logits, one by one."""
    model, calls = packed_model(name), watch_columns(monkeypatch)
    wanted = np.arange(model.vocab_size) == 5
    want, got = (first_logits(model, which, monkeypatch) for which in (None, wanted))
    assert torch.equal(got[:, wanted], want[:, wanted])
    assert len(calls) == (type(model.module.get_output_embeddings()) is PackedLinear)


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
