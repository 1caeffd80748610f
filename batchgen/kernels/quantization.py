"""`--quantize int8`: packs the linear layers of a loaded model in 8 bits, one after the other, so that both forms are never in memory together.

Codes of 4 bits (`coded`) stay what they are, and are multiplied in 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from batchgen.kernels.decoder_layers import fuse_layers, unfuse_layers
from batchgen.kernels.fusion import as_linear, fuse_linear
from batchgen.kernels.int8 import Int8Linear, Int8Weight, are_multiplied, quantize_weight
from batchgen.kernels.memory import give_back
from batchgen.kernels.ops import Activation, Gating, KernelLinear, PackedAdapter, PackedLinear, plain_weight
from batchgen.kernels.replacing import AdaptedLinear, Packing, adapter_of, replace_parts
from batchgen.kernels.whole_vectors import fill_activations
from batchgen.model_files import INT8_SMALL

DTYPES_PACKED = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 0.1
"""Largest allowed difference from a plain layer on random numbers, relative to the largest; 8 bits give 0.01 to 0.03."""


def quantize_linear(model: torch.nn.Module, scales: Mapping[str, torch.Tensor] | None = None) -> Int8Packing:
    """Replaces the linear layers of a decoder's layers by layers in 8 bits, in place. Returns what has packed them, with its figures.

    `scales` ([N] or [N, 1], by `from_layers` of a layer's name) belong to a checkpoint whose weights were whole numbers times scales:
    the same whole numbers come out. Embedding, head, shared weights and layers with few columns stay.
    """
    unfuse_layers(model)
    replace_parts(model, as_linear)
    packing = Int8Packing(model, scales or {})
    replace_parts(model, packing.replacement)
    fuse_linear(model, packing)
    fuse_linear(model, Packing())  # the rest
    fuse_layers(model)
    fill_activations(model)
    return packing


def in_8_bits(layer: PackedLinear) -> Int8Linear:
    """Returns a layer in 8 bits. It shares the codes of the packed one, if they can be multiplied as they are."""
    if layer.codes is not None and are_multiplied(layer.codes):
        return Int8Linear.of_codes(layer)
    pieces = ([quantize_weight(rows) for rows in parts] for parts in layer.pieces())
    weights = [_of_pieces(part, layer.experts) for part in zip(*pieces, strict=True)]
    made = Int8Linear(weights, [], layer.dtype, layer.gate)
    made.biases, made.adapter = layer.biases, layer.adapter
    if layer.weights is not None:
        give_back(layer.weights)
    return made


def _of_pieces(pieces: Sequence[Int8Weight], experts: int) -> Int8Weight:
    """Returns the weight of which these are the rows, or of `experts`, one after the other."""
    values, scales = torch.cat([piece.values for piece in pieces]), torch.cat([piece.scales for piece in pieces])
    if experts:
        values, scales = values.view(experts, -1, values.shape[1]), scales.view(experts, -1)
    return Int8Weight(values, scales, pieces[0].rotated)


class Int8Packing(Packing):
    """Packs the decoder layers' linear layers in 8 bits."""

    packs_tied = False

    def __init__(self, model: torch.nn.Module, scales: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        kinds = torch.nn.Linear, AdaptedLinear, PackedLinear
        named = {id(m): name for name, m in model.named_modules() if type(m) in kinds}
        adapters = (part for part in model.modules() if isinstance(part, PackedAdapter))
        beside = {id(part) for adapter in adapters for part in adapter.modules()}  # they stay as they are
        in_layers = {key: name for key, name in named.items() if any(map(str.isdigit, name.split(".")))}
        self._names = {key: name for key, name in in_layers.items() if key not in beside}
        self._scales = scales
        self.layers = self.weights = 0
        """Linear layers that were packed, and the numbers in their weights."""
        self.all_weights = sum(p.numel() for p in model.parameters())
        """Numbers in all weights of the model, with embedding and head."""
        packed = (part for part in model.modules() if isinstance(part, PackedLinear))
        self.all_weights += sum(part.num_weights for part in packed if not part.tied)

    def can_pack(self, layer: torch.nn.Linear) -> bool:
        return layer.weight.dtype in DTYPES_PACKED and self._is_large(layer)

    def _is_large(self, layer: torch.nn.Linear | PackedLinear) -> bool:
        """Whether a layer is in a decoder layer, and has columns enough."""
        return id(layer) in self._names and INT8_SMALL * layer.out_features > layer.in_features

    def replacement(self, part: torch.nn.Module) -> Int8Linear | None:
        """Returns a layer in 8 bits in the place of one that is packed already (`pack` makes the others); None for other modules."""
        if not isinstance(part, PackedLinear) or part.tied or not self._is_large(part):
            return None
        self.layers += part.num_parts
        self.weights += part.num_weights
        return in_8_bits(part)

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
        if any(scale is None for scale in scales):
            scales = [None] * len(weights)  # all of them read the same inputs
        values = [quantize_weight(plain_weight(weight), scale) for weight, scale in zip(weights, scales, strict=True)]
        made = Int8Linear(values, biases, weights[0].dtype, activation)
        made.adapter = adapter_of(layers, len(weights))
        return made

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
