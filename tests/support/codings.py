"""Weights in codes, of each form that the formats come down to."""

from typing import Any

import torch

from batchgen.kernels.codes import E2M1, Coding, PackedTensor, packed_planes

ROWS, SIZE = 200, 768  # rows that do not fill the last panel; the kernels unpack up to 256 inputs of them at a time
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
    "AWQ with scales in float32": (Coding(4, group=128), 1, {"scales": torch.float32, "zeros": torch.uint8}),
    "GPTQ, desc_act": (Coding(4), 1, HALF | {"zeros": torch.uint8, "groups": torch.int32}),
    "GPTQ in 8 bits, desc_act": (Coding(8), 1, HALF | {"zeros": torch.uint8, "groups": torch.int32}),
    "NF4": (Coding(4, tuple(range(-8, 8)), group=64), 1, {"scales": torch.float32}),
    "FP4": (Coding(4, tuple((i - 8) / 7 for i in range(16)), group=64), 1, {"scales": torch.float32}),
    "IQ4_XS": (Coding(4, tuple(range(-127, 129, 16)), group=32, sub="i8"), 8, HALF),
    "IQ2_S": (Coding(3, (1, 3, 5, 7, -1, -3, -5, -7), group=16, sub="u8"), 16, HALF),
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
