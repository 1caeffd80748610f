"""What a device did in some steps of a run, by torch's profiler: when it was busy, and with which kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.device import Bench
from benchmarks.gpu.floor import busy
from benchmarks.gpu.serving import Moment

NAME_LENGTH = 90
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("attend", "attention", "flash", "fmha", "cascade", "merge_partials")),
    ("matrix products", ("gemm", "cutlass", "cublas", "xmma", "nvjet", "matmul", "_mm_", "aten::linear", "splitk")),
    ("copies", ("memcpy", "memset", "copy")),
    ("norms", ("norm", "rsqrt")),
    ("sampling", ("sort", "argmax", "topk", "softmax", "cumsum", "scan", "multinomial")),
    ("indexing", ("index", "gather", "scatter")),
)  # fmt: skip
"""The kinds of kernels by parts of their names. The first that fits counts; the rest is `element-wise and other`."""
OTHER = "element-wise and other"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that ran on the device, in microseconds of the profiler's clock."""

    name: str
    begins: float
    ends: float


@dataclass(frozen=True, slots=True)
class Trace:
    events: tuple[Event, ...]
    steps: int

    @property
    def busy_us(self) -> float:
        return busy([(e.begins, e.ends) for e in self.events])


class Recorder:
    """Gets every moment of a run. Traces the steps from the first for which `begin` is true to the next for which `end` is true."""

    def __init__(self, bench: Bench, begin: Callable[[Moment], bool], end: Callable[[Moment], bool]) -> None:
        self.bench = bench
        self.begin, self.end = begin, end
        self.trace: Trace | None = None
        self._profile: Any = None
        self._first = 0

    def __call__(self, moment: Moment) -> None:
        if self.trace is not None:
            return
        if self._profile is None:
            if self.begin(moment):
                self._first = moment.steps
                self.bench.sync()
                on_device = [ProfilerActivity.CUDA] if self.bench.device.type == "cuda" else []
                self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
                self._profile.start()
            return
        if self.end(moment):
            self.bench.sync()
            self._profile.stop()
            self.trace = trace_of(self._profile.events(), self.bench.device, moment.steps - self._first)


def trace_of(events: Sequence[Any], device: torch.device, steps: int) -> Trace:
    """Returns the trace of the profiler's events. On a CPU, operations stand in for kernels."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    found = [
        Event(e.name, e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == kind and not e.is_user_annotation and e.time_range.end > e.time_range.start
    ]
    if not found:
        raise RuntimeError("the profiler saw nothing run on the device")
    if device.type != "cuda":
        found = outermost(found)
    return Trace(tuple(found), steps)


def outermost(events: Sequence[Event]) -> list[Event]:
    """Returns the events that are not inside another one: of nested operations, the outermost."""
    found: list[Event] = []
    for event in sorted(events, key=lambda e: (e.begins, -e.ends)):
        if not found or event.begins >= found[-1].ends:
            found.append(event)
    return found


def kind_of(name: str) -> str:
    low = name.lower()
    return next((kind for kind, words in KINDS if any(word in low for word in words)), OTHER)


def summary(trace: Trace, step_ms: float, most: int = 15) -> dict[str, Any]:
    """Where the milliseconds of a step go. `step_ms` is the time of the step without a profiler; the part in which the device is not busy is `idle`."""
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in trace.events:
        took = (event.ends - event.begins) / 1e3 / trace.steps
        kinds[kind_of(event.name)] += took
        kernels[event.name].append(took)
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:most]
    busy_ms = trace.busy_us / 1e3 / trace.steps
    return {
        "steps": trace.steps,
        "step_ms": round(step_ms, 3),
        "busy_ms": round(busy_ms, 3),
        "idle_ms": round(step_ms - busy_ms, 3),
        "kinds_ms": {kind: round(ms, 3) for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])},
        "launches_per_step": round(len(trace.events) / trace.steps, 1),
        "kernels": [
            {"name": name[:NAME_LENGTH], "per_step": round(len(took) / trace.steps, 1), "ms": round(sum(took), 4)}
            for name, took in largest
        ],
    }
