"""Log-probabilities of sampled tokens and of the likeliest ones: of raw logits, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CHUNK = 1 << 24
"""Most logits turned to float32 at once."""
CACHED = 1 << 19
"""The same on the CPU, where it is three times as fast on what stays in its cache."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one drawn token."""

    logprob: float
    top_ids: tuple[int, ...]
    """The likeliest tokens in its place, falling; of equal logits the first in the vocabulary, as greedy decoding takes them."""
    top_logprobs: tuple[float, ...]


def measure(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
    """[n, 1 + 2k] for rows of `logits` [n, V] and their drawn `tokens` [n]: its log-probability, the k likeliest, and theirs.

    In float64 (float32 on MPS), which holds token ids exactly: so that all of it goes to the host at once.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    size = max(1, (CACHED if logits.device.type == "cpu" else CHUNK) // logits.shape[1])
    chunks = []
    for start in range(0, len(logits), size):
        chunk = logits[start : start + size].float()
        ids = _likeliest(chunk, k)
        logprobs = chunk.log_softmax(-1).gather(1, torch.cat([tokens[start : start + size, None], ids], dim=1)).to(wide)
        chunks.append(torch.cat([logprobs[:, :1], ids.to(wide), logprobs[:, 1:]], dim=1))
    return torch.cat(chunks)


def _likeliest(x: torch.Tensor, k: int) -> torch.Tensor:
    """The `k` largest of each row of `x`, float32 [n, V]: their places [n, k], of equal ones the first.

    What `topk` takes of equal ones depends on k, the largest that any row of the batch asks for; bfloat16 logits are often equal.
    So a place is in the key: the float's bits, as an integer in the order of the floats, above those of the place.
    """
    if not k:
        return torch.empty((len(x), 0), dtype=torch.int64, device=x.device)
    last = x.shape[1] - 1
    bits = (x + 0.0).view(torch.int32)  # -0 becomes 0
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long().bitwise_left_shift_(32)
    keys.bitwise_or_(torch.arange(last, -1, -1, device=x.device))
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


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


@dataclass(frozen=True)
class SampledTokens:
    """A token per row, in the order of the rows."""

    tokens: list[int]
    valid: list[bool]
    """False where the row's logits are not numbers: a NaN, +inf, or nothing but -inf. Its token means nothing."""
    logprobs: list[TokenLogprobs | None] | None = None
    """By row, where a row wants them; None where none does."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The same while it is on the device."""

    tokens: torch.Tensor
    """int64 [N]"""
    valid: torch.Tensor
    """bool [N]"""
    measured: torch.Tensor | None
    """`logprobs.measure` of the rows that want log-probabilities."""
    wanted: dict[int, int]
    """By such a row, in their order: how many of the likeliest tokens it wants."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is to be read."""
        return [self.tokens, self.valid, *([] if self.measured is None else [self.measured])]

    def read(self, numbers: Sequence[Sequence[float]]) -> SampledTokens:
        """`numbers` are those of `tensors`, each flat."""
        tokens, valid = [int(t) for t in numbers[0]], [bool(v) for v in numbers[1]]
        if self.measured is None:
            return SampledTokens(tokens, valid)
        width = self.measured.shape[1]
        rows = [numbers[2][i : i + width] for i in range(0, len(numbers[2]), width)]
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        for row, found in zip(self.wanted, read(rows, list(self.wanted.values())), strict=True):
            logprobs[row] = found
        return SampledTokens(tokens, valid, logprobs)
