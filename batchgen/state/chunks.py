"""How the spans of a step lie in chunks: recurrences over many tokens are matrix products inside chunks and a loop over chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

LONG = 64
"""Tokens of a chunk: of all spans that are longer than `SHORT`."""
SHORT = 16
"""Tokens of a chunk of spans that are not longer: a chunk is padded, and most prompts end in a few tokens of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Spans of about one length, cut into chunks of `size` tokens; the last chunk of each is padded.

    Chunks lie in the order in which the loop runs them: the first of every span, then the second of every span that has one, and so
    on. Spans are sorted by their number of chunks, the longest first, so that each round runs a slice of the chunks on the first spans.
    """

    size: int
    spans: torch.Tensor
    """int64 [N] which of the step's spans these are, in their order here."""
    tokens: torch.Tensor
    """int64 [C * size] the packed token in each place. Padding repeats the last token of the same span, so that what is not a
    number stays in its own sequence."""
    padded: torch.Tensor
    """bool [C, size] the places that are padding."""
    places: torch.Tensor
    """int64 [T'] the places that are not, in the order of `outputs`."""
    outputs: torch.Tensor
    """int64 [T'] the packed tokens in them."""
    rounds: tuple[tuple[int, int], ...]
    """For each round of the loop: the first chunk and how many."""

    @property
    def num_chunks(self) -> int:
        return len(self.padded)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] of packed tokens as [C, size, ...]."""
        return x.index_select(0, self.tokens).view(self.num_chunks, self.size, *x.shape[1:])

    def put(self, out: torch.Tensor, y: torch.Tensor) -> None:
        """Writes [C, size, ...] to the packed tokens of `out` [T, ...]."""
        out.index_copy_(0, self.outputs, y.reshape(-1, *out.shape[1:]).index_select(0, self.places).to(out.dtype))


def chunks_of(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], spans: NDArray[np.int64], device: torch.device
) -> list[Chunks]:
    """The spans [N] that begin at packed tokens `starts` and have `lengths`, in at most two groups: short ones and long ones."""
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
    """From the logarithms of each token's decay [..., c], all <= 0, in float32: the decays from the chunk's start to each token
    [..., c], from token j to token i [..., i, j] (none for later ones), from each token to the chunk's end [..., c], and over the chunk [...].
    """
    # In float64: what lies between two tokens is the difference of two sums that may be many times as large.
    total = logs.double().cumsum(-1)
    later = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill_(later, -torch.inf).exp_()
    return total.float().exp_(), between, (total[..., -1:] - total).float().exp_(), total[..., -1].float().exp_()
