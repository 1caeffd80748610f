"""Log-probabilities of given texts under the logits of a step, for rows that score texts and sample nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from batchgen.kernels.transfer import put

AT_ONCE = 1 << 24
"""Number of logits converted to float32 at once."""


@torch.inference_mode()
def score_targets(
    logits: torch.Tensor, rows: Sequence[int], targets: Sequence[int], at_once: int = AT_ONCE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for each pair of a row of `logits` [N, V] and a target token, its log-probability and whether no token is likelier.

    Both are on the device, the first in float64 (float32 on MPS); nothing waits for the device. Of equally likely tokens the first
    counts as the likeliest, as in greedy decoding. The log-probability is that of the softmax over the row in float32. It is NaN if
    the row's logits are not numbers (a NaN, +inf, or nothing but -inf), or if the model has no logit for the target.
    """
    device = logits.device
    vocabulary = logits.shape[1]
    size = max(1, at_once // vocabulary)
    total = torch.empty(len(logits), dtype=torch.float32, device=device)
    best = torch.empty(len(logits), dtype=torch.int64, device=device)
    for start in range(0, len(logits), size):
        chunk = logits[start : start + size].float()
        # A single row is summed as part of two rows, because torch would split it between threads and add in another order.
        some = chunk.expand(2, -1) if len(chunk) == 1 else chunk
        total[start : start + size] = some.logsumexp(-1)[: len(chunk)]
        best[start : start + size] = chunk.argmax(-1)
    row, target = put(np.array([list(rows), list(targets)], dtype=np.int64), device)
    known = target < vocabulary  # a text may hold ids that the model has no logits for
    logprob = logits[row, target.where(known, 0)].float() - total[row]
    logprob = logprob.where(known & total[row].isfinite(), torch.nan)
    return (logprob if device.type == "mps" else logprob.double()), best[row] == target
