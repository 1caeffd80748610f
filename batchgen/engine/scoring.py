"""Log-probabilities of given texts, where a step's tokens lie in one: measured in the step's logits, noted in its spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchgen.engine.scores import score_targets
from batchgen.engine.spans import TokenScore
from batchgen.engine.steps import Work


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


def score_step(works: Sequence[Work], logits: torch.Tensor) -> StepScores | None:
    """Notes in `span.scores` what `logits` [N, vocabulary] will have said: N rows, the wanted positions of the works in their order.

    None when no text is scored. Does not wait for the device.
    """
    rows: list[int] = []
    targets: list[int] = []
    entries: list[TokenScore] = []
    at = 0
    for work in works:
        for position in range(work.logits, work.stop) if work.span.scoring else ():
            for token in work.span.next_tokens(position):
                rows.append(at + position - work.logits)
                targets.append(token)
                entry = work.span.scores[position, token] = TokenScore()
                entries.append(entry)
        at += work.stop - work.logits
    return StepScores(entries, score_targets(logits, rows, targets)) if rows else None
