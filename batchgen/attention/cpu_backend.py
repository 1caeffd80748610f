"""Attention on the CPU with batchgen's kernels (kernels/src/attention.cpp), in float32 and bfloat16.

The pool's layout puts side by side what the kernels' products read together: a block of a head's keys is
[D/u, block_size, u] and of its values [block_size/u, V, u], with u elements to a 32-bit word, D rounded up to whole words and V to 16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.attention.base import LayerOptions
from batchgen.attention.kv_cache import KVCache, LayerShape
from batchgen.attention.plan import contiguous_parts, repeated, split_step
from batchgen.kernels.build import integers, kernel, pointers
from batchgen.kernels.ops import Call, Heads, adjacent
from batchgen.scheduling.batch import ScheduledSpan

VECTOR = 16
"""Keys that are read at a time; blocks have a multiple of it."""
TILE_ROWS = 64
"""About how many query heads of neighbouring tokens read keys together."""
SHARED_READS = 2
"""A run of blocks becomes a shared part if queries x blocks reaches this."""
ENCODER_BLOCK = 64
"""Tokens of a block in `SegmentAttention`."""


def storage(layers: dict[int, LayerShape], dtype: torch.dtype) -> dict[int, LayerShape]:
    """Returns the layers' shapes in the pool, with sizes rounded up."""
    word = 4 // dtype.itemsize
    return {
        i: replace(s, k_size=-(-s.k_size // word) * word, v_size=-(-s.v_size // VECTOR) * VECTOR)
        for i, s in layers.items()
    }


class _Plan(ctypes.Structure):
    """`Plan` of attention.cpp."""

    _fields_ = [
        *integers("num_tokens", "block_size", "num_shared", "num_chunks", "tile"),
        *pointers("positions", "ends", "kv_indices", "shared", "chunks", "blocks", "starts"),
    ]


class _Layer(ctypes.Structure):
    """`Layer` of attention.cpp."""

    _fields_ = [
        *pointers("plan"),
        *integers("threads"),
        *integers("heads", "kv_heads", "size", "v_size", "num_blocks", "sliding_window"),
        *integers("q_head", "q_token", "k_head", "k_token", "v_head", "v_token"),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *pointers("sinks", "q", "k", "v", "keys", "values", "out", "rows"),
    ]


class PackedAttention:
    """The attention of a step as the model's layers call it: writes their KV, then attends by the plan."""

    def __init__(
        self,
        spans: Sequence[ScheduledSpan],
        cache: KVCache,
        narrowed: tuple[int, NDArray[np.int64]] | None = None,
    ) -> None:
        """`narrowed`: the first layer of which only some tokens' results are wanted, and the places of these tokens in the step."""
        size = cache.block_size
        split = split_step(spans, size, SHARED_READS)
        self.positions = split.positions
        self.num_parts = len(split.shared) + 1
        self.cache = cache
        chunks, parts = split.chunks, list(split.shared)
        for i in [i for i in chunks.flat if chunks.q_ends[i] - chunks.q_starts[i] > 1]:
            # The kernel reads all shared parts before a chunk's own blocks.
            queries = int(chunks.q_starts[i]), int(chunks.q_ends[i])
            for first, last in chunks.flat.pop(i):
                parts += contiguous_parts(chunks.tables[i], first, last, *queries, size)
        ranges = chunks.ranges(size)
        of, firsts, ends = np.array(ranges, dtype=np.int64).T
        lengths = ends - firsts
        begins = np.cumsum(lengths) - lengths
        indices, number = repeated(firsts, lengths)
        starts = np.append(chunks.q_starts, split.num_tokens)
        block_starts = np.append(begins[np.searchsorted(of, np.arange(len(chunks.tables)))], lengths.sum())
        shared = sorted(
            ((p.block, p.num_blocks, p.q_start, p.q_end, p.position) for p in parts), key=lambda part: part[-1]
        )
        arrays: tuple[Any, ...] = (
            split.positions,
            split.ends,
            split.kv_indices,
            shared,
            np.stack([starts, block_starts], axis=1),
            chunks.blocks(ranges),
            (indices + number) * size,
        )
        self._arrays = [np.ascontiguousarray(a, dtype=np.int32) for a in arrays]  # kept for as long as the plan is used
        counts = (split.num_tokens, size, len(shared), len(chunks.tables))
        self._counts, self._pointers = counts, tuple(a.ctypes.data for a in self._arrays)
        self._plans: dict[tuple[int, bool], _Plan] = {}  # by the size of a tile and `LayerOptions.causal`
        self._narrowed = None if narrowed is None else narrowed[0]
        self._wanted = np.arange(0) if narrowed is None else narrowed[1]
        self._rows = np.full((2, split.num_tokens), -1, dtype=np.int32)
        """The rows of the wanted tokens: among all, and among themselves."""
        self._rows[:, self._wanted] = self._wanted, np.arange(len(self._wanted))

    def wanted(self, layer: int) -> torch.Tensor | None:
        """Returns the places in the step of the tokens whose results of a layer are wanted; None if all are.

        The kernel computes only these, but writes the keys and values of all tokens.
        """
        return torch.from_numpy(self._wanted) if self._is_narrowed(layer) else None

    def _is_narrowed(self, layer: int) -> bool:
        return self._narrowed is not None and layer >= self._narrowed

    def __call__(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTV: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Returns the layer's attention output [T, H, V], 0 for tokens that are not `wanted`.

        If the queries are those of the wanted tokens alone, so is the output.
        """
        wanted = self.wanted(layer)
        q, k, v = map(adjacent, (q_HTD, k_KTD, v_KTV))
        out = q.new_empty((q.shape[1], q.shape[0], v.shape[2]))
        compact = wanted is not None and q.shape[1] < k.shape[1]
        if wanted is not None and not compact:
            out.zero_()
        heads = Heads.of(q), Heads.of(k), Heads.of(v)
        prepared = self.prepared(layer, heads, out.data_ptr(), q.dtype, options, compact)
        self.take_over(prepared)
        prepared.call.run()
        return out

    def prepared(
        self, layer: int, heads: tuple[Heads, Heads, Heads], out: int, dtype: torch.dtype, options: LayerOptions, compact: bool = False
    ) -> LayerAttention:  # fmt: skip
        """Returns one layer's attention in any step with this cache, with the step's tokens at these places.

        `out`: address for the output [T, H, V]. Keys and values at 0 are those of an earlier layer. `compact`: queries and the output are
        those of the wanted tokens alone.
        """
        return LayerAttention(self.cache, layer, heads, out, options, dtype, compact)

    def take_over(self, prepared: LayerAttention) -> None:
        """Makes a layer's attention that of this step, which must be kept until it has run."""
        kind = prepared.tile, prepared.causal
        plan = self._plans.get(kind)
        if plan is None:
            positions, ends, *others = self._pointers
            ends = positions if prepared.causal else ends
            plan = self._plans[kind] = _Plan(*self._counts, prepared.tile, positions, ends, *others)
        rows = self._rows[int(prepared.compact)].ctypes.data if self._is_narrowed(prepared.index) else None
        prepared.set_step(ctypes.addressof(plan), rows)


class LayerAttention:
    """The kernel's arguments for one layer."""

    def __init__(
        self, cache: KVCache, index: int, heads: tuple[Heads, Heads, Heads], out: int, options: LayerOptions, dtype: torch.dtype,
        compact: bool = False,
    ) -> None:  # fmt: skip
        q, k, v = heads
        self.index, self.causal, self.compact = index, options.causal, compact
        self.tile = max(1, TILE_ROWS * k.heads // q.heads)
        self._sinks = None if options.sinks is None else options.sinks.to(torch.float32).contiguous()
        self._layer = _Layer(
            None, 0, q.heads, k.heads, q.size, v.size, cache.num_blocks, options.sliding_window or 0,
            q.to_head, q.to_token, k.to_head, k.to_token, v.to_head, v.to_token,
            options.scale, options.softcap or 0.0, None if self._sinks is None else self._sinks.data_ptr(), q.at, k.at, v.at,
            cache.keys[index].data_ptr(), cache.values[index].data_ptr(), out,
        )  # fmt: skip
        self.call = Call(kernel("attention", dtype), self._layer)

    def set_step(self, plan: int, rows: int | None = None) -> None:
        """Sets what depends on the step: the addresses of its plan, and of each query's row if only some results are wanted."""
        self._layer.plan, self._layer.threads, self._layer.rows = plan, torch.get_num_threads(), rows


class SegmentAttention:
    """The attention of an encoder's layers: tokens lie in segments, one after the other, and see the first tokens of their own, or all of them."""

    def __init__(self, lengths: Sequence[int], cache: KVCache, seen: int | None = None) -> None:
        """`lengths`: the segments' numbers of tokens; `seen`: how many of each are seen. `cache`: see `segment_cache`."""
        counts = np.array(lengths, dtype=np.int64)
        blocks = -(-counts // ENCODER_BLOCK)
        ends, first_blocks = np.cumsum(counts), np.cumsum(blocks) - blocks
        of, self.positions = repeated(np.arange(len(counts)), counts)
        shared = np.stack([first_blocks, blocks, ends - counts, ends, np.zeros_like(counts)], axis=1)
        tokens = len(of)
        chunks = np.array([0, 0, tokens, 0])  # one, which has no keys of its own
        last = (counts if seen is None else np.minimum(counts, seen)) - 1
        places = first_blocks[of] * ENCODER_BLOCK + self.positions
        arrays = (self.positions, last[of], places, shared, chunks, chunks, chunks)
        self._arrays = [np.ascontiguousarray(a, dtype=np.int32) for a in arrays]  # kept for as long as the plan is used
        self.cache = cache
        self._plan = _Plan(tokens, ENCODER_BLOCK, len(counts), 1, TILE_ROWS, *(a.ctypes.data for a in self._arrays))

    def wanted(self, layer: int) -> None:
        """The results of all tokens are wanted."""

    def prepared(
        self, layer: int, heads: tuple[Heads, Heads, Heads], out: int, dtype: torch.dtype, options: LayerOptions, compact: bool = False
    ) -> LayerAttention:  # fmt: skip
        """As that of `PackedAttention`."""
        return LayerAttention(self.cache, layer, heads, out, options, dtype, compact)

    def take_over(self, prepared: LayerAttention) -> None:
        """As that of `PackedAttention`."""
        self._plan.tile = prepared.tile
        prepared.set_step(ctypes.addressof(self._plan))


def segment_blocks(lengths: Sequence[int]) -> int:
    """Returns the number of blocks that segments of these lengths need."""
    return sum(-(-length // ENCODER_BLOCK) for length in lengths)


def segment_cache(shape: LayerShape, blocks: int, dtype: torch.dtype) -> KVCache:
    """Returns memory for the keys and values of so many blocks in a layer, which has the index 0."""
    return KVCache(storage({0: shape}, dtype), blocks, ENCODER_BLOCK, dtype)


def attend_to_first(
    q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTV: torch.Tensor, seen: int, options: LayerOptions
) -> torch.Tensor:
    """Returns the attention output [T, H, V] of T tokens that all see the first `seen` of them. The tensors are float32 or bfloat16."""
    q, k, v = map(adjacent, (q_HTD, k_KTD, v_KTV))
    tokens = q.shape[1]
    cache = segment_cache(LayerShape(len(k), k.shape[2], v.shape[2]), segment_blocks([tokens]), q.dtype)
    attention = SegmentAttention([tokens], cache, seen)
    out = q.new_empty((tokens, len(q), v.shape[2]))
    prepared = attention.prepared(0, (Heads.of(q), Heads.of(k), Heads.of(v)), out.data_ptr(), q.dtype, options)
    attention.take_over(prepared)
    prepared.call.run()
    return out
