"""What a step has drawn: on the device, and once it has been read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchgen.engine.logprobs import TokenLogprobs, read


@dataclass(frozen=True)
class Sampled:
    """A token per row, in the order of the rows."""

    tokens: list[int]
    valid: list[bool]
    """False where the row's logits are not numbers: a NaN, +inf, or nothing but -inf. Its token means nothing."""
    logprobs: list[TokenLogprobs | None] | None = None
    """By row, where a row wants them; None where none does."""


@dataclass(frozen=True, slots=True)
class Drawn:
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

    def read(self, numbers: Sequence[Sequence[float]]) -> Sampled:
        """`numbers` are those of `tensors`, each flat."""
        tokens, valid = [int(t) for t in numbers[0]], [bool(v) for v in numbers[1]]
        if self.measured is None:
            return Sampled(tokens, valid)
        width = self.measured.shape[1]
        rows = [numbers[2][i : i + width] for i in range(0, len(numbers[2]), width)]
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        for row, found in zip(self.wanted, read(rows, list(self.wanted.values())), strict=True):
            logprobs[row] = found
        return Sampled(tokens, valid, logprobs)
