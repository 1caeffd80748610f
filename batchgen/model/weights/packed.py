"""Reads the weights of checkpoints in safetensors, and keeps quantized ones packed, and those of 16 bits in 16 bits.

To transformers, the weights look like those of a model that was never quantized: each is a `PackedTensor` of its shape. What a format stores
is described here, one function a format. Numbers mean what the format's own library makes of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from batchgen.config import ModelConfig
from batchgen.kernels.codes import E2M1, IN_16_BITS, Coding, PackedTensor, in_fields, levels_of, packed_planes
from batchgen.kernels.memory import Loading
from batchgen.model.weights.mlx import in_transformers, with_keys_and_values_joined
from batchgen.model.weights.variants import (
    AUTOROUND,
    are_codes,
    check_variant,
    compressed_groups,
    is_read_packed,
    not_read,
)
from batchgen.model.weights.weight_size import INDEX, WHOLE, quantization, shards_of, weight_files
from batchgen.model_files import MLX
from batchgen.prompts.tokenizer import quiet

SMALL = 1 << 14
"""Weights of fewer numbers are not kept in 16 bits."""
_Tensors = Mapping[str, torch.Tensor]
_Make = Callable[[_Tensors, Mapping[str, Any]], torch.Tensor]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of each column of a block of eight, the number of its nibble in AWQ's word."""
_AWQ_AT_A_TIME = 64
"""Of AWQ's words in a row, so that what is made of them stays in the cache."""
_PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "auto-round": ("qweight", "qzeros", "scales", "g_idx"),
    "bitsandbytes": (
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
        "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "SCB", "weight_format",
    ),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "fp8": ("weight", "weight_scale_inv"),
    "mxfp8": ("weight", "weight_scale_inv"),
    "mxfp4": ("_blocks", "_scales"),
    "mlx": ("weight", "scales", "biases"),
    "compressed-tensors": (
        "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx",
    ),
}  # fmt: skip
"""The tensors of a weight, by the end of their name, which follows the layer's."""
_UNUSED = {
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "output_global_scale",
    "activation_scale", "act_scale", "qscale_act", "q_scale", "k_scale", "v_scale", "kv_scale", "q_zero_point", "k_zero_point", "v_zero_point",
}  # fmt: skip
"""The last parts of the names of scales and zeros of activations and of the KV, which are not quantized here."""
_NEEDED = {
    ("awq", "I32"): ("qzeros", "scales"),
    ("gptq", "I32"): ("qzeros", "scales"),
    ("auto-round", "I32"): ("qzeros", "scales"),
    ("bitsandbytes", "I8"): ("SCB",),
    ("modelopt", "F8_E4M3"): ("weight_scale",),
    ("modelopt", "U8"): ("weight_scale", "weight_scale_2"),
    ("fp8", "F8_E4M3"): ("weight_scale_inv",),
    ("fp8", "I8"): ("weight_scale_inv",),
    ("mxfp8", "F8_E4M3"): ("weight_scale_inv",),
    ("mxfp4", "U8"): ("_scales",),
    ("mlx", "U32"): ("scales",),
    ("compressed-tensors", "F8_E4M3"): ("weight_scale",),
    ("compressed-tensors", "I8"): ("weight_scale",),
    ("compressed-tensors", "I32"): ("weight_scale", "weight_shape"),
    ("compressed-tensors", "U8"): ("weight_scale", "weight_global_scale"),
}
"""By the format and the type of the codes, the tensors without which they cannot be read."""


class UnreadWeight:
    """A packed weight in its file. Stands in for a slice of a file of safetensors, which transformers indexes once, when the model needs it."""

    def __init__(self, read: Callable[[], torch.Tensor], loading: Loading) -> None:
        self._read, self._loading = read, loading

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns the weight; `index` is `...`."""
        weight = self._read()
        self._loading.add(weight)
        return weight


def read_checkpoint(config: ModelConfig, hf_config: Any, *, halves: bool) -> dict[str, Any] | None:
    """Returns the weights of a checkpoint that is read here, which is downloaded if it is not on the disk; None for others.

    Quantized ones are (see `packed_weights`), and others if their weights stay in 16 bits (`halves`).
    """
    settings = quantization(hf_config)
    found: dict[str, Any] = {}
    if settings is not None and is_read_packed(settings):
        found = packed_weights(config.model, _files(config), settings)
    elif settings is None and halves:
        with suppress(OSError, ValueError):  # transformers will say why
            found = _slices(_files(config))
    return (in_16_bits(found) if halves else found) or None


def _files(config: ModelConfig) -> list[Path]:
    """Returns the checkpoint's files. Downloads those that transformers would read: repositories may have the same weights in others, too."""
    files = weight_files(config)
    if files is None:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import EntryNotFoundError

        with quiet():
            try:
                hf_hub_download(config.model, WHOLE, revision=config.revision)
            except EntryNotFoundError:
                index = hf_hub_download(config.model, INDEX, revision=config.revision)
                snapshot_download(config.model, revision=config.revision, allow_patterns=shards_of(Path(index)))
        files = weight_files(config)
    return files or []


