"""Turns a step's attention into a work list for a persistent kernel: which queries read which blocks, in items of about equal cost. numpy only.

An item is a tile of consecutive packed queries and a range of keys at consecutive positions. A shared part gives an item for each tile of
its queries, and a span's own blocks give one for each tile of the span. Long ranges are split, so that the whole device is busy. If a query
is in several items, their partial results are merged (FlashInfer, arXiv:2501.01005).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from batchgen.attention.plan import AttentionPlan, Ints, QueryChunks, SharedPart, repeated
from batchgen.scheduling.batch import ScheduledSpan

Q_START, Q_COUNT, BLOCK_TABLE, NUM_KEYS, FIRST_VISIBLE, POSITION, PARTIAL = range(7)
"""Columns of an item: packed queries [Q_START, Q_START + Q_COUNT); BLOCK_TABLE, the index of its first block; NUM_KEYS from the beginning
of that block on, of which query j sees those before FIRST_VISIBLE + j; POSITION of the first key; PARTIAL, the row of its first
query's partial result, -1 if the result is complete."""
HEADER = 16
"""Words at the beginning of a plan: the number of items, and where the lists are. Positions (int64) follow."""
FIELDS = 8
"""Words of an item: its columns, padded to 32 bytes."""
ALL = 1 << 30
"""FIRST_VISIBLE of items whose queries see every key."""
ITEM_KEYS = 64
"""The usual cost of an item beside its keys, counted in keys. Not measured."""
EVEN = 1.1
"""A lane is balanced if its busiest program has at most this multiple of the average work."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One launch of the kernel: tiles of one size."""

    tokens: int
    """Maximum number of queries of an item."""
    programs: int
    """The kernel's grid: program p takes the units p, p + programs and so on."""
    heads: int
    """Key/value heads; an item is a unit of work for each."""
    min_keys: int
    """Ranges are not split into parts with fewer keys."""
    item_keys: int = ITEM_KEYS
    """The fixed cost of an item, counted in keys."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """A step's items. `T` packed tokens."""

    wide: Ints
    """[N, FIELDS] items, the most expensive first."""
    narrow: Ints
    """[N, FIELDS] items of the lane for few queries, such as a decoding sequence's."""
    blocks: Ints
    """Blocks of the pool, which BLOCK_TABLE indexes."""
    merge_starts: Ints
    """[T + 1] where each token's partial results begin in `merge_rows`. A token whose result is complete has none."""
    merge_rows: Ints
    num_partials: int


def work_list(spans: Sequence[ScheduledSpan], plan: AttentionPlan, wide: Lane, narrow: Lane) -> WorkList:
    """Returns the items of a step that was split into one chunk for each span.

    A span that fills a wide tile by itself reads its whole block table: a shared part would save nothing and cost a merge.
    """
    ranges = _Ranges(plan.block_size)
    own, whole = _own(spans, plan.chunks, wide.tokens, ranges)
    _shared(plan, whole, ranges)
    rows = np.concatenate([own, np.array(ranges.rows, dtype=np.int64).reshape(-1, own.shape[1])])
    few = rows[:, Q_COUNT] <= narrow.tokens
    lanes = [_split(_tile(rows[of], lane.tokens), lane, plan.block_size) for of, lane in ((~few, wide), (few, narrow))]
    items = np.concatenate(lanes)
    starts, merged = _merges(items, plan.num_tokens)
    blocks = np.fromiter(chain.from_iterable(ranges.blocks), dtype=np.int64)
    return WorkList(items[: len(lanes[0])], items[len(lanes[0]) :], blocks, starts, merged, len(merged))


