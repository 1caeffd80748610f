"""What any number of prompts share: their prefix tree in outline, and their largest groups.

The prompts come one by one in depth-first order. Memory does not grow with their number: of the intervals, those of the largest worth are kept.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchgen.prefix.intervals import Interval, OpenIntervals, nested
from batchgen.request import IMAGE_IDS, TokenArray

MAX_NODES = 1000
MAX_TEXT_TOKENS = 1000
"""Number of a node's own tokens that are kept, from its start."""


class OutlineNode(NamedTuple):
    """A prefix node that is listed."""

    parent: int
    """Its parent's place in the list; -1 for a node at the top."""
    interval: Interval
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
    """Takes prompts in depth-first order, and gives the outline of their prefix tree at any time.

    It has the nodes with the most rows, and what is below each of them in sums. A node has more rows than any node below it, so these form the
    top of the tree: whatever is above a kept node is kept too.
    """

    def __init__(self, max_nodes: int = MAX_NODES, max_text_tokens: int = MAX_TEXT_TOKENS) -> None:
        self._max_text_tokens = max_text_tokens
        self._open, self._kept = OpenIntervals(), Largest(max_nodes)
        self._rows = self._prompt_tokens = self._saved_tokens = self._node_count = self._sharing_rows = 0

    def add(self, tokens: TokenArray, *, long: bool = False) -> None:
        """Adds the next prompt in depth-first order (`OpenIntervals.add`)."""
        self._close(self._open.add(tokens, long=long))
        self._rows += 1
        self._prompt_tokens += len(tokens)

    def tree(self) -> PrefixOutline:
        """Returns the outline of the prompts so far."""
        whole = copy.copy(self)  # ends here; more prompts may be added to this one
        whole._open, whole._kept = copy.deepcopy(self._open), self._kept.copy()
        whole._close(whole._open.end())
        return PrefixOutline(
            rows=whole._rows,
            prompt_tokens=whole._prompt_tokens,
            saved_tokens=whole._saved_tokens,
            node_count=whole._node_count,
            lone_rows=whole._rows - whole._sharing_rows,
            nodes=list(whole._kept.as_tree()),
        )

    def _close(self, closed: Iterable[tuple[Interval, TokenArray]]) -> None:
        for node, prompt in closed:
            self._node_count += 1
            self._saved_tokens += node.saved_tokens
            self._sharing_rows += 0 if node.start else node.rows
            self._kept.see(node.rows, node, prompt[node.start : min(node.end, node.start + self._max_text_tokens)])


@dataclass(frozen=True, slots=True)
class GroupLine:
    """Prompts that have the same longest shared prefix of whole chunks.

    Groups nest: the prompts of an outer group are those that share nothing deeper. There may be a single one, which shares its prefix with
    prompts of the inner groups.
    """

    hash: str
    """`prefix_hash` of the prefix, in hexadecimal."""
    prefix_tokens: int
    """A multiple of the chunk size."""
    rows: int
    """At least 1. Prompts of inner groups do not count."""


class GroupSurvey:
    """Counts the groups of prompts, and keeps the `max_groups` that save the most."""

    def __init__(self, chunk_size: int, max_groups: int) -> None:
        self.groups = self.grouped = 0
        """Number of groups, and of prompts that are in a group."""
        self._chunk_size = chunk_size
        self._open, self._kept = OpenIntervals(chunk_size), Largest(max_groups)

    def add(self, tokens: TokenArray, *, long: bool = False) -> None:
        """Adds the next prompt in depth-first order (`OpenIntervals.add`)."""
        self._close(self._open.add(tokens, long=long))

    def end(self) -> list[GroupLine]:
        """Must be called after the last prompt. Returns the kept groups, the largest first."""
        self._close(self._open.end())
        return [
            GroupLine(prefix_hash(path, self._chunk_size).hex(), group.end, group.ending_rows)
            for group, path in self._kept.largest_first()
        ]

    def _close(self, closed: Iterable[tuple[Interval, TokenArray]]) -> None:
        for group, prompt in closed:
            if group.ending_rows:
                self.groups += 1
                self.grouped += group.ending_rows
                self._kept.see(group.ending_rows * group.end, group, prompt[: group.end])


def prefix_hash(tokens: TokenArray, chunk_size: int) -> bytes:
    """Identifies a prefix of whole chunks in 16 bytes, the same in every window and on every machine.

    Hashes are chained: that of a prefix is blake2b-128 of the hash of the prefix before it (nothing for the first) and the last chunk's tokens
    as little-endian int32 (int64 if some of them stand for images).
    """
    found = b""
    for start in range(0, len(tokens), chunk_size):
        chunk = tokens[start : start + chunk_size]
        kind = "<i4" if chunk.dtype == np.int32 or chunk.max() < IMAGE_IDS else "<i8"
        found = hashlib.blake2b(found + chunk.astype(kind, copy=False).tobytes(), digest_size=16).digest()
    return found


class Largest:
    """The intervals of the largest worth, each with some tokens. Of intervals of equal worth, those that were seen first are kept."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._heap: list[tuple[int, int, Interval, TokenArray]] = []
        """(worth, minus the count of entries so far, interval, tokens): of equal worth, the newest is the smallest."""
        self._num_kept = 0

    def see(self, worth: int, interval: Interval, tokens: TokenArray) -> None:
        """Keeps the interval, and a copy of the tokens, if it is among the largest so far."""
        full = len(self._heap) == self._max_count
        if not full or worth > self._heap[0][0]:
            self._num_kept += 1
            entry = (worth, -self._num_kept, interval, tokens.copy())
            (heapq.heapreplace if full else heapq.heappush)(self._heap, entry)

    def largest_first(self) -> list[tuple[Interval, TokenArray]]:
        kept = sorted(self._heap, key=lambda entry: (-entry[0], entry[2].first))
        return [(interval, tokens) for _, _, interval, tokens in kept]

    def as_tree(self) -> Iterator[OutlineNode]:
        """Yields the kept intervals in depth-first order. The parent of one is the smallest kept interval around it."""
        tokens = {id(interval): its for _, _, interval, its in self._heap}
        for parent, interval in nested(interval for _, _, interval, _ in self._heap):
            yield OutlineNode(parent, interval, tokens[id(interval)])

    def copy(self) -> Largest:
        """Returns a copy that does not change with this one."""
        copied = Largest(self._max_count)
        copied._heap, copied._num_kept = list(self._heap), self._num_kept
        return copied
