"""Reads weights in packed formats that transformers reads only with another package's kernels: AWQ, GPTQ, bitsandbytes and ModelOpt.

To transformers, the weights look like those of a model that was never quantized. Each is unpacked when transformers asks for it, so that
only a few weights at a time are in memory in both forms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from batchgen.errors import ModelError

_Tensors = Mapping[str, torch.Tensor]
_Unpack = Callable[[_Tensors, Mapping[str, Any]], torch.Tensor]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of each column of a block of eight, the number of its nibble in AWQ's word."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "bitsandbytes": (
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
        "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "SCB", "weight_format",
    ),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"),
}  # fmt: skip
"""The tensors of a weight, by the end of their name, which follows the layer's. Scales of activations and of the KV are not used."""
PACKED = frozenset(_PARTS)
"""The formats, by their `quant_method`."""


class PackedWeight:
    """A weight that is unpacked when it is indexed. Stands in for a slice of a file of safetensors, which transformers indexes."""

    def __init__(self, parts: Mapping[str, Any], unpack: _Unpack, settings: Mapping[str, Any]) -> None:
        self._parts, self._unpack, self._settings = parts, unpack, settings

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns the whole weight, in float32 or as it is in the file; `index` is `...`."""
        return self._unpack({name: part[...] for name, part in self._parts.items()}, self._settings)[index]


def unpacked_weights(model: str, files: Sequence[Path], settings: Mapping[str, Any]) -> dict[str, Any]:
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
    if problem is not None:
        raise ModelError(
            f"the model {model!r} is quantized in a way that batchgen does not read: {problem}",
            "give the original model, or one quantized in a way that docs/quantized.md lists",
        )
    layers: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for name, part in slices.items():
        suffix = next((s for s in sorted(_PARTS[method], key=len, reverse=True) if name.endswith(f".{s}")), None)
        if suffix is None:
            found[name] = part
        else:
            layers.setdefault(name.removesuffix(f".{suffix}"), {})[suffix] = part
    for layer, parts in layers.items():
        if "weight" in parts and len(parts) == 1:
            found[f"{layer}.weight"] = parts["weight"]  # a layer that is not quantized
        elif "weight" in parts or "qweight" in parts:
            found[f"{layer}.weight"] = PackedWeight(parts, _UNPACK[method], settings)
    return found


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


def _nibbles(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the numbers of `bits` bits in int32 words, the lowest first, in a new last dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts) & ((1 << bits) - 1)


def _awq(parts: _Tensors, _: Mapping[str, Any]) -> torch.Tensor:
    """AutoAWQ's `gemm`: int32 [in, out/8], zeros [in/group, out/8] and scales [in/group, out]; in a word, columns are in the order `_AWQ_ORDER`."""
    weight, zeros = (_nibbles(parts[name], 4)[..., list(_AWQ_ORDER)].flatten(1) for name in ("qweight", "qzeros"))
    scales = parts["scales"].float()
    weight = weight.view(scales.shape[0], weight.shape[0] // scales.shape[0], -1) - zeros[:, None]
    return (weight * scales[:, None]).flatten(0, 1).T.contiguous()


def _gptq(parts: _Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """AutoGPTQ's and GPTQModel's: int32 [in*bits/32, out], zeros [groups, out*bits/32], scales [groups, out]; `g_idx` [in] is the group of an input.

    Except with `checkpoint_format` `gptq_v2`, stored zeros are too small by one. The bits of a layer may differ from the settings' (`dynamic`).
    """
    words, scales, groups = parts["qweight"], parts["scales"].float(), parts.get("g_idx")
    bits = int(settings["bits"]) if groups is None else words.shape[0] * 32 // len(groups)
    weight = _nibbles(words.T.contiguous(), bits).flatten(1)  # [out, in]
    shift = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    zeros = (_nibbles(parts["qzeros"], bits).flatten(1) + shift) & ((1 << bits) - 1)
    if groups is None:
        groups = torch.arange(weight.shape[1]) // (weight.shape[1] // scales.shape[0])
    groups = groups.long()
    return (weight - zeros[groups].T) * scales[groups].T


def _bitsandbytes(parts: _Tensors, _: Mapping[str, Any]) -> torch.Tensor:
    """NF4 and FP4: codes of a table of 16 numbers, with a scale for each block, which may itself be quantized. int8: a scale for each row."""
    state = next((part for name, part in parts.items() if ".quant_state." in name), None)
    if state is None:
        return parts["weight"].float() * parts["SCB"].float()[:, None] / 127
    made = json.loads(bytes(state.tolist()))
    scales = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        nested = parts["weight.nested_absmax"].repeat_interleave(made["nested_blocksize"])[: len(scales)]
        scales = parts["weight.nested_quant_map"][scales.long()] * nested + made["nested_offset"]
    packed = parts["weight"].flatten()
    codes = torch.stack([packed >> 4, packed & 15], -1).flatten().long()
    size = torch.Size(made["shape"]).numel()
    scales = scales.float().repeat_interleave(made["blocksize"])[:size]
    return (parts["weight.quant_map"][codes[:size]].float() * scales).view(made["shape"])


def _modelopt(parts: _Tensors, _: Mapping[str, Any]) -> torch.Tensor:
    """NVIDIA's formats. FP8: a scale for the tensor or for each row. NVFP4: two numbers in a byte, an FP8 scale for 16 numbers and one for the tensor."""
    weight, scale = parts["weight"], parts.get("weight_scale")
    if scale is None:
        return weight
    if weight.dtype != torch.uint8:
        return weight.float() * (scale.float()[:, None] if scale.dim() == 1 and len(scale) > 1 else scale.float())
    codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()
    scales = scale.float() * parts["weight_scale_2"].float()
    return torch.tensor(_E2M1)[codes] * scales.repeat_interleave(codes.shape[-1] // scale.shape[-1], -1)


_UNPACK: dict[str, _Unpack] = {"awq": _awq, "gptq": _gptq, "bitsandbytes": _bitsandbytes, "modelopt": _modelopt}
