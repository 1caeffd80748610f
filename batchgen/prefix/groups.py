"""Groups: which requests share which whole chunks. What distributed runs cut by and `batchgen plan` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.prefix.hashing import continue_hashes
from batchgen.prefix.intervals import lcp_intervals
from batchgen.request import TokenArray


@dataclass(frozen=True, slots=True)
class Group:
    """The requests whose longest chunk-aligned prefix that another request also has is the same.

    A request is in one group at the most, in none if it shares no whole chunk. Where groups nest, only the rows that
    share nothing deeper are the outer group's own: there may be a single one (what it shares, it shares with rows of
    the inner groups), and they need not follow each other, for inner groups may lie between them.
    """

    hash: bytes
    """The chunk hash (16 bytes) of the prefix."""
    prefix_tokens: int
    """Length of the prefix, a multiple of the chunk size."""
    rows: int
    """The group's own requests, at least 1."""
    first: int
    last: int
    """All requests that begin with the prefix, inner groups' too: first..last (exclusive) in depth-first order."""


def find_groups(
    prompts: Sequence[TokenArray], order: NDArray[np.int64], shared: NDArray[np.int64], chunk_size: int
) -> tuple[Group, ...]:
    """The groups, sorted by (first, prefix_tokens): an outer one before those inside it.

    `shared` is as `neighbour_lengths` gives it for `order`. Each chunk of the tree is hashed once: a chain goes on
    from that of the interval around it.
    """
    intervals = lcp_intervals(shared // chunk_size * chunk_size)
    rows = np.bincount(intervals.leaf_parent[intervals.leaf_parent >= 0], minlength=len(intervals.end)).tolist()
    firsts, ends = intervals.first.tolist(), intervals.end.tolist()
    hashes: list[bytes] = []
    groups: list[Group] = []
    for i, (parent, last) in enumerate(zip(intervals.parent.tolist(), intervals.last.tolist(), strict=True)):
        start, before = (ends[parent], hashes[parent]) if parent >= 0 else (0, b"")
        tokens = prompts[order[firsts[i]]][start : ends[i]]
        hashes.append(continue_hashes(before, tokens, chunk_size)[-1])
        if rows[i]:
            groups.append(Group(hashes[i], ends[i], rows[i], firsts[i], last))
    return tuple(groups)
