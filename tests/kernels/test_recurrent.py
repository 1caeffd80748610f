"""Kernels of recurrent layers, each against plain torch, with the same bits in any batch."""

from inspect import signature

import pytest
import torch
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from batchgen.kernels import recurrent
from batchgen.kernels.fusion import FusedGatedNorm, fuse_small_parts
from batchgen.state.convolution import convolve_spans
from batchgen.state.delta_rule import delta_rule_token, normalized
from batchgen.state.mamba import mamba2_token
from support.numbers import BFLOAT16, FLOAT32, numbers

pytestmark = pytest.mark.usefixtures("kernels")


def bamba_norm(size):
    """Returns Bamba's norm with one group. transformers 5.17 has no groups."""
    groups = [size] if "group_size" in signature(BambaRMSNormGated).parameters else []
    return BambaRMSNormGated(size, *groups)


NORMS = {
    "gate after the norm": lambda size: Qwen3_5RMSNormGated(size),
    "gate after the norm, sigmoid": lambda size: KimiLinearRMSNormGated(size),
    "gate before the norm": bamba_norm,
    "gate before the norm, groups": lambda size: Zamba2RMSNormGated(size, size // 4),
}


def fused_norm(kind, size, dtype):
    model = torch.nn.Module()
    model.norm = NORMS[kind](size)
    torch.nn.init.normal_(model.norm.weight, generator=torch.Generator().manual_seed(5))
    plain = model.norm.to(dtype)
    with torch.inference_mode():
        fuse_small_parts(model)
    assert isinstance(model.norm, FusedGatedNorm)
    return model.norm, plain


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("size", [128, 300])
@pytest.mark.parametrize(
    ("x", "weight"),
    [(FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT32, BFLOAT16)],
    ids=["float32", "bfloat16", "float32 beside bfloat16"],
)
@torch.inference_mode()
def test_a_gated_norm_equals_the_torch_module(kind, size, x, weight, threads):
    fused, plain = fused_norm(kind, size, weight)
    values = numbers(1, 90, size, dtype=x)
    gate = numbers(1, 90, 2 * size, dtype=weight, seed=1)[..., size:]  # a part of a projection
    got, want = fused(values, gate), plain(values, gate)
    assert got.dtype == want.dtype == x
    near = 2**-7 if x == BFLOAT16 else 1e-5
    torch.testing.assert_close(got.float(), want.float(), atol=near * float(want.float().abs().max()), rtol=0)
    alone = [fused(values[:, i : i + 1], gate[:, i : i + 1]) for i in (0, 7, 89)]
    assert torch.equal(torch.cat(alone, 1), got[:, [0, 7, 89]])


@torch.inference_mode()
def test_a_gated_norm_that_the_kernel_does_not_cover_runs_as_the_torch_module():
    fused, plain = fused_norm("gate before the norm", 64, FLOAT32)
    x = numbers(3, 64)
    assert torch.equal(fused(x), plain(x))
    assert torch.equal(fused(x.double(), x.double()), plain(x.double(), x.double()))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [64, 75])
