"""What a process takes of the machine when several run side by side."""

from __future__ import annotations

import torch

from batchgen.engine.loading import pick_device


def take_share(device: str, place: int, processes: int) -> None:
    """Its part of the CPU's threads; its GPU, and no context on another. Raises `ModelError` for one that this machine does not have."""
    torch.set_num_threads(max(1, (torch.get_num_threads() + place) // processes))
    own = pick_device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
