"""Log-probabilities of sampled tokens and of the likeliest tokens, from raw logits, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

AT_ONCE = 1 << 24
"""Number of logits converted to float32 at once."""
AT_ONCE_CPU = 1 << 19
"""The same on the CPU: as many as stay in its cache (three times as fast)."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a sampled token, and the likeliest tokens in its place."""

    logprob: float
    top_ids: tuple[int, ...]
    """The likeliest first; of equal logits the first in the vocabulary, as in greedy decoding."""
    top_logprobs: tuple[float, ...]


def measure(logits: torch.Tensor, tokens: torch.Tensor, k: int, at_once: int | None = None) -> torch.Tensor:
    """Returns [n, 1 + 2k] for rows of `logits` [n, V] and their sampled `tokens` [n].

    The columns are the log-probability of the sampled token, the ids of the k likeliest tokens, and their log-probabilities. All are
    float64 (float32 on MPS), which holds token ids exactly, so that one copy takes them to the host.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    at_once = at_once or (AT_ONCE_CPU if logits.device.type == "cpu" else AT_ONCE)
    size = max(1, at_once // logits.shape[1])
    chunks = []
    for start in range(0, len(logits), size):
        chunk = logits[start : start + size].float()
        ids = _likeliest(chunk, k)
        logprobs = chunk.log_softmax(-1).gather(1, torch.cat([tokens[start : start + size, None], ids], dim=1)).to(wide)
        chunks.append(torch.cat([logprobs[:, :1], ids.to(wide), logprobs[:, 1:]], dim=1))
    return torch.cat(chunks)


def _likeliest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the places [n, k] of the `k` largest numbers of each row of `x`, float32 [n, V]; of equal numbers the first.

    Which of several equal numbers `topk` takes depends on k, and k is the largest that any row of the batch asks for. Logits in bfloat16
    are often equal. So the sort key is an integer: in the high bits the float, as an integer that sorts as floats do, and in the low bits the place.
    """
    if not k:
        return torch.empty((len(x), 0), dtype=torch.int64, device=x.device)
    last = x.shape[1] - 1
    bits = (x + 0.0).view(torch.int32)  # -0 becomes 0
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long().bitwise_left_shift_(32)
    keys.bitwise_or_(torch.arange(last, -1, -1, device=x.device))
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def read(rows: Sequence[Sequence[float]], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Reads rows of `measure` on the host. Row i keeps the first `counts[i]` of its likeliest tokens."""
    return [
        TokenLogprobs(
            row[0],
            tuple(int(i) for i in row[1 : 1 + count]),
            tuple(row[1 + len(row) // 2 : 1 + len(row) // 2 + count]),
        )
        for row, count in zip(rows, counts, strict=True)
    ]
