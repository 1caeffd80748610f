"""Cuts the spans of a step into chunks. A recurrence over many tokens is matrix products inside the chunks and a loop over the chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

LONG = 64
"""Tokens of a chunk, for spans that are longer than `SHORT`."""
SHORT = 16
"""Tokens of a chunk, for shorter spans. Chunks are padded, and most prompts have only a few tokens of their own at the end."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Spans of similar length, cut into chunks of `size` tokens. The last chunk of each span is padded.

    The chunks are in the order in which the loop runs them: the first of every span, then the second of every span that has one, and so
    on. Spans are sorted by their number of chunks, the longest first, so that each round runs a slice of the chunks for the first spans.
    """

    size: int
    spans: torch.Tensor
    """int64 [N] index of each span among the step's spans."""
    tokens: torch.Tensor
    """int64 [C * size] index of the packed token in each place. Padding repeats the last token of the same span, so that a NaN stays in
    its own sequence."""
    padded: torch.Tensor
    """bool [C, size] whether a place is padding."""
    places: torch.Tensor
    """int64 [T'] the places that are not padding, in the order of `outputs`."""
    outputs: torch.Tensor
    """int64 [T'] index of the packed token in each of these places."""
    rounds: tuple[tuple[int, int], ...]
    """For each round of the loop: its first chunk and its number of chunks."""

    @property
    def num_chunks(self) -> int:
        return len(self.padded)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` [T, ...] of packed tokens as [C, size, ...]."""
        return x.index_select(0, self.tokens).view(self.num_chunks, self.size, *x.shape[1:])

    def put(self, out: torch.Tensor, y: torch.Tensor) -> None:
        """Writes `y` [C, size, ...] to the packed tokens of `out` [T, ...]."""
        out.index_copy_(0, self.outputs, y.reshape(-1, *out.shape[1:]).index_select(0, self.places).to(out.dtype))


def chunks_of(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], spans: NDArray[np.int64], device: torch.device
) -> list[Chunks]:
    """Cuts spans [N] that begin at packed tokens `starts` and have `lengths` into chunks. Returns at most two groups: short and long spans."""
    short = lengths <= SHORT
    groups = [(SHORT, np.flatnonzero(short)), (LONG, np.flatnonzero(~short))]
    return [_chunks(starts[i], lengths[i], spans[i], size, device) for size, i in groups if len(i)]


def _chunks(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], spans: NDArray[np.int64], size: int, device: torch.device
) -> Chunks:
    order = np.argsort(-lengths, kind="stable")
    starts, lengths, spans = starts[order], lengths[order], spans[order]
    counts = -(-lengths // size)
    rounds: list[tuple[int, int]] = []
    tokens: list[NDArray[np.int64]] = []
    padded: list[NDArray[np.bool_]] = []
    first = 0
    for n in range(int(counts[0])):
        active = int((counts > n).sum())
        rounds.append((first, active))
        first += active
        place = n * size + np.arange(size)
        last = lengths[:active, None] - 1
        tokens.append(starts[:active, None] + np.minimum(place, last))
        padded.append(place > last)
    at, padding = np.concatenate(tokens).ravel(), np.concatenate(padded)
    places = np.flatnonzero(~padding.ravel())
    return Chunks(
        size=size,
        spans=torch.from_numpy(spans).to(device),
        tokens=torch.from_numpy(at).to(device),
        padded=torch.from_numpy(padding).to(device),
        places=torch.from_numpy(places).to(device),
        outputs=torch.from_numpy(at[places]).to(device),
        rounds=tuple(rounds),
    )


def decays(logs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns decays in float32, given the logarithm of each token's decay [..., c] (all <= 0).

    These are the decays from the chunk's start to each token [..., c], from token j to token i [..., i, j] (0 if j is later), from each
    token to the chunk's end [..., c], and over the whole chunk [...].
    """
    # In float64, because the decay between two tokens is the difference of two sums that may be much larger.
    total = logs.double().cumsum(-1)
    later = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill_(later, -torch.inf).exp_()
    return total.float().exp_(), between, (total[..., -1:] - total).float().exp_(), total[..., -1].float().exp_()
