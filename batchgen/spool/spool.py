"""The requests of a whole input, put in depth-first order in constant memory.

An external merge sort: requests are collected into runs that fit in memory, each sorted and written as a file; the runs are then merged by
blocks (all that is known to come before the end of the block that ends first is next). Where everything fits one run, no file is made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from batchgen.prefix.order import common_length, depth_first_order
from batchgen.records.disk import reading, writing
from batchgen.records.writers import DigestFile
from batchgen.request import Request
from batchgen.spool.blocks import Block, cut, read_blocks, sort_key, write_blocks

RUN_ROWS = 50_000
WINDOW_ROWS = 20_000
MOST_TOKENS = 1 << 24
"""A run, and a window, has about so many rows, or the rows that have about so many tokens. A waiting row is small beside one that is planned."""
MOST_RUNS = 64
"""Merged at a time."""


class Spool:
    """Takes requests in any order, gives them back in windows: by priority, then depth-first. `folder` is there, and the spool's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[Request] = []
        self._tokens = 0
        self._made = 0
        self._runs: list[str] = []
        self.digests: dict[str, str] = {}
        """Of the files of runs, by name."""

    @classmethod
    def of(cls, folder: Path, digests: dict[str, str]) -> Spool:
        """The spool that an earlier process left, whose `digests` these were."""
        spool = cls(folder)
        spool.digests, spool._runs = digests, list(digests)
        return spool

    @property
    def on_disk(self) -> bool:
        return bool(self._runs)

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self._tokens += len(request.tokens)
        if len(self._waiting) > RUN_ROWS or self._tokens > MOST_TOKENS:
            *full, last = self._waiting  # one over: as many as a run takes stay in memory
            self._write_run(full or [last])
            self._waiting, self._tokens = ([last], len(last.tokens)) if full else ([], 0)

    def close(self) -> None:
        """No more requests will come."""
        if self._runs and self._waiting:
            self._write_run(self._waiting)
            self._waiting = []
        while len(self._runs) > MOST_RUNS:
            first, self._runs = self._runs[:MOST_RUNS], self._runs[MOST_RUNS:]
            merged = (r for piece in self._merged(first) for r in _in_order(piece))
            self._write(merged)
            for name in first:
                (self._folder / name).unlink()
                del self.digests[name]

    def windows(self) -> Iterator[list[Request]]:
        """All requests, each window being what comes next in the order; inside a window the order means nothing."""
        window: list[Request] = []
        tokens = 0
        for piece in self._merged(self._runs) if self._runs else self._blocks():
            size = sum(len(r.tokens) for r in piece.requests)
            if window and (len(window) + len(piece.requests) > WINDOW_ROWS or tokens + size > MOST_TOKENS):
                ordered = _in_order(piece)
                cut = _best_cut(ordered)
                yield window + ordered[:cut]
                window = ordered[cut:]
                tokens = sum(len(r.tokens) for r in window)
            else:
                window += piece.requests
                tokens += size
        if window:
            yield window

    def _write_run(self, requests: Sequence[Request]) -> None:
        self._write(_sorted(requests))

    def _blocks(self) -> Iterator[Block]:
        """What is in memory."""
        ordered, self._waiting = _sorted(self._waiting), []
        for block in cut(ordered):
            yield Block(block, [sort_key(r) for r in block])

    def _write(self, requests: Iterable[Request]) -> None:
        name = f"run-{self._made:05d}"
        self._made += 1
        with writing(self._folder), closing(DigestFile(self._folder / name)) as file:
            write_blocks(requests, file)
            file.sync()
            self.digests[name] = file.hexdigest()
        self._runs.append(name)

    def _merged(self, names: Sequence[str]) -> Iterator[Block]:
        with reading(self._folder), ExitStack() as files:
            runs = [_Head(read_blocks(files.enter_context((self._folder / name).open("rb")))) for name in names]
            yield from merged([run for run in runs if run.advance()])


@dataclass(slots=True, eq=False)
class _Head:
    """A run, and its block that is next."""

    blocks: Iterator[Block]
    block: Block = None  # type: ignore[assignment]  # set by the first `advance`
    at: int = 0

    def advance(self) -> bool:
        """To the next block; False where there is none."""
        block = next(self.blocks, None)
        if block is not None:
            self.block, self.at = block, 0
        return block is not None


def merged(runs: list[_Head]) -> Iterator[Block]:
    """Pieces of the merged order, each unsorted inside: whatever comes before the end of the block that ends first."""
    while runs:
        upto = min(run.block.keys[-1] for run in runs)
        piece = Block([], [])
        left = []
        for run in runs:
            end = bisect_right(run.block.keys, upto, run.at)
            piece.requests += run.block.requests[run.at : end]
            piece.keys += run.block.keys[run.at : end]
            run.at = end
            if end < len(run.block.keys) or run.advance():
                left.append(run)
        runs = left
        yield piece


def _sorted(requests: Sequence[Request]) -> list[Request]:
    ordered = [requests[i] for i in depth_first_order([r.tokens for r in requests]).tolist()]
    return sorted(ordered, key=lambda r: r.priority)


def _best_cut(ordered: Sequence[Request]) -> int:
    """Where the least is shared: a prefix of which a window has one row only is no node there, and would be run again in the next."""
    shared = [common_length(a.tokens, b.tokens) for a, b in pairwise(ordered)]
    return 1 + shared.index(min(shared)) if shared else 0


def _in_order(piece: Block) -> list[Request]:
    return [request for _, request in sorted(zip(piece.keys, piece.requests, strict=True), key=itemgetter(0))]
