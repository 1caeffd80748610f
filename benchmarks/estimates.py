"""How well `batchgen plan` foretells a job's time: `python -m benchmarks.estimates`.

For each workload: the estimate of `plan --measure`, which knows no earlier run, to the run of the other rows; and the estimate of `plan` from the
steps that runs of the other workloads have stored, to a run of all rows. A ratio is estimate / truth. The truth is the sum of the seconds of the
engine's steps; `generate` also has what runs beside them. On a busy machine, `--clock processor` counts the processor time of steps instead, in what is
stored and in what is compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from batchgen import JobConfig, ModelConfig, SamplingParams
from batchgen.prompts.tokenizer import quiet
from benchmarks.machine import machine_facts
from benchmarks.models import SHAPES, model_folder
from benchmarks.workloads import WORKLOADS, workload_file

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def job(
    tasks: Sequence[str], clock: str, costs: Path, config: JobConfig, write_template: str | None = None
) -> dict[str, Any]:
    """Does `measure`, `plan` or `run` of a job one after the other, in this process. `costs`: the file of the costs of steps. Returns figures."""
    from batchgen import dry_run, plan_job, run_job
    from batchgen.devices import opening
    from batchgen.job import measure_job

    with quiet():  # torch is imported
        from batchgen.engine import engine

    measured, now = 0.0, CLOCKS[clock]
    step = engine.Engine.step

    def timed(self: engine.Engine, admit: bool = True) -> None:
        nonlocal measured
        began = now()
        step(self, admit)
        measured += now() - began

    engine.Engine.step = timed  # type: ignore[method-assign]
    engine.time = SimpleNamespace(perf_counter=now)  # type: ignore[assignment]
    opening.costs_file = dry_run.costs_file = lambda *_: costs  # type: ignore[assignment,attr-defined]
    notes = Notes()
    found: dict[str, Any] = {"notes": notes.texts}
    for task in tasks:
        if task == "measure":
            measure_job(config, 32, notes)
        elif task == "plan":
            plan = plan_job(config, notes, write_template=write_template)
            found["estimate"] = None if plan.estimate is None else plan.estimate.seconds
            found["advice"] = "" if plan.advice is None else plan.advice.text
        else:
            measured = 0.0
            stats = run_job(config, notes).stats
            found |= {"generate": stats["seconds"]["generate"], "steps": measured, "prefill": stats["prefill_tokens"]}
    return found


class Notes:
    """A progress that keeps the notes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    def update(self, now: object) -> None:
        pass


def alone(*arguments: Any) -> dict[str, Any]:
    """Calls `job` in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(job, *arguments).result()


def measure(jobs: dict[str, JobConfig], work: Path, clock: str) -> list[dict[str, Any]]:
    """Returns the figures of each job."""
    found = []
    for name, config in jobs.items():
        measured, whole = (replace(config, output=str(work / f"{name}.{kind}.jsonl")) for kind in ("measured", "whole"))
        known = alone(["measure", "plan"], clock, work / "known", measured)
        rest = alone(["run"], clock, work / "known", measured)
        (work / "known").unlink()
        run = alone(["run"], clock, work / f"{name}.costs", whole)
        found.append(
            {"name": name, "model": config.model.model, "measured": known["estimate"], "rest": rest, "whole": run}
        )
        print(f"{name}: {json.dumps(found[-1])}", file=sys.stderr, flush=True)
    for one in found:
        others = [o["name"] for o in found if o["model"] == one["model"] and o is not one] or [one["name"]]
        stored = [step for other in others for step in json.loads((work / f"{other}.costs").read_text())]
        (work / "others").write_text(json.dumps(stored))
        config = replace(jobs[one["name"]], output=str(work / "not-begun.jsonl"))
        one["stored"] = alone(["plan"], clock, work / "others", config)["estimate"]
    return found


def trained_jobs(model: Path, work: Path, rows: int) -> dict[str, JobConfig]:
    """The jobs of `benchmarks.drafts`, for the model that it has trained."""
    from benchmarks.drafts import JOBS, task

    jobs = {}
    for job, settings in JOBS.items():
        name, rng = job.replace(" ", ""), random.Random(2)
        path = work / f"{name}.rows.jsonl"
        prompts = [task("label" if job.startswith("n") else job, rng)[0] for _ in range(rows)]
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        jobs[name] = JobConfig(
            inputs=(str(path),), model=ModelConfig(model=str(model)), sampling=SamplingParams(**settings)
        )
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="30m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--trained", type=Path, help="a model of benchmarks.drafts --keep: its jobs too")
    parser.add_argument("--rows", type=int, default=512, help="rows of each job of the trained model")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-benchmarks")
    parser.add_argument("--limit", type=int, help="so many rows of each workload")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = model_folder(args.work, args.model, args.dtype)
    files = {name: workload_file(args.work, name, model, args.limit)[0] for name in args.workloads}
    params = SamplingParams(ignore_eos=True)
    jobs = {
        name: JobConfig(inputs=(str(path),), model=ModelConfig(model=str(model)), sampling=params)
        for name, path in files.items()
    }
    with tempfile.TemporaryDirectory() as place:
        if args.trained:
            jobs |= trained_jobs(args.trained, Path(place), args.rows)
        found = measure(jobs, Path(place), args.clock)
    print(
        "| job | steps, s | generate, s | `plan --measure` | `plan` from other jobs |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for one in found:
        whole, rest = one["whole"], one["rest"]
        ratios = one["measured"] / rest["steps"], one["stored"] / whole["steps"]
        print(f"| {one['name']} | {whole['steps']:.1f} | {whole['generate']:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    print(
        f"\nmedian of |ratio - 1|: {statistics.median(abs(o['measured'] / o['rest']['steps'] - 1) for o in found):.2f} measured"
    )
    if args.out:
        text = json.dumps({"machine": machine_facts(), "clock": args.clock, "jobs": found}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
