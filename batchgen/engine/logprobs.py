"""Log-probabilities of drawn tokens and of the likeliest ones, as the model gives them: of raw logits, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 1 << 24
"""Most logits turned to float32 at once."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one drawn token."""

    logprob: float
    top_ids: tuple[int, ...]
    """The likeliest tokens in its place, falling."""
    top_logprobs: tuple[float, ...]


def measure(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
    """[n, 1 + 2k] for rows of `logits` [n, V] and their drawn `tokens` [n]: its log-probability, the k likeliest, and theirs.

    In float64 (float32 on MPS), which holds token ids exactly: so that all of it goes to the host at once.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    size = max(1, BLOCK // logits.shape[1])
    blocks = []
    for start in range(0, len(logits), size):
        logprobs = logits[start : start + size].float().log_softmax(-1)
        drawn = logprobs.gather(1, tokens[start : start + size, None])
        top = logprobs.topk(k, dim=-1)
        blocks.append(torch.cat([drawn.to(wide), top.indices.to(wide), top.values.to(wide)], dim=1))
    return torch.cat(blocks)


def read(rows: Sequence[Sequence[float]], counts: Sequence[int]) -> list[TokenLogprobs]:
    """What `measure` gave, on the host: of each row the first `counts[i]` of the likeliest."""
    return [
        TokenLogprobs(
            row[0],
            tuple(int(i) for i in row[1 : 1 + count]),
            tuple(row[1 + len(row) // 2 : 1 + len(row) // 2 + count]),
        )
        for row, count in zip(rows, counts, strict=True)
    ]
