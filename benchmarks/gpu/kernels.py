"""Attention of one layer by itself: from which size shared parts save time, which tiles are fast, and how it compares with torch's own attention.

The constants of `batchgen/attention/triton_backend.py` and `triton_kernels.py` are set by hand from these results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from batchgen.attention.base import LayerOptions
from batchgen.attention.kv_cache import KVCache
from batchgen.attention.triton_backend import DEFAULT_TUNING, DeviceAttention, Tuning
from batchgen.scheduling.batch import ScheduledSpan
from benchmarks.gpu.device import Bench, layer_shape, shape_of

BLOCK_SIZE = 32
PREFIXES = (32, 64, 128, 256, 512, 1024, 4096)
SHARERS = (2, 4, 8, 16, 32, 64, 128, 256)
OWN = 128
PROMPTS = ((4, 2048), (1, 8192))
ALWAYS, NEVER = 1, 1 << 40
"""Queries x blocks from which a run of blocks is a shared part."""
VARIANTS: dict[str, tuple[dict[str, int], ...]] = {
    "wide": (
        {}, {"keys": 32}, {"keys": 128}, {"stages": 2}, {"stages": 4}, {"warps": 4}, {"rows": 64}, {"rows": 64, "warps": 4},
        {"rows": 64, "warps": 4, "per_sm": 2},
    ),
    "narrow": (
        {}, {"keys": 32}, {"keys": 128}, {"stages": 2}, {"stages": 4}, {"warps": 2}, {"warps": 8}, {"per_sm": 2}, {"per_sm": 4},
    ),
}  # fmt: skip
"""Variants of the existing tiles that are tried."""
SPLITS: dict[str, tuple[int, ...]] = {
    "wide_min_keys": (256, 1024), "narrow_min_keys": (128, 512, 1024), "item_keys": (16, 32, 128, 256),
}  # fmt: skip
"""Values that are tried for the fields of `Tuning` that say how finely long ranges of keys are split."""


@dataclass(eq=False)
class Lying:
    """The attributes of a span that attention reads, without an engine."""

    table: list[int]
    start: int
    end: int
    path: tuple[Lying, ...] = ()
    dropped: int = 0


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for model in ("8b", "0.5b"):
        yield f"{model} shared or flat", lambda model=model: crossover(bench, model)  # type: ignore[misc]
    yield "8b decode alone", lambda: decode_alone(bench)
    yield "8b decode shared", lambda: decode_shared(bench)
    for count, length in PROMPTS:
        yield f"8b prefill {count} x {length}", lambda count=count, length=length: prefill(bench, count, length)  # type: ignore[misc]
    for lane in VARIANTS:
        yield f"8b {lane} tiles", lambda lane=lane: variants(bench, lane)  # type: ignore[misc]
    yield "8b splits", lambda: splits(bench)


class Layer:
    """A layer's attention over random keys and values."""

    def __init__(self, bench: Bench, model: str, blocks: int, tokens: int) -> None:
        shape = shape_of(bench.model(model), bench.dtype)
        self.bench = bench
        self.options = LayerOptions(scale=shape.head_dim**-0.5)
        self.cache = KVCache({0: layer_shape(shape, bench.device)}, blocks, BLOCK_SIZE, bench.dtype)
        for pool in (self.cache.keys[0], self.cache.values[0]):
            pool.normal_()
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        self.q, self.k, self.v = (
            torch.randn(h, tokens, shape.head_dim, device=bench.device, dtype=bench.dtype) for h in heads
        )
        self.group, self.tokens, self.shape = shape.heads // shape.kv_heads, tokens, shape

    def seconds(self, works: Sequence[ScheduledSpan], tuning: Tuning = DEFAULT_TUNING) -> float:
        """Returns the time of one layer with the writing of its KV; the plan is made and copied before."""
        attention = DeviceAttention(self.cache, self.tokens, self.bench.device, self.group, tuning)
        attention.plan(works)
        count = sum(w.stop - w.start for w in works)
        q, k, v = (x[:, :count] for x in (self.q, self.k, self.v))
        return self.bench.device_seconds(lambda: attention(0, q, k, v, self.options))


