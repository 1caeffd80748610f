"""Reads the weights of a GGUF file, and keeps them packed.

A file has blocks of 32 or 256 numbers: codes, and the scales of their groups (ggml-common.h and ggml-quants.c of llama.cpp). The package gguf has
the grids of the types of 1 to 3 bits. `gguf_families.py` knows which tensors make which weight, and how rows are put in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from batchgen.errors import ModelError
from batchgen.kernels.codes import E2M1, IN_16_BITS, Coding, PackedTensor, in_fields, packed_plane
from batchgen.kernels.memory import Loading
from batchgen.model.weights.gguf_families import (
    are_rows_of_inputs,
    arranged,
    family_tensors,
    heads_of_columns,
    in_shape,
    is_left_out,
    is_transposed,
)
from batchgen.model.weights.packed import UnreadWeight, stays_in_16_bits
from batchgen.prompts.gguf import gguf_header
from batchgen.prompts.gguf_families import GgufFamily
from batchgen.prompts.gguf_file import OTHER_FORMAT, GgufTensor


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _words(x: torch.Tensor, size: int) -> torch.Tensor:
    """Returns little-endian words of `size` bytes as int64."""
    in_bytes = x.reshape(*x.shape[:-1], -1, size).long()
    return (in_bytes << (8 * torch.arange(size))).sum(-1)


def _fields(words: torch.Tensor, shifts: list[int], mask: int) -> torch.Tensor:
    return ((words[..., None] >> torch.tensor(shifts)) & mask).flatten(-2)


_AT_A_TIME = 1 << 20
"""Bytes that are read at a time, so that what is made of them stays in the cache."""
_Parts = dict[str, torch.Tensor]


def _one(x: torch.Tensor) -> _Parts:
    return {"scales": _half(x, 0)}


def _and_minimum(x: torch.Tensor) -> _Parts:
    return {"scales": _half(x, 0), "offsets": _half(x, 2)}


def _q2_k(x: torch.Tensor) -> _Parts:
    fine = {"sub": packed_plane(x[..., :16] & 15, 4), "sub_offsets": packed_plane(x[..., :16] >> 4, 4)}
    return fine | {"scales": _half(x, 80), "offsets": -_half(x, 82)}


def _q3_k(x: torch.Tensor) -> _Parts:
    """Scales of 6 bits, less 32: the lower 4 bits of all, then the upper 2."""
    low, high = x[..., 96:104], x[..., 104:108]
    low = torch.cat([low & 15, low >> 4], -1)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    return {"scales": _half(x, 108), "sub": (low | (high << 4)) - 32}


def _q4_k(x: torch.Tensor) -> _Parts:
    """Eight scales and eight minima of 6 bits. The upper 2 bits of the last four are in the bytes of the first four."""
    a, b, rest = x[..., 4:8], x[..., 8:12], x[..., 12:16]
    scales = torch.cat([a & 63, (rest & 15) | ((a >> 6) << 4)], -1)
    minima = torch.cat([b & 63, (rest >> 4) | ((b >> 6) << 4)], -1)
    return {"scales": _half(x, 0), "sub": scales, "offsets": -_half(x, 2), "sub_offsets": minima}


def _q6_k(x: torch.Tensor) -> _Parts:
    return {"scales": _half(x, 208), "sub": x[..., 192:208]}


def _iq4_xs(x: torch.Tensor) -> _Parts:
    low = in_fields(x[..., 4:8], 4)
    high = _fields(_words(x[..., 2:4], 2), list(range(0, 16, 2)), 3)
    return {"scales": _half(x, 0), "sub": (low | (high << 4)).to(torch.uint8) - 32}


def _plane(words: torch.Tensor, size: int) -> torch.Tensor:
    return packed_plane(words.to(torch.uint8), size)


def _nibbles(x: torch.Tensor, half: int) -> _Parts:
    """Returns the plane of the codes of bytes. The lower nibbles of `half` bytes are `half` codes, the upper ones the next as many."""
    words = x.contiguous().view(torch.int16)  # two neighbours, each of two codes
    words = words.view(*x.shape[:-1], -1, 1, half // 2)
    pairs = torch.cat([(words & 15) | ((words >> 4) & 240), ((words >> 4) & 15) | ((words >> 8) & 240)], -2)
    return {"plane4": pairs.to(torch.uint8).flatten(-3)}


def _upper(x: torch.Tensor, size: int) -> _Parts:
    """Returns a plane of codes, or of their upper bits. The lowest `size` bits of 32 bytes are those of 32 codes, the next bits those of the next 32."""
    x = x.reshape(*x.shape[:-1], -1, 1, 32)
    codes = torch.cat([(x >> shift) & ((1 << size) - 1) for shift in range(0, 8, size)], -2)
    return {f"plane{size}": packed_plane(codes.flatten(-3), size)}


def _ternary(x: torch.Tensor) -> _Parts:
    """Five numbers of 0 to 2 in a byte, as the digits of a fraction to the base 3; four in the last four bytes."""
    powers = torch.tensor([1, 3, 9, 27, 81])[:, None]
    parts = ((x[..., :32], 5), (x[..., 32:48], 5), (x[..., 48:52], 4))
    codes = [((((bytes_[..., None, :] * powers[:count]) & 255) * 3) >> 8).flatten(-2) for bytes_, count in parts]
    return {"plane2": _plane(torch.cat(codes, -1), 2)}


def _signs(seven: torch.Tensor) -> torch.Tensor:
    """Returns bytes of eight signs, of which the first seven are given: the number of negative ones is even."""
    odd = seven ^ (seven >> 4)
    odd ^= odd >> 2
    odd ^= odd >> 1
    return (seven | ((odd & 1) << 7)).to(torch.uint8)


def _signs_of_32(words: torch.Tensor) -> torch.Tensor:
    return _signs(_fields(words, [0, 7, 14, 21], 127))


def _iq3_xxs(x: torch.Tensor) -> _Parts:
    """A byte for four numbers, then for 32 a word of signs and a scale."""
    words = _words(x[..., 66:], 4)
    found = {"plane_index": x[..., 2:66], "plane1": _signs_of_32(words)}
    return found | {"scales": _half(x, 0).float() / 4, "sub": _plane(words >> 28, 4)}


def _iq2_xxs(x: torch.Tensor) -> _Parts:
    """For 32 numbers, four bytes that choose from the grid, then a word of signs and a scale."""
    parts = x[..., 2:].reshape(*x.shape[:-1], -1, 2, 4)
    words = _words(parts[..., 1, :], 4).squeeze(-1)
    found = {"plane_index": parts[..., 0, :].flatten(-2), "plane1": _signs_of_32(words)}
    return found | {"scales": _half(x, 0).float() / 8, "sub": _plane(words >> 28, 4)}


def _iq2_xs(x: torch.Tensor) -> _Parts:
    """For eight numbers, 9 bits that choose from the grid, and 7 of signs."""
    words = _words(x[..., 2:66], 2)
    found = {"plane_index": (words & 255).to(torch.uint8), "plane_upper": _plane((words >> 8) & 1, 1)}
    return found | {"plane1": _signs(words >> 9), "scales": _half(x, 0).float() / 8, "sub": x[..., 66:]}


def _iq1_s(x: torch.Tensor) -> _Parts:
    words = _words(x[..., 34:], 2)
    upper = _fields(words, [0, 3, 6, 9], 7) | ((words >> 15) << 3).repeat_interleave(4, -1)
    found = {"plane_index": x[..., 2:34], "plane_upper": _plane(upper, 4)}
    return found | {"scales": _half(x, 0), "sub": _plane((words >> 12) & 7, 4)}


def _iq1_m(x: torch.Tensor) -> _Parts:
    words = _words(x[..., 48:56], 2)
    d = ((words >> 12) << (4 * torch.arange(4))).sum(-1, keepdim=True).to(torch.int32).to(torch.int16).view(torch.float16)  # fmt: skip
    found = {"plane_index": x[..., :32], "plane_upper": x[..., 32:48]}
    return found | {"scales": d, "sub": _plane(_fields(words, [0, 3, 6, 9], 7), 4)}


class _Type(NamedTuple):
    """A type of blocks: the coding of its numbers, and what makes the parts of blocks [..., bytes]."""

    coding: Coding
    parts: Callable[[torch.Tensor], _Parts]


def _and_negative(*levels: float) -> tuple[float, ...]:
    """Returns levels of codes of 4 bits, of which the highest is the sign."""
    positive = levels + (0.0,) * (8 - len(levels))
    return (*positive, *(-level for level in positive))


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = tuple(level or 0.0 for level in E2M1)  # without a negative zero
_IQ3 = _and_negative(4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = _and_negative(*range(1, 16, 2))
_IQ2 = _and_negative(8, 25, 43)
_IQ1 = (-0.875, 0.125, 1.125, -1.125, -0.125, 0.875)
TYPES = {
    "Q4_0": _Type(Coding(4, group=32, zero=8), lambda x: _nibbles(x[..., 2:], 16) | _one(x)),
    "Q4_1": _Type(Coding(4, group=32), lambda x: _nibbles(x[..., 4:], 16) | _and_minimum(x)),
    "Q5_0": _Type(Coding(5, group=32, zero=16), lambda x: _nibbles(x[..., 6:], 16) | {"plane1": x[..., 2:6]} | _one(x)),
    "Q5_1": _Type(Coding(5, group=32), lambda x: _nibbles(x[..., 8:], 16) | {"plane1": x[..., 4:8]} | _and_minimum(x)),
    "Q8_0": _Type(Coding(8, group=32, zero=128), lambda x: {"plane8": x[..., 2:] ^ 128} | _one(x)),
    "Q2_K": _Type(Coding(2, group=16, sub="u4"), lambda x: _upper(x[..., 16:80], 2) | _q2_k(x)),
    "Q3_K": _Type(Coding(3, group=16, zero=4, sub="i8"), lambda x: _upper(x[..., 32:96], 2) | _upper(x[..., :32], 1) | _q3_k(x)),
    "Q4_K": _Type(Coding(4, group=32, sub="u8"), lambda x: _nibbles(x[..., 16:], 32) | _q4_k(x)),
    "Q5_K": _Type(Coding(5, group=32, sub="u8"), lambda x: _nibbles(x[..., 48:], 32) | _upper(x[..., 16:48], 1) | _q4_k(x)),
    "Q6_K": _Type(Coding(6, group=16, zero=32, sub="i8"), lambda x: _nibbles(x[..., :128], 64) | _upper(x[..., 128:192], 2) | _q6_k(x)),
    "TQ1_0": _Type(Coding(2, group=256, zero=1), lambda x: _ternary(x) | {"scales": _half(x, 52)}),
    "TQ2_0": _Type(Coding(2, group=256, zero=1), lambda x: _upper(x[..., :64], 2) | {"scales": _half(x, 64)}),
    "IQ4_NL": _Type(Coding(4, group=32, levels=_IQ4), lambda x: _nibbles(x[..., 2:], 16) | _one(x)),
    "IQ4_XS": _Type(Coding(4, group=32, levels=_IQ4, sub="i8"), lambda x: _nibbles(x[..., 8:], 16) | _iq4_xs(x)),
    "IQ3_XXS": _Type(Coding(4, group=32, levels=_IQ3, sub="odd", unit=4), _iq3_xxs),
    "IQ3_S": _Type(
        Coding(4, group=32, levels=_IQ3_S, sub="odd", unit=4),
        lambda x: {"plane_index": x[..., 2:66], "plane_upper": x[..., 66:74], "plane1": x[..., 74:106], "sub": x[..., 106:]} | _one(x),
    ),
    "IQ2_XXS": _Type(Coding(4, group=32, levels=_IQ2, sub="odd", unit=8), _iq2_xxs),
    "IQ2_XS": _Type(Coding(4, group=16, levels=_IQ2, sub="odd", unit=8), _iq2_xs),
    "IQ2_S": _Type(
        Coding(4, group=16, levels=_IQ2, sub="odd", unit=8),
        lambda x: {
            "plane_index": x[..., 2:34], "plane_upper": x[..., 66:74], "plane1": x[..., 34:66], "scales": _half(x, 0).float() / 8, "sub": x[..., 74:],
        },
    ),
    "IQ1_S": _Type(Coding(4, group=32, levels=_IQ1, sub="odd", unit=8), _iq1_s),
    "IQ1_M": _Type(Coding(4, group=16, levels=_IQ1, sub="odd", unit=8), _iq1_m),
    "MXFP4": _Type(Coding(4, group=32, levels=_MXFP4, sub="e8m0"), lambda x: _nibbles(x[..., 1:], 16) | {"sub": x[..., :1]}),
}  # fmt: skip


@cache
def _grid_of(kind: str) -> torch.Tensor:
    """Returns the words of codes that a number of `plane_index` and `plane_upper` chooses (`codes.OF_ALL_ROWS`)."""
    import gguf.quants

    layout = getattr(gguf.quants, kind)
    layout.init_grid()
    numbers = torch.from_numpy(layout.grid).squeeze((0, 1))
    if kind.startswith("IQ1"):  # in the second half, an eighth less instead of an eighth more
        numbers = torch.cat([numbers + 0.125, numbers - 0.125])
    levels = torch.tensor(TYPES[kind].coding.levels)
    codes = (numbers[..., None] == levels).int().argmax(-1)
    return (codes << 4 * torch.arange(codes.shape[1])).sum(-1).to(torch.int32)


def from_blocks(data: torch.Tensor, kind: str, *, transposed: bool = False) -> PackedTensor:
    """Returns the weight of blocks [..., bytes of a row] of a type in `TYPES`. `transposed`: rows are those of its columns."""
    coding = TYPES[kind].coding
    rows = data.flatten(0, -2)
    pieces = [_parts_of(some, kind) for some in torch.split(rows, max(1, _AT_A_TIME // rows.shape[1]))]
    parts = {name: torch.cat([piece[name] for piece in pieces]).view(*data.shape[:-1], -1) for name in pieces[0]}
    if coding.unit:
        parts["grid"] = _grid_of(kind)
    return PackedTensor(coding, parts, transposed=transposed)


def _parts_of(rows: torch.Tensor, kind: str) -> _Parts:
    """Returns the parts of rows [N, bytes of a row]."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    blocks = rows.reshape(len(rows), -1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
    return {name: part.flatten(-2) for name, part in TYPES[kind].parts(blocks).items()}


