"""Peak memory of batchgen over a short and a long file: it must not grow with the file.

    python -m benchmarks.memory --rows 10000 200000

Runs and plans with a tiny random model and one token per row, each in its own process: with a given window, which both files fill, and with
the default window, which a short file does not fill. Exits with 1 if the peaks with the given window differ by 10% or more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.machine import machine_facts
from benchmarks.models import tiny_model_folder

ROOT = Path(__file__).resolve().parent.parent
LARGEST_GROWTH = 0.10
WORDS = ("import", "return", "class", "self", "value", "name", "raise", "None", "list", "while", "yield", "string")


def write_rows(path: Path, rows: int) -> Path:
    """Writes rows that share a prefix and have some words of their own, in random order."""
    rnd = random.Random(rows)
    prefix = " ".join(rnd.choices(WORDS, k=32))
    with path.open("w", encoding="utf-8") as f:
        for number in range(rows):
            own = " ".join(rnd.choices(WORDS, k=rnd.randint(4, 24)))
            f.write(json.dumps({"id": number, "prompt": f"{prefix} {own}"}) + "\n")
    return path


def child(task: str, rows: Path, model: Path, window: int | None, kv_memory: str) -> None:
    """The measured process: runs one job, and prints its peak memory."""
    from batchgen import EngineConfig, JobConfig, ModelConfig, PromptConfig, SamplingParams, plan_job, run_job
    from batchgen.stats import memory_bytes_peak

    config = JobConfig(
        inputs=(str(rows),),
        output=str(rows.with_suffix(".out.jsonl")),
        model=ModelConfig(model=str(model), device="cpu"),
        prompts=PromptConfig(chat=False),
        sampling=SamplingParams(max_tokens=1, ignore_eos=True),
        engine=EngineConfig(kv_memory=kv_memory),
        window=window,
        overwrite=True,
    )
    start = time.perf_counter()
    done = run_job(config).stats["rows_ok"] if task == "run" else plan_job(config).rows
    seconds = round(time.perf_counter() - start, 2)
    print(json.dumps({"rows_done": done, "memory_bytes_peak": memory_bytes_peak(), "seconds": seconds}))


def measure(task: str, rows: Path, model: Path, window: int | None, kv_memory: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory",
        "--child",
        task,
        str(rows),
        str(model),
        str(window or 0),
        kv_memory,
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{task} of {rows.name} failed:\n{done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rows", type=int, nargs=2, default=[10_000, 200_000], metavar=("SHORT", "LONG"))
    p.add_argument("--window", type=int, default=4096, help="rows planned at a time (%(default)s)")
    p.add_argument(
        "--kv-memory",
        default="auto",
        help="size of the KV pool, which prefixes kept between windows fill (%(default)s)",
    )
    p.add_argument("--tasks", nargs="+", choices=["run", "plan"], default=["run", "plan"])
    p.add_argument("--no-default-window", action="store_true", help="leave out the runs with the default window")
    p.add_argument(
        "--work",
        default=str(Path(tempfile.gettempdir()) / "batchgen-benchmarks"),
        help="the model goes there (%(default)s)",
    )
    p.add_argument("--output", metavar="FILE", help="write the figures there too, as JSON")
    return p.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]) or None, sys.argv[6])
        return
    args = parse()
    disable_progress_bar()
    model = tiny_model_folder(Path(args.work))
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        files = [write_rows(Path(folder) / f"rows-{rows}.jsonl", rows) for rows in args.rows]
        for task in args.tasks:
            for window in [args.window] + [None] * (not args.no_default_window):
                short, long = (measure(task, file, model, window, args.kv_memory) for file in files)
                if [short["rows_done"], long["rows_done"]] != args.rows:
                    raise SystemExit(f"{task}: not all rows were done")
                growth = long["memory_bytes_peak"] / short["memory_bytes_peak"] - 1
                cases.append({"task": task, "window": window, "short": short, "long": long, "growth": round(growth, 4)})
                peaks = " and ".join(
                    f"{f['memory_bytes_peak'] / 2**20:,.0f} MiB ({f['seconds']:.0f} s)" for f in (short, long)
                )
                print(
                    f"{task}, window {window or 'default'}: {args.rows[0]:,} and {args.rows[1]:,} rows peak at {peaks}: {growth:+.1%}",
                    flush=True,
                )
    if args.output:
        result = {
            "schema": "batchgen.benchmarks.memory/1",
            "machine": machine_facts(),
            "rows": args.rows,
            "kv_memory": args.kv_memory,
            "cases": cases,
        }
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if any(case["window"] and abs(case["growth"]) >= LARGEST_GROWTH for case in cases):
        raise SystemExit(f"peak memory grows with the file: by {LARGEST_GROWTH:.0%} or more")


if __name__ == "__main__":
    main()
