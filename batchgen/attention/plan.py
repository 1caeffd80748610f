"""What each query of a step attends to, cut into parts. Integers only: lists and numpy arrays, no tensors.

Three kinds of part (Hydragen, arXiv:2402.05099; FlashInfer cascade, arXiv:2501.01005):
- shared: whole pages that a contiguous slice of the packed queries sees without a mask: a prefix node under its
  descendants, or what a long prompt has already behind the slice being run;
- paged: the pages of one decoding query that no shared part covers, each page a batch element of its own;
- causal: several queries of one span against that span's pages, its own tokens among them, under a causal mask.

Every query is in exactly one paged or causal part, which holds its own token, and in any number of shared parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.scheduling.batch import Work
from batchgen.scheduling.sequence import Branch

CAUSAL_BLOCK = 256
"""Most queries of one causal part: what lies before them in their span is unmasked and read as a shared part."""
SHARED_READS = 64
"""A run of pages becomes a shared part where queries x pages reaches this (CPU, benchmarks/NOTES.md)."""
CAUSAL_SCORES = 1 << 16
"""Most (query, key) pairs of one causal batch, for each head: bounds the scores in memory."""
NO_LIMIT = 1 << 62
PADDING = np.int64(1) << 40  # the position of a key that is not there: after every query


@dataclass(frozen=True, slots=True)
class SharedPart:
    """`num_pages` pages that follow one another in the pool from `page`, read by queries [q_start, q_end) whole."""

    page: int
    num_pages: int
    q_start: int
    q_end: int
    position: int
    """Position of the first key."""


@dataclass(frozen=True, slots=True)
class PagedPart:
    """Pages read by one decoding query each, sorted by query. `Q` queries, `R` page reads."""

    queries: NDArray[np.int64]
    """[Q] places in the packed batch."""
    pages: NDArray[np.int64]
    """[R] pages of the pool."""
    owners: NDArray[np.int64]
    """[R] index into `queries`."""
    lengths: NDArray[np.int64]
    """[R] keys of the page that exist, 1 to page size."""
    positions: NDArray[np.int64]
    """[R] position of the page's first key."""


@dataclass(frozen=True, slots=True)
class CausalPart:
    """Blocks of queries, each with the keys of its own span, padded to a rectangle: `B` blocks, `L` queries, `S` keys."""

    queries: NDArray[np.int64]
    """[B, L] places in the packed batch; the number of packed tokens where there is no query."""
    q_positions: NDArray[np.int64]
    """[B, L]"""
    keys: NDArray[np.int64]
    """[B, S] places in the pool (page * page size + offset)."""
    k_positions: NDArray[np.int64]
    """[B, S] `PADDING` where there is no key."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's attention. `T` packed tokens."""

    num_tokens: int
    positions: NDArray[np.int64]
    """[T] each token's position in its sequence."""
    slots: NDArray[np.int64]
    """[T] the place in the pool (page * page size + offset) that each token's KV goes to."""
    shared: tuple[SharedPart, ...]
    paged: PagedPart | None
    causal: tuple[CausalPart, ...]
    page_size: int


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive queries of one span: [q_start, q_end) in the packed batch, from position `start`."""

    q_start: int
    q_end: int
    start: int
    table: list[int]
    own_page: int
    """Index in the table of the first page that is not a shared part's."""
    flat: list[tuple[int, int]]
    """Table ranges [from, to) above the own pages, too small to be a shared part: read with them."""

    def indices(self, page_size: int) -> list[int]:
        """Indices in the table of the pages that it reads, in the order of their positions."""
        last = (self.start + self.q_end - self.q_start - 1) // page_size
        own = range(self.own_page, last + 1)
        return [*(i for first, end in self.flat for i in range(first, end)), *own] if self.flat else list(own)


@dataclass(frozen=True, slots=True)
class Cuts:
    """A step cut into shared parts and blocks; every query is in one block, which has its own token among its pages."""

    num_tokens: int
    positions: NDArray[np.int64]
    """[T]"""
    slots: NDArray[np.int64]
    """[T]"""
    shared: list[SharedPart]
    blocks: list[Block]
    """In the order of their queries."""


