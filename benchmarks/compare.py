"""batchgen beside other ways to run the same rows on this CPU, one engine at a time, repeats interleaved; results as JSON.

    python -m benchmarks.compare --name cpu
    python -m benchmarks.compare --quick

Every run is a process of its own. All engines decode greedily, past the end token, and make the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.machine import cores, machine_facts
from benchmarks.models import DTYPES, SHAPES, model_folder, parameters
from benchmarks.workloads import WORKLOADS, workload_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = "batchgen.benchmarks/1"
ENGINES = ("batchgen", "transformers-generate", "transformers-continuous")
GENERATE = "transformers-generate"
QUICK_ROWS = 8
QUICK_SWEEP = "4,8"


class EngineFailed(Exception):
    """An engine's process ended without a result."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one dtype on one workload."""

    model: str
    dtype: str
    workload: str
    folder: Path
    input: Path

    def names(self) -> dict[str, str]:
        return {"model": self.model, "dtype": self.dtype, "workload": self.workload}

    def __str__(self) -> str:
        return f"{self.workload}, {self.model} {self.dtype}"


def call(engine: str, case: Case, options: list[str], *, threads: int, timeout: float | None) -> dict[str, Any]:
    """The JSON line of an engine's script, run in a process of its own with this Python."""
    command = [sys.executable, "-m", f"benchmarks.engines.{engine.replace('-', '_')}"]
    command += ["--model", str(case.folder), "--input", str(case.input), *options]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false" if threads == 1 else "true",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as e:
        raise EngineFailed(f"{engine}: not done after {timeout:g} s") from e
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EngineFailed(f"{engine}: exit {done.returncode}: {last}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


class Comparison:
    """A run of the benchmark, and its result file, which is written after every measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.threads: int = args.threads or cores()
        self.file = Path(args.output) if args.output else RESULTS / f"{args.name}.json"
        settings = ("repeats", "limit", "sweep", "sweep_rows", "quick")
        self.result: dict[str, Any] = {
            "schema": SCHEMA,
            "name": args.name,
            "machine": machine_facts(),
            "settings": {"threads": self.threads} | {name: getattr(args, name) for name in settings},
            "models": {},
            "workloads": {},
            "sweeps": [],
            "measurements": [],
            "failures": [],
        }

    def run(self) -> None:
        for case in self._cases():
            batch = self._best_batch(case) if GENERATE in self.args.engines else 0
            failed: set[str] = set()
            for repeat in range(self.args.repeats):
                # In turn, so that what the machine does meanwhile falls on all of them; each repeat begins with another.
                turn = repeat % len(self.args.engines)
                for engine in self.args.engines[turn:] + self.args.engines[:turn]:
                    if engine not in failed and not self._measure(engine, case, repeat, batch):
                        failed.add(engine)
            self._show_medians(case)

    def _cases(self) -> list[Case]:
        """Makes models and workloads that are not there yet, so that no measurement waits for them."""
        work = Path(self.args.work)
        cases = []
        for model in self.args.models:
            for dtype in self.args.dtypes:
                folder = model_folder(work, model, dtype)
                self.result["models"][model] = {"parameters": parameters(folder), **SHAPES[model]}
                for workload in self.args.workloads:
                    file, facts = workload_file(work, workload, folder, self.args.limit)
                    self.result["workloads"][workload] = facts
                    cases.append(Case(model, dtype, workload, folder, file))
        return cases

    def _best_batch(self, case: Case) -> int:
        """The batch size at which transformers `generate` is fastest; its repeats run with that one."""
        options = ["--sweep", self.args.sweep, "--sweep-rows", str(self.args.sweep_rows)]
        try:
            found = call(GENERATE, case, options, threads=self.threads, timeout=self.args.timeout)
        except EngineFailed as e:
            self._fail(case, e)
            return 16
        self.result["sweeps"].append(case.names() | {"engine": GENERATE, **found})
        self._save()
        tried = ", ".join(f"{size}: {rate:.0f}" for size, rate in found["tokens_per_s"].items())
        print(f"{case}: {GENERATE} tokens/s by batch size: {tried}", flush=True)
        return int(found["best"])

    def _measure(self, engine: str, case: Case, repeat: int, batch: int) -> bool:
        options = ["--batch", str(batch)] if engine == GENERATE else []
        load = round(os.getloadavg()[0], 2)
        try:
            figures = call(engine, case, options, threads=self.threads, timeout=self.args.timeout)
        except EngineFailed as e:
            self._fail(case, e)
            return False
        if figures["completion_tokens"] != self.result["workloads"][case.workload]["completion_tokens"]:
            self._fail(case, EngineFailed(f"{engine}: made {figures['completion_tokens']} tokens"))
            return False
        self.result["measurements"].append(case.names() | {"repeat": repeat, "load_average": load} | figures)
        self._save()
        print(f"{case}: {engine} {figures['tokens_per_s']:.1f} tokens/s ({figures['wall_s']:.1f} s)", flush=True)
        return True

    def _fail(self, case: Case, failure: EngineFailed) -> None:
        self.result["failures"].append(case.names() | {"message": str(failure)})
        self._save()
        print(f"{case}: {failure}", file=sys.stderr, flush=True)

    def _show_medians(self, case: Case) -> None:
        rates = medians(self.result, case.names())
        ours = rates.get("batchgen")
        for engine, rate in rates.items():
            ratio = f", batchgen is {ours / rate:.2f}x of it" if ours and engine != "batchgen" else ""
            print(f"{case}: median of {engine} {rate:.1f} tokens/s{ratio}", flush=True)

    def _save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.file)


def medians(result: dict[str, Any], names: dict[str, str]) -> dict[str, float]:
    """Median tokens/s of each engine that was measured on a case, in the order of `ENGINES`."""
    rates: dict[str, list[float]] = {}
    for m in result["measurements"]:
        if all(m[key] == value for key, value in names.items()):
            rates.setdefault(m["engine"], []).append(m["tokens_per_s"])
    return {engine: statistics.median(rates[engine]) for engine in ENGINES if engine in rates}


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def several(option: str, choices: list[str], default: list[str]) -> None:
        p.add_argument(
            option,
            nargs="+",
            choices=choices,
            default=default,
            metavar="NAME",
            help=f"of {', '.join(choices)} (default: {', '.join(default)})",
        )

    several("--workloads", list(WORKLOADS), list(WORKLOADS))
    several("--models", list(SHAPES), ["30m"])
    several("--dtypes", list(DTYPES), list(DTYPES))
    several("--engines", list(ENGINES), list(ENGINES))
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--limit", type=int, help="only the first rows of each workload")
    p.add_argument("--threads", type=int, help="of every engine (default: the cores there are)")
    p.add_argument("--sweep", default="4,8,16,32,64", help="batch sizes tried for transformers generate (%(default)s)")
    p.add_argument(
        "--sweep-rows", type=int, default=32, help="rows, at least, that each size is tried on (%(default)s)"
    )
    p.add_argument("--timeout", type=float, help="seconds after which a run is given up")
    p.add_argument(
        "--work",
        default=str(Path(tempfile.gettempdir()) / "batchgen-benchmarks"),
        help="models and workloads go there (%(default)s)",
    )
    p.add_argument("--name", default="compare", help="of the result file, benchmarks/results/NAME.json (%(default)s)")
    p.add_argument("--output", metavar="FILE", help="result file elsewhere")
    p.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_ROWS} rows, one repeat, two batch sizes: does it run? The figures mean nothing",
    )
    args = p.parse_args()
    if args.quick:
        args.limit, args.repeats, args.sweep, args.sweep_rows = args.limit or QUICK_ROWS, 1, QUICK_SWEEP, QUICK_ROWS
        args.output = args.output or str(Path(args.work) / "quick.json")
    if args.repeats < 1 or (args.limit is not None and args.limit < 1):
        p.error("--repeats and --limit must be at least 1")
    return args


def main() -> None:
    args = parse()
    disable_progress_bar()
    comparison = Comparison(args)
    comparison.run()
    print(f"results: {comparison.file}")
    if comparison.result["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
