"""`--quantize int8`: packs the linear layers of a loaded model in 8 bits, one after the other, so that both forms are never in memory together.

Codes of 4 bits (`coded`) stay what they are, and are multiplied in 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from batchgen.kernels.decoder_layers import fuse_layers, unfuse_layers
from batchgen.kernels.fusion import as_linear, fuse_linear
from batchgen.kernels.int8 import Int8Linear, are_whole, quantize_weight
from batchgen.kernels.memory import give_back
from batchgen.kernels.ops import Activation, Gating, KernelLinear, PackedLinear, plain_weight
from batchgen.kernels.replacing import Packing, replace_parts
from batchgen.kernels.whole_vectors import fill_activations
from batchgen.model_files import INT8_SMALL

DTYPES_PACKED = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 0.1
"""Largest allowed difference from a plain layer on random numbers, relative to the largest; 8 bits give 0.01 to 0.03."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """How much of a model's weights was packed."""

    layers: int
    """Linear layers in 8 bits."""
    weights: int
    """Numbers in their weights."""
    all_weights: int
    """Numbers in all weights of the model, with embedding and head."""
    bytes: int
    """Memory of all weights afterwards."""


def quantize_linear(model: torch.nn.Module, scales: Mapping[str, torch.Tensor] | None = None) -> Quantized:
    """Replaces the linear layers of a decoder's layers by layers in 8 bits, in place.

    `scales` ([N] or [N, 1], by `from_layers` of a layer's name) belong to a checkpoint whose weights were whole numbers times scales:
    the same whole numbers come out. Embedding, head, shared weights and layers with few columns stay.
    """
    unfuse_layers(model)
    all_weights = sum(p.numel() for p in model.parameters())
    if any(isinstance(part, PackedLinear) for part in model.modules()):
        return _quantize_packed(model)
    replace_parts(model, as_linear)
    packing = Int8Packing(model, scales or {})
    fuse_linear(model, packing)
    fuse_linear(model, Packing())  # the rest
    fuse_layers(model)
    fill_activations(model)
    return Quantized(packing.layers, packing.weights, all_weights, _bytes(model))


def _bytes(model: torch.nn.Module) -> int:
    packed = sum(m.bytes for m in model.modules() if isinstance(m, Int8Linear | PackedLinear))
    return packed + sum(p.numel() * p.element_size() for p in model.parameters())


def _quantize_packed(model: torch.nn.Module) -> Quantized:
    """Does the same to a model whose linear layers are `PackedLinear`, of which some are codes."""
    layers = weights = all_weights = 0
    for name, parent in list(model.named_modules()):
        for key, part in parent._modules.items():
            if not isinstance(part, PackedLinear):
                continue
            parts = max(1, part.experts) * (1 if part.activation is Activation.NONE else 2)
            all_weights += parts * part.out_features * part.in_features
            inside = any(map(str.isdigit, name.split(".")))
            if not inside or INT8_SMALL * part.out_features <= part.in_features or part.dtype not in DTYPES_PACKED:
                continue
            parent._modules[key] = in_8_bits(part)
            layers += parts
            weights += parts * part.out_features * part.in_features
    all_weights += sum(p.numel() for p in model.parameters())
    fuse_layers(model)
    return Quantized(layers, weights, all_weights, _bytes(model))


def in_8_bits(layer: PackedLinear) -> Int8Linear:
    """Returns a layer in 8 bits. It shares the codes of the packed one, if they can be multiplied as they are."""
    if layer.codes is not None and are_whole(layer.codes):
        return Int8Linear.of_codes(layer)
    made = Int8Linear([quantize_weight(weight) for weight in layer.plain()], [], layer.dtype, layer.gate)
    made.biases = layer.biases
    if layer.weights is not None:
        give_back(layer.weights)
    return made


class Int8Packing(Packing):
    """Packs the decoder layers' linear layers in 8 bits."""

    def __init__(self, model: torch.nn.Module, scales: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        named = {id(m): name for name, m in model.named_modules() if type(m) is torch.nn.Linear}
        self._names = {key: name for key, name in named.items() if any(map(str.isdigit, name.split(".")))}
        self._scales = scales
        self.layers = 0
        self.weights = 0

    def can_pack(self, layer: torch.nn.Linear) -> bool:
        return (
            layer.weight.dtype in DTYPES_PACKED
            and id(layer) in self._names
            and INT8_SMALL * layer.out_features > layer.in_features
        )

    def pack(
        self,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        activation: Activation | Gating = Activation.NONE,
        layers: Sequence[torch.nn.Linear] = (),
    ) -> KernelLinear:
        self.layers += len(layers) or len(weights) * len(weights[0])
        self.weights += sum(weight.numel() for weight in weights)
        scales: list[torch.Tensor | None] = [None] * len(weights)
        if layers:
            scales = [scale for layer in layers for scale in self._scales_of(layer, len(weights) // len(layers))]
        values = [quantize_weight(plain_weight(weight), scale) for weight, scale in zip(weights, scales, strict=True)]
        return Int8Linear(values, biases, weights[0].dtype, activation)

    def _scales_of(self, layer: torch.nn.Linear, parts: int) -> list[torch.Tensor | None]:
        """Returns the checkpoint's scales for each of a layer's equal parts; None for each if it has none."""
        found = self._scales.get(from_layers(self._names[id(layer)]))
        return [None] * parts if found is None else list(found.flatten().chunk(parts))

    def tolerance(self, dtype: torch.dtype) -> float:
        return TOLERANCE


def from_layers(name: str) -> str:
    """Returns a module's name from its first number on, because checkpoints have other names before it."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[first:])