_NOT_WEIGHTS = ("rope_freqs.", "rope_factors_", "v.", "a.", "mm.", "output.weight")
"""The beginnings of the names of tensors that are not weights, not of the language model, or of a head that embedding leaves out."""


_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


def gguf_weights(path: Path, module: Any, *, halves: bool) -> Mapping[str, UnreadWeight]:
    """Returns the weights of a file by their names in the model, which are read one by one.

    `module`: the model, without weights. `halves`: matrices of 16 bits stay in 16 bits in a model of float32. Raises `ModelError` if it does not have one of the file's weights.
    """
    header, config = gguf_header(path), module.config.get_text_config()
    stored = family_tensors(path, header, module)
    used = {tensor.name for parts in stored.values() for tensor in parts}
    for name in (tensor.name for tensor in header.tensors if tensor.name not in used):
        if not (name.startswith(_NOT_WEIGHTS) or ".attn_rot_embd." in name or is_left_out(config, name)):
            raise ModelError(f"{path} has a weight that batchgen does not use: {name}", OTHER_FORMAT)
    data, loading, weights = np.memmap(path, np.uint8, "c"), Loading(), module.state_dict()
    return {
        name: UnreadWeight(
            partial(_read_weight, data, parts, header.family, config, weights[name].shape, halves=halves), loading
        )
        for name, parts in stored.items()
    }


