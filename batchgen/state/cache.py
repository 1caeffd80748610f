"""The tensors behind the state slots: for each recurrent layer the state of every slot, allocated once, on the layer's device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one recurrent layer keeps of a sequence."""

    taps: int
    """Inputs of the convolution before the next token."""
    channels: int
    """Width of such an input."""
    recurrent: tuple[int, ...] = ()
    """Shape of the recurrent state; empty for a layer that only convolves."""
    device: torch.device = CPU
    """Where the layer runs, and so where its states lie."""


class StateCache:
    """States of `num_slots` slots in every recurrent layer, and one slot more that stays zero: what a sequence begins with."""

    def __init__(self, layers: dict[int, StateShape], num_slots: int, dtype: torch.dtype) -> None:
        """Inputs of convolutions are kept in `dtype`, recurrent states in float32."""
        self.num_slots = num_slots
        self.convolution: dict[int, torch.Tensor] = {}
        """By layer: [num_slots + 1, taps, channels]."""
        self.recurrent: dict[int, torch.Tensor] = {}
        """By layer: float32 [num_slots + 1, *shape]."""
        for i, shape in layers.items():
            self.convolution[i] = _zeros((num_slots + 1, shape.taps, shape.channels), dtype, shape.device)
            if shape.recurrent:
                self.recurrent[i] = _zeros((num_slots + 1, *shape.recurrent), torch.float32, shape.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, without the one that stays zero."""
        states = (*self.convolution.values(), *self.recurrent.values())
        return sum(s[:-1].numel() * s.element_size() for s in states)


def bytes_per_slot(layers: dict[int, StateShape], dtype: torch.dtype, device: torch.device | None = None) -> int:
    """State of one slot in all layers, or in those on `device`."""
    here = [s for s in layers.values() if device is None or s.device == device]
    return sum(s.taps * s.channels * dtype.itemsize + (4 * math.prod(s.recurrent) if s.recurrent else 0) for s in here)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU memory that no slot has used is never touched (calloc)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