def test_a_sigmoid_gate_equals_torch(dtype, size, threads):
    x = numbers(1, 90, 4, size, dtype=dtype)
    gate = numbers(1, 90, 4, 2 * size, dtype=dtype, seed=1)[..., size:]  # a part of a projection
    near = 2**-7 if dtype == BFLOAT16 else 1e-6
    torch.testing.assert_close(recurrent.sigmoid_gate(x, gate), x * torch.sigmoid(gate), atol=0, rtol=near)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_a_convolution_equals_torch_and_does_not_depend_on_how_prompts_are_chunked(dtype, taps, activation, threads):
    channels, lengths = 333, (1, 2, 40, 101)
    x = numbers(sum(lengths), channels, dtype=dtype)
    weight, bias = numbers(channels, taps + 1, dtype=dtype, seed=1), numbers(channels, dtype=dtype, seed=2)
    before = numbers(len(lengths), taps, channels, dtype=dtype, seed=3)

    def run(states, starts, sizes, state_slots):
        places = [torch.tensor(of) for of in (starts, sizes, state_slots, state_slots)]
        return recurrent.convolve(x, weight.t().contiguous(), bias, activation, states, recurrent.SpanPlaces(*places))

    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    whole, cut = before.clone(), before.clone()
    got = run(whole, starts, lengths, range(len(lengths)))
    parts = torch.empty_like(got)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for at in range(0, length, 7):
            some = min(7, length - at)
            here = slice(start + at, start + at + some)
            parts[here] = run(cut, [start + at], [some], [i])[here]
    assert torch.equal(parts, got)
    assert torch.equal(cut, whole)
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    places = (torch.tensor(starts), torch.tensor(lengths), owners)
    want, after = convolve_spans(x.float(), weight.float(), bias.float(), activation, before.float(), *places)
    torch.testing.assert_close(
        got.float(), want, atol=2**-7 if dtype == BFLOAT16 else 1e-5, rtol=2**-7 if dtype == BFLOAT16 else 1e-5
    )
    assert torch.equal(whole.float(), after)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["delta rule", "mamba2"])
@pytest.mark.parametrize("lengths", [(1,) * 9, (1, 2, 40, 23)], ids=["decode", "prompts"])
def test_a_recurrence_equals_torch_and_does_not_depend_on_how_prompts_are_chunked(dtype, rule, lengths, threads):
    """The 205 columns are computed in pieces of 128, 64 and 8 or 16; the rest fills no vector."""
    heads, groups, rows, columns, count = 4, 2, 24, 205, sum(lengths)
    q, k = (numbers(count, groups, rows, dtype=dtype, seed=i) for i in (1, 2))
    v, strength = numbers(count, heads, columns, dtype=dtype, seed=3), numbers(count, heads, seed=4).sigmoid()
    rates, skip = -numbers(heads, seed=5).abs(), numbers(heads, seed=7)
    before = numbers(len(lengths), heads, rows, columns, seed=6)

    def run(states, starts, sizes, state_slots):
        decay = (rates * strength).exp()
        places = [torch.tensor(of) for of in (starts, sizes, state_slots, state_slots)]
        if rule == "mamba2":
            return recurrent.mamba2(v, strength, decay, k, q, skip, states, recurrent.SpanPlaces(*places))
        return recurrent.delta_rule(q, k, v, decay, strength, 0.5, True, states, recurrent.SpanPlaces(*places))

    def token(t, states):
        """Computes one token in plain torch."""
        here = slice(t, t + 1)
        qt, kt, vt, bt = (of[here].float() for of in (q, k, v, strength))
        if rule == "mamba2":
            out, states = mamba2_token(rates, vt, bt, kt, qt, states)
            return out + skip[:, None] * vt, states
        qt, kt = (normalized(of).repeat_interleave(heads // groups, 1) for of in (qt, kt))
        return delta_rule_token(qt * 0.5, kt, vt, rates * bt, bt, states)

    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    whole, cut = before.clone(), before.clone()
    got = run(whole, starts, lengths, range(len(lengths)))
    assert got.dtype == (FLOAT32 if rule == "mamba2" else dtype)
    parts, want, states = torch.empty_like(got), torch.empty(got.shape), before.clone()
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for at in range(start, start + length, 7):
            here = slice(at, min(at + 7, start + length))
            parts[here] = run(cut, [at], [here.stop - at], [i])[here]
        for t in range(start, start + length):
            want[t : t + 1], states[i : i + 1] = token(t, states[i : i + 1])
    assert torch.equal(parts, got)
    assert torch.equal(cut, whole)
    near = 2**-7 if got.dtype == BFLOAT16 else 1e-4
    torch.testing.assert_close(got.float(), want, atol=near, rtol=near)
    torch.testing.assert_close(whole, states, atol=1e-4, rtol=1e-4)
