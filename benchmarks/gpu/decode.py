"""Decoding under one shared prefix, compared with the minimum time of a step (floor.py)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from benchmarks.gpu.device import Bench, rates, shape_of
from benchmarks.gpu.floor import Ceiling, decode_costs, floor_seconds
from benchmarks.gpu.parts import DECODE_PREFIXES
from benchmarks.gpu.serving import Moment, OneAtATime, Served, reached

SEQUENCES = 256
OWN = 64
"""Number of a prompt's own tokens; with the tokens sampled before and in the measured steps, 127.5 on average."""
OUT = 128
INTERVAL = 16
"""Steps that are timed together."""
FIRST, LAST = 16, 112
"""The tokens of each sequence that are measured: all sequences sample one in each of these steps."""
REPEATS = 3


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    ceiling = cache(bench.ceiling)
    served = OneAtATime(bench, batch_size=bench.size(SEQUENCES, 4), speculate="off")
    for prefix in DECODE_PREFIXES:
        # The ceiling first, because the KV pool takes all free memory.
        yield f"8b {prefix}", lambda prefix=prefix: measure(bench, ceiling(), served("8b"), prefix)  # type: ignore[misc]


def measure(bench: Bench, ceiling: Ceiling, served: Served, prefix: int) -> dict[str, Any]:
    sequences, shared = bench.size((SEQUENCES, prefix), (4, prefix // 64))
    found: list[Interval] = []
    preempted = served.engine.stats.preemptions
    for _ in range(bench.size(REPEATS, 1)):
        found += intervals(served, sequences, shared)
    shape = shape_of(served.name, bench.dtype)
    step = statistics.median(w.seconds for w in found)
    own = statistics.fmean(w.own for w in found)
    costs = decode_costs(shape, sequences, shared, own)
    floor = floor_seconds(costs, ceiling)
    return {
        "model": served.name,
        "sequences": sequences,
        "prefix_tokens": shared,
        "own_tokens": round(own, 1),
        "tokens_per_s": round(sequences / step, 1),
        "step_ms": round(step * 1e3, 3),
        "step_ms_spread": [round(f(w.seconds for w in found) * 1e3, 3) for f in (min, max)],
        "intervals": len(found),
        "floor_ms": round(floor * 1e3, 3),
        "floor_parts_ms": {name: round(cost.seconds(ceiling) * 1e3, 3) for name, cost in costs.items()},
        "floor_share": round(floor / step, 4),
        "rates": rates(ceiling),
        "preemptions": served.engine.stats.preemptions - preempted,
        "attention": served.engine.runner.attention,
    }


class Interval:
    """Some steps between two moments, in each of which every sequence samples a token."""

    def __init__(self, begin: Moment, end: Moment, before: int, sequences: int) -> None:
        """`before`: number of completion tokens at the start of the run."""
        self.seconds = (end.at - begin.at) * sequences / (end.tokens - begin.tokens)
        """A step."""
        drawn = ((begin.tokens + end.tokens) / 2 - before) / sequences
        self.own = OWN + drawn - 0.5  # the step that samples token k runs token k - 1
        """Tokens of a sequence's own, that which is run among them, on the mean."""


def intervals(served: Served, sequences: int, shared: int) -> list[Interval]:
    """Returns the intervals of one run: every 16 steps in which all sequences sample."""
    before = served.engine.stats.completion_tokens
    moments = served.run(served.prompts(sequences, shared, OWN), OUT)
    edges = [reached(moments, before + sequences * at) for at in range(FIRST, LAST + 1, INTERVAL)]
    return [Interval(begin, end, before, sequences) for begin, end in pairwise(edges)]
