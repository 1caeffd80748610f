"""The intervals of prompts in depth-first order, known from suffix arrays as LCP intervals: what neighbours share. They are the nodes of the prefix tree.

One pass holds only the open ones, so memory does not grow with the number of prompts. Lengths in whole chunks give the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batchgen.prefix.order import common_length
from batchgen.request import TokenArray


@dataclass(slots=True)
class Interval:
    """Prompts first..last (exclusive) share `end` tokens. They share the first `start` of these with other prompts, too."""

    first: int
    end: int
    ending_rows: int = 0
    """Number of prompts in no deeper interval."""
    last: int = -1
    start: int = 0
    nodes_below: int = 0
    """Number of intervals inside it."""
    saved_below: int = 0
    """Prompt tokens that need not be run because intervals inside it are shared."""

    @property
    def rows(self) -> int:
        return self.last - self.first

    @property
    def tokens(self) -> int:
        """Number of its own tokens."""
        return self.end - self.start

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that need not be run because its own tokens are shared."""
        return self.tokens * (self.rows - 1)


class OpenIntervals:
    """The intervals that the next prompt may still belong to, each deeper than the one below it. Lengths are whole multiples of `chunk_size`."""

    def __init__(self, chunk_size: int = 1) -> None:
        self._chunk_size = chunk_size
        self._stack: list[Interval] = []
        self._count = 0
        self._before: tuple[TokenArray, bool] | None = None

    def add(self, tokens: TokenArray, *, long: bool) -> Iterator[tuple[Interval, TokenArray]]:
        """Takes the next prompt. Yields the intervals that end before it, each with a prompt in it. A `long` prompt shares nothing with one that
        is not (`Request.long`)."""
        before, self._before = self._before, (tokens, long)
        if before is not None:
            length = common_length(before[0], tokens) if before[1] == long else 0
            for interval in self.shares(length // self._chunk_size * self._chunk_size):
                yield interval, before[0]

    def end(self) -> Iterator[tuple[Interval, TokenArray]]:
        """Yields the intervals that end with the last prompt."""
        if self._before is not None:
            for interval in self.shares(0):
                yield interval, self._before[0]

    def shares(self, length: int) -> Iterator[Interval]:
        """Takes the number of tokens that the next prompt shares with the one after it (0 if it is the last). Yields the intervals that end there."""
        stack, position = self._stack, self._count
        self._count += 1
        if length > self._top_end:
            stack.append(Interval(position, length))
        if stack:
            stack[-1].ending_rows += 1
        while self._top_end > length:
            closed = stack.pop()
            if length > self._top_end:
                stack.append(Interval(closed.first, length))
            closed.last, closed.start = position + 1, self._top_end
            if stack:
                stack[-1].nodes_below += 1 + closed.nodes_below
                stack[-1].saved_below += closed.saved_tokens + closed.saved_below
            yield closed

    @property
    def _top_end(self) -> int:
        return self._stack[-1].end if self._stack else 0


def nested(intervals: Iterable[Interval]) -> Iterator[tuple[int, Interval]]:
    """Yields (parent, interval) in depth-first order. `parent`: place in this order of the smallest of the intervals around it, or -1."""
    around: list[tuple[int, Interval]] = []
    for place, interval in enumerate(sorted(intervals, key=lambda interval: (interval.first, interval.end))):
        while around and interval.first >= around[-1][1].last:
            around.pop()
        yield around[-1][0] if around else -1, interval
        around.append((place, interval))
