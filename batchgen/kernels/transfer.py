"""Copies between host and device that do not wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray


def put(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of small `values` on the device."""
    # On MPS, from memory that is not pinned, the copy might find it used again.
    return staged(values, device).to(device, non_blocking=device.type != "mps")


def staged(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of the values on the host that a copy to the device need not wait for.

    It may be forgotten at once: torch uses pinned memory again only when the copies from it are done.
    """
    host = torch.tensor(values)
    return host.pin_memory() if device.type == "cuda" else host


class Readback:
    """Tensors on their way to the host, all in one copy behind what the device has still to do."""

    def __init__(self, parts: Sequence[torch.Tensor], device: torch.device) -> None:
        """`parts` lie on the device, in any shapes: booleans, integers, or floats of one width that holds the integers exactly."""
        self._ends = list(accumulate(part.numel() for part in parts))
        self._whole: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        if parts:
            wide = next((part.dtype for part in parts if part.is_floating_point()), torch.int64)
            self._whole = torch.cat([part.reshape(-1).to(wide) for part in parts])
        if device.type == "cuda":
            if self._whole is not None:
                # To any other memory than pinned the copy would wait for the device.
                host = torch.empty(self._whole.shape, dtype=self._whole.dtype, pin_memory=True)
                self._whole = host.copy_(self._whole, non_blocking=True)
            self._event = torch.cuda.current_stream(device).record_event()

    def lists(self) -> list[list[Any]]:
        """The parts' numbers, each flat. Waits for the copy and what was launched before it, not for what came after."""
        if self._event is not None:
            self._event.synchronize()
        if self._whole is None:
            return []
        numbers = self._whole.tolist()
        return [numbers[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]
