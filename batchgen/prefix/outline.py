"""The prefix tree of any number of prompts in outline: the nodes with the most rows, and what is below each of them in sums.

The prompts come one by one in depth-first order. Memory does not grow with their number. A node has more rows than any node below it, so
the nodes that are kept form the top of the tree: whatever is above a kept node is kept too.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.prefix.order import common_length
from batchgen.prefix.survey import Interval, OpenIntervals
from batchgen.request import TokenArray

MAX_NODES = 1000
MAX_TEXT_TOKENS = 1000
"""Number of a node's own tokens that are kept, from its start."""


@dataclass(frozen=True, slots=True, eq=False)
class OutlineNode:
    """A prefix node that is listed. What is below it and not listed is in its sums."""

    parent: int
    """Its parent's place in the list; -1 for a node at the top."""
    rows: int
    ending_rows: int
    """Rows among these that share nothing more with another row."""
    tokens: int
    """Number of its own tokens."""
    saved_tokens: int
    """Prompt tokens that need not be run because the node is shared."""
    nodes_below: int
    """All nodes below it, listed or not."""
    saved_below: int
    """Prompt tokens that need not be run because of these."""
    text_tokens: TokenArray
    """The first of its own tokens, at most `MAX_TEXT_TOKENS`."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixOutline:
    """The top of a prefix tree."""

    rows: int
    prompt_tokens: int
    saved_tokens: int
    """Prompt tokens that need not be run."""
    node_count: int
    """Number of nodes of the whole tree."""
    lone_rows: int
    """Rows that share nothing with another row."""
    nodes: Sequence[OutlineNode]
    """In depth-first order: a parent comes before its children."""


class Outline:
    """Takes prompts in depth-first order, and tells the outline of their prefix tree at any time."""

    def __init__(self, max_nodes: int = MAX_NODES, max_text_tokens: int = MAX_TEXT_TOKENS) -> None:
        self._max_nodes, self._max_text_tokens = max_nodes, max_text_tokens
        self._open = OpenIntervals()
        self._before: TokenArray | None = None
        self._kept: list[tuple[int, int, Interval, TokenArray]] = []
        """A heap, the node with the fewest rows first; of equal ones the one that ended last."""
        self._rows = self._prompt_tokens = self._saved_tokens = self._node_count = self._lone_rows = 0

    def add(self, tokens: TokenArray) -> None:
        """Adds the next prompt in depth-first order."""
        if self._before is not None:
            self._shares(common_length(self._before, tokens))
        self._before = tokens
        self._rows += 1
        self._prompt_tokens += len(tokens)

    def tree(self) -> PrefixOutline:
        """Returns the outline of the prompts so far."""
        whole = copy.copy(self)  # ended here, while this one may go on
        whole._open, whole._kept = self._open.copy(), list(self._kept)
        if whole._before is not None:
            whole._shares(0)
        return PrefixOutline(
            whole._rows, whole._prompt_tokens, whole._saved_tokens, whole._node_count, whole._lone_rows, whole._nodes()
        )

    def _shares(self, length: int) -> None:
        assert self._before is not None
        self._lone_rows += length == 0 and self._open.is_empty
        for node in self._open.shares(length):
            self._node_count += 1
            self._saved_tokens += node.own_saved
            full = len(self._kept) == self._max_nodes
            if not full or node.rows > self._kept[0][0]:
                text = self._before[node.start : min(node.end, node.start + self._max_text_tokens)].copy()
                entry = (node.rows, -self._node_count, node, text)
                (heapq.heapreplace if full else heapq.heappush)(self._kept, entry)

    def _nodes(self) -> list[OutlineNode]:
        nodes: list[OutlineNode] = []
        around: list[tuple[int, Interval]] = []  # nodes that may be above the next one, with their places
        for rows, _, node, text in sorted(self._kept, key=lambda kept: (kept[2].first, kept[2].end)):
            while around and node.first >= around[-1][1].last:
                around.pop()
            parent = around[-1][0] if around else -1
            around.append((len(nodes), node))
            nodes.append(
                OutlineNode(
                    parent=parent,
                    rows=rows,
                    ending_rows=node.own,
                    tokens=node.end - node.start,
                    saved_tokens=node.own_saved,
                    nodes_below=node.nodes,
                    saved_below=node.saved,
                    text_tokens=text,
                )
            )
        return nodes
