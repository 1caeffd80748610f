"""Log-probabilities of given texts under the logits of a step, for rows that score texts and sample nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from batchgen.kernels.transfer import put
from batchgen.sampling.logprobs import summaries


@torch.inference_mode()
def score_targets(
    logits: torch.Tensor, rows: Sequence[int], targets: Sequence[int], *, own_kernels: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for each pair of a row of `logits` [N, V] and a target token, its log-probability and whether no token is likelier.

    Both are on the device, the first in float64 (float32 on MPS); nothing waits for the device. Of equally likely tokens the first
    counts as the likeliest, as in greedy decoding. The log-probability is that of the softmax over the row in float32. It is NaN if
    the row's logits are not numbers (a NaN, +inf, or nothing but -inf), or if the model has no logit for the target.
    """
    device = logits.device
    found = summaries(logits, own_kernels=own_kernels)
    row, target = put(np.array([list(rows), list(targets)], dtype=np.int64), device)
    known = target < logits.shape[1]  # a text may hold ids that the model has no logits for
    logprob = logits[row, target.where(known, 0)].float() - found.best[row] - found.log_weights[row]
    logprob = logprob.where(known, torch.nan)
    return (logprob if device.type == "mps" else logprob.double()), found.ids[row, 0] == target
