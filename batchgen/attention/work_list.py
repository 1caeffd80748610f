"""A step's attention as a work list for a persistent kernel: who reads which pages, in items of about equal cost. numpy only.

An item is a tile of consecutive packed queries and a range of keys at consecutive positions. A shared part gives an item for
each tile of its queries, a span's own pages one for each tile of its own. Long ranges are split, so that all of the device is
busy; a query of several items gets its result from the merge of their partial ones (FlashInfer, arXiv:2501.01005).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from batchgen.attention.plan import Block, Cuts, SharedPart
from batchgen.scheduling.batch import Work

Q_START, Q_COUNT, PAGES, NUM_KEYS, FIRST_VISIBLE, POSITION, PARTIAL = range(7)
"""Columns of an item: packed queries [Q_START, Q_START + Q_COUNT); PAGES, the index of its first page; NUM_KEYS from the beginning
of that page on, of which query j sees those before FIRST_VISIBLE + j; POSITION of the first; PARTIAL, the row of its first
query's partial result, -1 where the result is whole."""
HEADER = 16
"""int32 before all else in a plan: how many items there are, and where things are. Positions follow, as int64."""
FIELDS = 8
"""int32 of an item: its columns, padded to 32 bytes."""
ALL = 1 << 30
"""FIRST_VISIBLE where every query sees every key."""
ITEM_KEYS = 64
"""What an item costs besides its keys, in keys. To be measured."""
EVEN = 1.1
"""A lane counts as balanced when its busiest program has at most so many times its share."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lane:
    """One launch of the kernel: tiles of one size."""

    tokens: int
    """Most queries of an item."""
    programs: int
    """The kernel's grid: program p takes the units p, p + programs and so on."""
    heads: int
    """Key/value heads: each item is so many units."""
    least_keys: int
    """A range is not split into shorter ones."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """A step's items. `T` packed tokens."""

    wide: Ints
    """[N, FIELDS], the costly ones first."""
    narrow: Ints
    """[N, FIELDS] of the lane for few queries, such as one that is decoding."""
    pages: Ints
    """Pages of the pool, which PAGES indexes."""
    merge_starts: Ints
    """[T + 1] where each token's partial results begin in `merge_rows`; it has none where its result is whole."""
    merge_rows: Ints
    num_partials: int


def work_list(works: Sequence[Work], cuts: Cuts, page_size: int, wide: Lane, narrow: Lane) -> WorkList:
    """The items of a step that was cut with one block for each work.

    A work that fills a wide tile by itself reads its block table from end to end: a shared part would save it nothing, and
    cost a merge.
    """
    ranges = _Ranges(page_size)
    whole = _own(works, cuts.blocks, wide.tokens, ranges)
    _shared(cuts, whole, ranges)
    rows = np.array(ranges.rows, dtype=np.int64)
    few = rows[:, Q_COUNT] <= narrow.tokens
    lanes = [_split(_tile(rows[of], lane.tokens), lane, page_size) for of, lane in ((~few, wide), (few, narrow))]
    items = np.concatenate(lanes)
    starts, merged = _merges(items, cuts.num_tokens)
    pages = np.fromiter(chain.from_iterable(ranges.pages), dtype=np.int64, count=ranges.num_pages)
    return WorkList(items[: len(lanes[0])], items[len(lanes[0]) :], pages, starts, merged, len(merged))


