"""The prefix tree of a window's prompts: every token that prompts share appears in exactly one node.

The tree is the tree of LCP intervals known from suffix arrays, over the prompts in depth-first order. The same algorithm over
chunk-aligned lengths gives the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.prefix.order import depth_first_order, neighbour_lengths
from batchgen.request import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class PrefixNode:
    """A run of tokens that two or more requests share. It is maximal: inside it nothing branches and no prompt ends."""

    index: int
    """Its place in `PrefixPlan.nodes`."""
    parent: int
    """Index of the node before it on its path; -1 if there is none."""
    start: int
    end: int
    """Positions [start, end) of its path are its own tokens. start is its parent's end, or 0."""
    first: int
    last: int
    """The requests below it are positions first..last (exclusive) in depth-first order."""
    depth: int
    """Number of nodes above it."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """The prefix tree of a window, and the window's requests in depth-first order.

    The tokens of a node are `prompts[order[node.first]][node.start:node.end]`. The own tokens of the request at position i begin at
    the end of `nodes[leaf_parent[i]]` (at 0 if that is -1); there may be none.
    """

    order: NDArray[np.int64]
    """[requests] order[i] is the index, among the prompts as given, of the i-th request in depth-first order."""
    nodes: tuple[PrefixNode, ...]
    """Sorted by (first, depth): a parent comes before its children."""
    leaf_parent: NDArray[np.int64]
    """[requests] Index of the deepest node above the request at a depth-first position; -1 if there is none."""
    prompt_tokens: int
    """Sum over the prompts."""
    prefill_tokens_min: int
    """Size of the token trie of the prompts: the tokens of all nodes and the own tokens of all requests."""
    groups: int
    """Number of groups. A group is the requests that have the same longest shared prefix of whole chunks."""
    grouped_requests: int
    """Requests that are in a group: those that share a whole chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Maximal runs of positions whose common prefix is longer than what they share with any other position.

    Sorted by (first, end): a parent comes before its children. All arrays are int64. `leaf_parent` has one entry per position, the
    others have one per interval.
    """

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    """Exclusive. last - first is at least 2."""
    end: NDArray[np.int64]
    """Length of the prefix that the interval's positions share, at least 1."""
    parent: NDArray[np.int64]
    """The smallest interval around this one; -1 if there is none."""
    leaf_parent: NDArray[np.int64]
    """The smallest interval around a position; -1 if there is none."""


def plan_prefixes(prompts: Sequence[TokenArray], chunk_size: int, *, share: bool = True) -> PrefixPlan:
    """Returns the plan of a window. No prompt may be empty.

    Equal prompts keep their order. With share=False there are no nodes and no groups; the order and `prefill_tokens_min` (a figure of
    the prompts alone) are the same.
    """
    order = depth_first_order(prompts)
    shared = neighbour_lengths(prompts, order)
    used = shared if share else np.zeros_like(shared)
    tree = lcp_intervals(used)
    group_of = lcp_intervals(used // chunk_size * chunk_size).leaf_parent
    prompt_tokens = sum(len(tokens) for tokens in prompts)
    return PrefixPlan(
        order=order,
        nodes=_nodes(tree),
        leaf_parent=tree.leaf_parent,
        prompt_tokens=prompt_tokens,
        prefill_tokens_min=prompt_tokens - int(shared.sum()),
        groups=len(np.unique(group_of[group_of >= 0])),
        grouped_requests=int((group_of >= 0).sum()),
    )


def _nodes(tree: Intervals) -> tuple[PrefixNode, ...]:
    firsts, lasts, ends = tree.first.tolist(), tree.last.tolist(), tree.end.tolist()
    nodes: list[PrefixNode] = []
    for index, parent in enumerate(tree.parent.tolist()):
        start, depth = (ends[parent], nodes[parent].depth + 1) if parent >= 0 else (0, 0)
        nodes.append(PrefixNode(index, parent, start, ends[index], firsts[index], lasts[index], depth))
    return tuple(nodes)


def lcp_intervals(shared: NDArray[np.int64]) -> Intervals:
    """Returns the intervals of the positions 0..n-1. `shared` [n + 1] is what `neighbour_lengths` returns.

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
            if length > top_end:  # the closed positions and the next one share less, but still something
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
    renumbered = np.full(len(by_place) + 1, -1, dtype=np.int64)  # index -1, the extra entry, stays -1
    renumbered[by_place] = np.arange(len(by_place))
    return Intervals(
        first=first[by_place],
        last=last[by_place],
        end=end[by_place],
        parent=renumbered[parent[by_place]],
        leaf_parent=renumbered[leaf_parent],
    )
