"""This machine's rates, for the roofline: torch's highest rates for a model's own matrix products and for reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from benchmarks.roofline import Rates, Shape

TOKENS = (256, 512, 1024, 2048, 4096)
"""Rows of a product; the highest rate counts."""
QUERIES = (64, 256)
KEYS = (512, 1024, 2048)
COPIED_BYTES = 2**28
REPEATS = 5
MIN_SECONDS = 0.05
"""Short calls are repeated until so much time has passed."""


def best_seconds(run: Callable[[], object]) -> float:
    """Returns the shortest of several times, so that other work on the machine does not count."""
    run()
    best, passed, tries = float("inf"), 0.0, 0
    while tries < REPEATS or passed < MIN_SECONDS:
        began = time.perf_counter()
        run()
        took = time.perf_counter() - began
        best, passed, tries = min(best, took), passed + took, tries + 1
    return best


@torch.inference_mode()
def measure(
    shape: Shape, tokens: Sequence[int] = TOKENS, keys: Sequence[int] = KEYS, copied_bytes: int = COPIED_BYTES
) -> Rates:
    """Returns the rates of this machine. Bfloat16 may be multiplied as float32, where the processor is faster at that."""
    dtypes = {getattr(torch, shape.dtype), torch.float32}
    torch.manual_seed(0)
    return Rates(
        linear={
            name: max(rate for dtype in dtypes for rate in linear(*size, dtype, tokens))
            for name, size in shape.linears().items()
        },
        attention=max(rate for dtype in dtypes for rate in attention(shape, dtype, tokens, keys)),
        bandwidth=bandwidth(copied_bytes),
    )


def linear(out: int, into: int, dtype: torch.dtype, tokens: Sequence[int]) -> Iterable[float]:
    """Returns operations per second for each number of tokens, with the weight as it is and in the library's own layout."""
    weight = torch.randn(out, into).to(dtype)
    for count in tokens:
        x = torch.randn(count, into).to(dtype)
        operations = 2 * count * out * into
        yield operations / best_seconds(lambda x=x: torch.nn.functional.linear(x, weight))  # type: ignore[misc]
        if torch.backends.mkldnn.is_available():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, count)
            yield operations / best_seconds(
                lambda x=x, packed=packed: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")  # type: ignore[misc]
            )


def attention(shape: Shape, dtype: torch.dtype, tokens: Sequence[int], key_counts: Sequence[int]) -> Iterable[float]:
    """Returns operations per second of the two products over keys and values in a cache, without the softmax between them: for all heads at once
    in the cache's layout, and for one head with its keys as a layer's weight (batched products in float32 are slow on some processors).
    """
    group = shape.heads // shape.kv_heads
    for keys in key_counts:
        k, v = torch.randn(2, shape.kv_heads, keys, shape.head_dim).to(dtype)
        turned = k.transpose(1, 2)
        scoring = max(linear(keys, shape.head_dim, dtype, tokens))
        summing = max(linear(shape.head_dim, keys, dtype, tokens))
        yield 2 / (1 / scoring + 1 / summing)
        for queries in QUERIES:
            q = torch.randn(shape.kv_heads, group * queries, shape.head_dim).to(dtype)
            scores = torch.empty(shape.kv_heads, group * queries, keys, dtype=dtype)
            found = torch.empty_like(q)
            operations = 4 * shape.heads * shape.head_dim * queries * keys
            for stored in (turned, turned.contiguous()):

                def both(
                    q: torch.Tensor = q,
                    k: torch.Tensor = stored,
                    v: torch.Tensor = v,
                    scores: torch.Tensor = scores,
                    found: torch.Tensor = found,
                ) -> None:
                    torch.bmm(q, k, out=scores)
                    torch.bmm(scores, v, out=found)

                yield operations / best_seconds(both)


def bandwidth(copied_bytes: int) -> float:
    """Returns bytes per second of a large copy, which reads and writes."""
    source = torch.ones(copied_bytes // 4)
    target = torch.empty_like(source)
    return 2 * copied_bytes / best_seconds(lambda: target.copy_(source))
