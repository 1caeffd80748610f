"""The tensors of the block pool: the keys and values of all blocks in each layer, allocated once on the layer's device.

Layers that read another one's keys and values (the last ones of Gemma 4 E2B and E4B) write theirs, which are the same, to the same place.

A layer's keys are [K, blocks * block_size, D]. Adjacent blocks are a view [K, S, D] of them, and the whole pool is a view [K, blocks,
block_size, D], so attention reads the pool in place. Keys and values of the same shape are in one tensor, so that one operation
copies a block in all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from batchgen.kernels.memory import HUGE_PAGE, PIECE, keep_pages_small, make_pages_huge
from batchgen.kernels.transfer import put, zeros

CPU = torch.device("cpu")
FEW = 1 / 8
"""On a CPU, the share of what huge pages would take with a few blocks; as long as the blocks in use take less, pages are small.

A head's KV is a range of its own, and blocks are taken from both ends. So in huge pages, the first blocks take two of them for each head.
"""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one attention layer's KV: `heads` key/value heads with keys of `k_size` and values of `v_size` numbers."""

    heads: int
    k_size: int
    v_size: int
    device: torch.device = CPU
    """The device of the layer and of its KV."""
    same_as: int | None = None
    """The layer whose keys and values it reads, and which keeps them; None for most."""


class KVCache:
    """The KV of `num_blocks` blocks of `block_size` tokens in every layer."""

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.devices = devices_of(layers)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.pools: list[torch.Tensor] = []
        """By shape and device: all keys and values [N, S, D]; S is the number of tokens of the pool, N the number of their heads together."""
        alike: dict[tuple[torch.device, int, int], list[tuple[dict[int, torch.Tensor], int]]] = {}
        for i, shape in own_layers(layers).items():
            alike.setdefault((shape.device, shape.heads, shape.k_size), []).append((self.keys, i))
            alike.setdefault((shape.device, shape.heads, shape.v_size), []).append((self.values, i))
        for (device, heads, size), places in alike.items():
            pool = zeros((len(places) * heads, num_blocks * block_size, size), dtype, device)
            self.pools.append(pool)
            for n, (of, i) in enumerate(places):
                of[i] = _on_its_own(pool[n * heads : (n + 1) * heads])
        for i, shape in layers.items():
            if shape.same_as is not None:
                self.keys[i], self.values[i] = self.keys[shape.same_as], self.values[shape.same_as]
        # Smaller ones might lie in memory that others use later.
        large = [pool for pool in self.pools if pool.device.type == "cpu" and pool.nbytes >= PIECE]
        self._in_small_pages = [pool for pool in large if keep_pages_small(pool)]
        huge = sum(min(pool.nbytes, 2 * len(pool) * HUGE_PAGE) for pool in self._in_small_pages)
        self.max_few_blocks = num_blocks
        """Until more blocks than that are in use, pages are small; then `make_pages_huge` is due."""
        if self._in_small_pages:
            self.max_few_blocks = int(FEW * huge) // (bytes_per_token(layers, dtype) * block_size)

    def write(self, layer: int, kv_indices_T: torch.Tensor, keys_KTD: torch.Tensor, values_KTD: torch.Tensor) -> None:
        """Stores the KV of T tokens at their places in the pool (block * block_size + offset).

        A token whose values are not all finite gets a NaN key and finite values. Queries that attend to it still get NaN, but queries
        that mask it, such as those of a later sequence in the same block, do not (0 * NaN is NaN).
        """
        # On devices other than the CPU, the check would wait for the device.
        if values_KTD.device.type != "cpu" or not math.isfinite(float(values_KTD.sum())):
            keys_KTD = keys_KTD + (values_KTD * 0).sum(-1, keepdim=True)
            values_KTD = values_KTD.nan_to_num(0, 0, 0)
        self.keys[layer].index_copy_(1, kv_indices_T, keys_KTD)
        self.values[layer].index_copy_(1, kv_indices_T, values_KTD)

    def make_pages_huge(self) -> None:
        """Makes the small pages huge, from which long ranges are read faster."""
        for pool in self._in_small_pages:
            make_pages_huge(pool)
        self.max_few_blocks = self.num_blocks

    def clear(self) -> None:
        """Sets all KV to zero. Masked values are still multiplied by 0, so the pool must not hold NaN or infinite values (`write`)."""
        for pool in self.pools:
            pool.zero_()

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (from, to), with the same result as one copy after the other."""
        begin = 0
        written: set[int] = set()
        for i, (source, to) in enumerate(copies):
            if source in written or to in written:  # a copy of a copy waits for the first
                self._copy(copies[begin:i])
                begin, written = i, set()
            written.add(to)
        if copies:
            self._copy(copies[begin:])

    def kv_of(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Returns a copy of the KV of these blocks [P, N, block_size, D], for each pool."""
        places = self._places(blocks)
        return [self._paged(pool).index_select(1, places[pool.device]) for pool in self.pools]

    def _paged(self, pool: torch.Tensor) -> torch.Tensor:
        return pool.view(pool.shape[0], self.num_blocks, self.block_size, pool.shape[2])

    def _places(self, blocks: Sequence[int]) -> dict[torch.device, torch.Tensor]:
        """Returns the blocks as an index tensor on each device."""
        places = np.array(blocks, dtype=np.int64)
        return {device: put(places, device) for device in self.devices}

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = self._places([s for s, _ in copies]), self._places([t for _, t in copies])
        for pool in self.pools:
            paged = self._paged(pool)
            paged.index_copy_(1, targets[pool.device], paged.index_select(1, sources[pool.device]))


def devices_of(layers: dict[int, LayerShape]) -> tuple[torch.device, ...]:
    """Returns the devices of the layers, each once, in the order of the layers."""
    return tuple(dict.fromkeys(s.device for s in layers.values()))


def own_layers(layers: dict[int, LayerShape]) -> dict[int, LayerShape]:
    """Returns the layers that keep keys and values of their own."""
    return {i: shape for i, shape in layers.items() if shape.same_as is None}


def bytes_per_token(layers: dict[int, LayerShape], dtype: torch.dtype, device: torch.device | None = None) -> int:
    """Returns the bytes of one token's KV in all layers, or in the layers on `device`."""
    here = [s for s in own_layers(layers).values() if device is None or s.device == device]
    return sum(s.heads * (s.k_size + s.v_size) for s in here) * dtype.itemsize


def _on_its_own(part: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as a tensor that is not a view. torch.compile computes wrong results for writes to several views of one tensor."""
    if part.device.type == "meta":
        return part
    # `from_dlpack` only takes tensors of the current device.
    with torch.cuda.device(part.device) if part.device.type == "cuda" else nullcontext():
        return from_dlpack(part)
