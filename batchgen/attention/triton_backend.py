"""Attention on one CUDA device: each step's plan is in static buffers, and the kernels are one operator of torch.

So torch can compile the model as a whole, and one CUDA graph serves all steps of its padded size. Tests run the same code on the CPU, with
Triton's interpreter. Imports triton only when it is used.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from batchgen.attention.base import LayerOptions
from batchgen.attention.kv_cache import KVCache
from batchgen.attention.plan import split_step
from batchgen.attention.work_list import BLOCK_TABLE, HEADER, ITEM_KEYS, Lane, work_list
from batchgen.scheduling.batch import ScheduledSpan

STAGING = 3
"""Number of host buffers, which are used in turn. The copy from a buffer must have ended when its turn comes again."""
MAX_POOL_TOKENS = 1 << 31
LOG2E = math.log2(math.e)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 512
BLOCK_T = 16
"""Tokens whose KV a program writes."""
MERGED = 4096
"""Elements of the output that a program merges."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How finely reads are shared and split: affects speed, and results by rounding only. Not measured one by one."""

    shared_reads: int = 64
    """A run of blocks becomes a shared part if queries x blocks reaches this."""
    wide_min_keys: int = 512
    narrow_min_keys: int = 256
    """Ranges of keys are not split into shorter ones: the merge would cost more."""
    item_keys: int = ITEM_KEYS
    """The fixed cost of an item, counted in keys."""
    partials: int = 4096
    """Initial room for partial results of queries; two for every query of the largest step, if that is more."""


DEFAULT_TUNING = Tuning()


def obstacle(cache: KVCache, device: torch.device) -> str:
    """Returns in one line why `DeviceAttention` does not support this cache; empty if it does.

    The whole cache must be on one CUDA device on which Triton works. Heads may be up to 512 wide; blocks may have any size.
    """
    pools = [*cache.keys.values(), *cache.values.values()]
    if device.type != "cuda" or any(pool.device != device for pool in pools):
        return "the kernels are for a model on one CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "the kernels need the package triton"
    from batchgen.attention.triton_kernels import INTERPRETED, why_not_here

    if INTERPRETED:
        return "TRITON_INTERPRET is set, with which kernels run on the CPU"
    why = why_not_here()
    if why:
        return f"Triton, which needs a C compiler, Python's headers (python3-dev on Debian) and the driver's libcuda, fails here: {why}"
    for pool in pools:
        if pool.dtype not in DTYPES or pool.shape[2] > MAX_HEAD_SIZE:
            return (
                f"the kernels do not have heads of {pool.shape[2]} numbers in {str(pool.dtype).removeprefix('torch.')}"
            )
        if pool.shape[1] >= MAX_POOL_TOKENS:
            return f"the kernels do not have pools of {pool.shape[1]} tokens"
    return ""