def decoding(sharers: int, prefix: int, own: int) -> list[ScheduledSpan]:
    """Returns sequences that sample their next token, with a common prefix of whole blocks and blocks of their own."""
    above = prefix // BLOCK_SIZE
    root = Lying(list(range(above)), 0, prefix)
    each = -(-own // BLOCK_SIZE)
    works = []
    for i in range(sharers):
        table = [*root.table, *range(above + i * each, above + (i + 1) * each)]
        span: Any = Lying(table, prefix, prefix + own, (root,) if above else ())
        works.append(ScheduledSpan(span, prefix + own - 1, prefix + own, prefix + own - 1))
    return works


def prompts(count: int, length: int) -> list[ScheduledSpan]:
    """Returns whole prompts that share nothing."""
    each = -(-length // BLOCK_SIZE)
    spans: list[Any] = [Lying(list(range(i * each, (i + 1) * each)), 0, length) for i in range(count)]
    return [ScheduledSpan(span, 0, length, length - 1) for span in spans]


def blocks_of(works: Sequence[ScheduledSpan]) -> int:
    return 1 + max(block for w in works for block in w.span.table)


def crossover(bench: Bench, model: str) -> dict[str, Any]:
    """Measures milliseconds with the prefix as a shared part, and read through each sequence's block table, by its length and its number of sequences."""
    prefixes, sharers = bench.size((PREFIXES, SHARERS), ((32, 64), (2,)))
    most = decoding(max(sharers), max(prefixes), BLOCK_SIZE)
    layer = Layer(bench, model, blocks_of(most), max(sharers))
    grid = []
    for prefix in prefixes:
        for count in sharers:
            works = decoding(count, prefix, BLOCK_SIZE)
            took = []
            for reads in (ALWAYS, NEVER):
                took.append(layer.seconds(works, Tuning(shared_reads=reads)))
            grid.append({"prefix": prefix, "sharers": count, "shared_ms": ms(took[0]), "flat_ms": ms(took[1])})
    return {
        "model": bench.model(model),
        "grid": grid,
        "best_shared_reads": best_threshold(grid),
        "used": DEFAULT_TUNING.shared_reads,
    }


def best_threshold(grid: Sequence[Mapping[str, Any]]) -> int:
    """Returns the power of two of queries x blocks from which sharing should begin, so that the choices lose the least time to the better ones."""

    def lost(threshold: int) -> float:
        total = 0.0
        for cell in grid:
            shared = cell["sharers"] * cell["prefix"] // BLOCK_SIZE >= threshold
            took = cell["shared_ms"] if shared else cell["flat_ms"]
            total += math.log(took / min(cell["shared_ms"], cell["flat_ms"]))
        return total

    return min((2**i for i in range(20)), key=lambda threshold: (round(lost(threshold), 9), threshold))


def decode_alone(bench: Bench) -> dict[str, Any]:
    """Measures one layer of sequences that share nothing, and torch's scaled_dot_product_attention over contiguous keys and values."""
    count, keys = bench.size((256, 1024), (2, 64))
    works = decoding(count, 0, keys)
    layer = Layer(bench, "8b", blocks_of(works), count)
    ours, s = layer.seconds(works), layer.shape
    q = layer.q.transpose(0, 1).unsqueeze(2)  # [256, H, 1, D]
    del layer
    k, v = (torch.randn(count, s.kv_heads, keys, s.head_dim, device=bench.device, dtype=bench.dtype) for _ in range(2))
    dense = bench.device_seconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    gigabytes = (k.nbytes + v.nbytes) / 1e9
    return {
        "sequences": count, "keys": keys, "ms": ms(ours), "sdpa_ms": ms(dense), "gb_per_s": round(gigabytes / ours, 1),
        "sdpa_gb_per_s": round(gigabytes / dense, 1),
    }  # fmt: skip


def decode_shared(bench: Bench) -> dict[str, Any]:
    """Measures one layer of sequences under one prefix. torch has no attention that reads the prefix once."""
    count, prefix, own = bench.size((256, 4096, OWN), (2, 64, 32))
    works = decoding(count, prefix, own)
    layer = Layer(bench, "8b", blocks_of(works), count)
    ours = layer.seconds(works)
    flop = 4 * layer.shape.heads * layer.shape.head_dim * count * (prefix + own)
    return {"sequences": count, "prefix": prefix, "own": own, "ms": ms(ours), "tflops": teraflops(flop, ours)}


def prefill(bench: Bench, count: int, length: int) -> dict[str, Any]:
    """Measures one layer of whole prompts, and torch's scaled_dot_product_attention and varlen attention."""
    count, length = bench.size((count, length), (2, 32))
    works = prompts(count, length)
    layer = Layer(bench, "8b", blocks_of(works), count * length)
    ours = layer.seconds(works)
    q, k, v = (x.reshape(x.shape[0], count, length, -1).transpose(0, 1) for x in (layer.q, layer.k, layer.v))
    dense = bench.device_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    flop = 4 * layer.shape.heads * layer.shape.head_dim * count * length * (length + 1) / 2
    return {
        "prompts": count, "tokens": length, "ms": ms(ours), "sdpa_ms": ms(dense), "varlen_ms": varlen(bench, layer, count, length),
        "tflops": teraflops(flop, ours), "sdpa_tflops": teraflops(flop, dense),
    }  # fmt: skip


def varlen(bench: Bench, layer: Layer, count: int, length: int) -> float | None:
    """Measures torch's own attention over packed prompts; None if torch has none for this device or does not take these arguments."""
    if bench.device.type != "cuda":
        return None
    from torch.nn.attention.varlen import varlen_attn

    group = layer.group
    q = layer.q.transpose(0, 1).contiguous()
    k, v = (x.repeat_interleave(group, 0).transpose(0, 1).contiguous() for x in (layer.k, layer.v))
    starts = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=bench.device)
    for causal in ({"is_causal": True}, {"window_size": (-1, 0)}):  # depends on torch's version
        try:
            return ms(
                bench.device_seconds(
                    lambda causal=causal: varlen_attn(q, k, v, starts, starts, length, length, **causal)
                )
            )  # type: ignore[misc]
        except Exception:  # an argument, a device or a type that torch does not support
            continue
    return None


def variants(bench: Bench, lane: str) -> dict[str, Any]:
    """Measures milliseconds with other tiles: decoding under a shared prefix, and prefill (wide) or decoding alone (narrow)."""
    from batchgen.attention import triton_kernels

    shape = shape_of(bench.model("8b"), bench.dtype)
    key = (bench.dtype.itemsize, max(64, shape.head_dim))
    now = dict(zip(("wide", "narrow"), triton_kernels.TILES[key], strict=True))
    found = []
    for change in VARIANTS[lane][: bench.size(None, 2)]:
        tiles = now | {lane: now[lane]._replace(**change)}
        with _tiles(triton_kernels, triton_kernels.TILES | {key: tuple(tiles.values())}):
            try:
                took = _two(bench, lane)
            except Exception as e:  # for example, too much shared memory
                found.append({"change": change, "failed": f"{type(e).__name__}: {e}"[:200]})
                continue
        found.append({"change": change, **took})
    return {"tile": now[lane]._asdict(), "variants": found}


def splits(bench: Bench) -> dict[str, Any]:
    """The same for finer and coarser splits of long ranges of keys: with `Tuning` as it is, and with one field at a time changed."""
    found = [{"change": {}, **_all(bench, DEFAULT_TUNING)}]
    for name, values in list(SPLITS.items())[: bench.size(None, 1)]:
        for value in values[: bench.size(None, 1)]:
            found.append({"change": {name: value}, **_all(bench, Tuning(**{name: value}))})
    return {"variants": found}


def _all(bench: Bench, tuning: Tuning) -> dict[str, float]:
    return _two(bench, "narrow", tuning) | _two(bench, "wide", tuning)


def _two(bench: Bench, lane: str, tuning: Tuning = DEFAULT_TUNING) -> dict[str, float]:
    count, prefix, own = bench.size((256, 4096, OWN), (2, 64, 32))
    kinds = {"decode_shared_ms": decoding(count, prefix, own)}
    if lane == "wide":
        kinds["prefill_ms"] = prompts(*bench.size((4, 2048), (2, 32)))
    else:
        kinds["decode_flat_ms"] = decoding(count, 0, bench.size(1024, 64))
    found = {}
    for name, works in kinds.items():
        layer = Layer(bench, "8b", blocks_of(works), sum(w.stop - w.start for w in works))
        found[name] = ms(layer.seconds(works, tuning))
    return found


@contextmanager
def _tiles(kernels: Any, tiles: Any) -> Iterator[None]:
    """Inside the block the kernels use other tiles, which a launch looks up."""
    before, kernels.TILES = kernels.TILES, tiles
    try:
        yield
    finally:
        kernels.TILES = before


def teraflops(flop: float, seconds: float) -> float:
    return round(flop / seconds / 1e12, 3)


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
