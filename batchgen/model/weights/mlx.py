"""Checkpoints quantized for MLX: the families whose weights are known, and how MLX's tensors become those of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch

_CENTERED = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
"""Families whose norms are stored as the difference from one, which MLX adds."""
_NORMS = re.compile(r".*(\.input_layernorm|\.post_attention_layernorm|model\.norm|\.q_norm|\.k_norm)\.weight")
_CONVOLUTION = re.compile(r".*\.(conv1d|conv\.conv)\.weight")
_EXPERTS = re.compile(r"(.*\.(\w+))\.switch_mlp\.(\w+)")
_EXPERT_PARTS = {"block_sparse_moe": {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}}
"""By the name of the mixture, what transformers calls the parts of an expert."""
_LANGUAGE = ("language_model.lm_head.", "lm_head."), ("language_model.model.", "model.language_model.")
"""What the parts of the language model in a multimodal one are called in MLX, and in transformers."""


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
    for stored_name, stored in tensors.items():
        layer, _, last = stored_name.rpartition(".")
        for name, part in _parts(layer, stored):
            found[f"{name}.{last}"] = _as_stored(f"{name}.{last}", part, settings["model_type"])
            if layer in settings:
                own[name] = settings[layer]
    return found, own


def _parts(layer: str, stored: Any) -> list[tuple[str, Any]]:
    """Returns the layers that a tensor belongs to, by their names in transformers, with the part of each: one, or all experts of a mixture."""
    for start, other in _LANGUAGE:
        if f"{layer}.".startswith(start):
            layer = f"{other}{layer[len(start) :]}".removesuffix(".")
    experts = _EXPERTS.fullmatch(layer)
    if experts is None:
        return [(layer, stored)]
    before, mixture, part = experts.groups()
    part = _EXPERT_PARTS.get(mixture, {}).get(part, part)
    count, *shape = stored.get_shape()
    return [
        (f"{before}.experts.{number}.{part}", ChangedTensor(stored, shape, itemgetter(number)))
        for number in range(count)
    ]


def _as_stored(name: str, stored: Any, kind: str) -> Any:
    """Returns a tensor as transformers stores it in models of this type."""
    shape = list(stored.get_shape())
    if kind in _CENTERED and _NORMS.fullmatch(name):
        return ChangedTensor(stored, shape, lambda x: x[...].float() - 1)
    if _CONVOLUTION.fullmatch(name) and len(shape) == 3:
        return ChangedTensor(stored, [shape[0], shape[2], shape[1]], lambda x: x[...].transpose(1, 2))
    return stored
