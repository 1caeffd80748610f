"""The parts of the GPU benchmarks. A part runs its cases in turn, and prints a line of JSON for each.

    python -m benchmarks.gpu.parts --device cuda decode prefill

A part's module has `cases(bench)`: names, and functions that measure them. A failure is reported, and the next case runs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

MARK = "@gpu "
"""The beginning of the lines for `__main__`; libraries print everything else."""
BROKEN_DEVICE = 3
"""Exit code after an error on the device: nothing more can be measured in this process."""
DECODE_PREFIXES = (1024, 4096, 16_384)
CONTINUOUS = "transformers-continuous"


@dataclass(frozen=True, slots=True)
class Part:
    module: str
    about: str
    limit: float
    """Maximum number of seconds."""
    workload: str | None = None
    shares: int | None = None
    """Number of processes that divide its cases, if its figures are no speeds: such parts run side by side."""


def _workload(name: str, model: str = "0.5b") -> Part:
    module = "benchmarks.gpu.workloads"
    return Part(module, f"{name} beside transformers, {model}", 420.0, f"{name} {model}")


PARTS: dict[str, Part] = {
    "check": Part(
        "benchmarks.gpu.check", "what a job tries before it uses a GPU, and what it would switch off", 240.0, shares=1
    ),
    "parity": Part("benchmarks.gpu.parity", "tokens and logits against transformers", 540.0, shares=4),
    "tests": Part("benchmarks.gpu.tests", "the tests that need a GPU", 420.0, shares=1),
    "jobs": Part("benchmarks.gpu.jobs", "whole jobs: answers, beside the CPU, killed and continued", 300.0, shares=1),
    "images": Part("benchmarks.gpu.images", "rows with images against transformers", 180.0, shares=1),
    "packed": Part("benchmarks.gpu.packed", "packed weights against unpacked ones", 180.0, shares=1),
    "decode": Part("benchmarks.gpu.decode", "8B decoding under a shared prefix, against the step's floor", 240.0),
    "prefill": Part("benchmarks.gpu.prefill", "prompts against the rate of a large matrix product", 180.0),
    "profile": Part("benchmarks.gpu.profile", "what the GPU does in a step, kernel by kernel", 120.0),
    "shared-prefix": _workload("shared-prefix"),
    "nested-groups": _workload("nested-groups"),
    "few-shot": _workload("few-shot"),
    "nothing-shared": _workload("nothing-shared"),
    "shared-prefix-8b": _workload("shared-prefix", "8b"),
}
GROUPS = {
    "workloads": tuple(name for name, part in PARTS.items() if part.workload and not name.endswith("-8b")),
    "first": (
        "check",
        "jobs",
        "decode",
        "prefill",
        "parity",
        "images",
        "packed",
        "tests",
    ),  # the most useful parts for ten minutes
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="+", choices=list(PARTS))
    p.add_argument("--device", required=True)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--skip", type=json.loads, default=[], help="JSON list of [part, case]")
    p.add_argument(
        "--share", type=int, nargs=2, default=[0, 1], metavar=("I", "N"), help="every Nth case from the Ith on"
    )
    args = p.parse_args()
    import torch
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.gpu.device import Bench
    from benchmarks.programs import end_children_too

    disable_progress_bar()
    end_children_too()
    bench = Bench(torch.device(args.device), args.tiny)
    for name in args.parts:
        part = PARTS[name]
        cases = importlib.import_module(part.module).cases
        if part.workload:
            cases = partial(cases, workload=part.workload, work=args.work)
        first, every = args.share
        for case, measure in islice(cases(bench), first, None, every):
            if [name, case] not in args.skip:
                _measure(name, case, measure)
                bench.free()


def _measure(part: str, case: str, measure: Any) -> None:
    _tell(part=part, case=case, begins=True)
    began = time.perf_counter()
    try:
        figures = measure()
    except Exception as e:
        traceback.print_exc()
        said = " ".join(str(e).split())
        _tell(part=part, case=case, failure=f"{type(e).__name__}: {said}"[:600])
        if "CUDA error" in said or "Triton Error" in said:
            sys.exit(BROKEN_DEVICE)
    else:
        _tell(part=part, case=case, figures=figures, seconds=time.perf_counter() - began)
    gc.collect()


def _tell(**what: Any) -> None:
    print(f"{MARK}{json.dumps(what)}", flush=True)


if __name__ == "__main__":
    main()
