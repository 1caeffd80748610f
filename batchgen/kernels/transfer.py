"""Copies between host and device that do not wait for the device, and zeros that cost no memory before they are used."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros. On the CPU, memory that is not used is never touched (calloc), and they begin at a page.

    Calloc's own beginnings are multiples of 16 bytes, so that each vector and tile row would lie in two lines of the cache.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + mmap.PAGESIZE, dtype=np.uint8)
    begin = -raw.ctypes.data % mmap.PAGESIZE
    return torch.from_numpy(raw[begin : begin + size]).view(dtype).view(shape)


def put(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns a copy of small `values` on the device."""
    # On MPS the source is not pinned, and its memory might be reused before the copy.
    return staged(values, device).to(device, non_blocking=device.type != "mps")


def staged(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns a copy of the values on the host from which a copy to the device does not wait.

    The caller may drop it at once: torch reuses pinned memory only when all copies from it are done.
    """
    host = torch.tensor(values)
    return host.pin_memory() if device.type == "cuda" else host


class Readback:
    """Copies tensors to the host in one copy, after the work that was launched before."""

    def __init__(self, parts: Sequence[torch.Tensor], device: torch.device) -> None:
        """`parts` are on the device and have any shapes. They are booleans, integers, or floats of one type that holds the integers exactly."""
        self._ends = list(accumulate(part.numel() for part in parts))
        self._whole: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        if parts:
            wide = next((part.dtype for part in parts if part.is_floating_point()), torch.int64)
            self._whole = torch.cat([part.reshape(-1).to(wide) for part in parts])
        if device.type == "cuda":
            if self._whole is not None:
                # A copy to memory that is not pinned would wait for the device.
                host = torch.empty(self._whole.shape, dtype=self._whole.dtype, pin_memory=True)
                self._whole = host.copy_(self._whole, non_blocking=True)
            self._event = torch.cuda.current_stream(device).record_event()

    def lists(self) -> list[list[Any]]:
        """Returns the numbers of each part, flat. Waits for the copy and for work launched before it, but not for later work."""
        numbers = self._numbers()
        if numbers is None:
            return []
        flat = numbers.tolist()
        return [flat[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def array(self) -> NDArray[Any] | None:
        """Returns the numbers of all parts as one flat array, None without parts. Waits as `lists` does."""
        numbers = self._numbers()
        return None if numbers is None else numbers.cpu().numpy()

    def _numbers(self) -> torch.Tensor | None:
        if self._event is not None:
            self._event.synchronize()
        return self._whole
