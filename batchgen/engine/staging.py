"""Numbers from the host to a device, which may be busy with steps launched before: the host does not wait for it.

A copy from memory that is not pinned would.
"""

from __future__ import annotations

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
