"""Cuts a job that runs in shards into contiguous shares of the prefix order, of about equal estimated cost.

The costs are on disk, 12 bytes for each request, so that memory does not grow with the input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchgen.jobs.files.disk import writing
from batchgen.prefix.order import common_length
from batchgen.request import Request, TokenArray

SLACK = 1 / 16
"""A cut is at most this part of a share away from where the shares would be equal, unless a single request costs more."""


@dataclass(frozen=True, slots=True)
class Share:
    """One contiguous part of the prefix order."""

    first: int
    last: int
    """Its requests are first..last (exclusive) in prefix order."""
    cost: float
    """Estimated, in prompt tokens."""
    again: int
    """Prompt tokens at its start that the share before it runs too: the cost of the cut."""


class PrefixCosts:
    """The estimated costs of requests in prefix order. Writes two files, `costs` and `shared`, into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._paths = (folder / "costs", folder / "shared")
        self._before: TokenArray | None = None
        self._sum = 0.0
        self.count = 0
        with writing(folder):
            for path in self._paths:
                path.write_bytes(b"")

    def add(self, requests: Iterable[Request]) -> None:
        """Adds the next requests."""
        ends: list[float] = []
        shared: list[int] = []
        for request in requests:
            length = 0 if self._before is None else common_length(self._before, request.tokens)
            self._before = request.tokens
            self._sum += request.cost - length
            ends.append(self._sum)
            shared.append(length)
        with writing(self._paths[0].parent):
            for path, values, dtype in zip(self._paths, (ends, shared), ("<f8", "<i4"), strict=True):
                with path.open("ab") as file:
                    file.write(np.array(values, dtype=dtype).tobytes())
        self.count += len(ends)

    def shares(self, count: int, chunk_size: int) -> list[Share]:
        """All requests in `count` shares (see `shard_bounds`)."""
        if not self.count:
            return [Share(0, 0, 0.0, 0) for _ in range(count)]
        # "c": a private map, which file systems allow that share no memory. Nothing is written.
        ends = np.memmap(self._paths[0], dtype="<f8", mode="c")
        shared = np.memmap(self._paths[1], dtype="<i4", mode="c")
        cuts = [0, *shard_bounds(ends, shared, count, chunk_size), self.count]
        found = []
        for first, last in pairwise(cuts):
            again = int(shared[first]) if 0 < first < last else 0
            cost = float(ends[last - 1]) - (float(ends[first - 1]) if first else 0.0) if last > first else 0.0
            found.append(Share(first, last, cost + again, again))
        return found


def shard_bounds(ends: NDArray[np.float64], shared: NDArray[np.int32], shares: int, chunk_size: int) -> list[int]:
    """The `shares` - 1 places before which the prefix order is cut.

    `ends` [requests] is the cost of all requests up to each, itself included; `shared` [requests] the tokens that each shares with the one
    before it. Within `SLACK` of the place where costs would be equal, the cut is where neighbours share the fewest whole chunks, and of
    such places at the nearest. So a group that costs less than 2 * `SLACK` of a share stays whole.
    """
    total, count = float(ends[-1]), len(ends)
    places: list[int] = []
    for number in range(1, shares):
        aim, slack = total * number / shares, total / shares * SLACK
        low = max(int(np.searchsorted(ends, aim - slack, side="left")) + 1, places[-1] if places else 0)
        high = int(np.searchsorted(ends, aim + slack, side="right"))
        if low > high:  # one request is larger than the slack
            low, high = sorted((max(high, places[-1] if places else 0), min(low, count)))
        candidates = np.arange(low, high + 1)
        before = np.where(candidates > 0, ends[np.maximum(candidates, 1) - 1], 0.0)
        chunks = np.where(candidates < count, shared[np.minimum(candidates, count - 1)], 0) // chunk_size
        chunks = np.where(candidates > 0, chunks, 0)
        best = np.lexsort((np.abs(before - aim), chunks))[0]
        places.append(int(candidates[best]))
    return places