def in_16_bits(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights by their names, of which matrices of 16 bits stay in 16 bits in a model of float32."""
    loading = Loading()

    def is_wide(part: Any) -> bool:
        half = not isinstance(part, UnreadWeight) and part.get_dtype() in ("BF16", "F16")
        return half and stays_in_16_bits(part.get_shape())

    def read(part: Any) -> torch.Tensor:
        return PackedTensor(IN_16_BITS, {"plane16": part[...]})

    return {
        name: UnreadWeight(partial(read, part), loading) if is_wide(part) else part for name, part in weights.items()
    }


def stays_in_16_bits(shape: Sequence[int]) -> bool:
    """Whether a weight of bfloat16 or float16 stays so in a model of float32: a matrix, or those of experts, that is worth it."""
    return len(shape) in (2, 3) and shape[-1] % 2 == 0 and math.prod(shape) >= SMALL


def _slices(files: Sequence[Path]) -> dict[str, Any]:
    from safetensors import safe_open

    slices: dict[str, Any] = {}
    for path in files:
        file: Any = safe_open(path, framework="pt")
        slices.update((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 - it is no mapping
    return slices


def packed_weights(model: str, files: Sequence[Path], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights of the files, by their names in a model that is not quantized. `settings`: the checkpoint's quantization settings.

    Raises `ModelError` for a variant of the format that is not known.
    """
    check_variant(model, settings)
    slices = _slices(files)
    if settings["quant_method"] == MLX:
        slices, settings = in_transformers(slices, settings)
        return with_keys_and_values_joined(_by_weight(model, slices, settings))
    return _by_weight(model, slices, settings)


def _by_weight(model: str, slices: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Gathers the parts of each weight. Raises `ModelError` if one lacks a part, and for a tensor that may belong to a weight and is not known."""
    method = str(settings["quant_method"])
    suffixes = sorted(_PARTS[method], key=len, reverse=True)
    layers: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    loading = Loading()
    for name, part in slices.items():
        if name.rpartition(".")[2] in _UNUSED:
            continue
        if method in ("fp8", "mxfp8"):
            name = _usual_name(name, slices)
        ends = (s if s.startswith("_") else f".{s}" for s in suffixes)
        end = next((end for end in ends if name.endswith(end)), None)
        if end is None:
            found[name] = part
        else:
            layers.setdefault(name.removesuffix(end), {})[end.removeprefix(".")] = part
    for name, part in found.items():
        if (problem := _unknown_tensor(name, part, layers)) is not None:
            raise not_read(model, problem)
    for layer, parts in layers.items():
        if parts.keys() == {"weight"} and not are_codes(
            layer, parts["weight"].get_dtype(), parts["weight"].get_shape()
        ):
            found[f"{layer}.weight"] = parts["weight"]  # a layer that is not quantized
            continue
        if (problem := _incomplete(layer, parts, method)) is not None:
            raise not_read(model, problem)
        fused = method == MLX and layer.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        name = layer if method == "mxfp4" or fused else f"{layer}.weight"
        own = settings.get(layer) if method == MLX else None
        all_own = {**settings, **own} if isinstance(own, dict) else settings
        found[name] = UnreadWeight(partial(_read, name, _READ[method], parts, all_own), loading)
    return found


def _unknown_tensor(name: str, part: Any, layers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns in words why a tensor that is no part of a weight may change what weights mean; None if it does not."""
    layer, _, last = name.rpartition(".")
    dtype = part.get_dtype()
    if last.endswith("pre_quant_scale"):
        return f"its activations are scaled ({name})"
    if dtype.startswith("F8"):
        return f"{name} is in FP8, without scales that are known here"
    if are_codes(name, dtype, part.get_shape()):
        return f"{name} is of type {dtype}"
    quantized = len(layers.get(layer, ())) > 1
    return f"{name} is not known here" if quantized and not last.endswith("bias") else None


def _incomplete(layer: str, parts: Mapping[str, Any], method: str) -> str | None:
    """Returns in words why a weight cannot be read from its parts; None if it can."""
    codes = next((name for name in ("qweight", "weight_packed", "weight", "_blocks") if name in parts), None)
    if codes is None:
        return f"{layer}.{next(iter(parts))} belongs to no weight"
    dtype = parts[codes].get_dtype()
    needed = ("weight.quant_map",) if "weight.absmax" in parts else _NEEDED.get((method, dtype))
    name = f"{layer}{'' if method == 'mxfp4' else '.'}{codes}"
    if needed is None:
        return f"{name} is of type {dtype}" + (
            "" if len(parts) == 1 else f" and has {', '.join(sorted(parts.keys() - {codes}))}"
        )
    if method == MLX and "scales" in parts and parts["scales"].get_dtype() != "U8":  # bytes: codes of floating point
        needed += ("biases",)
    missing = [part for part in needed if part not in parts]
    return f"{name} ({dtype}) has no {missing[0]}" if missing else None


def _read(name: str, make: _Make, parts: Mapping[str, Any], settings: Mapping[str, Any]) -> torch.Tensor:
    try:
        return make({part: stored[...] for part, stored in parts.items()}, settings)
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e


def _usual_name(name: str, slices: Mapping[str, Any]) -> str:
    """Returns the name that most FP8 checkpoints have for the scales of a weight."""
    layer, _, last = name.rpartition(".")
    weight = slices.get(f"{layer}.weight") if last in ("scale", "qscale_weight", "weight_scale") else None
    return name if weight is None or weight.get_dtype() not in ("F8_E4M3", "I8") else f"{layer}.weight_scale_inv"


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
    return in_fields(words.contiguous()[..., None].view(torch.uint8), bits)


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
    inputs, count = words.shape[0] * 32 // bits, scales.shape[1]
    group = int(settings.get("group_size") or 0)
    if (
        group < 1 or -(-inputs // group) != count
    ):  # groups of the settings, of which the last may be cut, or of equal size
        group = inputs // count
    if groups is None and count > 1 and (settings.get("desc_act") or group * count < inputs):
        raise ValueError("GPTQ without g_idx, in groups that are not those of neighbouring inputs, is not known here")
    is_v2 = (settings.get("checkpoint_format") or settings.get("format")) == "gptq_v2"
    zeros = parts["qzeros"] if is_v2 else parts["qzeros"] + sum(1 << shift for shift in range(0, 32, bits))
    zeros = _codes(zeros, bits).flatten(1).T[: scales.shape[0]].contiguous()
    return _in_groups(Coding(bits, group=group), words.T.contiguous(), groups, zeros=zeros, scales=scales)


def _autoround(parts: _Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Those of GPTQ and AWQ by other names. The bits of a layer may differ from the settings' (`extra_config`)."""
    layout = AUTOROUND[settings["packing_format"]]
    if layout == "awq":
        return _awq(parts, settings)
    bits, rest = divmod(parts["qzeros"].shape[1] * 32, parts["scales"].shape[1])
    bits = int(settings["bits"]) if rest else bits
    return _gptq(parts, {"bits": bits, "group_size": settings.get("group_size"), "checkpoint_format": layout})


def _bitsandbytes(parts: _Tensors, _: Mapping[str, Any]) -> torch.Tensor:
    """NF4 and FP4: codes of a table of 16 numbers, with a scale for each block, which may itself be quantized. int8: a scale for each row."""
    state = next((part for name, part in parts.items() if ".quant_state." in name), None)
    weight = parts["weight"]
    if state is None:
        if int(parts.get("weight_format", torch.tensor(0))) != 0:
            raise ValueError("weights of bitsandbytes that are not in the order of rows are not known here")
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
    if made["quant_type"] == "fp4":  # the table has 0.0 where the library's kernels for CUDA and AVX2 make -0.0
        levels = (*levels[:8], *(-level for level in levels[:8]))
    weight = weight.view(torch.uint8)  # stored as another type, if its settings say so
    plane = (weight << 4) | (weight >> 4)  # the first number of two is the upper one there
    if size % group == 0:
        return _packed(Coding(4, levels, group=group), plane.view(rows, -1), scales=scales.float().view(rows, -1))
    codes = in_fields(plane.flatten(), 4)[: rows * size]
    numbers = torch.tensor(levels)[codes.long()] * scales.float().repeat_interleave(group)[: rows * size]
    return numbers.view(rows, size)  # blocks go on over the end of rows


def _in_float8(weight: torch.Tensor, **scales: Any) -> torch.Tensor:
    rounds = scales.pop("rounds", None)
    return _packed(Coding(8, "e4m3", rounds=rounds, group=scales.pop("group")), weight, **scales)


def _modelopt(parts: _Tensors, _: Mapping[str, Any]) -> torch.Tensor:
    """NVIDIA's formats. FP8: a scale for the tensor or for each row. NVFP4: two numbers in a byte, an FP8 scale for 16 numbers and one for the tensor."""
    weight, scale = parts["weight"], parts["weight_scale"]
    rows, size = weight.shape[0], weight.shape[-1]
    if weight.dtype != torch.uint8:
        return _in_float8(weight, scales=scale.float().view(-1, 1).expand(rows, 1).contiguous(), group=size)
    coding = Coding(4, E2M1, group=2 * size // scale.shape[-1], sub="e4m3")
    whole = parts["weight_scale_2"].float().view(1, 1).expand(rows, 1).contiguous()
    return _packed(coding, weight, sub=scale.view(torch.uint8), scales=whole)


def _by_rows(scales: torch.Tensor, rows: int, size: int, settings: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """Returns the scales of the groups of each row, [rows, G], of scales for blocks of a weight [rows, size], and the size of a group.

    Blocks are those of the settings, of which the last may be cut; else groups of equal size of a row or of the whole weight.
    """
    schemes = (group.get("weights") or {} for group in compressed_groups(settings))
    blocks = [settings.get("weight_block_size"), *(scheme.get("block_structure") for scheme in schemes)]
    block = [int(side) for side in re.findall(r"\d+", str(next(filter(None, blocks), "")))]
    scales = scales.reshape(-1, scales.shape[-1] if scales.dim() > 1 else 1)
    sides: list[int] = []
    for length, count, side in zip((rows, size), scales.shape, block or (rows, size), strict=True):
        if -(-length // side) != count:
            side = length // count
            if side * count != length or (not sides and count not in (1, rows)):
                raise ValueError(f"weights [{rows}, {size}] have scales for {list(scales.shape)} blocks")
        sides.append(side)
    return scales.repeat_interleave(sides[0], 0)[:rows], sides[1]


def _fp8(parts: _Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """DeepSeek's: a scale for each block of rows and inputs. Weights in int8 are two numbers of FP4 in a byte; scales in uint8 are exponents."""
    weight, scales = parts["weight"], parts["weight_scale_inv"]
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
    scale, weight = parts["weight_scale"], parts["weight" if "weight" in parts else "weight_packed"]
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


def _mlx(parts: _Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """MLX's: words [..., out, in*bits/32] of codes one behind the other, the lowest bits first, with scales and biases for groups of inputs.

    MLX rounds a product before it adds the bias or does not, as the operation has it; here, only the sum is rounded. Without biases, codes stand
    for numbers of floating point, with an exponent for 32 inputs (MXFP4, MXFP8) or such a number for 16 (NVFP4).
    """
    plane, scales = parts["weight"].view(torch.uint8), parts["scales"]
    bits, group = int(settings["bits"]), int(settings["group_size"])
    columns = settings["model_type"] == "gpt_oss" and plane.dim() == 3  # its experts are [E, in, out]
    if "biases" not in parts:
        coding = Coding(bits, "e4m3" if bits == 8 else E2M1, group=group, sub="e4m3" if group == 16 else "e8m0")
        return PackedTensor(coding, {f"plane{bits}": plane, "sub": scales}, transposed=columns)
    planes = {f"plane{bits}": plane} if bits in (2, 4, 8) else packed_planes(_codes_across_bytes(plane, bits), bits)
    return PackedTensor(
        Coding(bits, group=group), {**planes, "scales": scales, "offsets": parts["biases"]}, transposed=columns
    )


def _codes_across_bytes(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes [..., K] of `bits` bits in bytes [..., K*bits/8], the lowest first, as uint8."""
    eight = plane.view(*plane.shape[:-1], -1, bits)  # the bytes of eight codes
    words = sum(eight[..., i].long() << (8 * i) for i in range(bits))
    codes = torch.empty(*eight.shape[:-1], 8, dtype=torch.uint8)
    for i in range(8):
        codes[..., i] = (words >> (bits * i)) & ((1 << bits) - 1)
    return codes.flatten(-2)


_READ: dict[str, _Make] = {
    "awq": _awq, "gptq": _gptq, "auto-round": _autoround, "bitsandbytes": _bitsandbytes, "modelopt": _modelopt, "fp8": _fp8, "mxfp8": _fp8, "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors, "mlx": _mlx,
}  # fmt: skip
