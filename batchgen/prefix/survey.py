"""The groups of any number of prompts, which come one by one in depth-first order, and the intervals of the largest worth.

Memory does not grow with the number of prompts.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchgen.prefix.intervals import Interval, OpenIntervals, nested
from batchgen.prefix.order import common_length
from batchgen.request import IMAGE_IDS, TokenArray


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
        self._open, self._kept = OpenIntervals(), Largest(max_groups)
        self._before: TokenArray | None = None
        self._long = False

    def add(self, tokens: TokenArray, *, long: bool = False) -> None:
        """Adds the next prompt in depth-first order. A `long` prompt shares nothing with one that is not (`Request.long`)."""
        if self._before is not None:
            self._shares(common_length(self._before, tokens) if long == self._long else 0)
        self._before, self._long = tokens, long

    def end(self) -> list[GroupLine]:
        """Must be called after the last prompt. Returns the kept groups, the largest first."""
        if self._before is not None:
            self._shares(0)
        return [
            GroupLine(prefix_hash(path, self._chunk_size).hex(), group.end, group.own)
            for group, path in self._kept.largest_first()
        ]

    def _shares(self, length: int) -> None:
        assert self._before is not None
        for group in self._open.shares(length // self._chunk_size * self._chunk_size):
            if group.own:
                self.groups += 1
                self.grouped += group.own
                self._kept.see(group.own * group.end, group, self._before[: group.end])


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

    def as_tree(self) -> Iterator[tuple[int, Interval, TokenArray]]:
        """Yields (parent, interval, tokens) in depth-first order. `parent`: place in this order of the smallest kept interval around it, or -1."""
        tokens = {id(interval): its for _, _, interval, its in self._heap}
        for parent, interval in nested(interval for _, _, interval, _ in self._heap):
            yield parent, interval, tokens[id(interval)]

    def copy(self) -> Largest:
        """Returns a copy that does not change with this one."""
        copied = Largest(self._max_count)
        copied._heap, copied._num_kept = list(self._heap), self._num_kept
        return copied