def _with_columns_of_heads(
    weight: PackedTensor, heads: int, arrange: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
) -> PackedTensor:
    """Returns a weight whose columns are in another order. `arrange` puts the columns [..., heads x any] of an array in that order."""

    def moved(part: torch.Tensor) -> torch.Tensor:
        in_heads = part.repeat_interleave(heads // math.gcd(heads, part.shape[-1]), -1)  # a scale of several heads
        return torch.from_numpy(np.ascontiguousarray(arrange(in_heads.numpy())))

    group = math.gcd(weight.coding.group, weight.shape[-1] // heads)
    return weight.with_parts(moved, coding=replace(weight.coding, group=group))


def _read_weight(
    data: np.ndarray[Any, Any],
    tensors: list[GgufTensor],
    family: GgufFamily,
    config: Any,
    shape: Sequence[int],
    *,
    halves: bool,
) -> torch.Tensor:
    """Returns a weight of `shape` of the tensors of a file whose bytes are `data`."""
    import gguf

    kind = tensors[0].kind if len({tensor.kind for tensor in tensors}) == 1 else ""
    packed = kind in TYPES and are_rows_of_inputs(family, config, tensors)
    heads = heads_of_columns(family, config, tensors)
    half = _HALVES.get(kind) if len(tensors[0].shape) > 1 and tensors[0].name.endswith(".weight") else None
    rows = [data[t.offset : t.offset + t.nbytes].reshape(*t.shape[:-1], -1) for t in tensors]
    if half is not None:
        rows = [each.view(np.int16) for each in rows]
    elif not packed:
        rows = [gguf.dequantize(each, gguf.GGMLQuantizationType[t.kind]) for each, t in zip(rows, tensors, strict=True)]
    elif heads:
        return _with_columns_of_heads(
            from_blocks(torch.from_numpy(rows[0]), kind), heads, lambda part: arranged(family, config, tensors, [part])
        )
    weight = torch.from_numpy(np.asarray(arranged(family, config, tensors, rows)))
    transposed = is_transposed(family, tensors)
    if packed:
        return from_blocks(weight, kind, transposed=transposed)
    weight = in_shape(weight.transpose(-1, -2) if transposed else weight, shape)
    if half is None:
        return weight
    weight = weight.contiguous().view(half)
    return PackedTensor(IN_16_BITS, {"plane16": weight}) if halves and stays_in_16_bits(weight.shape) else weight
