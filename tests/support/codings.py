"""Weights in codes, of each form that the formats come down to."""

from typing import Any

import torch

from batchgen.kernels.codes import E2M1, OF_4_BITS, Coding, PackedTensor, packed_plane, packed_planes

ROWS, SIZE = 200, 768  # rows that do not fill the last panel; the kernels unpack up to 256 inputs of them at a time
HALF = {"scales": torch.float16}
_SIGNED = (*range(1, 16, 2), *range(-1, -16, -2))
CODINGS: dict[str, tuple[Coding, int, dict[str, Any]]] = {
    "Q4_0": (Coding(4, zero=8, group=32), 1, HALF),
    "Q8_0": (Coding(8, zero=128, group=32), 1, HALF),
    "Q4_1": (Coding(4, group=32), 1, HALF | {"offsets": torch.float16}),
    "Q2_K": (Coding(2, group=16, sub="u4"), 16, HALF | {"offsets": torch.float16}),
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
    "IQ3_S": (Coding(4, _SIGNED, group=32, unit=4, sub="odd"), 8, HALF | {"upper": 1, "signs": 1}),
    "IQ2_XXS": (Coding(4, _SIGNED, group=32, unit=8, sub="odd"), 8, {"scales": torch.float32, "upper": 0, "signs": 1}),
    "IQ2_S": (Coding(4, _SIGNED, group=16, unit=8, sub="odd"), 16, {"scales": torch.float32, "upper": 2, "signs": 1}),
    "IQ1_M": (Coding(4, (-0.875, 0.125, 1.125, -1.125, -0.125, 0.875), group=16, unit=8, sub="odd"), 16, HALF | {"upper": 4}),
    "int8 of bitsandbytes": (Coding(8, zero=128, group=SIZE, divisor=127.0), 1, {"scales": torch.float32}),
    "FP8": (Coding(8, "e4m3", group=128), 1, {"scales": torch.float32}),
    "NVFP4": (Coding(4, E2M1, group=16, sub="e4m3", divides=True, rounds=torch.bfloat16), 16, {"scales": torch.float32}),
    "MXFP4": (Coding(4, E2M1, group=32, sub="e8m0"), 1, {}),
    "W4A16": (Coding(4, zero=8, group=32, rounds=torch.bfloat16), 1, {"scales": torch.bfloat16}),
}  # fmt: skip
"""The coding, groups that have one scale, and the types of the parts. `upper`, `signs`: bits of a number that chooses codes from a grid, and of a code,
that lie by themselves."""


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
    if coding.unit:
        levels = len(coding.levels or ()) >> types.get("signs", 0)
        in_grid = torch.randint(
            0, levels, (256 << types["upper"], coding.unit), generator=torch.Generator().manual_seed(0)
        )
        parts = {
            "plane_index": whole(0, 256, SIZE // coding.unit),
            "grid": (in_grid << 4 * torch.arange(coding.unit)).sum(-1).to(torch.int32),
        }
        if types["upper"]:
            parts["plane_upper"] = packed_plane(whole(0, 1 << types["upper"], SIZE // coding.unit), types["upper"])
        if "signs" in types:
            parts["plane1"] = packed_plane(whole(0, 2, SIZE), 1)
    for part in types.keys() & {"scales", "offsets"}:
        parts[part] = (torch.rand(ROWS, groups // per_scale, generator=numbers) / 50 + 0.001).to(types[part])
    if coding.sub:
        parts["sub"] = whole(*((110, 130) if coding.sub == "e8m0" else (1, 15)), groups)
    if "offsets" in types and coding.sub:
        parts["sub_offsets"] = whole(0, 15, groups)
    if coding.sub in OF_4_BITS:
        parts |= {name: packed_plane(parts[name], 4) for name in parts.keys() & {"sub", "sub_offsets"}}
    if "zeros" in types:
        parts["zeros"] = whole(0, 2**coding.bits, groups)
    if "groups" in types:
        parts["groups"] = torch.arange(SIZE).flip(0).int() % groups
    return PackedTensor(coding, parts).to(dtype)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)
