"""The cost of keeping a job: the share of a run's time that goes into its folder (keys, results, output).

    python -m benchmarks.journal --workloads shared-prefix few-shot

The model is `30m`. The methods of the job's folder are timed in the run itself. Every result is committed at once, and synced every second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from batchgen import JobConfig, ModelConfig, PromptConfig, SamplingParams, run_job
from batchgen.jobs.job_folder import JobFolder
from benchmarks.machine import machine_facts
from benchmarks.models import model_folder
from benchmarks.workloads import workload_file

TIMED = ("occurrences", "stored", "add_rows", "append", "keep_under_way", "write", "flush", "finish")
TOKENS = {"shared-prefix": 64, "few-shot": 4}


def timed(seconds: dict[str, float]) -> None:
    """Adds the time in the folder's methods to `seconds` from now on."""

    def around(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

        return run

    for name in TIMED:
        setattr(JobFolder, name, around(name, getattr(JobFolder, name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(TOKENS), choices=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-benchmarks")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = model_folder(given.work, "30m", "bfloat16")
    seconds: dict[str, float] = {}
    timed(seconds)
    results: dict[str, Any] = {"machine": machine_facts()}
    for name in given.workloads:
        source, _ = workload_file(given.work, name, model)
        runs = []
        for _ in range(given.repeats):
            seconds.clear()
            config = JobConfig(
                inputs=(str(source),),
                output=str(given.work / f"journal-{name}.jsonl"),
                model=ModelConfig(model=str(model), device="cpu"),
                prompts=PromptConfig(chat=False),
                sampling=SamplingParams(max_tokens=TOKENS[name], ignore_eos=True),
                overwrite=True,
                flush_every=1.0,
            )
            stats = run_job(config).stats
            total = stats["seconds"]["total"]
            runs.append({"rows": stats["rows"], "total_s": total, "folder_s": dict(seconds)})
            print(name, f"{sum(seconds.values()):.3f} of {total:.1f} s", flush=True)
        share = statistics.median(sum(run["folder_s"].values()) / run["total_s"] for run in runs)
        results[name] = {"share": share, "runs": runs}
        print(f"{name}: {share:.2%} of the run")
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
