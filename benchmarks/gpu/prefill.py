"""Prefill of prompts that share nothing, with one token to generate, compared with the rate of a large matrix product."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from benchmarks.gpu.device import Bench, rates, shape_of
from benchmarks.gpu.floor import Ceiling, prefill_flop
from benchmarks.gpu.serving import OneAtATime, Served

SHAPES = (("8b", 32, 2048), ("8b", 4, 16_384), ("0.5b", 128, 2048))
"""Model, prompts, tokens of each."""
REPEATS = 3


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    ceiling = cache(bench.ceiling)
    served = OneAtATime(bench)
    for model, count, length in SHAPES:
        yield (
            f"{model} {count} x {length}",
            lambda model=model, count=count, length=length: measure(bench, ceiling(), served(model), count, length),  # type: ignore[misc]
        )


def measure(bench: Bench, ceiling: Ceiling, served: Served, count: int, length: int) -> dict[str, Any]:
    count, length = bench.size((count, length), (3, length // 64))
    stats = served.engine.stats
    walls: list[float] = []
    for _ in range(1 + bench.size(REPEATS, 1)):  # the first warms up
        before = stats.prefill_tokens
        moments = served.run([served.tokens(length) for _ in range(count)], 1)
        walls.append(moments[-1].at - moments[0].at)
        if stats.prefill_tokens - before < count * (length - 1):  # two random prompts may begin with one token
            raise RuntimeError(f"{stats.prefill_tokens - before} tokens were run, not {count * length}")
    wall = statistics.median(walls[1:])
    flop = prefill_flop(shape_of(served.name, bench.dtype), [length] * count)
    return {
        "model": served.name,
        "prompts": count,
        "prompt_tokens": length,
        "tokens_per_s": round(count * length / wall, 1),
        "tflops": round(flop / wall / 1e12, 3),
        "matmul_share": round(flop / wall / ceiling.matmul, 4),
        "seconds": [round(w, 4) for w in walls[1:]],
        "steps": moments[-1].steps - moments[0].steps,
        "rates": rates(ceiling),
    }
