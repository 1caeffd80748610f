"""The kernels of `DeviceAttention`: they write a step's KV, attend over a work list, and merge partial results.

Scores are exponents of two: weights are exp2(score), and the log-sum-exp has base 2. Everything between the matrix products is float32.
`triton_backend.py` describes the layout of the plan, `work_list.py` the columns of an item.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchgen.attention import work_list
from batchgen.errors import in_one_line

FIELDS = tl.constexpr(work_list.FIELDS)
Q_START = tl.constexpr(work_list.Q_START)
Q_COUNT = tl.constexpr(work_list.Q_COUNT)
BLOCK_TABLE = tl.constexpr(work_list.BLOCK_TABLE)
NUM_KEYS = tl.constexpr(work_list.NUM_KEYS)
FIRST_VISIBLE = tl.constexpr(work_list.FIRST_VISIBLE)
POSITION = tl.constexpr(work_list.POSITION)
PARTIAL = tl.constexpr(work_list.PARTIAL)
# Words of the plan's header.
NUM_TOKENS = tl.constexpr(0)
WIDE = tl.constexpr(1)  # number of items; the next word says where they are
NARROW = tl.constexpr(3)
MERGE_STARTS = tl.constexpr(5)
HEADER = tl.constexpr(work_list.HEADER)

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


REGISTERS = 1 << 16
"""Registers of a multiprocessor, from the A100 on."""
THREADS = 32
"""Threads of a warp."""


class Tile(NamedTuple):
    """How the attention kernel runs a lane."""

    rows: int
    """Rows of queries: queries x query heads per key/value head. At least 16, which tensor cores need."""
    keys: int
    """Keys that are read at a time."""
    warps: int
    stages: int
    """Depth of the loads' pipeline."""
    per_sm: int
    """Programs on each multiprocessor, for which its shared memory and registers have room."""

    @property
    def registers(self) -> int:
        """The largest number of registers per thread with which `per_sm` programs run at once. A program that had to wait would run its items alone."""
        return min(255, REGISTERS // (self.per_sm * self.warps * THREADS) // 8 * 8)


TILES = {
    # (wide, narrow) by bytes of an element and the larger of the sizes of keys and values. Of (2, 128) eight pairs were measured on an H100; the
    # others were chosen because they compile for it with few or no spilled registers.
    (2, 64): (Tile(128, 64, 4, 3, 2), Tile(16, 64, 4, 3, 4)),
    (2, 128): (Tile(128, 128, 8, 3, 1), Tile(16, 32, 2, 4, 6)),
    (2, 256): (Tile(128, 32, 8, 3, 1), Tile(16, 32, 4, 3, 2)),
    (2, 512): (Tile(64, 32, 8, 2, 1), Tile(16, 16, 4, 3, 2)),
    (4, 64): (Tile(64, 32, 8, 2, 2), Tile(16, 32, 4, 2, 4)),
    (4, 128): (Tile(32, 32, 8, 2, 2), Tile(16, 32, 4, 2, 3)),
    (4, 256): (Tile(32, 32, 8, 2, 1), Tile(16, 16, 4, 2, 3)),
    (4, 512): (Tile(16, 16, 8, 2, 1), Tile(16, 16, 8, 2, 1)),
}
RESERVE = 1024
"""Bytes of shared memory for everything except queries, keys and values."""
INTERPRETED_PROGRAMS = 3


def tiles(k_size: int, v_size: int, dtype: torch.dtype, group: int, device: torch.device) -> tuple[Tile, Tile]:
    """Returns the tiles (wide, narrow) for these sizes of heads, with `group` query heads per key/value head: those of `TILES`, or smaller ones if
    the device has less shared memory."""
    size, bytes_ = max(k_size, v_size), dtype.itemsize
    wide, narrow = TILES[bytes_, max(64, triton.next_power_of_2(size))]
    narrow = narrow._replace(rows=max(16, min(64, triton.next_power_of_2(group))))
    if device.type != "cuda":
        return wide, narrow
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return _fitting(wide, size, bytes_, room), _fitting(narrow, size, bytes_, room)


def _fitting(tile: Tile, size: int, bytes_: int, room: int) -> Tile:
    """Returns the tile, or a smaller one, whose queries and two buffers of keys and values fit the room."""
    for smaller in (
        tile,
        *(tile._replace(keys=keys) for keys in (64, 32, 16)),
        *(Tile(rows, 16, *tile[2:]) for rows in (64, 32, 16)),
    ):
        tile = Tile(min(tile.rows, smaller.rows), min(tile.keys, smaller.keys), *tile[2:])
        if (tile.rows + 4 * tile.keys) * triton.next_power_of_2(size) * bytes_ + RESERVE <= room:
            break
    return tile


def programs(tile: Tile, device: torch.device) -> int:
    """Returns the kernel's grid, which does not depend on the plan."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * tile.per_sm


@triton.jit
def write_kernel(
    k, v, keys, values, kv_indices, k_head, k_token, v_head, v_token, keys_head, values_head, MAX_TOKENS: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`KVCache.write` for a block of tokens and the head `program_id(1)`; a KV index below 0 has no token."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    at_d = tl.arange(0, BLOCK_D)
    at_v = tl.arange(0, BLOCK_V)
    kv_index = tl.load(kv_indices + token, mask=token < MAX_TOKENS, other=-1).to(tl.int64)
    in_k = (kv_index >= 0)[:, None] & (at_d < D)[None, :]
    in_v = (kv_index >= 0)[:, None] & (at_v < V)[None, :]
    token = token.to(tl.int64)
    key = tl.load(k + head * k_head + (token * k_token)[:, None] + at_d[None, :], mask=in_k, other=0.0).to(tl.float32)
    value = tl.load(v + head * v_head + (token * v_token)[:, None] + at_v[None, :], mask=in_v, other=0.0).to(tl.float32)
    # A token whose values are not all finite gets a NaN key and finite values, as in `KVCache.write`.
    key += tl.sum(value * 0.0, 1)[:, None]
    value = tl.where(tl.abs(value) < INF, value, 0.0)
    to_k = keys + head * keys_head + (kv_index * D)[:, None] + at_d[None, :]
    to_v = values + head * values_head + (kv_index * V)[:, None] + at_v[None, :]
    tl.store(to_k, key.to(keys.dtype.element_ty), mask=in_k)
    tl.store(to_v, value.to(values.dtype.element_ty), mask=in_v)


@triton.jit
def _walk(
    acc, top, total, q, keys, values, blocks, begin, end, num_keys, visible, position, lowest, scale, cap,
    D: tl.constexpr, V: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, SLIDING_WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds softmax attention over keys [begin, end) of an item to the running results (acc, top, total)."""
    at_d = tl.arange(0, BLOCK_D)
    at_v = tl.arange(0, BLOCK_V)
    for at in tl.range(begin, end, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(blocks + n // BLOCK_SIZE, mask=n < num_keys, other=0)
        else:
            block = tl.load(blocks + n // BLOCK_SIZE)
        kv_index = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        k_at = keys + kv_index[:, None] * D + at_d[None, :]
        v_at = values + kv_index[:, None] * V + at_v[None, :]
        if MASKED:
            k = tl.load(k_at, mask=(n < num_keys)[:, None] & (at_d < D)[None, :], other=0.0)
            v = tl.load(v_at, mask=(n < num_keys)[:, None] & (at_v < V)[None, :], other=0.0)
        else:
            if D == BLOCK_D:
                k = tl.load(k_at)
            else:
                k = tl.load(k_at, mask=(at_d < D)[None, :], other=0.0)
            if V == BLOCK_V:
                v = tl.load(v_at)
            else:
                v = tl.load(v_at, mask=(at_v < V)[None, :], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            s = (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E)) + 1.0)) * cap  # tanh
        if MASKED:
            s = tl.where(n[None, :] < visible[:, None], s, -INF)
        if SLIDING_WINDOW:
            s = tl.where((position + n)[None, :] >= lowest[:, None], s, -INF)
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == -INF, 0.0, new)  # no key seen yet
        weights = tl.exp2(s - base[:, None])
        old = tl.exp2(top - base)
        total = total * old + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit
def _store(
    acc, top, total, sinks, out, part_out, part_lse, partial, q_start, token, head, real, H: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Stores the result of a block of rows: as output if it is complete, else as a partial result for the merge."""
    at_v = tl.arange(0, BLOCK_V)
    base = tl.where(top == -INF, 0.0, top)
    columns = real[:, None] & (at_v < V)[None, :]
    if partial < 0:
        if SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - base)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        to = ((q_start + token).to(tl.int64) * H + head) * V
        tl.store(out + to[:, None] + at_v[None, :], acc.to(out.dtype.element_ty), mask=columns)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        to = (partial + token).to(tl.int64) * H + head
        tl.store(part_out + to[:, None] * V + at_v[None, :], acc, mask=columns)
        tl.store(part_lse + to, tl.where(total == 0.0, -INF, base + tl.log2(total)), mask=real)


@triton.jit
def attend_kernel(
    q, keys, values, plan, sinks, out, part_out, part_lse, q_head, q_token, keys_head, values_head, sliding_window, scale, cap,
    LANE: tl.constexpr, TOKENS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Runs a lane's items. A unit of work is one item, one key/value head and, if the item has more rows than a block, one block of rows."""
    BLOCKS: tl.constexpr = (TOKENS * G + BLOCK_M - 1) // BLOCK_M
    at_d = tl.arange(0, BLOCK_D)
    items = plan + tl.load(plan + LANE + 1)
    count = tl.load(plan + LANE) * (K * BLOCKS)
    for unit in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        item = items + unit // (K * BLOCKS) * FIELDS
        kv_head = unit // BLOCKS % K
        first_row = unit % BLOCKS * BLOCK_M
        q_start = tl.load(item + Q_START)
        q_count = tl.load(item + Q_COUNT)
        blocks = plan + tl.load(item + BLOCK_TABLE)
        num_keys = tl.load(item + NUM_KEYS)
        first_visible = tl.load(item + FIRST_VISIBLE)
        position = tl.load(item + POSITION)
        partial = tl.load(item + PARTIAL)
        if first_row < q_count * G:
            row = first_row + tl.arange(0, BLOCK_M)
            token = row // G
            head = kv_head * G + row % G
            real = token < q_count
            q_at = q + head.to(tl.int64) * q_head + (q_start + token).to(tl.int64) * q_token
            queries = tl.load(q_at[:, None] + at_d[None, :], mask=real[:, None] & (at_d < D)[None, :], other=0.0)
            if UPCAST:
                queries = queries.to(tl.float32)

            # Keys before `full` are seen by all queries of the block, those from `end` on by none.
            last = tl.minimum(first_row + BLOCK_M - 1, q_count * G - 1) // G
            visible = tl.minimum(first_visible + token, num_keys)
            end = tl.minimum(first_visible + last, num_keys)
            full = tl.minimum(first_visible + first_row // G, num_keys)
            begin = 0
            lowest = token
            if SLIDING_WINDOW:
                q_position = tl.load(plan + HEADER + 2 * (q_start + token), mask=real, other=2147483647)
                lowest = q_position - sliding_window + 1
                begin = tl.maximum(tl.min(lowest, 0) - position, 0) // BLOCK_N * BLOCK_N
            full = tl.maximum(full // BLOCK_N * BLOCK_N, begin)

            acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
            top = tl.full([BLOCK_M], -INF, dtype=tl.float32)
            total = tl.zeros([BLOCK_M], dtype=tl.float32)
            k_at = keys + kv_head.to(tl.int64) * keys_head
            v_at = values + kv_head.to(tl.int64) * values_head
            acc, top, total = _walk(
                acc, top, total, queries, k_at, v_at, blocks, begin, full, num_keys, visible, position, lowest, scale, cap,
                D, V, BLOCK_SIZE, BLOCK_D, BLOCK_V, BLOCK_N, False, SLIDING_WINDOW, SOFTCAP, UPCAST, PRECISION,
            )  # fmt: skip
            acc, top, total = _walk(
                acc, top, total, queries, k_at, v_at, blocks, full, end, num_keys, visible, position, lowest, scale, cap,
                D, V, BLOCK_SIZE, BLOCK_D, BLOCK_V, BLOCK_N, True, SLIDING_WINDOW, SOFTCAP, UPCAST, PRECISION,
            )  # fmt: skip

            _store(
                acc, top, total, sinks, out, part_out, part_lse, partial, q_start, token, head, real, K * G, V, BLOCK_V, SINKS
            )  # fmt: skip


@triton.jit
def merge_kernel(
    plan, sinks, out, part_out, part_lse, H: tl.constexpr, V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of token `program_id(0)` in a block of heads; zeros for a padded place."""
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < H
    at_v = tl.arange(0, BLOCK_V)
    columns = real[:, None] & (at_v < V)[None, :]
    to = out + (token.to(tl.int64) * H + head)[:, None] * V + at_v[None, :]
    acc = tl.zeros([BLOCK_H, BLOCK_V], dtype=tl.float32)
    if token >= tl.load(plan + NUM_TOKENS):
        tl.store(to, acc.to(out.dtype.element_ty), mask=columns)
    else:
        starts = plan + tl.load(plan + MERGE_STARTS) + token
        begin = tl.load(starts)
        end = tl.load(starts + 1)
        if begin < end:
            if SINKS:
                top = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
                total = tl.full([BLOCK_H], 1.0, dtype=tl.float32)
            else:
                top = tl.full([BLOCK_H], -INF, dtype=tl.float32)
                total = tl.zeros([BLOCK_H], dtype=tl.float32)
            for i in tl.range(begin, end):
                at = tl.load(plan + i).to(tl.int64) * H + head
                lse = tl.load(part_lse + at, mask=real, other=-INF)
                new = tl.maximum(top, lse)
                base = tl.where(new == -INF, 0.0, new)
                old = tl.exp2(top - base)
                weight = tl.exp2(lse - base)
                partial = tl.load(part_out + at[:, None] * V + at_v[None, :], mask=columns, other=0.0)
                acc = acc * old[:, None] + partial * weight[:, None]
                total = total * old + weight
                top = new
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(to, acc.to(out.dtype.element_ty), mask=columns)


INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)
"""Whether the kernels run on Triton's interpreter (TRITON_INTERPRET=1 when triton is imported)."""


def why_not_here() -> str:
    """Returns in one line why Triton does not work on this machine; empty if it works. Triton compiles a part of itself with the system's C compiler when it is first used."""
    try:
        triton.runtime.driver.active.get_current_device()
    except Exception as e:  # noqa: BLE001 - whatever a compiler, a loader or a driver may raise
        return f"{type(e).__name__}: {in_one_line(e)}"
    return ""
