"""The prefix tree of a window's prompts: every token that prompts share appears in exactly one node.

Its nodes are the intervals (`intervals`) of the prompts in depth-first order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.prefix.intervals import Interval, OpenIntervals, nested
from batchgen.prefix.order import depth_first_order, neighbour_lengths
from batchgen.request import Leaf, Request, TokenArray, leaves_of


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


def plan_prefixes(prompts: Sequence[TokenArray], chunk_size: int, *, share: bool = True) -> PrefixPlan:
    """Returns the plan of a window. No prompt may be empty.

    Equal prompts keep their order. With share=False there are no nodes and no groups; the order and `prefill_tokens_min` (a figure of
    the prompts alone) are the same.
    """
    order = depth_first_order(prompts)
    shared = neighbour_lengths(prompts, order)
    nodes: list[PrefixNode] = []
    leaf_parent = np.full(len(order), -1, dtype=np.int64)
    for index, (parent, one) in enumerate(nested(_intervals(shared) if share else ())):
        depth = nodes[parent].depth + 1 if parent >= 0 else 0
        nodes.append(PrefixNode(index, parent, one.start, one.end, one.first, one.last, depth))
        leaf_parent[one.first : one.last] = index
    groups = (
        [one.ending_rows for one in _intervals(shared // chunk_size * chunk_size) if one.ending_rows] if share else []
    )
    prompt_tokens = sum(len(tokens) for tokens in prompts)
    return PrefixPlan(
        order=order,
        nodes=tuple(nodes),
        leaf_parent=leaf_parent,
        prompt_tokens=prompt_tokens,
        prefill_tokens_min=prompt_tokens - int(shared.sum()),
        groups=len(groups),
        grouped_requests=sum(groups),
    )


def plan_requests(requests: Iterable[Request], chunk_size: int, *, share: bool = True) -> tuple[list[Leaf], PrefixPlan]:
    """Returns the leaves of requests, and their plan."""
    leaves = leaves_of(requests)
    return leaves, plan_prefixes([leaf.tokens for leaf in leaves], chunk_size, share=share)


def _intervals(shared: NDArray[np.int64]) -> Iterator[Interval]:
    """Yields the intervals of prompts in depth-first order. `shared`: `neighbour_lengths`."""
    opened = OpenIntervals()
    for length in shared[1:].tolist():
        yield from opened.shares(length)
