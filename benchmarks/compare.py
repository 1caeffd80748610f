"""Compares batchgen with other engines on the same rows on this CPU: one engine at a time, repeats interleaved, results as JSON.

    python -m benchmarks.compare --name cpu
    python -m benchmarks.compare --name cpu --continue       only what is not measured yet
    python -m benchmarks.compare --quick

Every run is a process of its own. All engines decode greedily, past the end token, and make the same number of tokens.
Engines that are not installed are left out. `bash benchmarks/setup_engines.sh` makes their environments.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from batchgen.process.machine import usable_cores
from benchmarks.machine import machine_facts
from benchmarks.models import DTYPES, INT8, PRECISIONS, SHAPES, model_folder, parameters
from benchmarks.programs import (
    OURS,
    PROGRAMS,
    Case,
    EngineFailed,
    Launcher,
    NotDone,
    end_children_too,
    last_json,
    python_path,
    run,
)
from benchmarks.programs import environment_of as environment
from benchmarks.result_file import SAME_SETTINGS, OtherRun, ResultFile, medians, new_result, shares
from benchmarks.stand_in import STAND_INS, without_bfloat16
from benchmarks.stand_in import environment as stand_in
from benchmarks.workloads import WORKLOADS, workload_file

RESULTS = Path(__file__).resolve().parent / "results"
QUICK_ROWS = 8
QUICK_SWEEP = "4,8"
TIMEOUT = 900.0


class Comparison:
    """A run of the benchmark, and its result file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = Path(args.work)
        smaller = stand_in(args.stand_in, self.work / "stand-ins") if args.stand_in else {}
        self.launcher = Launcher(Path(args.engines_folder), args.threads or usable_cores(), args.timeout, smaller)
        settings = {"threads": self.launcher.threads} | {name: getattr(args, name) for name in SAME_SETTINGS[1:]}
        settings |= {"repeats": args.repeats, "timeout": args.timeout, "engine_rows": args.engine_rows}
        path = Path(args.output) if args.output else RESULTS / f"{args.name}.json"
        self.file = ResultFile(path, new_result(args.name, machine_facts(), settings))
        self.tokens: dict[tuple[str, int | None], int] = {}
        """Completion tokens of a workload, or of its first rows."""

    def run(self) -> None:
        if self.args.go_on:
            for line in self.file.take_up():
                print(line, flush=True)
        engines = []
        for engine in self.args.engines:
            why = self.launcher.missing(engine)
            if why:
                print(why, file=sys.stderr, flush=True)
            else:
                engines.append(engine)
        for case, runs in [(case, self._runs(case, engines)) for case in self._cases()]:
            self._compare(case, runs)

    def _cases(self) -> list[Case]:
        """Makes missing models and workloads, so that no measurement waits for them."""
        cases = []
        for model in self.args.models:
            for dtype in self.args.dtypes:
                folder = model_folder(self.work, model, "bfloat16" if dtype == INT8 else dtype)
                self.file.result["models"][model] = {"parameters": parameters(folder), **SHAPES[model]}
                for workload in self.args.workloads:
                    case = self._rows(Case(model, dtype, workload, folder, Path()), self.args.limit)
                    cases.append(case)
        return cases

    def _rows(self, case: Case, limit: int | None) -> Case:
        file, facts = workload_file(self.work, case.workload, case.folder, limit)
        if limit == self.args.limit:
            self.file.result["workloads"][case.workload] = facts
        self.tokens[case.workload, limit] = facts["completion_tokens"]
        return replace(case, input=file, limit=limit)

    def _runs(self, case: Case, engines: list[str]) -> list[tuple[str, Case]]:
        """Returns the runs of a case. An engine that gets fewer rows is compared with batchgen on these rows."""
        runs: dict[tuple[str, Case], None] = {}
        for engine in engines:
            if case.dtype == INT8 and not PROGRAMS[engine].int8:
                continue
            limit = self.args.engine_rows.get(engine)
            if limit is None or limit >= self.file.result["workloads"][case.workload]["rows"]:
                runs[engine, case] = None
                continue
            fewer = self._rows(case, limit)
            runs[engine, fewer] = None
            if OURS in engines:
                runs[OURS, fewer] = None
        return list(runs)

    def _compare(self, case: Case, runs: list[tuple[str, Case]]) -> None:
        self._roofline(case)
        prepared = [(engine, of) for engine, of in runs if self._prepare(engine, of)]
        batch = {(engine, of): self._best_batch(engine, of) for engine, of in prepared if PROGRAMS[engine].swept}
        for repeat in range(self.args.repeats):
            # In turn, so that other work on the machine affects all engines alike; each repeat begins with another engine.
            turn = repeat % max(1, len(prepared))
            for engine, of in prepared[turn:] + prepared[:turn]:
                failed = self.file.find("failures", of, engine=engine)
                if failed is None and self.file.find("measurements", of, engine=engine, repeat=repeat) is None:
                    self._measure(engine, of, repeat, batch.get((engine, of)))
        for of in dict.fromkeys(of for _, of in runs):
            self._show_medians(of)

    def _roofline(self, case: Case) -> None:
        if "model_type" in SHAPES[case.model] or case.dtype == INT8:
            return  # the roofline knows only Llamas, and no products of 8 bits
        if self.file.find("rooflines", case) is None:
            command = [sys.executable, "-m", "benchmarks.roofline"]
            command += ["--model", str(case.folder), "--input", str(case.input)]
            command += ["--dtype", "float32"] if without_bfloat16(self.args.stand_in) else []
            try:
                stdout = run(
                    "roofline",
                    command,
                    environment(self.launcher.threads, python_path()) | self.launcher.stand_in,
                    self.args.timeout,
                )
                self.file.add("rooflines", case, last_json("roofline", stdout))
            except EngineFailed as e:
                self._fail("roofline", case, e)
                return
        found = self.file.find("rooflines", case)
        assert found is not None
        least, tokens = found["seconds"]["total"], self.tokens[case.workload, case.limit]
        print(f"{case}: the roofline is {least:.2f} s, {tokens / least:.0f} tokens/s", flush=True)

    def _prepare(self, engine: str, case: Case) -> bool:
        try:
            self.launcher.prepare(engine, case)
        except EngineFailed as e:
            self._fail(engine, case, e)
            return False
        return True

    def _best_batch(self, engine: str, case: Case) -> int | None:
        """Returns the batch size at which an engine is fastest; its repeats use it."""
        found = self.file.find("sweeps", case, engine=engine)
        if found is None:
            if self.file.find("failures", case, engine=engine):
                return None
            options = ["--sweep", self.args.sweep, "--sweep-rows", str(self.args.sweep_rows)]
            try:
                found = self.launcher.call(engine, case, options)
            except EngineFailed as e:
                self._fail(engine, case, e)
                return None
            self.file.add("sweeps", case, {"engine": engine, **found})
            tried = ", ".join(f"{size}: {rate:.0f}" for size, rate in found["tokens_per_s"].items())
            print(f"{case}: {engine} tokens/s by batch size: {tried}", flush=True)
        return int(found["best"])

    def _measure(self, engine: str, case: Case, repeat: int, batch: int | None) -> None:
        options = [] if batch is None else ["--batch", str(batch)]
        load = round(os.getloadavg()[0], 2)
        try:
            figures = self.launcher.call(engine, case, options)
            if figures["completion_tokens"] != self.tokens[case.workload, case.limit]:
                raise EngineFailed(f"{engine}: made {figures['completion_tokens']} tokens")
        except EngineFailed as e:
            self._fail(engine, case, e)
            return
        self.file.add("measurements", case, {"repeat": repeat, "load_average": load} | figures | {"engine": engine})
        print(f"{case}: {engine} {figures['tokens_per_s']:.1f} tokens/s ({figures['wall_s']:.1f} s)", flush=True)

    def _fail(self, engine: str, case: Case, failure: EngineFailed) -> None:
        """Notes that an engine has failed on a case, so that it is not tried on it again."""
        after = self.args.timeout if isinstance(failure, NotDone) else None
        self.file.add("failures", case, {"engine": engine, "message": str(failure), "timed_out_after": after})
        print(f"{case}: {failure}", file=sys.stderr, flush=True)

    def _show_medians(self, case: Case) -> None:
        rates = medians(self.file.result, case.names())
        roofline = shares(self.file.result, case.names())
        ours = rates.get(OURS)
        for engine, rate in rates.items():
            share = f", {roofline[engine]:.0%} of the roofline" if roofline else ""
            ratio = f", batchgen is {ours / rate:.2f}x of it" if ours and engine != OURS else ""
            print(f"{case}: median of {engine} {rate:.1f} tokens/s{share}{ratio}", flush=True)