class DeviceAttention:
    """The attention of an engine on one device. `plan` writes each step's plan into static buffers.

    The plan is one buffer of int32: a header, positions (int64), KV indices, and then the parts that vary in length: items, blocks, and the
    lists of the merge. One copy moves it.
    """

    def __init__(
        self,
        cache: KVCache,
        max_tokens: int,
        device: torch.device,
        group: int = 1,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        """`max_tokens`: tokens of the largest padded batch. `group`: query heads per key/value head, for speed only; best is the model's own."""
        from batchgen.attention import triton_kernels as kernels

        self.generation = 0
        """Increases when a static buffer is reallocated, which invalidates the graphs captured before."""
        self.num_parts = 0
        """Number of attention parts of the present step."""
        self._cache, self._device, self._max_tokens = cache, device, max_tokens
        self._shared_reads = tuning.shared_reads
        keys, values = [*cache.keys.values()], [*cache.values.values()]
        heads = max(pool.shape[0] for pool in keys)
        k_size, v_size = (max(pool.shape[2] for pool in pools) for pools in (keys, values))
        tiles = kernels.tiles(k_size, v_size, keys[0].dtype, group, device)
        self._wide, self._narrow = (
            Lane(max(1, tile.rows // group), kernels.programs(tile, device), heads, min_keys, tuning.item_keys)
            for tile, min_keys in zip(tiles, (tuning.wide_min_keys, tuning.narrow_min_keys), strict=True)
        )
        self._lists = HEADER + 3 * max_tokens  # where the parts that vary in length begin
        self._partials = max(tuning.partials, 2 * max_tokens)
        self._allocate(self._lists + 8 * max_tokens + (1 << 14))

    def _allocate(self, words: int) -> None:
        cuda = self._device.type == "cuda"
        self._plan = torch.zeros(words, dtype=torch.int32, device=self._device)
        self.positions = self._plan[HEADER : HEADER + 2 * self._max_tokens].view(torch.int64)
        """int64 [max_tokens] on the device; 0 at padded places."""
        self._staging = [torch.zeros(words, dtype=torch.int32, pin_memory=cuda) for _ in range(STAGING)]
        self._copied: list[torch.cuda.Event | None] = [None] * STAGING

    def _reserve(self, words: int, partials: int) -> None:
        if words <= len(self._plan) and partials <= self._partials:
            return
        self.generation += 1
        while self._partials < partials:
            self._partials *= 2
        if words > len(self._plan):
            self._allocate(max(words, 2 * len(self._plan)))

    def plan(self, spans: Sequence[ScheduledSpan], tokens: int | None = None) -> None:
        """Plans a step and starts to copy the plan to the device. Does not wait for the copy.

        `tokens`: the padded size of the batch; padded places write no KV and give zeros. Raises `ValueError` if it is too small.
        """
        size = self._cache.block_size
        plan = split_step(spans, size, self._shared_reads)
        count = plan.num_tokens
        padded = count if tokens is None else tokens
        if not count <= padded <= self._max_tokens:
            raise ValueError(f"{count} tokens in a batch of {padded}, of at most {self._max_tokens}")
        lists = work_list(spans, plan, self._wide, self._narrow)
        self.num_parts = len(plan.shared) + 1
        parts = (lists.wide, lists.narrow, lists.blocks, lists.merge_starts, lists.merge_rows)
        wide, narrow, blocks, starts, rows, end = np.cumsum([self._lists, *(part.size for part in parts)]).tolist()
        self._reserve(end, lists.num_partials)
        for items in parts[:2]:
            items[:, BLOCK_TABLE] += blocks
        header = (count, len(lists.wide), wide, len(lists.narrow), narrow, starts)
        host = self._next_staging()
        staged = host.numpy()
        staged[: len(header)] = header
        positions = staged[HEADER : HEADER + 2 * self._max_tokens].view(np.int64)
        kv_indices = staged[HEADER + 2 * self._max_tokens : self._lists]
        for static, values, nothing in ((positions, plan.positions, 0), (kv_indices, plan.kv_indices, -1)):
            static[:count] = values
            static[count:] = nothing
        np.concatenate(
            [part.ravel() for part in (*parts[:3], lists.merge_starts + rows, lists.merge_rows)],
            out=staged[self._lists : end],
            casting="same_kind",
        )
        self._plan[:end].copy_(host[:end], non_blocking=True)
        if self._device.type == "cuda":
            self._copied.insert(0, torch.cuda.current_stream(self._device).record_event())
            self._copied.pop()

    def _next_staging(self) -> torch.Tensor:
        """Returns the staging buffer that was used longest ago, and moves it to the front."""
        self._staging.insert(0, self._staging.pop())
        if (copied := self._copied[-1]) is not None:
            copied.synchronize()  # this copy began some steps ago
        return self._staging[0]

    def __call__(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTV: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Writes the layer's KV into the pool. Returns its attention output [T, H, V] for the planned step's padded batch."""
        out: torch.Tensor = torch.ops.batchgen.attend(
            q_HTD, k_KTD, v_KTV, self._cache.keys[layer], self._cache.values[layer], self._plan, options.sinks, options.scale,
            options.sliding_window, options.softcap, self._cache.block_size, self._max_tokens, self._partials, self._wide.tokens,
            self._narrow.tokens,
        )  # fmt: skip
        return out


@torch.library.custom_op("batchgen::attend", mutates_args=("keys", "values"))
def attend(
    q_HTD: torch.Tensor,
    k_KTD: torch.Tensor,
    v_KTV: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    block_size: int,
    max_tokens: int,
    partials: int,
    wide_tokens: int,
    narrow_tokens: int,
) -> torch.Tensor:
    """Writes a layer's KV into the pool. Returns its attention output [T, H, V], by a plan of `DeviceAttention`.

    It has no state besides its arguments, which are on the current device. `partials`: rows for partial results. `wide_tokens`,
    `narrow_tokens`: largest number of queries in an item.
    """
    import triton

    from batchgen.attention import triton_kernels as kernels

    # Both factors of a product must have one type, and some models have queries in float32.
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q_HTD.to(keys.dtype), k_KTD, v_KTV))
    H, T, D = q.shape
    K, V = keys.shape[0], values.shape[2]
    G = H // K
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (D, V))
    out = torch.empty((T, H, V), dtype=q_HTD.dtype, device=q.device)
    part_out = torch.empty((partials, H, V), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((partials, H), dtype=torch.float32, device=q.device)
    scores = (scale * LOG2E, 1.0) if softcap is None else (scale / softcap, softcap * LOG2E)
    some_sinks = plan if sinks is None else sinks.contiguous()  # any tensor: it is not read without sinks
    kv_indices = plan[HEADER + 2 * max_tokens :]
    kernels.write_kernel[-(-T // BLOCK_T), K](
        k, v, keys, values, kv_indices, k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), values.stride(0), max_tokens,
        D, V, BLOCK_T, block_d, block_v, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    tiles = kernels.tiles(D, V, q.dtype, G, q.device)
    lanes = (kernels.WIDE.value, wide_tokens), (kernels.NARROW.value, narrow_tokens)
    for tile, (lane, tokens) in zip(tiles, lanes, strict=True):
        kernels.attend_kernel[(kernels.programs(tile, q.device),)](
            q, keys, values, plan, some_sinks, out, part_out, part_lse, q.stride(0), q.stride(1), keys.stride(0),
            values.stride(0), sliding_window or 0, *scores, lane, tokens, K, G, D, V, block_size, block_d, block_v, tile.rows, tile.keys,
            sliding_window is not None, softcap is not None, sinks is not None, kernels.INTERPRETED,
            "ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
            maxnreg=tile.registers, enable_fp_fusion=True,
        )  # fmt: skip
    block_h = max(1, min(triton.next_power_of_2(H), MERGED // block_v))
    kernels.merge_kernel[T, -(-H // block_h)](
        plan, some_sinks, out, part_out, part_lse, H, V, block_h, block_v, sinks is not None, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@attend.register_fake
def _(q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTV: torch.Tensor, *_: object) -> torch.Tensor:
    return q_HTD.new_empty((q_HTD.shape[1], q_HTD.shape[0], v_KTV.shape[2]))