class _Ranges:
    """Queries and a range of keys that they read, before they are tiled and split."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        """Columns Q_START to POSITION."""
        self.blocks: list[Iterable[int]] = []
        self.num_blocks = 0

    def add(
        self, q_start: int, q_count: int, blocks: Sequence[int], num_keys: int, visible: int, position: int
    ) -> None:
        self.rows.append((q_start, q_count, self.num_blocks, num_keys, visible, position))
        self.blocks.append(blocks)
        self.num_blocks += len(blocks)


def _own(
    spans: Sequence[ScheduledSpan], chunks: QueryChunks, whole_tokens: int, ranges: _Ranges
) -> tuple[Ints, list[tuple[int, int]]]:
    """Returns the ranges [C, 6] that the spans read through their own block tables, the last of each span's, and the queries of the spans that read
    all of it. The ranges above the last are added to `ranges`, and all blocks.
    """
    size = ranges.block_size
    counts = chunks.q_ends - chunks.q_starts
    stops = chunks.starts + counts
    firsts, ends = chunks.first_blocks.copy(), (stops - 1) // size + 1
    long = np.flatnonzero(counts >= whole_tokens).tolist()
    for i in long:
        firsts[i] = spans[i].span.dropped
    for i in chunks.flat.keys() - set(long):
        (firsts[i], _), *above = _runs(chunks.flat[i], int(firsts[i]), int(ends[i]))
        for lower, upper in above:
            blocks = chunks.tables[i][lower:upper]
            ranges.add(int(chunks.q_starts[i]), int(counts[i]), blocks, len(blocks) * size, ALL, lower * size)
    lengths, at = ends - firsts, firsts * size
    begins = ranges.num_blocks + np.cumsum(lengths) - lengths
    ranges.blocks += [table[f:e] for table, f, e in zip(chunks.tables, firsts.tolist(), ends.tolist(), strict=True)]
    ranges.num_blocks += int(lengths.sum())
    rows = np.stack([chunks.q_starts, counts, begins, stops - at, chunks.starts + 1 - at, at], axis=1)
    return rows, [(int(chunks.q_starts[i]), int(chunks.q_ends[i])) for i in long]


def _runs(flat: list[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """Returns table ranges with consecutive positions, the last first. The gaps between them are shared parts."""
    runs = [(first, end)]
    for lower, upper in sorted(flat, reverse=True):
        if upper == runs[-1][0] and lower < upper:
            runs[-1] = (lower, runs[-1][1])
        elif lower < upper:
            runs.append((lower, upper))
    return runs


def _shared(plan: AttentionPlan, whole: list[tuple[int, int]], ranges: _Ranges) -> None:
    """Adds the shared parts that several spans read, without the queries that read their own whole block table."""
    starts, ends = plan.chunks.q_starts.tolist(), plan.chunks.q_ends.tolist()
    for parts in _adjoining(plan.shared, ranges.block_size):
        q_start, q_end = parts[0].q_start, parts[0].q_end
        if ends[bisect_right(starts, q_start) - 1] >= q_end:
            continue  # read by one span alone, so `_own` has added it
        blocks = [block for part in parts for block in range(part.block, part.block + part.num_blocks)]
        for begin, end in _without(q_start, q_end, whole):
            ranges.add(begin, end - begin, blocks, len(blocks) * ranges.block_size, ALL, parts[0].position)


def _adjoining(parts: Sequence[SharedPart], block_size: int) -> Iterator[list[SharedPart]]:
    """Groups the parts that differ only in their place in the pool."""
    together: list[SharedPart] = []
    for part in parts:
        if together:
            last = together[-1]
            if (last.q_start, last.q_end, last.position + last.num_blocks * block_size) != (
                part.q_start, part.q_end, part.position,
            ):  # fmt: skip
                yield together
                together = []
        together.append(part)
    if together:
        yield together


def _without(start: int, end: int, holes: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Returns [start, end) without the holes. The holes are in order, and each is either inside or outside of the range."""
    for begin, stop in holes[bisect_right(holes, (start, -1)) :]:
        if begin >= end:
            break
        if start < begin:
            yield start, begin
        start = stop
    if start < end:
        yield start, end


def _tile(rows: Ints, tokens: int) -> Ints:
    """Returns ranges [R, 6] as items [N, FIELDS] of at most `tokens` queries."""
    items = np.zeros((len(rows), FIELDS), dtype=np.int64)
    items[:, : rows.shape[1]] = rows
    items, number = repeated(items, -(-rows[:, Q_COUNT] // tokens))
    first = number * tokens
    items[:, Q_START] += first
    items[:, Q_COUNT] = np.minimum(items[:, Q_COUNT] - first, tokens)
    items[:, FIRST_VISIBLE] += first
    items[:, NUM_KEYS] = np.minimum(items[:, NUM_KEYS], items[:, FIRST_VISIBLE] + items[:, Q_COUNT] - 1)
    return items


def _split(items: Ints, lane: Lane, block_size: int) -> Ints:
    """Splits the keys of items so that the programs' work is even. Expensive items come first; items with the same keys are together."""
    longest = _longest(items[:, NUM_KEYS], lane)
    blocks = -(-items[:, NUM_KEYS] // block_size)
    counts = np.minimum(-(-items[:, NUM_KEYS] // longest), blocks)
    items, number = repeated(items, counts)
    blocks, counts = np.repeat(blocks, counts), np.repeat(counts, counts)
    first, end = number * blocks // counts, (number + 1) * blocks // counts
    items[:, BLOCK_TABLE] += first
    items[:, NUM_KEYS] = np.minimum(items[:, NUM_KEYS], end * block_size) - first * block_size
    items[:, FIRST_VISIBLE] -= first * block_size
    items[:, POSITION] += first * block_size
    return items[np.lexsort((items[:, Q_START], items[:, BLOCK_TABLE], -items[:, NUM_KEYS]))]


def _longest(keys: Ints, lane: Lane) -> int:
    """Returns the maximum number of keys of an item: the largest that balances the lane, or the best one if none does."""
    largest = int(keys.max(initial=1))
    share = keys.sum() * lane.heads / lane.programs + lane.item_keys
    best = (np.inf, -largest)
    for splits in range(1, largest // lane.min_keys + 1):
        longest = -(-largest // splits)
        counts = -(-keys // longest)
        sizes = np.sort(np.repeat(keys / counts, counts))[::-1] + lane.item_keys
        busiest = sizes[np.arange(0, len(sizes) * lane.heads, lane.programs) // lane.heads].sum()
        best = min(best, (busiest, -longest))
        if best[0] <= EVEN * share or len(sizes) * lane.heads > 4 * lane.programs:
            break
    return -best[1]


def _merges(items: Ints, num_tokens: int) -> tuple[Ints, Ints]:
    """Sets PARTIAL of the items. Returns `merge_starts` and `merge_rows`."""
    begin, count = items[:, Q_START], items[:, Q_COUNT]
    change = np.bincount(begin, minlength=num_tokens + 1) - np.bincount(begin + count, minlength=num_tokens + 1)
    several = np.concatenate([[0], np.cumsum(np.cumsum(change)[:-1] > 1)])  # tokens before that are in several items
    partial = several[begin + count] > several[begin]
    sizes = np.where(partial, count, 0)
    items[:, PARTIAL] = np.where(partial, np.cumsum(sizes) - sizes, -1)
    first, number = repeated(begin[partial], count[partial])
    tokens = first + number
    starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=num_tokens))])
    return starts, np.argsort(tokens, kind="stable")
