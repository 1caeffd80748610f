"""One job on 1, 2 and 4 workers of one thread each: rows/s, the share of time without work, and prompt tokens that are run more than once.

    python -m benchmarks.workers --workers 1 2 --out benchmarks/results/workers.json

Every job is a separate command. Loading models does not count for the speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_facts
from benchmarks.models import SHAPES, model_folder
from benchmarks.programs import run_batchgen
from benchmarks.workloads import WORKLOADS, workload_file


def run(model: Path, rows: Path, workers: int) -> dict[str, Any]:
    """The figures of one job."""
    with tempfile.TemporaryDirectory() as place:
        stats = Path(place, "stats.json")
        devices = ",".join(map(str, range(workers)))
        options = ["--no-chat", "--device", f"cpu:{devices}", "--threads", str(workers), "--kv-memory", "1GiB"]
        run_batchgen(rows, model, f"{place}/out.jsonl", "--stats", str(stats), *options, OMP_NUM_THREADS="1")
        found: dict[str, Any] = json.loads(stats.read_text(encoding="utf-8"))
        return found


def figures(found: dict[str, Any], workers: int) -> dict[str, Any]:
    seconds = found["seconds"]["generate"]
    idle = sum(worker["idle_seconds"] for worker in found.get("workers", ()))
    return {
        "workers": workers,
        "rows_per_s": found["rows_per_s"],
        "completion_tokens_per_s": found["completion_tokens_per_s"],
        "generate_s": seconds,
        "idle_share": round(idle / (workers * seconds), 4),
        "prefill_tokens": found["prefill_tokens"],
        "prefill_tokens_again": found["prefill_tokens"] - found["prefill_tokens_min"],
        "rows_of_workers": [worker["rows"] for worker in found.get("workers", ())],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--model", choices=list(SHAPES), default="30m")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="nested-groups")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-benchmarks")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = model_folder(arguments.work, arguments.model, "bfloat16")
    rows, _ = workload_file(arguments.work, arguments.workload, model)
    measured = []
    for workers in arguments.workers:
        runs = [figures(run(model, rows, workers), workers) for _ in range(arguments.repeats)]
        middle = statistics.median_low([one["rows_per_s"] for one in runs])
        measured.append(next(one for one in runs if one["rows_per_s"] == middle))
        print(json.dumps(measured[-1]), flush=True)
    facts = {"model": arguments.model, "workload": arguments.workload, "repeats": arguments.repeats}
    if arguments.out:
        found = {"machine": machine_facts(), **facts, "measured": measured}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
