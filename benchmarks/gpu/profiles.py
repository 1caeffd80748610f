"""Where each millisecond of a step goes: the kernels of a decode step and of a prefill step, by kind and one by one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.decode import SEQUENCES, intervals
from benchmarks.gpu.device import Bench
from benchmarks.gpu.overhead import decode_trace
from benchmarks.gpu.serving import OneAtATime, Served
from benchmarks.gpu.traces import Recorder, summary

PREFIX = 4096
PROMPTS, LENGTH = 32, 2048


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    served = OneAtATime(bench, batch_size=bench.size(SEQUENCES, 4))
    for model in ("8b", "0.5b"):
        yield f"{model} decode", lambda model=model: decode(bench, served(model))  # type: ignore[misc]
        yield f"{model} prefill", lambda model=model: prefill(bench, served(model))  # type: ignore[misc]


def decode(bench: Bench, served: Served) -> dict[str, Any]:
    sequences, shared = bench.size((SEQUENCES, PREFIX), (4, PREFIX // 64))
    step = statistics.median(w.seconds for w in intervals(served, sequences, shared)) * 1e3
    return {"model": served.name} | summary(decode_trace(bench, served, sequences, shared), step)


def prefill(bench: Bench, served: Served) -> dict[str, Any]:
    """Returns the profile of all steps except the first."""
    count, length = bench.size((PROMPTS, LENGTH), (3, LENGTH // 64))

    def prompts() -> list[list[int]]:
        return [served.tokens(length) for _ in range(count)]

    served.run(prompts(), 1)
    moments = served.run(prompts(), 1)
    steps = moments[-1].steps - moments[0].steps
    step = (moments[-1].at - moments[0].at) / steps * 1e3
    last = served.engine.stats.completion_tokens + count
    recorder = Recorder(bench, lambda m: True, lambda m: m.tokens >= last)
    served.run(prompts(), 1, recorder)
    assert recorder.trace is not None
    return {"model": served.name} | summary(recorder.trace, step)
