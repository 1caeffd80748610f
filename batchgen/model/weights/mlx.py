"""Checkpoints quantized for MLX: how MLX's tensors become those of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch

from batchgen.model.weights.mlx_names import name_in_transformers

_CENTERED = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
"""Families whose norms are stored as the difference from one, which MLX adds."""
_NORMS = re.compile(r".*(\.input_layernorm|\.post_attention_layernorm|model\.norm|\.q_norm|\.k_norm)\.weight")
_CONVOLUTION = re.compile(r".*\.(conv1d|conv\.conv)\.weight")
"""Convolutions of three dimensions. All tensors of more dimensions are convolutions."""
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_proj|up_proj|down_proj|w[123])")
_NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_OWN_NAMES = {
    "lfm2_moe": _NUMBERED, "minimax_m2": _NUMBERED, "mixtral": _NUMBERED, "nemotron_h": {"fc1": "up_proj", "fc2": "down_proj"},
    "phimoe": _NUMBERED,
}  # fmt: skip
"""What transformers calls the parts of experts and of MLPs in files of these families."""
_FUSED_EXPERTS = {".experts.gate_proj": ".experts.gate_up_proj"}
_OF_GRANITE = {
    ".experts.gate_proj": ".input_linear", ".experts.down_proj": ".output_linear",
    ".mlp.gate_proj": ".shared_mlp.input_linear", ".mlp.down_proj": ".shared_mlp.output_linear",
}  # fmt: skip
_FUSED = {
    "gemma4": _FUSED_EXPERTS, "gpt_oss": _FUSED_EXPERTS, "granitemoe": _OF_GRANITE, "granitemoehybrid": _OF_GRANITE,
    "qwen3_vl_moe": _FUSED_EXPERTS,
}  # fmt: skip
"""Families of which transformers, too, stores all experts in one tensor, and how the names end in MLX and there. A gate becomes one with the up projection."""


class ChangedTensor:
    """A tensor of a file that is changed when it is indexed. Stands in for a slice of a file of safetensors."""

    def __init__(self, stored: Any, shape: list[int], read: Callable[[Any], torch.Tensor]) -> None:
        self._stored, self._shape, self._read = stored, shape, read

    def get_dtype(self) -> str:
        return str(self._stored.get_dtype())

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns the tensor; `index` is `...`."""
        return self._read(self._stored)


def in_transformers(tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors of a checkpoint as transformers names and stores them, and its quantization settings with the same names.

    `settings` has the model's type and, by the names of layers, the settings of those that differ from the others.
    """
    found: dict[str, Any] = {}
    own = dict(settings)
    kind = settings["model_type"]
    parts_of = _parts_of_fused if kind in _FUSED else _parts
    for stored_name, stored in tensors.items():
        layer, _, last = name_in_transformers(stored_name, settings).rpartition(".")
        beside = tensors.get(stored_name.replace(".gate_proj.", ".up_proj."))
        for name, part in parts_of(layer, stored, beside, kind):
            in_fused = last == "bias" and ".experts." in name
            found[f"{name}_bias" if in_fused else f"{name}.{last}"] = _as_stored(f"{name}.{last}", part, kind)
            if (there := stored_name.rpartition(".")[0]) in settings:
                own[name] = settings[there]
    return found, own


def _parts(layer: str, stored: Any, _: Any, kind: str) -> list[tuple[str, Any]]:
    """Returns the layers that a tensor belongs to, with the part of each: one, or all experts of a mixture."""
    before, dot, part = layer.rpartition(".")
    layer = f"{before}{dot}{_OWN_NAMES.get(kind, {}).get(part, part)}"
    experts = _EXPERTS.fullmatch(layer)
    if experts is None:
        return [(layer, stored)]
    before, part = experts.groups()
    count, *shape = stored.get_shape()
    return [(f"{before}.{number}.{part}", ChangedTensor(stored, shape, itemgetter(number))) for number in range(count)]


def _parts_of_fused(layer: str, stored: Any, up: Any, kind: str) -> list[tuple[str, Any]]:
    """Returns what `_parts` does for the families in `_FUSED`. `up`: the tensor that a gate becomes one with."""
    for end, name in _FUSED[kind].items():
        if layer.endswith(end):
            if end.endswith(".gate_proj"):
                stored = _with_up(stored, up, int(end.startswith(".experts")), kind)
            return [(f"{layer.removesuffix(end)}{name}", stored)]
    ups = (end.replace(".gate_proj", ".up_proj") for end in _FUSED[kind] if end.endswith(".gate_proj"))
    return [] if layer.endswith(tuple(ups)) else [(layer, stored)]


def _with_up(gate: Any, up: Any, dim: int, kind: str) -> ChangedTensor:
    """Returns a gate and an up projection as one tensor. `dim`: that of their rows."""

    def read(gate: Any) -> torch.Tensor:
        both = [gate[...], up[...]]
        return torch.stack(both, dim + 1).flatten(dim, dim + 1) if kind == "gpt_oss" else torch.cat(both, dim)

    shape = list(gate.get_shape())
    shape[dim] *= 2
    return ChangedTensor(gate, shape, read)


def _as_stored(name: str, stored: Any, kind: str) -> Any:
    """Returns a tensor as transformers stores it in models of this type."""
    shape = list(stored.get_shape())
    if kind in _CENTERED and _NORMS.fullmatch(name):
        return ChangedTensor(stored, shape, lambda x: x[...].float() - 1)
    if len(shape) > 3 or (len(shape) == 3 and _CONVOLUTION.fullmatch(name)):  # channels are last
        return ChangedTensor(stored, [shape[0], shape[-1], *shape[1:-1]], lambda x: x[...].movedim(-1, 1))
    if name.endswith((".alpha_p", ".alpha_n")) and not shape:  # settings of Apertus's activation
        return ChangedTensor(stored, [1], lambda x: x[...].view(1))
    return stored


def with_keys_and_values_joined(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights with one projection where MLX has two for each head, of keys and of values (DeepSeek). It is not packed."""
    found = dict(weights)
    for name in weights:
        if name.endswith(".embed_q.weight"):
            keys, values = found.pop(name), found.pop(name.replace(".embed_q.", ".unembed_out."))
            found[name.replace(".embed_q.", ".kv_b_proj.")] = ChangedTensor((keys, values), [], _joined)
    return found


def _joined(both: tuple[Any, Any]) -> torch.Tensor:
    """Returns [heads * (K + V), rank] of weights for keys [heads, rank, K] and for values [heads, V, rank]."""
    keys, values = (weight.unpacked() if hasattr(weight := half[...], "unpacked") else weight for half in both)
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
