"""The prefix tree of a window's prompts and the plan made of it: every token that prompts share, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.prefix.groups import Group, find_groups
from batchgen.prefix.intervals import Intervals, lcp_intervals
from batchgen.prefix.order import depth_first_order, neighbour_lengths
from batchgen.request import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class PrefixNode:
    """A run of tokens that two or more requests share: maximal, nothing branches and no prompt ends inside it."""

    index: int
    """Its place in `PrefixPlan.nodes`."""
    parent: int
    """Index of the node before it on its path, -1 for none."""
    start: int
    end: int
    """Positions [start, end) on its path are its own tokens; start is its parent's end, or 0."""
    first: int
    last: int
    """Requests below it: positions first..last (exclusive) in depth-first order."""
    depth: int
    """Number of nodes above it."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """The prefix tree of a window, and its requests in depth-first order.

    The tokens of a node are `prompts[order[node.first]][node.start:node.end]`; those that a request at position i has
    for itself begin at the end of `nodes[leaf_parent[i]]` (at 0 where that is -1) and may be none.
    """

    order: NDArray[np.int64]
    """[requests] order[i] is the index, among the prompts as given, of the i-th request in depth-first order."""
    nodes: tuple[PrefixNode, ...]
    """Sorted by (first, depth): a parent before its children."""
    leaf_parent: NDArray[np.int64]
    """[requests] by depth-first position: index of the deepest node above the request, -1 for none."""
    prompt_tokens: int
    """Sum over the prompts."""
    prefill_tokens_min: int
    """Size of the token trie of the prompts: the nodes' tokens and each request's own."""
    groups: tuple[Group, ...]
    chunk_size: int


def plan_prefixes(prompts: Sequence[TokenArray], chunk_size: int, *, share: bool = True) -> PrefixPlan:
    """Plans a window. Prompts have at least one token each; `ValueError` otherwise.

    Equal prompts keep the order they came in. With share=False there are no nodes and no groups; the order and
    `prefill_tokens_min`, which is a figure of the prompts, are the same.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    for index, tokens in enumerate(prompts):
        if len(tokens) == 0:
            raise ValueError(f"prompt {index} has no tokens")
    order = depth_first_order(prompts)
    shared = neighbour_lengths(prompts, order)
    tree = lcp_intervals(shared if share else np.zeros_like(shared))
    prompt_tokens = sum(len(tokens) for tokens in prompts)
    return PrefixPlan(
        order=order,
        nodes=_nodes(tree),
        leaf_parent=tree.leaf_parent,
        prompt_tokens=prompt_tokens,
        prefill_tokens_min=prompt_tokens - int(shared.sum()),
        groups=find_groups(prompts, order, shared, chunk_size) if share else (),
        chunk_size=chunk_size,
    )


def _nodes(tree: Intervals) -> tuple[PrefixNode, ...]:
    firsts, lasts, ends = tree.first.tolist(), tree.last.tolist(), tree.end.tolist()
    nodes: list[PrefixNode] = []
    for index, parent in enumerate(tree.parent.tolist()):
        start, depth = (ends[parent], nodes[parent].depth + 1) if parent >= 0 else (0, 0)
        nodes.append(PrefixNode(index, parent, start, ends[index], firsts[index], lasts[index], depth))
    return tuple(nodes)
