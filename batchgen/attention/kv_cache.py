"""The tensors behind the blocks: for each layer the keys and the values of the whole pool, allocated once, on the layer's device.

A layer's keys are [K, blocks * block_size, D]: blocks that follow one another are a view [K, S, D] of it, and all of it is
a view [K, blocks, block_size, D], so attention reads the pool where it lies. Keys and values of one shape lie in one tensor,
so that a block is moved in all layers at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from batchgen.kernels.transfer import put

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer's KV: `heads` key/value heads with keys `k_size` and values `v_size` wide."""

    heads: int
    k_size: int
    v_size: int
    device: torch.device = CPU
    """Where the layer runs, and so where its KV lies."""


class KVCache:
    """KV of `num_blocks` blocks of `block_size` tokens in every layer."""

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
        """Keys and values of one shape and device: [N, slots, D], N the heads of all of them."""
        alike: dict[tuple[torch.device, int, int], list[tuple[dict[int, torch.Tensor], int]]] = {}
        for i, shape in layers.items():
            alike.setdefault((shape.device, shape.heads, shape.k_size), []).append((self.keys, i))
            alike.setdefault((shape.device, shape.heads, shape.v_size), []).append((self.values, i))
        for (device, heads, size), places in alike.items():
            pool = _zeros((len(places) * heads, num_blocks * block_size, size), dtype, device)
            self.pools.append(pool)
            for n, (of, i) in enumerate(places):
                of[i] = _on_its_own(pool[n * heads : (n + 1) * heads])
        self._saving = {on: torch.cuda.Stream(on) for on in self.devices if on.type == "cuda"}  # type: ignore[no-untyped-call]

    def write(self, layer: int, slots_T: torch.Tensor, keys_KTD: torch.Tensor, values_KTD: torch.Tensor) -> None:
        """Stores the KV of T tokens at their places in the pool (block * block_size + offset).

        A token whose values are not all numbers gets a NaN key and finite values: whoever attends to it still gets NaN,
        but not who masks it (0 * NaN is NaN), such as a later sequence in the same block.
        """
        # Elsewhere than on the CPU, looking first would cost a wait for the device.
        if values_KTD.device.type != "cpu" or not math.isfinite(float(values_KTD.sum())):
            keys_KTD = keys_KTD + (values_KTD * 0).sum(-1, keepdim=True)
            values_KTD = values_KTD.nan_to_num(0, 0, 0)
        self.keys[layer].index_copy_(1, slots_T, keys_KTD)
        self.values[layer].index_copy_(1, slots_T, values_KTD)

    def clear(self) -> None:
        """Zeros everywhere. What is masked is still multiplied by 0, so a slot must not hold what is no number (`write`)."""
        for pool in self.pools:
            pool.zero_()

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (from, to), as if one after the other."""
        begin = 0
        written: set[int] = set()
        for i, (source, to) in enumerate(copies):
            if source in written or to in written:  # a copy of a copy waits for the first
                self._copy(copies[begin:i])
                begin, written = i, set()
            written.add(to)
        if copies:
            self._copy(copies[begin:])

    def swap_out(self, blocks: Sequence[int]) -> list[HostBlocks]:
        """The KV of these blocks in host memory. On CUDA it is on its way there, beside what the device computes next."""
        places = self._places(blocks)
        return [
            self._to_host(self._paged(pool).transpose(0, 1).index_select(0, places[pool.device])) for pool in self.pools
        ]

    def swap_in(self, saved: Sequence[HostBlocks], first: int, blocks: Sequence[int]) -> None:
        """Puts what was saved, from its `first`-th block on, into these blocks."""
        places = self._places(blocks)
        for pool, kept in zip(self.pools, saved, strict=True):
            if kept.there is not None:
                torch.cuda.current_stream(pool.device).wait_event(kept.there)
            # One piece of memory: of several, torch would make one first, on the host, which does not wait for the event.
            part = kept.blocks[first : first + len(blocks)].to(pool.device, non_blocking=True)
            self._paged(pool).index_copy_(1, places[pool.device], part.transpose(0, 1))

    def _to_host(self, kv: torch.Tensor) -> HostBlocks:
        """A copy in pinned memory, made by a stream of its own: the device goes on meanwhile, and so does the host."""
        if kv.device.type != "cuda":
            return HostBlocks(kv, None)
        stream = self._saving[kv.device]
        stream.wait_stream(torch.cuda.current_stream(kv.device))
        with torch.cuda.stream(stream):
            host = torch.empty(kv.shape, dtype=kv.dtype, pin_memory=True).copy_(kv, non_blocking=True)
        kv.record_stream(stream)  # else its memory could be given to the next tensor while it is still read
        return HostBlocks(host, stream.record_event())

    def _paged(self, pool: torch.Tensor) -> torch.Tensor:
        return pool.view(pool.shape[0], self.num_blocks, self.block_size, pool.shape[2])

    def _places(self, blocks: Sequence[int]) -> dict[torch.device, torch.Tensor]:
        """Blocks as an index on each device."""
        places = np.array(blocks, dtype=np.int64)
        return {device: put(places, device) for device in self.devices}

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = self._places([s for s, _ in copies]), self._places([t for _, t in copies])
        for pool in self.pools:
            paged = self._paged(pool)
            paged.index_copy_(1, targets[pool.device], paged.index_select(1, sources[pool.device]))


@dataclass(frozen=True, slots=True, eq=False)
class HostBlocks:
    """The KV of some blocks in host memory, for one of a cache's pools."""

    blocks: torch.Tensor
    """[P, N, block_size, D]"""
    there: torch.cuda.Event | None
    """Happens when it has arrived; None: it has."""


def devices_of(layers: dict[int, LayerShape]) -> tuple[torch.device, ...]:
    """The devices that layers lie on, each once, the first layer's first."""
    return tuple(dict.fromkeys(s.device for s in layers.values()))


def bytes_per_token(layers: dict[int, LayerShape], dtype: torch.dtype, device: torch.device | None = None) -> int:
    """KV of one token in all layers, or in those on `device`."""
    here = [s for s in layers.values() if device is None or s.device == device]
    return sum(s.heads * (s.k_size + s.v_size) for s in here) * dtype.itemsize


def _on_its_own(part: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no view: what torch.compile makes of writes to several views of one tensor is wrong."""
    if part.device.type == "meta":
        return part
    with (
        torch.cuda.device(part.device) if part.device.type == "cuda" else nullcontext()
    ):  # it takes the current device's only
        return from_dlpack(part)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU pages of the operating system that are not used are never touched (calloc)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
