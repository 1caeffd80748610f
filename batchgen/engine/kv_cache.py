"""The tensors behind the pages: for each layer the keys and the values of the whole pool, allocated once.

A layer's keys are [K, pages * page_size, D]: pages that follow one another are a view [K, S, D] of it, and all of it is
a view [K, pages, page_size, D], so attention reads the pool where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer's KV: `heads` key/value heads with keys `k_size` and values `v_size` wide."""

    heads: int
    k_size: int
    v_size: int


class KVCache:
    """KV of `num_pages` pages of `page_size` tokens in every layer."""

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        slots = num_pages * page_size
        self.keys = {i: _zeros((s.heads, slots, s.k_size), dtype, device) for i, s in layers.items()}
        self.values = {i: _zeros((s.heads, slots, s.v_size), dtype, device) for i, s in layers.items()}

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

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        device = next(iter(self.keys.values())).device
        source, to = torch.tensor(copies, dtype=torch.int64, device=device).unbind(1)
        for pool in (*self.keys.values(), *self.values.values()):
            paged = pool.view(pool.shape[0], self.num_pages, self.page_size, pool.shape[2])
            paged.index_copy_(1, to, paged.index_select(1, source))


def bytes_per_token(layers: dict[int, LayerShape], dtype: torch.dtype) -> int:
    """KV of one token in all layers."""
    return sum(s.heads * (s.k_size + s.v_size) for s in layers.values()) * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU pages of the operating system that are not used are never touched (calloc)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
