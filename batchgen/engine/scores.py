"""Log-probabilities of given tokens under rows of logits: for texts that are scored, not drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 1 << 24
"""Most logits turned to float32 at once."""


@torch.inference_mode()
def score_targets(logits: torch.Tensor, rows: Sequence[int], targets: Sequence[int]) -> tuple[list[float], list[bool]]:
    """For each pair of a row of `logits` [N, V] and a target token: its log-probability, and whether it is the likeliest.

    Of equally likely tokens the first is the likeliest, as in greedy decoding. The log-probability is that of the softmax over
    the row in float32; NaN where the row's logits are not numbers (a NaN, +inf, or nothing but -inf), or the target has none.
    """
    device = logits.device
    vocabulary = logits.shape[1]
    size = max(1, BLOCK // vocabulary)
    total = torch.empty(len(logits), dtype=torch.float32, device=device)
    best = torch.empty(len(logits), dtype=torch.int64, device=device)
    for start in range(0, len(logits), size):
        block = logits[start : start + size].float()
        total[start : start + size] = block.logsumexp(-1)
        best[start : start + size] = block.argmax(-1)
    # CUDA stages a small copy from the host by itself, so nothing has to wait for it.
    pairs = torch.tensor([list(rows), list(targets)], dtype=torch.int64).to(device, non_blocking=device.type == "cuda")
    row, target = pairs
    known = target < vocabulary  # a text may hold ids that the model has no logits for
    logprob = logits[row, target.where(known, 0)].float() - total[row]
    logprob = logprob.where(known & total[row].isfinite(), torch.nan)
    found = torch.stack([logprob.double(), (best[row] == target).double()]).tolist()  # the only wait for the device
    return found[0], [bool(first) for first in found[1]]
