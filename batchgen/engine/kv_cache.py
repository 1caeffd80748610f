"""The tensors behind the pages: for each layer the keys and the values of the whole pool, allocated once, on the layer's device.

A layer's keys are [K, pages * page_size, D]: pages that follow one another are a view [K, S, D] of it, and all of it is
a view [K, pages, page_size, D], so attention reads the pool where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

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
    """KV of `num_pages` pages of `page_size` tokens in every layer."""

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        slots = num_pages * page_size
        self.devices = devices_of(layers)
        self.keys = {i: _zeros((s.heads, slots, s.k_size), dtype, s.device) for i, s in layers.items()}
        self.values = {i: _zeros((s.heads, slots, s.v_size), dtype, s.device) for i, s in layers.items()}

    def write(self, layer: int, slots_T: torch.Tensor, keys_KTD: torch.Tensor, values_KTD: torch.Tensor) -> None:
        """Stores the KV of T tokens at their places in the pool (page * page_size + offset).

        A token whose values are not all numbers gets a NaN key and finite values: whoever attends to it still gets NaN,
        but not who masks it (0 * NaN is NaN), such as a later sequence in the same page.
        """
        # Elsewhere than on the CPU, looking first would cost a wait for the device.
        if values_KTD.device.type != "cpu" or not math.isfinite(float(values_KTD.sum())):
            keys_KTD = keys_KTD + (values_KTD * 0).sum(-1, keepdim=True)
            values_KTD = values_KTD.nan_to_num(0, 0, 0)
        self.keys[layer].index_copy_(1, slots_T, keys_KTD)
        self.values[layer].index_copy_(1, slots_T, values_KTD)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages (from, to), as if one after the other."""
        begin = 0
        written: set[int] = set()
        for i, (source, to) in enumerate(copies):
            if source in written or to in written:  # a copy of a copy waits for the first
                self._copy(copies[begin:i])
                begin, written = i, set()
            written.add(to)
        if copies:
            self._copy(copies[begin:])

    def save(self, pages: Sequence[int]) -> list[torch.Tensor]:
        """The KV of these pages in host memory: keys and values of each layer, [K, P, page_size, D]."""
        places = self._places(pages)
        return [_to_host(self._paged(pool).index_select(1, places[pool.device])) for pool in self._pools()]

    def load(self, saved: Sequence[torch.Tensor], first: int, pages: Sequence[int]) -> None:
        """Puts what was saved, from its `first`-th page on, into these pages."""
        places = self._places(pages)
        for pool, kept in zip(self._pools(), saved, strict=True):
            part = kept[:, first : first + len(pages)].to(pool.device, non_blocking=True)
            self._paged(pool).index_copy_(1, places[pool.device], part)

    def _pools(self) -> list[torch.Tensor]:
        return [*self.keys.values(), *self.values.values()]

    def _paged(self, pool: torch.Tensor) -> torch.Tensor:
        return pool.view(pool.shape[0], self.num_pages, self.page_size, pool.shape[2])

    def _places(self, pages: Sequence[int]) -> dict[torch.device, torch.Tensor]:
        """Pages as an index on each device."""
        return {device: torch.tensor(pages, dtype=torch.int64, device=device) for device in self.devices}

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = self._places([s for s, _ in copies]), self._places([t for _, t in copies])
        for pool in self._pools():
            paged = self._paged(pool)
            paged.index_copy_(1, targets[pool.device], paged.index_select(1, sources[pool.device]))


def devices_of(layers: dict[int, LayerShape]) -> tuple[torch.device, ...]:
    """The devices that layers lie on, each once, the first layer's first."""
    return tuple(dict.fromkeys(s.device for s in layers.values()))


def bytes_per_token(layers: dict[int, LayerShape], dtype: torch.dtype, device: torch.device | None = None) -> int:
    """KV of one token in all layers, or in those on `device`."""
    here = [s for s in layers.values() if device is None or s.device == device]
    return sum(s.heads * (s.k_size + s.v_size) for s in here) * dtype.itemsize


def _to_host(kv: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; of a CUDA tensor in pinned memory, from where it comes back faster."""
    if kv.device.type != "cuda":
        return kv
    host = torch.empty(kv.shape, dtype=kv.dtype, pin_memory=True)
    return host.copy_(kv)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU pages of the operating system that are not used are never touched (calloc)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
