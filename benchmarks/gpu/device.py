"""The device that is measured: waits for it, times it, and measures its highest rates."""

from __future__ import annotations

import gc
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from typing import Any, TypeVar

import torch

from benchmarks.gpu.floor import Ceiling
from benchmarks.machine import machine_facts
from benchmarks.models import GPU_CONFIGS
from benchmarks.roofline import Shape

T = TypeVar("T")
NOT_OF_A_MACHINE = ("date", "load_average", "instruction_sets", "memory_bytes")
"""Entries that differ between two runs on one machine or between two machines of one kind, or that are not about a GPU."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The device, and the size of the measurements. A tiny bench shows that a benchmark runs; its figures mean nothing."""

    device: torch.device
    tiny: bool

    def size(self, real: T, tiny: T) -> T:
        return tiny if self.tiny else real

    def model(self, name: str) -> str:
        """Returns a model of `GPU_CONFIGS`."""
        return self.size(name, "tiny")

    @property
    def dtype(self) -> torch.dtype:
        """The type in which models compute."""
        return torch.bfloat16

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Returns memory that torch keeps to the device, because a KV pool takes its size from the free memory."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], object], repeats: int = 20, warm_up: int = 5) -> float:
        """Returns the median time of `repeats` calls. On a GPU the calls follow each other, and the GPU's own clock is read between them."""
        repeats, warm_up = self.size((repeats, warm_up), (1, 0))
        for _ in range(warm_up):
            run()
        if self.device.type == "cuda":
            return self._by_events(run, repeats)
        found = []
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    def _by_events(self, run: Callable[[], object], repeats: int) -> float:
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        self.sync()
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        self.sync()
        times = [before.elapsed_time(after) for before, after in pairwise(marks)]
        return statistics.median(times) / 1e3

    def ceiling(self) -> Ceiling:
        """Measures a copy of 4 GiB, and a product of two matrices of 8,192 x 8,192."""
        found = Ceiling(bandwidth=self._bandwidth(self.size(2**30, 2**16)), matmul=self._matmul(self.size(8192, 64)))
        self.free()
        return found

    def _bandwidth(self, numbers: int) -> float:
        source = torch.randint(-100, 100, (numbers,), dtype=torch.int32, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))

    def _matmul(self, side: int) -> float:
        a, b = (torch.randn(side, side, device=self.device, dtype=self.dtype) for _ in range(2))
        return 2 * side**3 / self.seconds(lambda: a @ b)


def rates(ceiling: Ceiling) -> dict[str, float]:
    """Returns the rates for a result."""
    return {"copy_gb_per_s": round(ceiling.bandwidth / 1e9, 1), "matmul_tflops": round(ceiling.matmul / 1e12, 2)}


def shape_of(name: str, dtype: torch.dtype) -> Shape:
    c = GPU_CONFIGS[name]
    return Shape(
        hidden=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        intermediate=c["intermediate_size"],
        vocabulary=c["vocab_size"],
        dtype=str(dtype).removeprefix("torch."),
    )


def gpu_machine() -> dict[str, Any]:
    """Returns the machine of a result. On a machine without a GPU `gpu`, `driver` and `cuda` are None."""
    facts = {name: value for name, value in machine_facts().items() if name not in NOT_OF_A_MACHINE}
    name, driver = _smi("name"), _smi("driver_version")
    facts["versions"] |= {"triton": _version("triton")}
    return {"gpu": name, "driver": driver, "cuda": torch.version.cuda if name else None} | facts


def _smi(field: str) -> str | None:
    """Returns a field of nvidia-smi for the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
