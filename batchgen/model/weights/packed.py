"""Reads the weights of quantized checkpoints in safetensors, and keeps them packed.

To transformers, the weights look like those of a model that was never quantized: each is a `PackedTensor` of its shape. What a format stores
is described here, one function a format. Numbers mean what the format's own library makes of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from batchgen.errors import ModelError
from batchgen.kernels.codes import E2M1, Coding, PackedTensor, levels_of
from batchgen.kernels.memory import Loading

_Tensors = Mapping[str, torch.Tensor]
_Make = Callable[[_Tensors, Mapping[str, Any]], torch.Tensor]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of each column of a block of eight, the number of its nibble in AWQ's word."""
_AWQ_AT_A_TIME = 64
"""Of AWQ's words in a row, so that what is made of them stays in the cache."""
_PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "bitsandbytes": (
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
        "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "SCB", "weight_format",
    ),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"),
    "fp8": ("weight", "weight_scale_inv", "activation_scale", "input_scale"),
    "mxfp4": ("_blocks", "_scales"),
    "compressed-tensors": (
        "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx",
        "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "k_scale", "v_scale",
    ),
}  # fmt: skip
"""The tensors of a weight, by the end of their name, which follows the layer's. Scales of activations and of the KV are not used."""
PACKED = frozenset(_PARTS)
"""The formats, by their `quant_method`."""
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
"""The formats of compressed-tensors that are read here. transformers dequantizes the others."""