def engine_rows(text: str) -> tuple[str, int]:
    engine, _, rows = text.partition("=")
    if engine not in PROGRAMS or engine == OURS or not rows.isdecimal() or int(rows) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=ROWS, with another engine than batchgen")
    return engine, int(rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def several(option: str, choices: list[str], default: list[str]) -> None:
        text = f"of {', '.join(choices)} (default: {', '.join(default)})"
        p.add_argument(option, nargs="+", choices=choices, default=default, metavar="NAME", help=text)

    several("--workloads", list(WORKLOADS), list(WORKLOADS))
    several("--models", list(SHAPES), ["30m"])
    several("--dtypes", list(PRECISIONS), list(DTYPES))
    several("--engines", list(PROGRAMS), list(PROGRAMS))
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--limit", type=int, help="only the first rows of each workload")
    p.add_argument(
        "--engine-rows",
        type=engine_rows,
        action="append",
        default=[],
        metavar="ENGINE=ROWS",
        help="for an engine that is too slow for all rows: only so many, on which batchgen is measured once more beside it",
    )
    p.add_argument(
        "--stand-in", choices=STAND_INS, help="hide from every engine what this processor has beyond that (stand_in.py)"
    )
    p.add_argument("--threads", type=int, help="of every engine (default: the cores there are)")
    p.add_argument(
        "--sweep",
        default="4,8,16,32,64",
        help="batch sizes tried for transformers generate and llama.cpp (%(default)s)",
    )
    p.add_argument(
        "--sweep-rows", type=int, default=32, help="rows, at least, that each size is tried on (%(default)s)"
    )
    p.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds after which a run is ended (%(default)g)")
    p.add_argument(
        "--work",
        default=str(Path(tempfile.gettempdir()) / "batchgen-benchmarks"),
        help="models and workloads go there (%(default)s)",
    )
    p.add_argument("--engines-folder", help="what setup_engines.sh made (default: batchgen-engines beside --work)")
    p.add_argument("--name", default="compare", help="of the result file, benchmarks/results/NAME.json (%(default)s)")
    p.add_argument("--output", metavar="FILE", help="result file elsewhere")
    p.add_argument(
        "--continue", dest="go_on", action="store_true", help="keep what the result file has, measure what it has not"
    )
    p.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_ROWS} rows, one repeat, two batch sizes: does it run? The figures mean nothing",
    )
    args = p.parse_args(arguments)
    if args.quick:
        args.limit, args.repeats, args.sweep, args.sweep_rows = args.limit or QUICK_ROWS, 1, QUICK_SWEEP, QUICK_ROWS
        args.output = args.output or str(Path(args.work) / "quick.json")
    if args.repeats < 1 or (args.limit is not None and args.limit < 1):
        p.error("--repeats and --limit must be at least 1")
    args.engines_folder = args.engines_folder or str(Path(args.work).absolute().parent / "batchgen-engines")
    args.engine_rows = dict(args.engine_rows)
    return args


def main() -> None:
    args = parse()
    disable_progress_bar()
    end_children_too()
    comparison = Comparison(args)
    try:
        comparison.run()
    except OtherRun as e:
        raise SystemExit(str(e)) from e
    print(f"results: {comparison.file.path}")
    failures: list[dict[str, Any]] = comparison.file.result["failures"]
    if any(failure["timed_out_after"] is None for failure in failures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
