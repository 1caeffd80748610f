"""The tree behind a list of neighbours' common lengths (the LCP-interval tree of suffix arrays). Integers only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Maximal runs of positions that share a prefix longer than what they share with any other position.

    Sorted by (first, end): a parent before its children. All arrays are int64; `leaf_parent` has one entry a position,
    the others one an interval.
    """

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    """Exclusive; last - first is at least 2."""
    end: NDArray[np.int64]
    """Length of the prefix that the interval's positions share, at least 1."""
    parent: NDArray[np.int64]
    """The smallest interval around this one, -1 for none."""
    leaf_parent: NDArray[np.int64]
    """The smallest interval around a position, -1 for none."""


def lcp_intervals(shared: NDArray[np.int64]) -> Intervals:
    """Intervals of the positions 0..n-1, where `shared` [n + 1] is as `neighbour_lengths` gives it.

    One pass with a stack of the intervals that are still open, each deeper than the one below it.
    """
    count = len(shared) - 1
    firsts: list[int] = []
    lasts: list[int] = []
    ends: list[int] = []
    parents: list[int] = []
    leaf_parents = [-1] * count
    stack: list[int] = []

    def opened(first: int, end: int) -> int:
        firsts.append(first)
        lasts.append(-1)
        ends.append(end)
        parents.append(-1)
        return len(ends) - 1

    top_end = 0
    for position, length in enumerate(shared[1:].tolist()):
        # `length` is what this position shares with the next one.
        if length > top_end:
            stack.append(opened(position, length))
            top_end = length
        if stack:
            leaf_parents[position] = stack[-1]
        while top_end > length:
            closed = stack.pop()
            lasts[closed] = position + 1
            top_end = ends[stack[-1]] if stack else 0
            if length > top_end:  # the positions so far go on together, but less deep
                stack.append(opened(firsts[closed], length))
                top_end = length
            parents[closed] = stack[-1] if stack else -1
    return _in_depth_first_order(firsts, lasts, ends, parents, leaf_parents)


def _in_depth_first_order(
    firsts: list[int], lasts: list[int], ends: list[int], parents: list[int], leaf_parents: list[int]
) -> Intervals:
    """The intervals renumbered by (first, end)."""
    first, last, end, parent, leaf_parent = (
        np.array(values, dtype=np.int64) for values in (firsts, lasts, ends, parents, leaf_parents)
    )
    by_place = np.lexsort((end, first))
    renumbered = np.full(len(by_place) + 1, -1, dtype=np.int64)  # the extra entry at the end is that of -1
    renumbered[by_place] = np.arange(len(by_place))
    return Intervals(
        first=first[by_place],
        last=last[by_place],
        end=end[by_place],
        parent=renumbered[parent[by_place]],
        leaf_parent=renumbered[leaf_parent],
    )
