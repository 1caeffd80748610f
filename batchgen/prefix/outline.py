"""The prefix tree of any number of prompts in outline: the nodes with the most rows, and what is below each of them in sums.

The prompts come one by one in depth-first order. Memory does not grow with their number. A node has more rows than any node below it, so
the nodes that are kept form the top of the tree: whatever is above a kept node is kept too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.prefix.intervals import OpenIntervals
from batchgen.prefix.order import common_length
from batchgen.prefix.survey import Largest
from batchgen.request import TokenArray

MAX_NODES = 1000
MAX_TEXT_TOKENS = 1000
"""Number of a node's own tokens that are kept, from its start."""


@dataclass(frozen=True, slots=True, eq=False)
class OutlineNode:
    """A prefix node that is listed. Its sums include the nodes below it that are not listed."""

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
    """Prompt tokens that need not be run because these nodes are shared."""
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
    """Takes prompts in depth-first order, and gives the outline of their prefix tree at any time."""

    def __init__(self, max_nodes: int = MAX_NODES, max_text_tokens: int = MAX_TEXT_TOKENS) -> None:
        self._max_text_tokens = max_text_tokens
        self._open = OpenIntervals()
        self._before: TokenArray | None = None
        self._long = False
        self._kept = Largest(max_nodes)
        self._rows = self._prompt_tokens = self._saved_tokens = self._node_count = self._lone_rows = 0

    def add(self, tokens: TokenArray, *, long: bool = False) -> None:
        """Adds the next prompt in depth-first order. A `long` prompt shares nothing with one that is not (`Request.long`)."""
        if self._before is not None:
            self._shares(common_length(self._before, tokens) if long == self._long else 0)
        self._before, self._long = tokens, long
        self._rows += 1
        self._prompt_tokens += len(tokens)

    def tree(self) -> PrefixOutline:
        """Returns the outline of the prompts so far."""
        whole = copy.copy(self)  # ends here; more prompts may be added to this one
        whole._open, whole._kept = copy.deepcopy(self._open), self._kept.copy()
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
            self._kept.see(
                node.rows, node, self._before[node.start : min(node.end, node.start + self._max_text_tokens)]
            )

    def _nodes(self) -> list[OutlineNode]:
        return [
            OutlineNode(
                parent=parent,
                rows=node.rows,
                ending_rows=node.own,
                tokens=node.end - node.start,
                saved_tokens=node.own_saved,
                nodes_below=node.nodes,
                saved_below=node.saved,
                text_tokens=text,
            )
            for parent, node, text in self._kept.as_tree()
        ]
