"""What each query of a step attends to, cut into parts. Integers only: lists and numpy arrays, no tensors.

Two kinds of part (Hydragen, arXiv:2402.05099; FlashInfer cascade, arXiv:2501.01005):
- shared: whole blocks that a contiguous slice of the packed queries sees without a mask: a prefix node under its
  descendants, or the part of a long prompt before the slice that runs;
- causal: the queries of one span, of a decoding sequence a single one, against that span's blocks that no shared part covers, its own
  tokens among them, under a causal mask.

Every query is in exactly one causal part, which holds its own token, and in any number of shared parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from batchgen.scheduling.batch import ScheduledSpan
from batchgen.scheduling.sequence import PrefixNodeSpan, last_seen

CAUSAL_CHUNK = 256
"""Maximum number of queries in a causal part. The keys before a chunk in its own span need no mask and are read as a shared part."""
SHARED_READS = 64
"""A run of blocks becomes a shared part where queries x blocks reaches this (CPU, benchmarks/NOTES.md)."""
CAUSAL_SCORES = 1 << 16
"""Maximum number of (query, key) pairs in a causal batch, for each head. It bounds the memory of the scores."""
NO_LIMIT = 1 << 62
PADDING = np.int64(1) << 40  # the position of a key that is not there: after every query

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedPart:
    """`num_blocks` blocks that follow one another in the pool from `block`, read by queries [q_start, q_end) whole."""

    block: int
    num_blocks: int
    q_start: int
    q_end: int
    position: int
    """Position of the first key."""


@dataclass(frozen=True, slots=True)
class CausalPart:
    """Chunks of queries, each with the keys of its own span, padded to a rectangle: `B` chunks, `L` queries, `S` keys."""

    queries: Ints
    """[B, L] places in the packed batch; the number of packed tokens where there is no query."""
    q_positions: Ints
    """[B, L]"""
    q_ends: Ints
    """[B, L] the last position that each query sees: its own, except inside of some images"""
    kv_indices: Ints
    """[B, S] where in the pool each key lies: block * block size + offset."""
    k_positions: Ints
    """[B, S] `PADDING` where there is no key."""


@dataclass(frozen=True, slots=True)
class QueryChunks:
    """Chunks of consecutive queries of one span. `C` chunks, in the order of their queries; arrays are [C]."""

    q_starts: Ints
    q_ends: Ints
    """Queries [q_start, q_end) of the packed batch."""
    starts: Ints
    """Position of the first query."""
    ends: Ints
    """The last position that one of its queries sees."""
    first_blocks: Ints
    """Index in the table of the first block that is the span's own."""
    own_blocks: Ints
    """Index in the table of the first block that is not a shared part's."""
    tables: list[list[int]]
    """By chunk: its span's block table."""
    flat: dict[int, list[tuple[int, int]]]
    """By number of a chunk: table ranges [from, to) above the own blocks, too small to be a shared part: read with them."""

    def ranges(self, block_size: int) -> list[tuple[int, int, int]]:
        """Returns the table ranges that the chunks read, in the order of chunks and positions: (chunk, from, to)."""
        ends = self.ends // block_size + 1
        found = list(zip(range(len(ends)), self.own_blocks.tolist(), ends.tolist(), strict=True))
        for i in sorted(self.flat, reverse=True):
            found[i:i] = [(i, first, end) for first, end in sorted(self.flat[i])]
        return found

    def blocks(self, ranges: Sequence[tuple[int, int, int]]) -> Ints:
        """Returns the blocks of table ranges, one after the other."""
        found = chain.from_iterable(self.tables[i][first:end] for i, first, end in ranges)
        return np.fromiter(found, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's attention, split into shared parts and chunks. Every query is in one chunk; that chunk reads the query's own token. `T` packed tokens."""

    num_tokens: int
    block_size: int
    positions: Ints
    """[T] each token's position in its sequence."""
    ends: Ints
    """[T] the last position that each token sees: its own, except inside of some images"""
    kv_indices: Ints
    """[T] where in the pool each token's KV goes: block * block size + offset."""
    shared: tuple[SharedPart, ...]
    chunks: QueryChunks
    causal: tuple[CausalPart, ...] = ()
    """The chunks in batches, for plain torch (`plan_attention`)."""


def plan_attention(
    spans: Sequence[ScheduledSpan],
    block_size: int,
    shared_reads: int = SHARED_READS,
    causal_chunk: int = CAUSAL_CHUNK,
    causal_scores: int = CAUSAL_SCORES,
) -> AttentionPlan:
    """Returns the attention plan of spans that are in depth-first order, with its chunks in batches."""
    plan = split_step(spans, block_size, shared_reads, causal_chunk)
    return replace(plan, causal=_causal(plan, causal_scores))


def split_step(
    spans: Sequence[ScheduledSpan], block_size: int, shared_reads: int, chunk: int = NO_LIMIT
) -> AttentionPlan:
    """Splits a step, whose spans are in depth-first order, into shared parts and chunks of at most `chunk` queries of one span."""
    sizes = np.array([w.stop - w.start for w in spans], dtype=np.int64)
    begins = np.cumsum(sizes) - sizes
    num_tokens = int(sizes.sum())
    starts, number = repeated(np.array([w.start for w in spans], dtype=np.int64), sizes)
    positions = starts + number
    long = np.flatnonzero(sizes > 1).tolist()
    seen = positions
    if any(spans[i].span.images and spans[i].start < spans[i].span.prompt_end for i in long):
        seen = np.concatenate([last_seen(w.span, w.start, w.stop) for w in spans])
    blocks = _blocks_of(spans, positions // block_size, begins.tolist(), long)
    dropped = [w.span.dropped for w in spans]
    parts, flat = _node_parts(spans, begins.tolist(), num_tokens, dropped, block_size, shared_reads)
    firsts = np.maximum(np.array([w.span.start for w in spans], dtype=np.int64) // block_size, dropped)
    of, q_starts, q_ends = _cut(begins, sizes, chunk)
    chunks = QueryChunks(
        q_starts=q_starts,
        q_ends=q_ends,
        starts=positions[q_starts],
        ends=np.maximum.reduceat(seen, q_starts),
        first_blocks=firsts[of],
        own_blocks=firsts[of],
        tables=[spans[i].span.table for i in of.tolist()],
        flat={i: flat[span] for i, span in enumerate(of.tolist()) if span in flat},
    )
    parts += _own_parts(chunks, block_size, shared_reads)
    kv_indices = blocks * block_size + positions % block_size
    return AttentionPlan(num_tokens, block_size, positions, seen, kv_indices, tuple(parts), chunks)


def _blocks_of(spans: Sequence[ScheduledSpan], entries: Ints, begins: list[int], long: list[int]) -> Ints:
    """Returns the block [T] of each token, whose entry of its span's table is in `entries`. `begins`: the spans' first tokens. `long`: the spans that
    have several."""
    blocks = np.empty(len(entries), dtype=np.int64)
    blocks[begins] = [w.span.table[entry] for w, entry in zip(spans, entries[begins].tolist(), strict=True)]
    for i in long:
        begin, end = begins[i], begins[i] + spans[i].stop - spans[i].start
        blocks[begin:end] = np.asarray(spans[i].span.table)[entries[begin:end]]
    return blocks


def _node_parts(
    spans: Sequence[ScheduledSpan],
    begins: list[int],
    num_tokens: int,
    dropped: list[int],
    block_size: int,
    shared_reads: int,
) -> tuple[list[SharedPart], dict[int, list[tuple[int, int]]]]:
    """Returns the resident nodes above the spans as shared parts, or as table ranges, by number of a span below them.

    `begins`: the spans' first tokens. `dropped`: the blocks that they have released.
    """
    parts: list[SharedPart] = []
    flat: dict[int, list[tuple[int, int]]] = {}
    open_: list[tuple[PrefixNodeSpan, int]] = []  # node, first span below it

    def close(depth: int, end: int) -> None:
        """Closes nodes whose last span is the one before `end`."""
        query = begins[end] if end < len(spans) else num_tokens
        while len(open_) > depth:
            node_span, begin = open_.pop()
            first, last = node_span.start // block_size, node_span.end // block_size
            if first == last:
                continue
            if end - begin > 1 and (query - begins[begin]) * (last - first) >= shared_reads:
                # The span below that has released the fewest blocks. Blocks that the others do not see any more are masked for them.
                fewest = min(dropped[begin:end])
                table = spans[dropped.index(fewest, begin)].span.table
                parts.extend(contiguous_parts(table, max(first, fewest), last, begins[begin], query, block_size))
            else:
                for i in range(begin, end):
                    if dropped[i] < last:
                        flat.setdefault(i, []).append((max(first, dropped[i]), last))

    paths = [w.span.path for w in spans]
    lowest = [path[-1] if path else None for path in paths]
    for i, path in enumerate(paths):
        if i and lowest[i] is lowest[i - 1]:
            continue
        depth = 0
        while depth < min(len(open_), len(path)) and open_[depth][0] is path[depth]:
            depth += 1
        close(depth, i)
        open_.extend((node_span, i) for node_span in path[depth:])
    close(0, len(spans))
    return parts, flat


def contiguous_parts(
    table: list[int], first: int, last: int, q_start: int, q_end: int, block_size: int
) -> list[SharedPart]:
    """Returns table entries [first, last) as parts whose blocks are contiguous in the pool."""
    parts: list[SharedPart] = []
    begin = first
    for i in range(first + 1, last + 1):  # no part if first >= last: all blocks were released
        if i == last or table[i] != table[i - 1] + 1:
            parts.append(SharedPart(table[begin], i - begin, q_start, q_end, begin * block_size))
            begin = i
    return parts


def _cut(begins: Ints, sizes: Ints, max_queries: int) -> tuple[Ints, Ints, Ints]:
    """Cuts spans of `sizes` tokens into chunks of at most `max_queries`. Returns the span of each chunk, and its queries [from, to)."""
    of, number = repeated(np.arange(len(sizes)), -(-sizes // max_queries))
    q_starts = begins[of] + number * max_queries
    return of, q_starts, np.minimum(q_starts + max_queries, (begins + sizes)[of])


def repeated(rows: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Returns each row repeated `counts` times, and the number of each copy among its row's copies."""
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(rows, counts, axis=0), number


def _own_parts(chunks: QueryChunks, block_size: int, shared_reads: int) -> list[SharedPart]:
    """Returns the blocks before a chunk in its own span as shared parts, where they are large enough. The chunk's own blocks begin behind them then."""
    parts: list[SharedPart] = []
    counts, behind = chunks.q_ends - chunks.q_starts, chunks.starts // block_size
    for i in np.flatnonzero((counts > 1) & (counts * (behind - chunks.first_blocks) >= shared_reads)).tolist():
        first, last, begin, end = (
            int(numbers[i]) for numbers in (chunks.first_blocks, behind, chunks.q_starts, chunks.q_ends)
        )
        parts += contiguous_parts(chunks.tables[i], first, last, begin, end, block_size)
        chunks.own_blocks[i] = last
    return parts


def _causal(plan: AttentionPlan, max_scores: int) -> tuple[CausalPart, ...]:
    """Batches chunks of similar shape, so that padding at most doubles each dimension."""
    chunks, block_size = plan.chunks, plan.block_size
    indices: list[list[int]] = [[] for _ in chunks.tables]
    for i, first, end in chunks.ranges(block_size):
        indices[i] += range(first, end)
    lengths = (chunks.q_ends - chunks.q_starts).tolist()
    shapes: dict[tuple[int, int], list[int]] = {}
    for i, length in enumerate(lengths):
        shapes.setdefault(((length - 1).bit_length(), (len(indices[i]) - 1).bit_length()), []).append(i)
    parts: list[CausalPart] = []
    for similar in shapes.values():
        L = max(lengths[i] for i in similar)
        N = max(len(indices[i]) for i in similar)
        size = max(1, max_scores // (L * N * block_size))
        for at in range(0, len(similar), size):
            parts.append(_causal_batch(similar[at : at + size], indices, L, N, plan))
    return tuple(parts)


def _causal_batch(batch: list[int], indices: list[list[int]], L: int, N: int, plan: AttentionPlan) -> CausalPart:
    """`L` queries and `N` blocks of each chunk of the batch; a chunk that has fewer is padded. `indices`: by chunk, the table entries that it reads."""
    chunks, block_size = plan.chunks, plan.block_size
    first, end, start = (numbers[batch][:, None] for numbers in (chunks.q_starts, chunks.q_ends, chunks.starts))
    queries = first + np.arange(L)
    there = queries < end
    padding = [[-1] * (N - len(indices[i])) for i in batch]
    places = np.array([indices[i] + more for i, more in zip(batch, padding, strict=True)], dtype=np.int64)[:, :, None]
    tables = [[chunks.tables[i][entry] for entry in indices[i]] for i in batch]
    blocks = np.array([table + more for table, more in zip(tables, padding, strict=True)], dtype=np.int64)
    offsets = np.arange(block_size)
    return CausalPart(
        queries=np.where(there, queries, plan.num_tokens),
        q_positions=np.where(there, start + np.arange(L), start),
        q_ends=np.where(there, plan.ends[np.minimum(queries, plan.num_tokens - 1)], start),
        kv_indices=np.where(places < 0, 0, blocks[:, :, None] * block_size + offsets).reshape(len(batch), -1),
        k_positions=np.where(places < 0, PADDING, places * block_size + offsets).reshape(len(batch), -1),
    )
