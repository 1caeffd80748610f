"""`--quantize int8`: packs the linear layers of a loaded model in 8 bits, one after the other, so that both forms are never in memory together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from batchgen.kernels.decoder_layers import fuse_layers
from batchgen.kernels.fusion import FusedNorm, Packing, fuse_linear
from batchgen.kernels.int8 import Int8Linear, QuantizingNorm, quantize_weight
from batchgen.kernels.onednn import OneDnnInt8Linear
from batchgen.kernels.ops import Activation, PackedLinear, plain_weight
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


def quantize_linear(
    model: torch.nn.Module, scales: Mapping[str, torch.Tensor] | None = None, *, own_kernels: bool = True
) -> Quantized:
    """Replaces the linear layers of a decoder's layers by layers in 8 bits, in place. Raises `NoKernels`.

    `scales` ([N] or [N, 1], by `from_layers` of a layer's name) belong to a checkpoint whose weights were whole numbers times scales:
    the same whole numbers come out. Embedding, head, shared weights and layers with few columns stay. Without `own_kernels`, oneDNN runs.
    """
    all_weights = sum(p.numel() for p in model.parameters())
    packing = Int8Packing(model, scales or {}, own_kernels=own_kernels)
    fuse_linear(model, packing, own_kernels=own_kernels)
    if own_kernels:
        fuse_linear(model, Packing())  # the rest
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, FusedNorm):
                parent._modules[name] = QuantizingNorm(child)
    if own_kernels:
        fuse_layers(model)
    rest = sum(p.numel() * p.element_size() for p in model.parameters())
    packed = sum(m.bytes for m in model.modules() if isinstance(m, Int8Linear | OneDnnInt8Linear))
    packed += sum(m.bytes for m in model.modules() if isinstance(m, PackedLinear))
    return Quantized(packing.layers, packing.weights, all_weights, rest + packed)


class Int8Packing(Packing):
    """Packs the decoder layers' linear layers in 8 bits."""

    def __init__(self, model: torch.nn.Module, scales: Mapping[str, torch.Tensor], *, own_kernels: bool) -> None:
        super().__init__()
        named = {id(m): name for name, m in model.named_modules() if type(m) is torch.nn.Linear}
        self._names = {key: name for key, name in named.items() if any(map(str.isdigit, name.split(".")))}
        self._scales = scales
        self._own_kernels = own_kernels
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
        layers: list[torch.nn.Linear],
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        activation: Activation = Activation.NONE,
    ) -> torch.nn.Module:
        self.layers += len(layers)
        self.weights += sum(weight.numel() for weight in weights)
        scales = [scale for layer in layers for scale in self._scales_of(layer, len(weights) // len(layers))]
        values = [quantize_weight(plain_weight(weight), scale) for weight, scale in zip(weights, scales, strict=True)]
        if not self._own_kernels:
            return OneDnnInt8Linear(*values[0], biases[0], weights[0].dtype)
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
