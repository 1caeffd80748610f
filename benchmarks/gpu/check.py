"""The trials of `batchgen/model/checks/device_check.py`, one case for each: which parts a job would switch off on this GPU, and how long the trials take.

First the attention kernels by themselves, for the head shapes and options of several families; then all parts on whole models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from batchgen.model.adapter import prepare
from batchgen.model.checks.device_check import PARTS, TrialSetup
from batchgen.model.checks.device_trials import attention_trial, run_trials, sampler_trial
from batchgen.model.loaded_model import AttentionKind
from benchmarks.gpu.device import Bench
from benchmarks.models import random_model

BLOCK = 32
KINDS: dict[str, dict[str, Any]] = {
    "llama 8b": {"heads": 8, "group": 4, "k_size": 128, "v_size": 128},
    "qwen 0.5b": {"heads": 2, "group": 7, "k_size": 64, "v_size": 64},
    "gemma-2": {"heads": 4, "group": 2, "k_size": 256, "v_size": 256, "softcap": 50.0, "sliding_window": 256},
    "gpt-oss": {"heads": 8, "group": 8, "k_size": 64, "v_size": 64, "sliding_window": 128, "sinks": torch.bfloat16},
    "phi-3": {"heads": 8, "group": 1, "k_size": 96, "v_size": 96},
    "deepseek": {"heads": 4, "group": 1, "k_size": 192, "v_size": 128},
}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    if bench.device.type == "cuda":
        torch.cuda.set_device(bench.device)
    for name in bench.size(("8b", "0.5b"), ("tiny",)):
        yield f"{name} all parts", lambda name=name: all_parts(bench, name)  # type: ignore[misc]
    yield "sampling", lambda: timed(lambda: sampler_trial(bench.size(151_936, 1024), bench.device))
    for dtype in DTYPES[: bench.size(len(DTYPES), 0)]:
        for name, shape in KINDS.items():
            kind = kind_of(dtype, **shape)
            yield f"{name} {str(dtype).removeprefix('torch.')}", lambda kind=kind: attention(bench, kind)  # type: ignore[misc]


def kind_of(dtype: torch.dtype, **shape: Any) -> AttentionKind:
    free = {"scale": shape["k_size"] ** -0.5, "sliding_window": None, "softcap": None, "sinks": None}
    return AttentionKind(dtype=dtype, **(free | shape))


def attention(bench: Bench, kind: AttentionKind) -> dict[str, Any]:
    on: Any = SimpleNamespace(dtype=kind.dtype, device=bench.device)
    first = timed(lambda: attention_trial(kind, on, BLOCK))
    again = timed(lambda: attention_trial(kind, on, BLOCK))
    return {"with_compiling_s": first["seconds"], "again_s": again["seconds"]}


def timed(trial: Callable[[], None]) -> dict[str, Any]:
    began = time.perf_counter()
    with torch.inference_mode():
        trial()
    return {"seconds": round(time.perf_counter() - began, 3)}


def all_parts(bench: Bench, name: str) -> dict[str, Any]:
    """Seconds of each trial, twice: Triton compiles in the first. Raises `RuntimeError`, which names the part that would be switched off."""
    model = prepare(random_model(name, str(bench.device), str(bench.dtype).removeprefix("torch.")))
    found: dict[str, Any] = {"model": name}
    for when in ("with_compiling_s", "again_s"):
        marks: list[tuple[Any, float]] = []
        setup: Any = TrialSetup(None, BLOCK, tuple(PARTS))  # type: ignore[arg-type]
        run_trials(setup, model, lambda told, marks=marks: marks.append((told, time.perf_counter())))  # type: ignore[misc]
        starts, (last, end) = marks[:-1], marks[-1]
        if last.why:
            raise RuntimeError(f"{last.part}: {last.why}")
        ends = [at for _, at in starts[1:]] + [end]
        found[when] = {told.part: round(until - at, 3) for (told, at), until in zip(starts, ends, strict=True)}
    return found