class UnreadWeight:
    """A packed weight in its file. Stands in for a slice of a file of safetensors, which transformers indexes once, when the model needs it."""

    def __init__(self, read: Callable[[], torch.Tensor], loading: Loading) -> None:
        self._read, self._loading = read, loading

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns the weight; `index` is `...`."""
        weight = self._read()
        self._loading.add(weight)
        return weight


def is_read_packed(settings: Mapping[str, Any] | None) -> bool:
    """Whether weights of a checkpoint with these quantization settings are read here."""
    method = None if settings is None else settings.get("quant_method")
    if settings is None or method not in PACKED:
        return False
    if method != "compressed-tensors":
        return True
    groups = list((settings.get("config_groups") or {}).values())
    formats = {group.get("format") or settings.get("format") for group in groups}
    bits = {(group.get("weights") or {}).get("num_bits") for group in groups}
    sparse = (settings.get("sparsity_config") or {}).get("format") not in (None, "dense")
    return bool(groups) and formats.issubset(_COMPRESSED) and bits.issubset((4, 8)) and not sparse


def packed_weights(model: str, files: Sequence[Path], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights of the files, by their names in a model that is not quantized. `settings`: the checkpoint's quantization settings.

    Raises `ModelError` for a variant of the format that is not known.
    """
    from safetensors import safe_open

    method = str(settings["quant_method"])
    problem = _unknown_variant(method, settings)
    slices: dict[str, Any] = {}
    for path in files:
        file: Any = safe_open(path, framework="pt")
        slices.update((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 - it is no mapping
    if any(name.endswith("pre_quant_scale") for name in slices):
        problem = "its activations are scaled (pre_quant_scale)"
    found = _by_weight(slices, method, settings)
    for name, part in found.items():
        if not isinstance(part, UnreadWeight) and part.get_dtype().startswith("F8"):
            problem = problem or f"{name} is in FP8, without scales that are known here"
    if problem is not None:
        raise ModelError(
            f"the model {model!r} is quantized in a way that batchgen does not read: {problem}",
            "give the original model, or one quantized in a way that docs/quantized.md lists",
        )
    return found


def _by_weight(slices: Mapping[str, Any], method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Gathers the parts of each weight."""
    suffixes = sorted(_PARTS[method], key=len, reverse=True)
    layers: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    loading = Loading()
    for name, part in slices.items():
        if method == "fp8":
            name = _usual_name(name, slices)
        ends = (s if s.startswith("_") else f".{s}" for s in suffixes)
        end = next((end for end in ends if name.endswith(end)), None)
        if end is None:
            found[name] = part
        else:
            layers.setdefault(name.removesuffix(end), {})[end.removeprefix(".")] = part
    for layer, parts in layers.items():
        if method == "mxfp4":
            found[layer] = UnreadWeight(partial(_read, _mxfp4, parts, settings), loading)
        elif "weight" in parts and len(parts) == 1:
            found[f"{layer}.weight"] = parts["weight"]  # a layer that is not quantized
        elif not parts.keys().isdisjoint(("weight", "qweight", "weight_packed")):
            found[f"{layer}.weight"] = UnreadWeight(partial(_read, _READ[method], parts, settings), loading)
    return found


def _read(make: _Make, parts: Mapping[str, Any], settings: Mapping[str, Any]) -> torch.Tensor:
    return make({name: part[...] for name, part in parts.items()}, settings)


def _usual_name(name: str, slices: Mapping[str, Any]) -> str:
    """Returns the name that most FP8 checkpoints have for the scales of a weight."""
    layer, _, last = name.rpartition(".")
    weight = slices.get(f"{layer}.weight") if last in ("scale", "qscale_weight") else None
    return name if weight is None or weight.get_dtype() not in ("F8_E4M3", "I8") else f"{layer}.weight_scale_inv"


def _unknown_variant(method: str, settings: Mapping[str, Any]) -> str | None:
    """Returns in words which setting of a format is not supported; None if all are."""
    bits = settings.get("bits", settings.get("w_bit"))
    if method == "awq":
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm" or bits not in (None, 4):
            return f"AWQ of version {version!r} with {bits} bits"
    if method == "gptq" and bits not in (2, 4, 8):
        return f"GPTQ with {bits} bits"
    return None


def _packed(coding: Coding, plane: torch.Tensor, **parts: torch.Tensor) -> PackedTensor:
    """Returns the weight of the bytes [..., B] that hold the codes of a row, which have 2, 4 or 8 bits."""
    return PackedTensor(coding, {f"plane{coding.bits}": plane.view(torch.uint8), **parts})


def _in_groups(coding: Coding, plane: torch.Tensor, groups: torch.Tensor | None, **parts: torch.Tensor) -> PackedTensor:
    """Returns the weight of a plane whose `groups` [K] are the groups of the inputs. None, and numbers below 0: groups of neighbours."""
    neighbours = torch.arange(8 * plane.itemsize * plane.shape[1] // coding.bits) // max(coding.group, 1)
    if groups is None or bool((groups < 0).any()) or torch.equal(groups.long(), neighbours):
        return _packed(coding, plane, **parts)
    return _packed(replace(coding, group=0), plane, groups=groups.int(), **parts)


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the numbers of `bits` bits in int32 words, the lowest first, as uint8 in a new last dimension."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    in_bytes = words.contiguous()[..., None].view(torch.uint8)
    return ((in_bytes[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _awq(parts: _Tensors, _: Mapping[str, Any]) -> torch.Tensor:
    """AutoAWQ's `gemm`: int32 [in, out/8], zeros [in/group, out/8] and scales [in/group, out]; in a word, columns are in the order `_AWQ_ORDER`."""
    plane = torch.cat([_awq_plane(words) for words in torch.split(parts["qweight"], _AWQ_AT_A_TIME, 1)])
    zeros = _codes(parts["qzeros"], 4)[..., list(_AWQ_ORDER)].flatten(1).T
    scales = parts["scales"].T.contiguous()
    coding = Coding(4, group=2 * plane.shape[1] // scales.shape[1])
    return _packed(coding, plane, zeros=zeros.contiguous(), scales=scales)


def _awq_plane(words: torch.Tensor) -> torch.Tensor:
    """Returns the bytes [out, in/2] of AWQ's words [in, out/8]."""
    inputs, columns = words.shape[0], 8 * words.shape[1]
    rows = words.contiguous().view(torch.uint8).view(inputs // 8, 4, 2, columns // 2)
    first, second = rows.transpose(1, 3).unbind(2)  # of two inputs, each [in/8, out/2, 4]
    found = torch.empty(inputs // 8, columns // 2, 2, 4, dtype=torch.uint8)
    found[:, :, 0] = (first & 15) | (second << 4)
    found[:, :, 1] = (first >> 4) | (second & 240)
    eight_inputs = found.view(torch.int32).view(inputs // 8, columns // 8, 2, 4)  # the last two: `_AWQ_ORDER`
    return eight_inputs.permute(1, 3, 2, 0).reshape(columns, -1).view(torch.uint8)


def _gptq(parts: _Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """AutoGPTQ's and GPTQModel's: int32 [in*bits/32, out], zeros [groups, out*bits/32], scales [groups, out]; `g_idx` [in] is the group of an input.

    Except in the format `gptq_v2`, one was subtracted from each stored zero, in words: where a zero was 0, the next in its word lost another one.
    The bits of a layer may differ from the settings' (`dynamic`).
    """
    words, scales, groups = parts["qweight"], parts["scales"].T.contiguous(), parts.get("g_idx")
    bits = int(settings["bits"]) if groups is None else words.shape[0] * 32 // len(groups)
    inputs = words.shape[0] * 32 // bits
    is_v2 = (settings.get("checkpoint_format") or settings.get("format")) == "gptq_v2"
    zeros = parts["qzeros"] if is_v2 else parts["qzeros"] + sum(1 << shift for shift in range(0, 32, bits))
    zeros = _codes(zeros, bits).flatten(1).T[: scales.shape[0]].contiguous()
    coding = Coding(bits, group=inputs // scales.shape[1])
    return _in_groups(coding, words.T.contiguous(), groups, zeros=zeros, scales=scales)


def _bitsandbytes(parts: _Tensors, _: Mapping[str, Any]) -> torch.Tensor:
    """NF4 and FP4: codes of a table of 16 numbers, with a scale for each block, which may itself be quantized. int8: a scale for each row."""
    state = next((part for name, part in parts.items() if ".quant_state." in name), None)
    weight = parts["weight"]
    if state is None:
        coding = Coding(8, zero=128, group=weight.shape[1], divisor=127.0)
        return _packed(coding, weight.view(torch.uint8) ^ 0x80, scales=parts["SCB"].float()[:, None])
    made = json.loads(bytes(state.tolist()))
    scales = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        nested = parts["weight.nested_absmax"].repeat_interleave(made["nested_blocksize"])[: len(scales)]
        scales = parts["weight.nested_quant_map"][scales.long()] * nested + made["nested_offset"]
    rows, size = made["shape"]
    group = made["blocksize"]
    levels = tuple(parts["weight.quant_map"].float().tolist())
    if made["quant_type"] == "fp4":  # the table has 0.0 where the library's kernels make -0.0
        levels = (*levels[:8], *(-level for level in levels[:8]))
    plane = (weight << 4) | (weight >> 4)  # the first number of two is the upper one there
    if size % group == 0:
        return _packed(Coding(4, levels, group=group), plane.view(rows, -1), scales=scales.float().view(rows, -1))
    codes = nibbles(plane.flatten())[: rows * size]
    numbers = torch.tensor(levels)[codes.long()] * scales.float().repeat_interleave(group)[: rows * size]
    return numbers.view(rows, size)  # blocks go on over the end of rows


def _in_float8(weight: torch.Tensor, **scales: Any) -> torch.Tensor:
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weights of type {weight.dtype} are not known here")
    rounds = scales.pop("rounds", None)
    return _packed(Coding(8, "e4m3", rounds=rounds, group=scales.pop("group")), weight, **scales)


def nibbles(weight: torch.Tensor) -> torch.Tensor:
    """Returns the codes of bytes of two, the lower first."""
    return torch.stack([weight & 15, weight >> 4], -1).flatten(-2)


def _modelopt(parts: _Tensors, _: Mapping[str, Any]) -> torch.Tensor:
    """NVIDIA's formats. FP8: a scale for the tensor or for each row. NVFP4: two numbers in a byte, an FP8 scale for 16 numbers and one for the tensor."""
    weight, scale = parts["weight"], parts.get("weight_scale")
    if scale is None:
        return weight
    rows, size = weight.shape[0], weight.shape[-1]
    if weight.dtype != torch.uint8:
        return _in_float8(weight, scales=scale.float().view(-1, 1).expand(rows, 1).contiguous(), group=size)
    coding = Coding(4, E2M1, group=2 * size // scale.shape[-1], sub="e4m3")
    whole = parts["weight_scale_2"].float().view(1, 1).expand(rows, 1).contiguous()
    return _packed(coding, weight, sub=scale.view(torch.uint8), scales=whole)


def _by_rows(scales: torch.Tensor, rows: int, size: int, settings: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """Returns the scales of the groups of each row, [rows, G], of scales for blocks of a weight [rows, size], and the size of a group.

    Blocks are those of the settings, of which the last may be cut, or parts of equal size: groups, rows, or the whole weight.
    """
    groups = (settings.get("config_groups") or {}).values()
    blocks = [
        settings.get("weight_block_size"),
        *((group.get("weights") or {}).get("block_structure") for group in groups),
    ]
    block = [int(side) for side in re.findall(r"\d+", str(next(filter(None, blocks), "")))]
    scales = scales.reshape(-1, scales.shape[-1] if scales.dim() > 1 else 1)
    sides = []
    for length, count, side in zip((rows, size), scales.shape, block or (rows, size), strict=True):
        if -(-length // side) != count:
            side = length // count
            if side * count != length:
                raise ValueError(f"weights [{rows}, {size}] have scales for {list(scales.shape)} blocks")
        sides.append(side)
    return scales.repeat_interleave(sides[0], 0)[:rows], sides[1]


def _fp8(parts: _Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """DeepSeek's: a scale for each block of rows and inputs. Weights in int8 are two numbers of FP4 in a byte; scales in uint8 are exponents."""
    weight, scales = parts["weight"], parts.get("weight_scale_inv")
    if scales is None:
        return weight
    pairs = weight.dtype == torch.int8
    rows, size = weight.shape[0], weight.shape[1] * (2 if pairs else 1)
    if scales.dtype == torch.uint8:
        scales = levels_of("e8m0")[scales.long()]
    scales, group = _by_rows(scales.float(), rows, size, settings)
    if pairs:
        return _packed(Coding(4, E2M1, group=group), weight, scales=scales)
    return _in_float8(weight, scales=scales, group=group)


def _mxfp4(parts: _Tensors, _: Mapping[str, Any]) -> torch.Tensor:
    """OpenAI's, of experts: blocks [E, out, in/32, 16] of two codes in a byte, with an exponent [E, out, in/32]. The weight is [E, in, out]."""
    coding = Coding(4, E2M1, group=32, sub="e8m0")
    blocks = {"plane4": parts["_blocks"].flatten(-2), "sub": parts["_scales"]}
    return PackedTensor(coding, blocks, transposed=True)


def _compressed_tensors(parts: _Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Codes in words or bytes, with scales for groups, blocks, rows or the tensor, in whose type numbers are computed; NVFP4 has an FP8 scale and
    one for the tensor. `weight_g_idx` of older versions is the group of each input."""
    scale, weight = parts.get("weight_scale"), parts.get("weight", parts.get("weight_packed"))
    assert weight is not None
    if scale is None:
        return weight
    if "weight_global_scale" in parts:
        whole = parts["weight_global_scale"].float().view(1, 1).expand(len(weight), 1).contiguous()
        coding = Coding(4, E2M1, group=16, sub="e4m3", divides=True, rounds=torch.bfloat16)
        return _packed(coding, weight, sub=scale.view(torch.uint8), scales=whole)
    rounds = None if scale.dtype == torch.float32 else scale.dtype
    rows, size = parts.get("weight_shape", weight.shape)
    scale, group = _by_rows(scale, int(rows), int(size), settings)
    if weight.dtype == torch.float8_e4m3fn:
        return _in_float8(weight, scales=scale, group=group, rounds=rounds)
    if weight.dtype == torch.int8:
        bits, plane = 8, weight.view(torch.uint8) ^ 0x80
    else:
        bits = 32 // -(-int(size) // weight.shape[1])
        plane = weight.view(torch.uint8)[:, : -(-int(size) * bits // 8)]  # without bytes that only fill the last word
    coding = Coding(bits, zero=1 << (bits - 1), group=group, rounds=rounds)
    zeros = parts.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _codes(zeros.T, bits).flatten(1).T[: len(plane)]
    elif zeros is not None:
        zeros = (zeros.to(torch.int16) + coding.zero).to(torch.uint8).expand(scale.shape) if zeros.any() else None
    own = {} if zeros is None else {"zeros": zeros.contiguous()}
    found = _in_groups(coding, plane, parts.get("weight_g_idx"), scales=scale, **own)
    return found if found.shape[1] == int(size) else found.unpacked()[:, : int(size)]


_READ: dict[str, _Make] = {
    "awq": _awq, "gptq": _gptq, "bitsandbytes": _bitsandbytes, "modelopt": _modelopt, "fp8": _fp8, "compressed-tensors": _compressed_tensors,
}  # fmt: skip
