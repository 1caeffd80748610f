"""Packed weights: what a code means, what keeps a weight packed, and that the kernels unpack exactly the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchgen.kernels.codes import E2M1, PLANES, Coding, PackedTensor, packed_planes, unpacked_codes

ROWS, SIZE = 200, 256  # rows that do not fill the last panel
HALF = {"scales": torch.float16}
CODINGS = {
    "Q4_0": (Coding(4, zero=8, group=32), 1, HALF),
    "Q8_0": (Coding(8, zero=128, group=32), 1, HALF),
    "Q4_1": (Coding(4, group=32), 1, HALF | {"offsets": torch.float16}),
    "Q2_K": (Coding(2, group=16, sub="u8"), 16, HALF | {"offsets": torch.float16}),
    "Q3_K": (Coding(3, zero=4, group=16, sub="i8"), 16, HALF),
    "Q5_K": (Coding(5, group=32, sub="u8"), 8, HALF | {"offsets": torch.float16}),
    "Q6_K": (Coding(6, zero=32, group=16, sub="i8"), 16, HALF),
    "AWQ": (Coding(4, group=128), 1, HALF | {"zeros": torch.uint8}),
    "GPTQ in 8 bits, desc_act": (Coding(8), 1, HALF | {"zeros": torch.uint8, "groups": torch.int32}),
    "NF4": (Coding(4, tuple(range(-8, 8)), group=64), 1, {"scales": torch.float32}),
    "int8 of bitsandbytes": (Coding(8, zero=128, group=SIZE, divisor=127.0), 1, {"scales": torch.float32}),
    "FP8": (Coding(8, "e4m3", group=128), 1, {"scales": torch.float32}),
    "NVFP4": (Coding(4, E2M1, group=16, sub="e4m3", divides=True, rounds=torch.bfloat16), 16, {"scales": torch.float32}),
    "MXFP4": (Coding(4, E2M1, group=32, sub="e8m0"), 1, {}),
    "W4A16": (Coding(4, zero=8, group=32, rounds=torch.bfloat16), 1, {"scales": torch.bfloat16}),
}  # fmt: skip
"""The coding, groups that have one scale, and the types of the parts."""


def weight_of(name: str, dtype: torch.dtype, seed: int = 0) -> PackedTensor:
    coding, per_scale, types = CODINGS[name]
    numbers = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, size: int) -> torch.Tensor:
        return torch.randint(low, high, (ROWS, size), generator=numbers).to(torch.uint8)

    codes = whole(0, 2**coding.bits, SIZE)
    if coding.levels == "e4m3":
        codes[codes & 127 == 127] = 0  # NaN
    groups = SIZE // (coding.group or 64)
    parts: dict[str, Any] = packed_planes(codes, coding.bits)
    for part in types.keys() & {"scales", "offsets"}:
        parts[part] = (torch.rand(ROWS, groups // per_scale, generator=numbers) / 50 + 0.001).to(types[part])
    if coding.sub:
        parts["sub"] = whole(*((110, 130) if coding.sub == "e8m0" else (1, 15)), groups)
    if "offsets" in types and coding.sub:
        parts["sub_offsets"] = whole(0, 15, groups)
    if "zeros" in types:
        parts["zeros"] = whole(0, 2**coding.bits, groups)
    if "groups" in types:
        parts["groups"] = torch.arange(SIZE).flip(0).int() % groups
    return PackedTensor(coding, parts).to(dtype)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CODINGS)
def test_a_layer_of_codes_computes_what_the_layer_of_their_numbers_does_to_the_last_bit(name, dtype):
    from batchgen.kernels.ops import Activation, PackedLinear

    weights = [weight_of(name, dtype), weight_of(name, dtype, seed=1)]
    if "groups" in weights[0].parts:
        weights[1].parts["groups"] = weights[0].parts["groups"]
    plain = [weight.unpacked() for weight in weights]
    for count, activation in ((1, Activation.NONE), (2, Activation.SILU)):
        coded = PackedLinear(list(weights[:count]), [None] * count, activation)
        whole = PackedLinear(plain[:count], [None] * count, activation)
        assert coded.codes is not None
        assert coded.bytes < 0.6 * whole.bytes * (2 if whole.kind else 1)
        if count == 1:
            assert torch.equal(bits_of(coded.weight), bits_of(plain[0]))
        for rows in (1, 3, 8, 70, 600):
            x = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows)).to(dtype)
            assert torch.equal(bits_of(coded(x)), bits_of(whole(x)))


def test_weights_that_the_kernels_cannot_unpack_exactly_are_packed_as_numbers():
    from batchgen.kernels.ops import PackedLinear

    tiny, odd, rounded = (weight_of("Q4_0", torch.float32) for _ in range(3))
    tiny.parts["scales"] = tiny.parts["scales"].float() * 1e-30
    odd.coding = Coding(4, zero=8, group=4)
    odd.parts["scales"] = torch.ones(ROWS, SIZE // 4)
    rounded.coding = Coding(4, zero=8, group=32, rounds=torch.float16)
    for weight in (tiny, odd, rounded):
        layer = PackedLinear([weight], [None])
        assert layer.codes is None
        assert torch.equal(layer.weight, weight.unpacked())


@pytest.mark.parametrize("bits", PLANES)
def test_codes_lie_in_planes_the_first_in_the_lowest_bits(bits):
    codes = (torch.arange(32) % 2**bits).to(torch.uint8)[None]
    planes = packed_planes(codes, bits)
    assert sum(plane.numel() for plane in planes.values()) == 32 * bits // 8
    assert torch.equal(unpacked_codes(Coding(bits), planes), codes)
    if bits == 4:
        assert planes["plane4"][0, :2].tolist() == [0x10, 0x32]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_moving_rows_keeps_a_weight_packed_and_everything_else_unpacks_it(mode):
    weight = torch.nn.Parameter(weight_of("Q6_K", torch.bfloat16))
    assert isinstance(weight, PackedTensor)
    plain = weight.unpacked().detach()
    x, ids = torch.randn(3, SIZE).bfloat16(), torch.tensor([[5, 0, 199]])
    kept = [
        lambda w: w.view(2, 50, 2, SIZE).transpose(1, 2).reshape(ROWS, SIZE),
        lambda w: torch.stack([w, w])[1],
        lambda w: torch.cat([w, w[3:7]]),
        lambda w: w.chunk(2)[1],
        lambda w: w[torch.tensor([4, 2])],
        lambda w: torch.stack([w, w]).transpose(1, 2)[0],
        lambda w: w.unsqueeze(1),
    ]
    unpacked = [
        lambda w: torch.nn.functional.linear(x, w),
        lambda w: x @ w.T,
        lambda w: torch.nn.functional.embedding(ids, w),
        lambda w: w.view(ROWS, 2, -1),
        lambda w: w + 1,
    ]
    with mode():
        for change in kept:
            found = change(weight)
            assert isinstance(found, PackedTensor)
            assert found.packed_bytes < 0.5 * found.nbytes
            assert torch.equal(found.unpacked(), change(plain))
        for change in unpacked:
            found = change(weight)
            assert not isinstance(found, PackedTensor)
            assert torch.equal(found, change(plain))
