"""Log-probabilities of given texts under the logits of a step: for rows that score texts and sample nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from batchgen.kernels.transfer import put
from batchgen.scheduling.batch import ScheduledSpan
from batchgen.scheduling.sequence import TokenScore

CHUNK = 1 << 24
"""Most logits turned to float32 at once."""


@torch.inference_mode()
def score_targets(
    logits: torch.Tensor, rows: Sequence[int], targets: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each pair of a row of `logits` [N, V] and a target token: its log-probability, and whether it is the likeliest.

    Both on the device, the first in float64 (float32 on MPS); nothing waits for it. Of equally likely tokens the first is the likeliest, as in greedy decoding. The log-probability is that of the softmax over
    the row in float32; NaN where the row's logits are not numbers (a NaN, +inf, or nothing but -inf), or the target has none.
    """
    device = logits.device
    vocabulary = logits.shape[1]
    size = max(1, CHUNK // vocabulary)
    total = torch.empty(len(logits), dtype=torch.float32, device=device)
    best = torch.empty(len(logits), dtype=torch.int64, device=device)
    for start in range(0, len(logits), size):
        chunk = logits[start : start + size].float()
        total[start : start + size] = chunk.logsumexp(-1)
        best[start : start + size] = chunk.argmax(-1)
    row, target = put(np.array([list(rows), list(targets)], dtype=np.int64), device)
    known = target < vocabulary  # a text may hold ids that the model has no logits for
    logprob = logits[row, target.where(known, 0)].float() - total[row]
    logprob = logprob.where(known & total[row].isfinite(), torch.nan)
    return (logprob if device.type == "mps" else logprob.double()), best[row] == target


@dataclass(frozen=True, slots=True)
class StepScores:
    """What a step says of given texts, while it is on the device."""

    entries: list[TokenScore]
    """Not filled in yet."""
    tensors: tuple[torch.Tensor, torch.Tensor]
    """By entry: log-probability, and whether the token is the likeliest."""

    def fill(self, logprobs: list[float], likeliest: list[float]) -> None:
        """`tensors`, read."""
        for entry, logprob, first in zip(self.entries, logprobs, likeliest, strict=True):
            entry.logprob, entry.likeliest = logprob, bool(first)


def score_step(spans: Sequence[ScheduledSpan], logits: torch.Tensor) -> StepScores | None:
    """Notes in `span.scores` what `logits` [N, vocabulary] will have said: N rows, the wanted positions of the works in their order.

    None when no text is scored. Does not wait for the device.
    """
    rows: list[int] = []
    targets: list[int] = []
    entries: list[TokenScore] = []
    at = 0
    for scheduled in spans:
        for position in range(scheduled.logits, scheduled.stop) if scheduled.span.scoring else ():
            for token in scheduled.span.next_tokens(position):
                rows.append(at + position - scheduled.logits)
                targets.append(token)
                entry = scheduled.span.scores[position, token] = TokenScore()
                entries.append(entry)
        at += scheduled.stop - scheduled.logits
    return StepScores(entries, score_targets(logits, rows, targets)) if rows else None
