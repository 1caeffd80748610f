"""The packed mixers agree with transformers' own functions, however the tokens of ragged sequences are cut into spans and steps."""

import inspect
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import softplus
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.recurrent_gemma import modeling_recurrent_gemma

from batchgen.errors import ModelError
from batchgen.state.cache import StateCache, StateShape, bytes_per_state_slot
from batchgen.state.mixers import RecurrentLayers, install
from batchgen.state.step import StateSpan, StateStep
from support.models import kernels as compiled

HEADS, GROUPS, WIDTH, DEPTH, CHANNELS, TAPS = 4, 2, 40, 10, 300, 3
LAYER = 5
LENGTHS = [1, 2, 3, 15, 16, 17, 40, 64, 65, 130]


each_way = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(False, id="torch"),
        pytest.param(True, id="kernels", marks=pytest.mark.skipif(compiled() is None, reason="no compiler")),
    ],
)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cuts(rng: random.Random, lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Steps of (sequence, start, stop): every sequence from its start to its end, some resting in some steps."""
    done = [0] * len(lengths)
    steps = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        step = []
        for i, n in enumerate(lengths):
            if done[i] < n and rng.random() < 0.8:
                count = min(n - done[i], rng.choice([1, 1, 2, 5, 16, 17, 64, 100]))
                step.append((i, done[i], done[i] + count))
                done[i] += count
        if step:
            steps.append(step)
    return steps


def in_steps(
    kernels: bool,
    lengths: Sequence[int],
    seed: int,
    shape: StateShape,
    run: Callable[[StateStep, Callable[..., torch.Tensor]], Any],
) -> list[torch.Tensor]:
    """By sequence its outputs, run in steps of random spans. `run` gets a step and what packs a list of tensors, one a sequence."""
    rng = random.Random(seed)
    count = len(lengths)
    cache = StateCache({LAYER: shape}, 2 * count, torch.float32)
    slots = rng.sample(range(2 * count), 2 * count)
    held = [-1] * count
    out: list[list[torch.Tensor]] = [[] for _ in lengths]
    for step in cuts(rng, lengths):
        spans = []
        for i, start, stop in step:  # a state is changed in its slot, or read in one and written to the other
            read = held[i]
            write = held[i] = slots[2 * i + rng.randrange(2)]
            spans.append(StateSpan(stop - start, read if start else -1, write))

        def pack(whole: Sequence[torch.Tensor], step: Any = step) -> torch.Tensor:
            return torch.cat([whole[i][start:stop] for i, start, stop in step])

        y = run(StateStep(spans, cache, kernels), pack)
        for (i, _, _), part in zip(step, y.split([stop - start for _, start, stop in step]), strict=True):
            out[i].append(part)
    return [torch.cat(parts) for parts in out]


def agree(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5 * max(1.0, float(want.abs().max())))


Case = tuple[StateShape, Callable[[StateStep, Callable[..., torch.Tensor]], Any], list[list[torch.Tensor]]]
"""A shape of states, what runs a mixer, and by function of transformers what each sequence should give."""


def inputs(seed: int, lengths: Sequence[int], *shape: int) -> list[torch.Tensor]:
    return [normal(10 * i + seed, n, *shape) for i, n in enumerate(lengths)]


def convolution(lengths: Sequence[int], activation: str | None = "silu") -> Case:
    weight, bias = normal(1, CHANNELS, TAPS + 1), normal(2, CHANNELS)
    xs = inputs(3, lengths, CHANNELS)
    own = inspect.unwrap(modeling_bamba.causal_conv1d_fn)
    return (
        StateShape(TAPS, CHANNELS),
        lambda s, pack: s.convolve(LAYER, pack(xs), weight, bias, activation),
        [[own(x.t()[None], weight, bias, activation)[0].t() for x in xs]],
    )


def plain_convolution(lengths: Sequence[int]) -> Case:
    return convolution(lengths, None)


def delta_rule(lengths: Sequence[int]) -> Case:
    unit = torch.nn.functional.normalize
    qs, ks = ([unit(x, dim=-1) for x in inputs(at, lengths, HEADS, DEPTH)] for at in (1, 2))
    vs = inputs(3, lengths, HEADS, WIDTH)
    gs = [-softplus(4 * x) for x in inputs(4, lengths, HEADS)]
    betas = [2 * x.sigmoid() for x in inputs(5, lengths, HEADS)]  # up to 2: negative eigenvalues
    every = (qs, ks, vs, gs, betas)
    both = (modeling_qwen3_next.torch_chunk_gated_delta_rule, modeling_qwen3_next.torch_recurrent_gated_delta_rule)
    return (
        StateShape(1, 1, (HEADS, DEPTH, WIDTH)),
        lambda s, pack: s.delta_rule(LAYER, *map(pack, every), False),
        [[own(*(x[None] for x in one))[0][0] for one in zip(*every, strict=True)] for own in both],
    )


def kimi_delta_attention(lengths: Sequence[int]) -> Case:
    qs, ks = (inputs(at, lengths, HEADS, DEPTH) for at in (1, 2))
    vs = inputs(3, lengths, HEADS, WIDTH)
    gs = [-softplus(2 * x) for x in inputs(4, lengths, HEADS, DEPTH)]
    every = (qs, ks, vs, gs, [x.sigmoid() for x in inputs(5, lengths, HEADS)])
    own = modeling_kimi_linear.recurrent_kimi_delta_attention
    return (
        StateShape(1, 1, (HEADS, DEPTH, WIDTH)),
        lambda s, pack: s.delta_rule(LAYER, *map(pack, every), True),
        [[own(*(x[None] for x in one), None, False, use_qk_l2norm_in_kernel=True)[0][0] for one in zip(*every, strict=True)]],
    )  # fmt: skip


def mamba(lengths: Sequence[int]) -> Case:
    a = -torch.rand(CHANNELS, DEPTH, generator=torch.Generator().manual_seed(7)) * 4
    xs, dts = inputs(1, lengths, CHANNELS), [softplus(x) for x in inputs(2, lengths, CHANNELS)]
    bs, cs = (inputs(at, lengths, DEPTH) for at in (3, 4))
    own = inspect.unwrap(modeling_mamba.mamba_selective_scan)
    return (
        StateShape(1, 1, (DEPTH, CHANNELS)),
        lambda s, pack: s.mamba(LAYER, pack(xs), pack(dts), a, pack(bs), pack(cs)),
        [[own(x.t()[None], dt.t()[None], a, b.t()[None], c.t()[None])[0].t() for x, dt, b, c in zip(xs, dts, bs, cs, strict=True)]],
    )  # fmt: skip


def rg_lru(lengths: Sequence[int]) -> Case:
    xs, decays = inputs(1, lengths, CHANNELS), [x.sigmoid() for x in inputs(2, lengths, CHANNELS)]
    own = modeling_recurrent_gemma.RecurrentGemmaRglru._rnn_scan
    return (
        StateShape(1, 1, (CHANNELS,)),
        lambda s, pack: s.linear_scan(LAYER, pack(xs), pack(decays)),
        [[own(None, x[None], d[None], torch.zeros(1, len(x), 1, dtype=torch.bool), None)[0][0] for x, d in zip(xs, decays, strict=True)]],
    )  # fmt: skip


def mamba2(lengths: Sequence[int]) -> Case:
    skip, a = normal(9, HEADS), -torch.tensor([0.1, 1.0, 4.0, 16.0])
    xs, dts = inputs(1, lengths, HEADS, WIDTH), [softplus(x) for x in inputs(2, lengths, HEADS)]
    bs, cs = (inputs(at, lengths, GROUPS, DEPTH) for at in (3, 4))
    own = modeling_bamba.mamba2_chunk_scan
    return (
        StateShape(1, 1, (HEADS, DEPTH, WIDTH)),
        lambda s, pack: s.mamba2(LAYER, pack(xs), pack(dts), (0.0, math.inf), a, pack(bs), pack(cs), skip),
        [[own(x[None], dt[None], a, b[None], c[None], chunk_size=16, D=skip)[0] for x, dt, b, c in zip(xs, dts, bs, cs, strict=True)]],
    )  # fmt: skip


@each_way
@pytest.mark.parametrize(
    "mixer", [convolution, plain_convolution, delta_rule, kimi_delta_attention, mamba, rg_lru, mamba2]
)
@settings(max_examples=6)
@given(lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_each_mixer_is_that_of_transformers(kernels, mixer, lengths, seed):
    shape, run, wanted = mixer(lengths)
    got = in_steps(kernels, lengths, seed, shape, run)
    for want in wanted:
        for y, expected in zip(got, want, strict=True):
            agree(y, expected)


@pytest.mark.parametrize("exact", [False, True])
@settings(max_examples=8)
@given(lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_unfolding_gives_the_inputs_before_each_token_and_zeros_before_the_first(exact, lengths, seed):
    xs = [normal(10 + i, n, 5) for i, n in enumerate(lengths)]
    shape = StateShape(0, 0, (TAPS, 5)) if exact else StateShape(TAPS, 5)
    got = in_steps(False, lengths, seed, shape, lambda s, pack: s.unfold(LAYER, pack(xs), TAPS, exact=exact))
    for x, unfolded in zip(xs, got, strict=True):
        padded = torch.cat([torch.zeros(TAPS, 5), x])
        assert torch.equal(unfolded, padded.unfold(0, TAPS + 1, 1).transpose(1, 2))


def test_steps_of_mamba2_are_limited_in_prompts_only():
    x, dt = normal(1, 6, HEADS, WIDTH), torch.full((6, HEADS), 0.2)
    b, c = normal(2, 6, GROUPS, DEPTH), normal(3, 6, GROUPS, DEPTH)
    a = -torch.ones(HEADS)

    def run(dt: torch.Tensor, limit: tuple[float, float], generated: int) -> torch.Tensor:
        cache = StateCache({LAYER: StateShape(1, 1, (HEADS, DEPTH, WIDTH))}, 2, torch.float32)
        step = StateStep([StateSpan(4, -1, 0, generated), StateSpan(2, -1, 1)], cache)
        return step.mamba2(LAYER, x, dt, limit, a, b, c, None)

    limited = dt.clone()
    limited[:3] = limited[4:] = 0.5  # all but the last of the first span, which was generated
    torch.testing.assert_close(run(dt, (0.5, math.inf), 1), run(limited, (0.0, math.inf), 0))


def test_a_slot_is_as_large_as_its_states():
    layers = {0: StateShape(3, 8, (2, 4, 5)), 1: StateShape(2, 8)}
    assert bytes_per_state_slot(layers, torch.bfloat16) == 3 * 8 * 2 + 2 * 4 * 5 * 4 + 2 * 8 * 2
    cache = StateCache(layers, 7, torch.bfloat16)
    states = (*cache.convolution.values(), *cache.recurrent.values())
    assert sum(s[:-1].nbytes for s in states) == 7 * bytes_per_state_slot(layers, torch.bfloat16)


def test_a_model_without_recurrent_layers_is_left_as_it_is():
    assert install(torch.nn.Sequential(torch.nn.Linear(2, 2))) is None


def test_a_recurrent_layer_does_not_run_without_states():
    with pytest.raises(ModelError, match="without a step's states"):
        RecurrentLayers().step  # noqa: B018


@pytest.mark.skipif(compiled() is None, reason="no compiler")
def test_in_bfloat16_the_convolution_rounds_where_transformers_does():
    weight, bias = normal(1, CHANNELS, TAPS + 1).bfloat16(), normal(2, CHANNELS).bfloat16()
    x = normal(3, 90, CHANNELS).bfloat16()
    cache = StateCache({LAYER: StateShape(TAPS, CHANNELS)}, 1, torch.bfloat16)
    for activation in ("silu", None):
        got = StateStep([StateSpan(90, -1, 0)], cache, kernels=True).convolve(LAYER, x, weight, bias, activation)
        want = inspect.unwrap(modeling_bamba.causal_conv1d_fn)(x.t()[None], weight, bias, activation)[0].t()
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)
        assert torch.equal(cache.convolution[LAYER][0], x[-TAPS:])
