"""What the GPU does in a decode step and in a step of prompts: how long it is busy, and with which kernels.

A GPU that is busy for much less than a step takes waits for the host. The profiler slows the host down, so the times of steps are those of `decode` and `prefill`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.decode import FIRST, INTERVAL, OWN, SEQUENCES
from benchmarks.gpu.device import Bench
from benchmarks.gpu.serving import OneAtATime, Served

PREFIX = 1024
PROMPTS, PROMPT_TOKENS = 32, 2048
SHOWN = 20
"""Kernels, those that take the longest."""


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    served = OneAtATime(bench, batch_size=bench.size(SEQUENCES, 4))
    for model in ("8b", "0.5b"):
        yield f"{model} decoding", lambda model=model: decoding(bench, served(model))  # type: ignore[misc]
        yield f"{model} prompts", lambda model=model: prompts(bench, served(model))  # type: ignore[misc]


def decoding(bench: Bench, served: Served) -> dict[str, Any]:
    """Of steps in which every sequence samples a token."""
    sequences, prefix = bench.size((SEQUENCES, PREFIX), (4, 16))
    before = served.engine.stats.completion_tokens
    profiler = profile(activities=[_activity(bench)])
    run, steps = served.engine.run, []

    def watched(stop: Callable[[], None]) -> None:
        def at_a_step() -> None:
            stop()
            done = (served.engine.stats.completion_tokens - before) // sequences
            if len(steps) == (done >= FIRST) + (done >= FIRST + INTERVAL):
                return
            bench.sync()
            (profiler.stop if steps else profiler.start)()
            steps.append(done)

        run(at_a_step)

    served.engine.run = watched  # type: ignore[method-assign, assignment]
    try:
        served.run(served.prompts(sequences, prefix, OWN), FIRST + 2 * INTERVAL)
    finally:
        served.engine.run = run  # type: ignore[method-assign]
    return summary(bench, profiler, steps[1] - steps[0])


def prompts(bench: Bench, served: Served) -> dict[str, Any]:
    count, length = bench.size((PROMPTS, PROMPT_TOKENS), (3, 32))
    for profiler in (None, profile(activities=[_activity(bench)])):  # the first run warms up
        texts = [served.tokens(length) for _ in range(count)]
        before = served.engine.stats.steps
        if profiler is None:
            served.run(texts, 1)
            continue
        with profiler:
            served.run(texts, 1)
    return summary(bench, profiler, served.engine.stats.steps - before)


def summary(bench: Bench, profiler: Any, steps: int) -> dict[str, Any]:
    """Milliseconds of a step: from the first kernel to the last, with any kernel at work, and of each kernel."""
    kind = "CUDA" if bench.device.type == "cuda" else "CPU"
    spans, kernels = [], defaultdict(list)
    for event in profiler.profiler.kineto_results.events():
        if kind in str(event.device_type()):
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            kernels[event.name()[:100]].append(event.duration_ns())
    busy = end = 0
    for begin, until in sorted(spans):
        busy += max(0, until - max(begin, end))
        end = max(end, until)
    longest = sorted(kernels.items(), key=lambda kernel: -sum(kernel[1]))[:SHOWN]
    return {
        "steps": steps,
        "span_ms": round((end - min(spans)[0]) / 1e6 / steps, 3),
        "busy_ms": round(busy / 1e6 / steps, 3),
        "launches": round(len(spans) / steps, 1),
        "kernels": [
            {"name": name, "ms": round(sum(found) / 1e6 / steps, 4), "launches": round(len(found) / steps, 1)}
            for name, found in longest
        ],
    }


def _activity(bench: Bench) -> ProfilerActivity:
    return ProfilerActivity.CUDA if bench.device.type == "cuda" else ProfilerActivity.CPU
