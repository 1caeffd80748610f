"""Compares batchgen on one workload with vLLM, if this Python has it, with transformers, and with itself without sharing.

Every engine runs in its own process.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchgen.process.machine import usable_cores
from benchmarks.gpu.device import Bench
from benchmarks.gpu.parts import CONTINUOUS
from benchmarks.models import gpu_model_folder
from benchmarks.programs import (
    GENERATE,
    OURS,
    PROGRAMS,
    VLLM,
    EngineFailed,
    NotDone,
    environment_of,
    last_json,
    python_path,
    run,
)
from benchmarks.workloads import workload_file

FEWER_ROWS = (512, 128)
"""Numbers of rows that slow engines get: the smaller one if the larger one is not done in time."""
TIMEOUT = 120.0
COMPILED_IN = 240.0
"""Time limit of vLLM, which compiles the model and captures its graphs before it begins."""
SWEEP = "32,128,512"
KEPT = ("prefill_tokens", "prefill_tokens_min", "shared_fraction", "steps", "mean_decode_batch", "preemptions",
        "kv_bytes_peak", "kv_bytes_unshared", "seconds", "generate_s")  # fmt: skip
"""The figures of batchgen that are kept."""


class Workload:
    """A model and a workload's rows on the disk, and the engines on them."""

    def __init__(self, bench: Bench, name: str, model: str, work: Path) -> None:
        self.bench = bench
        self.folder = gpu_model_folder(work, bench.model(model), str(bench.device))
        bench.free()  # the engines need what making the model took
        self.name, self.work = f"gpu-{name}", work
        self.environment = environment_of(usable_cores(), python_path())
        for hidden in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"):
            self.environment.pop(hidden, None)
            if hidden in os.environ and bench.device.type == "cuda":
                self.environment[hidden] = os.environ[hidden]

    def file(self, limit: int | None) -> tuple[Path, dict[str, Any]]:
        return workload_file(self.work, self.name, self.folder, limit)

    def call(
        self, engine: str, limit: int | None, options: Sequence[str] = (), timeout: float = TIMEOUT
    ) -> dict[str, Any]:
        """Returns an engine's figures for the first `limit` rows. Raises `EngineFailed`."""
        command = [sys.executable, "-m", PROGRAMS[engine].module, "--model", str(self.folder)]
        command += ["--input", str(self.file(limit)[0]), "--device", self.bench.device.type, *options]
        return last_json(engine, run(engine, command, self.environment, timeout))


def cases(bench: Bench, workload: str, work: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    name, model = workload.split()
    rows = bench.size((None, *FEWER_ROWS), (4, 4))

    @cache
    def made() -> Workload:
        return Workload(bench, name, model, work)

    yield OURS, lambda: ours(made(), rows[0], 1 if model == "8b" else bench.size(2, 1))
    if bench.tiny and name != "shared-prefix":  # every process takes seconds to start
        return
    if bench.device.type == "cuda" and find_spec("vllm"):
        yield VLLM, lambda: figures(made(), rows[0], [made().call(VLLM, rows[0], timeout=COMPILED_IN)])
    unshared = rows[1] if model == "8b" else rows[0]  # two million tokens of prompts take minutes there
    yield f"{OURS} --no-share", lambda: ours(made(), unshared, 1, ["--no-share"])
    needed = {rows[1]}
    yield GENERATE, lambda: theirs(made(), GENERATE, rows[1:], needed)
    yield CONTINUOUS, lambda: theirs(made(), CONTINUOUS, rows[1:], needed)
    for fewer in rows[1:]:
        if fewer in needed and fewer != rows[0]:
            yield f"{OURS} {fewer} rows", lambda fewer=fewer: ours(made(), fewer, 1)  # type: ignore[misc]


def ours(workload: Workload, limit: int | None, repeats: int, options: Sequence[str] = ()) -> dict[str, Any]:
    return figures(workload, limit, [workload.call(OURS, limit, options) for _ in range(repeats)])


def theirs(workload: Workload, engine: str, limits: Sequence[int], needed: set[int]) -> dict[str, Any]:
    """Runs an engine on as many rows as are done in time, whose number `needed` gets. Raises `NotDone` if even the fewest are not."""
    for limit in limits:
        needed.add(limit)
        try:
            if not PROGRAMS[engine].swept:
                return figures(workload, limit, [workload.call(engine, limit, ["--max-batch-tokens", "0"])])
            sizes = workload.bench.size(SWEEP, "1,2")
            found = workload.call(engine, limit, ["--sweep", sizes, "--sweep-rows", "64"])
            best = workload.call(engine, limit, ["--batch", str(found["best"])])
            return figures(workload, limit, [best]) | {"sweep": found["tokens_per_s"], "batch": found["best"]}
        except NotDone as e:
            last = e
    raise last


def figures(workload: Workload, limit: int | None, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    _, facts = workload.file(limit)
    if any(r["completion_tokens"] != facts["completion_tokens"] for r in runs):
        raise EngineFailed(f"made {[r['completion_tokens'] for r in runs]} tokens, not {facts['completion_tokens']}")
    extras = runs[-1]["extras"]
    return {
        "model": workload.folder.name,
        "description": facts["description"],
        "rows": facts["rows"],
        "completion_tokens": facts["completion_tokens"],
        "wall_s": [r["wall_s"] for r in runs],
        "tokens_per_s": round(statistics.median(r["tokens_per_s"] for r in runs), 1),
        "load_s": runs[-1]["load_s"],
        "extras": {name: extras[name] for name in KEPT if name in extras},
    }
