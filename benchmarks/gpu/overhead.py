"""The part of a small model's step that is not the device's work: scheduling, packing, launching, reading tokens back, waiting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.decode import OUT, OWN, SEQUENCES, intervals
from benchmarks.gpu.device import Bench
from benchmarks.gpu.serving import OneAtATime, Served
from benchmarks.gpu.traces import Recorder, Trace

PREFIXES = (1024, 0)
REPEATS = 3
TRACED = (48, 80)
"""The tokens of each sequence whose steps are traced."""


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    served = OneAtATime(bench, batch_size=bench.size(SEQUENCES, 4))
    for prefix in PREFIXES:
        yield f"0.5b {prefix}", lambda prefix=prefix: measure(bench, served("0.5b"), prefix)  # type: ignore[misc]


def measure(bench: Bench, served: Served, prefix: int) -> dict[str, Any]:
    """Measures a step: its time in runs without the profiler, and the device's busy time in a run with it."""
    sequences, shared = bench.size((SEQUENCES, prefix), (4, prefix // 64))
    found = [w.seconds for _ in range(bench.size(REPEATS, 1)) for w in intervals(served, sequences, shared)]
    step = statistics.median(found) * 1e3
    busy = decode_trace(bench, served, sequences, shared)
    busy_ms = busy.busy_us / 1e3 / busy.steps
    return {
        "model": served.name,
        "sequences": sequences,
        "prefix_tokens": shared,
        "step_ms": round(step, 3),
        "busy_ms": round(busy_ms, 3),
        "outside_share": round(1 - busy_ms / step, 4),
        "launches_per_step": round(len(busy.events) / busy.steps, 1),
        "tokens_per_s": round(sequences / step * 1e3, 1),
    }


def decode_trace(bench: Bench, served: Served, sequences: int, shared: int) -> Trace:
    """Returns the trace of some steps in which all sequences sample a token."""
    before = served.engine.stats.completion_tokens
    first, last = (before + sequences * at for at in bench.size(TRACED, (20, 22)))
    recorder = Recorder(bench, lambda m: m.tokens >= first, lambda m: m.tokens >= last)
    served.run(served.prompts(sequences, shared, OWN), OUT, recorder)
    assert recorder.trace is not None, "the run ended before the traced steps"
    return recorder.trace
