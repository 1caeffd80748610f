"""The tensors of the state slots: for each recurrent layer the states of all slots, allocated once on the layer's device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from batchgen.kernels.transfer import zeros

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of the state that one recurrent layer keeps of a sequence."""

    taps: int
    """Number of earlier inputs that the convolution of the next token needs; 0 for a layer without one."""
    channels: int
    """Width of an input."""
    recurrent: tuple[int, ...] = ()
    """Shape of the recurrent state; empty for a layer that only convolves."""
    device: torch.device = CPU
    """The device of the layer and of its states."""


class StateCache:
    """The states of `num_state_slots` slots in every recurrent layer, and of one more slot that stays zero, which sequences begin with."""

    def __init__(self, layers: dict[int, StateShape], num_state_slots: int, dtype: torch.dtype) -> None:
        """Keeps inputs of convolutions in `dtype` and recurrent states in float32."""
        self.num_state_slots = num_state_slots
        self.convolution: dict[int, torch.Tensor] = {}
        """By layer: [num_state_slots + 1, taps, channels]."""
        self.recurrent: dict[int, torch.Tensor] = {}
        """By layer: float32 [num_state_slots + 1, *shape]."""
        for i, shape in layers.items():
            if shape.taps:
                self.convolution[i] = zeros((num_state_slots + 1, shape.taps, shape.channels), dtype, shape.device)
            if shape.recurrent:
                self.recurrent[i] = zeros((num_state_slots + 1, *shape.recurrent), torch.float32, shape.device)
        self._filters: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def filter_of(self, layer: int, weight_CK: torch.Tensor) -> torch.Tensor:
        """Returns the weight of a layer's convolution as [K, C], contiguous; it is made once."""
        given, made = self._filters.get(layer, (None, None))
        if given is None or made is None or given.data_ptr() != weight_CK.data_ptr() or given.shape != weight_CK.shape:
            made = weight_CK.t().contiguous()
            self._filters[layer] = weight_CK, made  # the given one is kept, so that no other comes to lie there
        return made


def bytes_per_state_slot(layers: dict[int, StateShape], dtype: torch.dtype, device: torch.device | None = None) -> int:
    """Returns the bytes of one slot's state in all layers, or in the layers on `device`."""
    here = [s for s in layers.values() if device is None or s.device == device]
    return sum(s.taps * s.channels * dtype.itemsize + (4 * math.prod(s.recurrent) if s.recurrent else 0) for s in here)
