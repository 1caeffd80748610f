"""Log-probabilities of given texts, where a step's tokens lie in one: read from the step's logits into its spans."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen.engine.scores import score_targets
from batchgen.engine.spans import Span
from batchgen.engine.steps import Work


def score_step(works: Sequence[Work], logits: torch.Tensor) -> None:
    """Puts into `span.scores` what `logits` [N, vocabulary] say: N rows, the wanted positions of the works in their order."""
    rows: list[int] = []
    targets: list[int] = []
    places: list[tuple[Span, int]] = []
    at = 0
    for work in works:
        for position in range(work.logits, work.stop) if work.span.scoring else ():
            for token in work.span.next_tokens(position):
                rows.append(at + position - work.logits)
                targets.append(token)
                places.append((work.span, position))
        at += work.stop - work.logits
    if rows:
        logprobs, likeliest = score_targets(logits, rows, targets)
        for (span, position), token, logprob, first in zip(places, targets, logprobs, likeliest, strict=True):
            span.scores[position, token] = (logprob, first)
