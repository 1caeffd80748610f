"""How fast each engine is with as many threads as cores while a busy loop runs on one of the cores, beside its speed without the loop.

    taskset -c 0,1 python -m benchmarks.busy --limit 32 --out benchmarks/results/busy.json

One core of N is then half gone, and an engine that shares out its work well loses 1 / (2 N); one that waits for its slowest thread
loses half. Engines and the two conditions take turns. The shares are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_facts
from benchmarks.models import SHAPES, model_folder
from benchmarks.programs import PROGRAMS, Case, EngineFailed, Launcher, end_children_too
from benchmarks.workloads import WORKLOADS, workload_file

CASES = ("batchgen@bfloat16", "openvino@bfloat16", "batchgen@int8", "openvino@int8", "llamacpp@int8")


@contextmanager
def busy_loop(core: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(process.pid, [core])
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["shared-prefix", "nothing-shared"])
    p.add_argument("--cases", nargs="+", default=CASES, metavar="ENGINE@PRECISION", help="(%(default)s)")
    p.add_argument("--model", choices=list(SHAPES), default="30m")
    p.add_argument("--limit", type=int, help="only the first rows of each workload")
    p.add_argument("--batch", type=int, default=16, help="sequences of llama.cpp (%(default)s)")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--timeout", type=float, default=300, help="seconds after which a run is ended (%(default)g)")
    p.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-benchmarks")
    p.add_argument(
        "--engines-folder", type=Path, help="what setup_engines.sh made (default: batchgen-engines beside --work)"
    )
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    end_children_too()
    cores = sorted(os.sched_getaffinity(0))
    launcher = Launcher(
        args.engines_folder or args.work.absolute().parent / "batchgen-engines", len(cores), args.timeout
    )
    folder = model_folder(args.work, args.model, "bfloat16")
    machine, measured = machine_facts(), list[dict[str, Any]]()
    for workload in args.workloads:
        file, _ = workload_file(args.work, workload, folder, args.limit)
        cases = []
        for engine, _, dtype in (case.partition("@") for case in args.cases):
            if why := launcher.missing(engine):
                p.error(why)
            cases.append((engine, Case(args.model, dtype, workload, folder, file, args.limit)))
        for engine, case in cases:
            launcher.prepare(engine, case)
        for repeat in range(args.repeats):
            for engine, case in cases:
                options = ["--batch", str(args.batch)] if PROGRAMS[engine].swept else []
                one: dict[str, Any] = {"engine": engine, "repeat": repeat, **case.names()}
                try:
                    one["alone"] = launcher.call(engine, case, options)["tokens_per_s"]
                    with busy_loop(cores[-1]):
                        one["beside_loop"] = launcher.call(engine, case, options)["tokens_per_s"]
                except EngineFailed as e:
                    one["failed"] = str(e)
                print(json.dumps(one), flush=True)
                measured.append(one)
                if args.out:
                    found = {"machine": machine, "threads": len(cores), "measured": measured}
                    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for line in table(measured):
        print(line)


def table(measured: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: tokens/s alone and beside the loop, and the share that is left."""
    yield "| workload | precision | engine | alone | beside a busy loop | share |"
    yield "| --- | --- | --- | ---: | ---: | ---: |"
    done = [one for one in measured if "failed" not in one]
    for workload, dtype, engine in dict.fromkeys((m["workload"], m["dtype"], m["engine"]) for m in done):
        runs = [m for m in done if (m["workload"], m["dtype"], m["engine"]) == (workload, dtype, engine)]
        alone, beside = (statistics.median(run[name] for run in runs) for name in ("alone", "beside_loop"))
        name = workload.replace("-", " ")
        yield f"| {name} | {dtype} | {PROGRAMS[engine].label} | {alone:.0f} | {beside:.0f} | {beside / alone:.2f} |"


if __name__ == "__main__":
    main()
