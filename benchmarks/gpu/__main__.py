"""The benchmarks on one GPU, in parts that can be run apart; figures go into one file as they come.

    benchmarks/gpu.sh                                 all parts, into benchmarks/results/gpu.json
    benchmarks/gpu.sh --only parity,kernels OUTPUT    some of them, into OUTPUT/gpu.json
    benchmarks/gpu.sh --merge OUTPUT/gpu.json         copies its newer figures into benchmarks/results/gpu.json
    benchmarks/gpu.sh --tiny                          runs every part with tiny shapes, also without a GPU; the figures mean nothing

Every part is a separate process. Those whose figures are no speeds run first, side by side, parity in several processes. A part that fails or takes
too long is noted, and the next one runs. A run that is killed loses only its current cases.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import BROKEN_DEVICE, GROUPS, MARK, PARTS
from benchmarks.gpu.result import START, GpuResult, NotAResult, read_result
from benchmarks.programs import ROOT, end_children_too, python_path
from benchmarks.result_file import source_digest

RESULTS = ROOT / "benchmarks" / "results"
OVERHEAD = 20.0
"""Minimum number of seconds for a part: it is not started with fewer left."""
GRACE = 10.0
"""Seconds that a process has to end."""


class Run:
    """Runs parts one after the other, and keeps their results."""

    def __init__(self, result: GpuResult, args: argparse.Namespace, device: str) -> None:
        self.result = result
        self.args = args
        self.device = device
        self.deadline = time.monotonic() + args.within if args.within else None
        self.failed = 0
        self._lock = threading.Lock()
        self._processes: set[Child] = set()
        self._interrupted = False

    def parts(self, names: Sequence[str]) -> None:
        """A tiny run has all parts in one process, because starting a process takes longer than its work."""
        if self.args.tiny:
            self._begin(list(names))
            return
        shares = [(name, (i, n)) for name in names if (n := PARTS[name].shares) for i in range(n)]
        with ThreadPoolExecutor(max(1, len(shares))) as pool:
            begun = [pool.submit(self._begin, [name], share) for name, share in shares]
            try:
                for done in begun:
                    done.result()
            except BaseException:
                self._interrupted = True
                for process in list(self._processes):
                    process.end()
                raise
        for name in names:
            if not PARTS[name].shares:
                self._begin([name])

    def _begin(self, group: list[str], share: tuple[int, int] = (0, 1)) -> None:
        limit = sum(PARTS[name].limit for name in group)
        if self.deadline is not None:
            left = self.deadline - time.monotonic()
            if left < OVERHEAD:
                print(f"no time is left for {', '.join(group)}", file=sys.stderr, flush=True)
                self.failed += 1
                return
            limit = min(limit, left)
        self._group(group, share, time.monotonic() + limit, limit)

    def _group(self, group: list[str], share: tuple[int, int], end: float, limit: float) -> None:
        """Runs a share of the cases of some parts in one process; starts another one after a case that left the device unusable."""
        skip: list[tuple[str, str]] = []
        if self.args.go_on:
            kept = [(e["part"], e["case"]) for e in self.result.json["figures"] if e["part"] in group]
            skip = [(part, case) for part, case in kept if self.result.has(part, case)]
        while not self._interrupted:
            command = command_of(group, self.device, self.args, skip, share)
            process = Child(command, self.device, max(1.0, end - time.monotonic()))
            self._processes.add(process)
            at: tuple[str, str] | None = None
            told_any = False
            with closing(process.told()) as all_told:
                for told in all_told:
                    case = told["part"], told["case"]
                    if told.get("begins"):
                        at = case
                        continue
                    at, told_any = None, True
                    skip.append(case)
                    self._take(told)
            self._processes.discard(process)
            code = process.code
            if code == BROKEN_DEVICE:
                continue
            if code:
                part, name = at or (group[0], START)
                why = f"not done after {limit:g} s" if process.late else f"exit {code}: {process.last_words}"
                self._take({"part": part, "case": name, "failure": why})
                if not process.late and (at or told_any):
                    skip += [at] if at else []  # otherwise it ended between two cases
                    continue
            return

    def _take(self, told: dict[str, Any]) -> None:
        part, case = told["part"], told["case"]
        with self._lock:
            if "failure" in told:
                self.failed += 1
                self.result.fail(part, case, told["failure"])
                print(f"{part}, {case}: failed: {told['failure']}", file=sys.stderr, flush=True)
            else:
                self.result.add(part, case, told["figures"], told["seconds"])
                print(f"{part}, {case} ({told['seconds']:.0f} s): {_brief(told['figures'])}", flush=True)


class Child:
    """A process that runs parts. It and everything that it started are ended when its time is up or this process is interrupted."""

    def __init__(self, command: list[str], device: str, limit: float) -> None:
        more = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.code = -1
        self.late = False
        self._timer = threading.Timer(limit, self._too_late)
        self._timer.start()
        self._last: deque[str] = deque(maxlen=5)

    def told(self) -> Generator[dict[str, Any], None, None]:
        """Yields the messages of the parts as they come. Their other output goes to standard error."""
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))
                else:
                    self._last.append(line.strip())
                    sys.stderr.write(line)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        finally:
            self._timer.cancel()
            self.end()
            self.code = self._process.wait()
            self._process.stdout.close()

    @property
    def last_words(self) -> str:
        return " | ".join(filter(None, self._last))[-600:]

    def _too_late(self) -> None:
        self.late = True
        self.end()

    def end(self) -> None:
        """Asks the process to end, which also ends what it started, and kills it if it does not."""
        for kind in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, kind)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE)


def command_of(
    group: list[str], device: str, args: argparse.Namespace, skip: list[tuple[str, str]], share: tuple[int, int]
) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.parts", "--device", device, "--work", str(args.work)]
    command += ["--share", *map(str, share), "--skip", json.dumps(skip)]
    return [*command, *(["--tiny"] if args.tiny else []), *group]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    lines = [f"  {name:18}{part.about}" for name, part in PARTS.items()]
    lines += [f"  {name:18}{', '.join(members)}" for name, members in GROUPS.items()]
    p = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh",
        description=__doc__,
        epilog="parts:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("output", nargs="?", type=Path, help="folder of the result file (default: benchmarks/results)")
    p.add_argument(
        "--only", type=part_names, default=list(PARTS), metavar="PART,…", help="these parts alone, in this order"
    )
    p.add_argument("--tiny", action="store_true", help="tiny shapes, into gpu-tiny.json of a temporary folder")
    p.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="what the file, or benchmarks/results/gpu.json, has of this code and such a machine is not measured again",
    )
    p.add_argument("--within", type=float, metavar="SECONDS", help="end what is not done by then")
    p.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing: take over what these have newer"
    )
    p.add_argument(
        "--work", type=Path, help="models and workloads go there (default: a folder under the temporary one)"
    )
    args = p.parse_args(arguments)
    if args.work is None:
        args.work = Path(tempfile.gettempdir()) / f"batchgen-benchmarks-gpu{'-tiny' if args.tiny else ''}"
    if args.output is None:
        args.output = args.work / "results" if args.tiny else RESULTS
    return args


def part_names(text: str) -> list[str]:
    names: list[str] = []
    for name in text.split(","):
        if name not in PARTS and name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is no part: {', '.join([*PARTS, *GROUPS])}")
        names += GROUPS.get(name, (name,))
    return list(dict.fromkeys(names))


def _brief(figures: dict[str, Any]) -> str:
    """Returns the figures that have no table of their own, and what the engine noted, in one line."""
    numbers = {name: value for name, value in figures.items() if not isinstance(value, dict | list | str)}
    return json.dumps(numbers | ({"notes": figures["notes"]} if figures.get("notes") else {}))


def main() -> None:
    args = parse()
    path = args.output / ("gpu-tiny.json" if args.tiny else "gpu.json")
    try:
        if args.merge:
            result = GpuResult(path, {}, "", tiny=args.tiny)
            for file in args.merge:
                print(f"{result.merge(read_result(file))} cases of {file} taken over into {path}")
            return
        import torch

        from benchmarks.gpu.device import gpu_machine

        if not torch.cuda.is_available() and not args.tiny:
            raise NotAResult("there is no CUDA device here; --tiny runs everything in small without one")
        result = GpuResult(path, gpu_machine(), source_digest(), tiny=args.tiny)
        if args.go_on and not args.tiny and (RESULTS / path.name).exists():
            result.merge(read_result(RESULTS / path.name))
    except NotAResult as e:
        raise SystemExit(f"benchmarks/gpu.sh: {e}") from e
    end_children_too()
    run = Run(result, args, "cuda:0" if torch.cuda.is_available() else "cpu")
    run.parts(args.only)
    print(f"results: {path}")
    if run.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