def plan_attention(works: Sequence[Work], page_size: int, shared_reads: int = SHARED_READS) -> AttentionPlan:
    """Plans a step whose works are in depth-first order."""
    cuts = cut(works, page_size, shared_reads, CAUSAL_BLOCK)
    paged = _paged([b for b in cuts.blocks if b.q_end - b.q_start == 1], page_size)
    causal = _causal([b for b in cuts.blocks if b.q_end - b.q_start > 1], cuts.num_tokens, page_size)
    return AttentionPlan(cuts.num_tokens, cuts.positions, cuts.slots, tuple(cuts.shared), paged, causal, page_size)


def cut(works: Sequence[Work], page_size: int, shared_reads: int, block: int = NO_LIMIT) -> Cuts:
    """Cuts a step whose works are in depth-first order, into blocks of at most `block` queries of one span."""
    sizes = [w.stop - w.start for w in works]
    num_tokens = sum(sizes)
    positions = np.concatenate([np.arange(w.start, w.stop) for w in works])
    slots = np.empty(num_tokens, dtype=np.int64)
    at = 0
    for work, size in zip(works, sizes, strict=True):
        if size == 1:
            page, offset = divmod(work.start, page_size)
            slots[at] = work.span.table[page] * page_size + offset
        else:
            place = positions[at : at + size]
            table = np.asarray(work.span.table, dtype=np.int64)
            slots[at : at + size] = table[place // page_size] * page_size + place % page_size
        at += size
    parts, flat = _node_parts(works, sizes, page_size, shared_reads)
    blocks = _blocks(works, sizes, flat, parts, page_size, shared_reads, block)
    return Cuts(num_tokens, positions, slots, parts, blocks)


def _node_parts(
    works: Sequence[Work], sizes: list[int], page_size: int, shared_reads: int
) -> tuple[list[SharedPart], list[list[tuple[int, int]]]]:
    """The resident nodes above the works: as shared parts, or listed with each work below (table ranges)."""
    parts: list[SharedPart] = []
    flat: list[list[tuple[int, int]]] = [[] for _ in works]
    open_: list[tuple[Branch, int, int]] = []  # branch, first work below it, first query below it

    def close(depth: int, work: int, query: int) -> None:
        while len(open_) > depth:
            branch, first_work, q_start = open_.pop()
            first, last = branch.start // page_size, branch.end // page_size
            if first == last:
                continue
            if work - first_work > 1 and (query - q_start) * (last - first) >= shared_reads:
                # Of the spans below, that which has given back least: what others see no more is masked for them.
                span = min((w.span for w in works[first_work:work]), key=lambda span: span.dropped)
                parts.extend(_runs(span.table, max(first, span.dropped), last, q_start, query, page_size))
            else:
                for w in range(first_work, work):
                    flat[w].append((max(first, works[w].span.dropped), last))

    at = 0
    for i, (work, size) in enumerate(zip(works, sizes, strict=True)):
        path = work.span.path
        depth = len(open_)
        if depth != len(path) or (depth and open_[-1][0] is not path[-1]):
            depth = 0
            while depth < min(len(open_), len(path)) and open_[depth][0] is path[depth]:
                depth += 1
            close(depth, i, at)
            open_.extend((branch, i, at) for branch in path[depth:])
        at += size
    close(0, len(works), at)
    return parts, flat


def _runs(table: list[int], first: int, last: int, q_start: int, q_end: int, page_size: int) -> list[SharedPart]:
    """Table entries [first, last) as parts of pages that follow one another in the pool."""
    parts: list[SharedPart] = []
    begin = first
    for i in range(first + 1, last + 1):  # none where first >= last: all of it was given back
        if i == last or table[i] != table[i - 1] + 1:
            parts.append(SharedPart(table[begin], i - begin, q_start, q_end, begin * page_size))
            begin = i
    return parts


def _blocks(
    works: Sequence[Work],
    sizes: list[int],
    flat: list[list[tuple[int, int]]],
    parts: list[SharedPart],
    page_size: int,
    shared_reads: int,
    most: int,
) -> list[Block]:
    """Cuts the works into blocks of queries; what a block has behind it in its own span may become a shared part."""
    blocks: list[Block] = []
    at = 0
    for work, size, ranges in zip(works, sizes, flat, strict=True):
        table, own = work.span.table, max(work.span.start // page_size, work.span.dropped)
        for offset in range(0, size, most):
            start = work.start + offset
            q_start, q_end = at + offset, at + min(offset + most, size)
            behind = start // page_size
            if size > 1 and (q_end - q_start) * (behind - own) >= shared_reads:
                parts.extend(_runs(table, own, behind, q_start, q_end, page_size))
                blocks.append(Block(q_start, q_end, start, table, behind, ranges))
            else:
                blocks.append(Block(q_start, q_end, start, table, own, ranges))
        at += size
    return blocks


def _paged(blocks: list[Block], page_size: int) -> PagedPart | None:
    if not blocks:
        return None
    pages: list[int] = []
    owners: list[int] = []
    lengths: list[int] = []
    indices: list[int] = []
    for q, block in enumerate(blocks):
        before = len(pages)
        for first, last in block.flat:
            pages += block.table[first:last]
            indices += range(first, last)
        last = block.start // page_size
        pages += block.table[block.own_page : last + 1]
        indices += range(block.own_page, last + 1)
        reads = len(pages) - before
        owners += [q] * reads
        lengths += [page_size] * (reads - 1)
        lengths.append(block.start - last * page_size + 1)
    return PagedPart(
        queries=np.array([b.q_start for b in blocks], dtype=np.int64),
        pages=np.array(pages, dtype=np.int64),
        owners=np.array(owners, dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        positions=np.array(indices, dtype=np.int64) * page_size,
    )


def _causal(blocks: list[Block], num_tokens: int, page_size: int) -> tuple[CausalPart, ...]:
    """Batches blocks of similar shape, so that padding costs at most half."""
    shapes: dict[tuple[int, int], list[tuple[Block, list[int]]]] = {}
    for block in blocks:
        indices = block.indices(page_size)
        shape = ((block.q_end - block.q_start - 1).bit_length(), (len(indices) - 1).bit_length())
        shapes.setdefault(shape, []).append((block, indices))
    parts: list[CausalPart] = []
    for similar in shapes.values():
        L = max(b.q_end - b.q_start for b, _ in similar)
        S = max(len(indices) for _, indices in similar) * page_size
        most = max(1, CAUSAL_SCORES // (L * S))
        parts += [
            _causal_batch(similar[i : i + most], L, S, num_tokens, page_size) for i in range(0, len(similar), most)
        ]
    return tuple(parts)


def _causal_batch(batch: list[tuple[Block, list[int]]], L: int, S: int, num_tokens: int, page_size: int) -> CausalPart:
    B = len(batch)
    part = CausalPart(
        queries=np.full((B, L), num_tokens, dtype=np.int64),
        q_positions=np.zeros((B, L), dtype=np.int64),
        keys=np.zeros((B, S), dtype=np.int64),
        k_positions=np.full((B, S), PADDING, dtype=np.int64),
    )
    offsets = np.arange(page_size)
    for b, (block, indices) in enumerate(batch):
        count = block.q_end - block.q_start
        part.queries[b, :count] = np.arange(block.q_start, block.q_end)
        part.q_positions[b, :count] = np.arange(block.start, block.start + count)
        part.q_positions[b, count:] = block.start
        pages = np.array([block.table[i] for i in indices], dtype=np.int64)
        size = len(indices) * page_size
        part.keys[b, :size] = (pages[:, None] * page_size + offsets).reshape(-1)
        part.k_positions[b, :size] = (np.array(indices)[:, None] * page_size + offsets).reshape(-1)
    return part
