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
from dataclasses import dataclass
from typing import NamedTuple

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

    queries: NDArray[np.int64]
    """[B, L] places in the packed batch; the number of packed tokens where there is no query."""
    q_positions: NDArray[np.int64]
    """[B, L]"""
    q_ends: NDArray[np.int64]
    """[B, L] the last position that each query sees: its own, except inside of some images"""
    kv_indices: NDArray[np.int64]
    """[B, S] where in the pool each key lies: block * block size + offset."""
    k_positions: NDArray[np.int64]
    """[B, S] `PADDING` where there is no key."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's attention. `T` packed tokens."""

    num_tokens: int
    positions: NDArray[np.int64]
    """[T] each token's position in its sequence."""
    kv_indices: NDArray[np.int64]
    """[T] where in the pool each token's KV goes: block * block size + offset."""
    shared: tuple[SharedPart, ...]
    causal: tuple[CausalPart, ...]
    block_size: int


class QueryChunk(NamedTuple):
    """Consecutive queries of one span: [q_start, q_end) in the packed batch, from position `start`."""

    q_start: int
    q_end: int
    start: int
    table: list[int]
    own_block: int
    """Index in the table of the first block that is not a shared part's."""
    flat: list[tuple[int, int]]
    """Table ranges [from, to) above the own blocks, too small to be a shared part: read with them."""
    ends: NDArray[np.int64]
    """[q_end - q_start] the last position that each query sees"""

    def ranges(self, block_size: int) -> list[tuple[int, int]]:
        """Table ranges [from, to) of the blocks that it reads, in the order of their positions."""
        return [*sorted(self.flat), (self.own_block, int(self.ends.max()) // block_size + 1)]


@dataclass(frozen=True, slots=True)
class StepParts:
    """A step split into shared parts and chunks. Every query is in one chunk; that chunk reads the query's own token."""

    num_tokens: int
    positions: NDArray[np.int64]
    """[T]"""
    ends: NDArray[np.int64]
    """[T] the last position that each token sees"""
    kv_indices: NDArray[np.int64]
    """[T]"""
    shared: list[SharedPart]
    chunks: list[QueryChunk]
    """In the order of their queries."""


def plan_attention(
    spans: Sequence[ScheduledSpan],
    block_size: int,
    shared_reads: int = SHARED_READS,
    causal_chunk: int = CAUSAL_CHUNK,
    causal_scores: int = CAUSAL_SCORES,
) -> AttentionPlan:
    """Returns the attention plan of spans that are in depth-first order."""
    step = split_step(spans, block_size, shared_reads, causal_chunk)
    causal = _causal(step, block_size, causal_scores)
    return AttentionPlan(step.num_tokens, step.positions, step.kv_indices, tuple(step.shared), causal, block_size)


def split_step(spans: Sequence[ScheduledSpan], block_size: int, shared_reads: int, chunk: int = NO_LIMIT) -> StepParts:
    """Splits a step, whose spans are in depth-first order, into shared parts and chunks of at most `chunk` queries of one span."""
    sizes = [w.stop - w.start for w in spans]
    num_tokens = sum(sizes)
    ends = np.cumsum(sizes)
    positions = np.arange(num_tokens) + np.repeat([w.stop for w in spans] - ends, sizes)
    seen = positions
    if any(size > 1 and w.span.images and w.start < w.span.prompt_end for w, size in zip(spans, sizes, strict=True)):
        seen = np.concatenate([last_seen(w.span, w.start, w.stop) for w in spans])
    blocks: list[int] = []
    for scheduled, size in zip(spans, sizes, strict=True):
        if size == 1:
            blocks.append(scheduled.span.table[scheduled.start // block_size])
        else:
            table = np.asarray(scheduled.span.table)
            blocks += table[np.arange(scheduled.start, scheduled.stop) // block_size].tolist()
    kv_indices = np.array(blocks, dtype=np.int64) * block_size + positions % block_size
    parts, flat = _node_parts(spans, sizes, block_size, shared_reads)
    chunks = _query_chunks(spans, seen, flat, parts, block_size, shared_reads, chunk)
    return StepParts(num_tokens, positions, seen, kv_indices, parts, chunks)


def _node_parts(
    spans: Sequence[ScheduledSpan], sizes: list[int], block_size: int, shared_reads: int
) -> tuple[list[SharedPart], list[list[tuple[int, int]]]]:
    """Returns the resident nodes above the spans as shared parts, or as table ranges of each span below them."""
    parts: list[SharedPart] = []
    flat: list[list[tuple[int, int]]] = [[] for _ in spans]
    open_: list[tuple[PrefixNodeSpan, int, int]] = []  # node, first span below it, first query below it

    def close(depth: int, last_span: int, query: int) -> None:
        while len(open_) > depth:
            node_span, first_span, q_start = open_.pop()
            first, last = node_span.start // block_size, node_span.end // block_size
            if first == last:
                continue
            if last_span - first_span > 1 and (query - q_start) * (last - first) >= shared_reads:
                # The span below that has released the fewest blocks. Blocks that the others do not see any more are masked for them.
                span = min((w.span for w in spans[first_span:last_span]), key=lambda span: span.dropped)
                parts.extend(contiguous_parts(span.table, max(first, span.dropped), last, q_start, query, block_size))
            else:
                for i in range(first_span, last_span):
                    flat[i].append((max(first, spans[i].span.dropped), last))

    at = 0
    for i, (scheduled, size) in enumerate(zip(spans, sizes, strict=True)):
        path = scheduled.span.path
        depth = len(open_)
        if depth != len(path) or (depth and open_[-1][0] is not path[-1]):
            depth = 0
            while depth < min(len(open_), len(path)) and open_[depth][0] is path[depth]:
                depth += 1
            close(depth, i, at)
            open_.extend((node_span, i, at) for node_span in path[depth:])
        at += size
    close(0, len(spans), at)
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


def _query_chunks(
    spans: Sequence[ScheduledSpan],
    seen: NDArray[np.int64],
    flat: list[list[tuple[int, int]]],
    parts: list[SharedPart],
    block_size: int,
    shared_reads: int,
    max_queries: int,
) -> list[QueryChunk]:
    """Cuts the spans into chunks of queries. The blocks before a chunk in its own span may become a shared part."""
    chunks: list[QueryChunk] = []
    at = 0
    for scheduled, ranges in zip(spans, flat, strict=True):
        size = scheduled.stop - scheduled.start
        table, own = scheduled.span.table, max(scheduled.span.start // block_size, scheduled.span.dropped)
        for offset in range(0, size, max_queries):
            start = scheduled.start + offset
            q_start, q_end = at + offset, at + min(offset + max_queries, size)
            behind = start // block_size
            if size > 1 and (q_end - q_start) * (behind - own) >= shared_reads:
                parts.extend(contiguous_parts(table, own, behind, q_start, q_end, block_size))
                chunks.append(QueryChunk(q_start, q_end, start, table, behind, ranges, seen[q_start:q_end]))
            else:
                chunks.append(QueryChunk(q_start, q_end, start, table, own, ranges, seen[q_start:q_end]))
        at += size
    return chunks


def _causal(step: StepParts, block_size: int, max_scores: int) -> tuple[CausalPart, ...]:
    """Batches chunks of similar shape, so that padding at most doubles each dimension."""
    shapes: dict[tuple[int, int], list[tuple[QueryChunk, list[int]]]] = {}
    for chunk in step.chunks:
        indices = [i for first, end in chunk.ranges(block_size) for i in range(first, end)]
        shape = ((chunk.q_end - chunk.q_start - 1).bit_length(), (len(indices) - 1).bit_length())
        shapes.setdefault(shape, []).append((chunk, indices))
    parts: list[CausalPart] = []
    for similar in shapes.values():
        L = max(b.q_end - b.q_start for b, _ in similar)
        N = max(len(indices) for _, indices in similar)
        size = max(1, max_scores // (L * N * block_size))
        parts += [_causal_batch(similar[i : i + size], L, N, step, block_size) for i in range(0, len(similar), size)]
    return tuple(parts)


def _causal_batch(
    batch: list[tuple[QueryChunk, list[int]]], L: int, N: int, step: StepParts, block_size: int
) -> CausalPart:
    """`L` queries and `N` blocks of each chunk; a chunk that has fewer is padded."""
    first, end, start = np.array([(c.q_start, c.q_end, c.start) for c, _ in batch], dtype=np.int64).T[:, :, None]
    queries = first + np.arange(L)
    there = queries < end
    places = np.array([indices + [-1] * (N - len(indices)) for _, indices in batch], dtype=np.int64)[:, :, None]
    blocks = np.array(
        [[c.table[i] for i in indices] + [0] * (N - len(indices)) for c, indices in batch], dtype=np.int64
    )
    offsets = np.arange(block_size)
    return CausalPart(
        queries=np.where(there, queries, step.num_tokens),
        q_positions=np.where(there, start + np.arange(L), start),
        q_ends=np.where(there, step.ends[np.minimum(queries, step.num_tokens - 1)], start),
        kv_indices=np.where(places < 0, 0, blocks[:, :, None] * block_size + offsets).reshape(len(batch), -1),
        k_positions=np.where(places < 0, PADDING, places * block_size + offsets).reshape(len(batch), -1),
    )