class _Ranges:
    """Queries and a range of keys that they read, before they are tiled and split."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        """Columns Q_START to POSITION."""
        self.pages: list[Iterable[int]] = []
        self.num_pages = 0

    def add(self, q_start: int, q_count: int, pages: Sequence[int], num_keys: int, visible: int, position: int) -> None:
        self.rows.append((q_start, q_count, self.num_pages, num_keys, visible, position))
        self.pages.append(pages)
        self.num_pages += len(pages)


def _own(works: Sequence[Work], blocks: list[Block], whole_tokens: int, ranges: _Ranges) -> list[tuple[int, int]]:
    """Adds what each work reads of its own block table; gives the queries of those that read all of it."""
    size = ranges.page_size
    whole: list[tuple[int, int]] = []
    for work, block in zip(works, blocks, strict=True):
        span, start, stop = work.span, work.start, work.stop
        table, q_start, count = span.table, block.q_start, stop - start
        first, end = span.dropped, (stop - 1) // size + 1
        if count >= whole_tokens:
            whole.append((q_start, block.q_end))
        else:
            first = max(span.start // size, first)
            if block.flat:
                (first, _), *above = _runs(block.flat, first, end)
                for lower, upper in above:
                    ranges.add(q_start, count, table[lower:upper], (upper - lower) * size, ALL, lower * size)
        at = first * size
        ranges.add(q_start, count, table[first:end], stop - at, start + 1 - at, at)
    return whole


def _runs(flat: list[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """Table ranges whose positions follow one another, the last first: what lies between them is a shared part."""
    runs = [(first, end)]
    for lower, upper in sorted(flat, reverse=True):
        if upper == runs[-1][0] and lower < upper:
            runs[-1] = (lower, runs[-1][1])
        elif lower < upper:
            runs.append((lower, upper))
    return runs


def _shared(cuts: Cuts, whole: list[tuple[int, int]], ranges: _Ranges) -> None:
    """Adds the shared parts that several works read, without the queries that read their own block table."""
    starts = [block.q_start for block in cuts.blocks]
    for parts in _adjoining(cuts.shared, ranges.page_size):
        q_start, q_end = parts[0].q_start, parts[0].q_end
        if cuts.blocks[bisect_right(starts, q_start) - 1].q_end >= q_end:
            continue  # what one work has behind it: `_own` has it
        pages = [page for part in parts for page in range(part.page, part.page + part.num_pages)]
        for begin, end in _without(q_start, q_end, whole):
            ranges.add(begin, end - begin, pages, len(pages) * ranges.page_size, ALL, parts[0].position)


def _adjoining(parts: list[SharedPart], page_size: int) -> Iterator[list[SharedPart]]:
    """Parts that differ in nothing but their place in the pool, together."""
    together: list[SharedPart] = []
    for part in parts:
        if together:
            last = together[-1]
            if (last.q_start, last.q_end, last.position + last.num_pages * page_size) != (
                part.q_start, part.q_end, part.position,
            ):  # fmt: skip
                yield together
                together = []
        together.append(part)
    if together:
        yield together


def _without(start: int, end: int, holes: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """[start, end) without the holes, which are in order and each inside of it or outside."""
    for begin, stop in holes[bisect_right(holes, (start, -1)) :]:
        if begin >= end:
            break
        if start < begin:
            yield start, begin
        start = stop
    if start < end:
        yield start, end


def _tile(rows: Ints, tokens: int) -> Ints:
    """[R, 6] ranges as items [N, FIELDS] of at most so many queries."""
    items = np.zeros((len(rows), FIELDS), dtype=np.int64)
    items[:, : rows.shape[1]] = rows
    items, number = _repeated(items, -(-rows[:, Q_COUNT] // tokens))
    first = number * tokens
    items[:, Q_START] += first
    items[:, Q_COUNT] = np.minimum(items[:, Q_COUNT] - first, tokens)
    items[:, FIRST_VISIBLE] += first
    items[:, NUM_KEYS] = np.minimum(items[:, NUM_KEYS], items[:, FIRST_VISIBLE] + items[:, Q_COUNT] - 1)
    return items


def _split(items: Ints, lane: Lane, page_size: int) -> Ints:
    """Splits the keys of items so that none holds up the others; costly ones come first, those of the same keys together."""
    longest = _longest(items[:, NUM_KEYS], lane)
    pages = -(-items[:, NUM_KEYS] // page_size)
    counts = np.minimum(-(-items[:, NUM_KEYS] // longest), pages)
    items, number = _repeated(items, counts)
    pages, counts = np.repeat(pages, counts), np.repeat(counts, counts)
    first, end = number * pages // counts, (number + 1) * pages // counts
    items[:, PAGES] += first
    items[:, NUM_KEYS] = np.minimum(items[:, NUM_KEYS], end * page_size) - first * page_size
    items[:, FIRST_VISIBLE] -= first * page_size
    items[:, POSITION] += first * page_size
    return items[np.lexsort((items[:, Q_START], items[:, PAGES], -items[:, NUM_KEYS]))]


def _longest(keys: Ints, lane: Lane) -> int:
    """Most keys of an item: the fewest splits with which no program works much longer than its share, or the best there are."""
    most = int(keys.max(initial=1))
    share = keys.sum() * lane.heads / lane.programs + ITEM_KEYS
    best = (np.inf, -most)
    for splits in range(1, most // lane.least_keys + 1):
        longest = -(-most // splits)
        counts = -(-keys // longest)
        sizes = np.sort(np.repeat(keys / counts, counts))[::-1] + ITEM_KEYS
        busiest = sizes[np.arange(0, len(sizes) * lane.heads, lane.programs) // lane.heads].sum()
        best = min(best, (busiest, -longest))
        if best[0] <= EVEN * share or len(sizes) * lane.heads > 4 * lane.programs:
            break
    return -best[1]


def _repeated(rows: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Each row so many times, and its number among its copies."""
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(rows, counts, axis=0), number


def _merges(items: Ints, num_tokens: int) -> tuple[Ints, Ints]:
    """Sets PARTIAL; gives `merge_starts` and `merge_rows`."""
    begin, count = items[:, Q_START], items[:, Q_COUNT]
    change = np.bincount(begin, minlength=num_tokens + 1) - np.bincount(begin + count, minlength=num_tokens + 1)
    several = np.concatenate([[0], np.cumsum(np.cumsum(change)[:-1] > 1)])  # tokens before that are in several items
    partial = several[begin + count] > several[begin]
    sizes = np.where(partial, count, 0)
    items[:, PARTIAL] = np.where(partial, np.cumsum(sizes) - sizes, -1)
    first, number = _repeated(begin[partial], count[partial])
    tokens = first + number
    starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=num_tokens))])
    return starts, np.argsort(tokens, kind="stable")
