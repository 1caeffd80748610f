"""Runs the command in child processes that start in a fraction of a second (`child.py`) and can be killed or made to fail (`faults.py`).

Also the jobs to kill, their inputs, and the comparison of their outputs.
"""

import ctypes
import json
import os
import random
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.child import run_command
from support.runs import FINISHED_FILES

SHARED = "The reports of this region begin alike, and differ in what comes after. "
TINY_SPOOL = {
    "batchgen.config:INPUT_LIMITS": {"read_rows": 5, "run_rows": 6, "window_leaves": 6, "batch_rows": 2},
    "batchgen.assembly:INPUT_LIMITS": {"read_rows": 5},  # for a merge, which has no configuration
}
"""Windows of six rows and several files of sorted requests, like a job of millions of rows."""


@dataclass(frozen=True)
class Ended:
    """The outcome of a run."""

    code: int
    """The exit code; minus the number of the signal that killed the run."""
    out: str
    err: str
    calls: tuple[str, ...]
    """The calls that changed files of its folder, in order, as `name path`. If one killed the run, it is the last."""

    @property
    def error(self) -> str:
        """The one-line error message, without `batchgen: error: `."""
        lines = [line for line in self.err.splitlines() if line.startswith("batchgen: error: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("batchgen: error: ")


@dataclass(frozen=True)
class Running:
    """A run that has not ended."""

    process: BaseProcess
    _files: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ended(self) -> bool:
        return not self.process.is_alive()

    def kill(self, signum: int) -> None:
        """Sends a signal, unless the run has ended."""
        if not self.ended():
            os.kill(self.pid, signum)

    def kill_main_thread(self, signum: int) -> None:
        """Sends a signal to the main thread, which takes several in one go. Of others, two threads may each take one."""
        assert ctypes.CDLL(None).tgkill(self.pid, self.pid, signum) == 0

    def calls(self) -> int:
        """The number of calls so far."""
        return self._files.with_suffix(".log").read_bytes().count(b"\n")

    def workers(self) -> list[int]:
        """The ids of its device processes."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[1] == str(self.pid):
                    found.append(int(stat.parent.name))
        return sorted(found)

    def until_stopped(self) -> None:
        """Waits until the run has stopped itself (`how="SIGSTOP"`)."""
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert not self.ended(), self.wait().err
            time.sleep(0.002)

    def until_said(self, text: str) -> None:
        """Waits until its standard error contains a text."""
        while text not in self._files.with_suffix(".err").read_text():
            assert not self.ended(), self.wait().err
            time.sleep(0.01)

    def wait(self) -> Ended:
        self.process.join()
        out, err, log = (self._files.with_suffix(s).read_text() for s in (".out", ".err", ".log"))
        assert "Traceback" not in err, err
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, out, err, tuple(log.splitlines()))


class Harness:
    """Starts runs of `batchgen` in a folder. Only the files of that folder are watched."""

    def __init__(self, model: Path, scratch: Path) -> None:
        """`model`: the folder of the cases that name no other."""
        self._models, self._scratch = {"": model}, scratch
        self._count = 0
        forkserver.set_forkserver_preload(["support.child_imports", "support.child"])
        forkserver.ensure_running()
        self.uninterrupted: dict[str, tuple[Ended, Any]] = {}
        """By case: its uninterrupted run and the output. Jobs of one case share them."""

    def start(
        self,
        folder: Path,
        arguments: Sequence[str | Path],
        *,
        settings: Mapping[str, Any] | None = None,
        file_size: int | None = None,
        stdout: str | None = None,
        model: str = "",
        **plan: Any,
    ) -> Running:
        """Starts a run. `model` is that of a `Case`, `settings` replaces names of modules (`module:NAME`): by values, by others such names, or in some fields, `file_size` limits the size of files, and
        `plan` has the fields of `faults.Plan`.
        """
        self._count += 1
        files = self._scratch / f"{self._count:05d}"
        for suffix in (".out", ".err", ".log"):
            files.with_suffix(suffix).touch()
        command = ["run", *map(str, arguments), "-m", str(self._folder_of(model))]
        streams = [stdout or f"{files}.out", f"{files}.err", f"{files}.log"]
        given = (str(folder), command, dict(settings or {}), streams, file_size, plan)
        process = get_context("forkserver").Process(target=run_command, args=given)
        process.start()
        return Running(process, files)

    def _folder_of(self, model: str) -> Path:
        if model not in self._models:
            from support.quantized import make_for_jobs

            self._models[model] = make_for_jobs(model, self._scratch / model)[0]
        return self._models[model]


@dataclass(frozen=True)
class Case:
    """The inputs and options of a job. All names are relative to the job's own folder."""

    inputs: tuple[str, ...] = ("in.jsonl",)
    output: str = "out.jsonl"
    options: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: int = 3
    """The exit code of an uninterrupted run. The common input has rows that fail."""
    model: str = ""
    """Its name in `make_for_jobs`; empty for the tiny Llama."""

    @property
    def arguments(self) -> list[str]:
        return [*self.inputs, "-o", self.output, "--max-tokens", "6", "--batch-size", "5", *self.options]


CASES = {
    "jsonl": Case(),
    "spooled": Case(settings=TINY_SPOOL),
    "windows": Case(options=("--window", "7")),
    "sampled, spooled": Case(options=("--temperature", "0.9", "--seed", "7"), settings=TINY_SPOOL),
    "sampled, windows": Case(options=("--temperature", "0.9", "--seed", "7", "--window", "7")),
    "several, gzip": Case(
        output="out.jsonl.gz", options=("-n", "2", "--temperature", "0.9", "--token-ids"), settings=TINY_SPOOL
    ),
    "parquet": Case(output="out.parquet", settings=TINY_SPOOL),
    "parquet, windows": Case(output="out.parquet", options=("--window", "9")),
    "several inputs": Case(inputs=("in.jsonl", "more.csv", "in.jsonl"), settings=TINY_SPOOL),
    "labels": Case(options=("--choices", "north,south,southern"), settings=TINY_SPOOL),
    "two devices": Case(options=("--device", "cpu:0,1"), settings=TINY_SPOOL),
    "embeddings": Case(options=("--embed", "--pooling", "mean"), settings=TINY_SPOOL),
    "drafts": Case(
        options=("-n", "2", "--temperature", "0.6"),
        settings=TINY_SPOOL | {"batchgen.engine.engine:Payoff": "support.drafters:EveryDraft"},
    ),
    "packed": Case(model="awq", settings=TINY_SPOOL),
    "streamed": Case(model="awq hybrid", options=("--weights", "streamed"), settings=TINY_SPOOL),
    "another folder": Case(options=("--work-dir", "work"), settings=TINY_SPOOL),
}


def common_rows(count: int) -> list[str]:
    """Lines of JSON: shuffled groups with shared prefixes, equal prompts, rows with their own parameters, and rows that fail."""
    lines = []
    for i in range(count):
        region = ("north", "south", "east")[i * 7 % 3]
        row: dict[str, Any] = {"prompt": f"{SHARED}{region} \u00e9\u2028 {i * 5 % 23}", "n": i}
        if i % 6 == 1:
            row["sampling_params"] = {"max_tokens": 1 + i % 5}
        if i == 4:
            row["prompt"] = "much too long " * 100
        lines.append("{not json" if i == 9 else json.dumps(row, ensure_ascii=i % 2 == 0))
    return lines


def write_common_input(folder: Path, count: int = 26) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "in.jsonl").write_text("".join(line + "\n" for line in common_rows(count)))


class Nearly(float):
    """A probability or a number of an embedding. Its last digits depend on which rows run together."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-5

    __hash__ = float.__hash__


def read_output(path: Path) -> Any:
    """The content that equal outputs share: a Parquet table, the bytes of JSONL, or its rows if they contain probabilities or embeddings."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path)
    content = path.read_bytes()
    if b'"choice_probs"' in content or b'"embedding"' in content:
        return [json.loads(line, parse_float=Nearly) for line in content.splitlines()]
    return content


def stored_keys(folder: Path, query: str = "SELECT key FROM results ORDER BY rowid") -> list[bytes]:
    """The keys of the results in a job's folder, in the order in which they were stored, or those that `query` finds. Reads a copy, so that
    the folder is not changed.
    """
    with tempfile.TemporaryDirectory() as copy:
        try:
            for path in folder.glob("results.sqlite*"):
                shutil.copyfile(path, Path(copy) / path.name)
        except FileNotFoundError:  # a journal that existed for a moment
            return stored_keys(folder, query)
        if not (Path(copy) / "results.sqlite").exists():
            return []
        with closing(sqlite3.connect(Path(copy) / "results.sqlite")) as db:
            try:
                return [key for (key,) in db.execute(query)]
            except sqlite3.OperationalError:  # killed before there was a table
                return []


class Job:
    """A case in its own folder with its input, and the output of an uninterrupted run."""

    def __init__(self, runs: Harness, case: Case, folder: Path) -> None:
        self.runs, self.case, self.folder = runs, case, folder
        self.output = folder / case.output
        self.job_folder = folder / ("work" if "--work-dir" in case.options else "") / f"{case.output}.job"
        self.partial = str((self.job_folder / "output.partial").relative_to(folder))
        self.results = f"sqlite INSERT results {(self.job_folder / 'results.sqlite').relative_to(folder)}"
        """The line of the log when a result is stored."""
        self.prepare()
        if str(case) not in runs.uninterrupted:
            ended = self.run()
            assert ended.code == case.code, ended.err
            runs.uninterrupted[str(case)] = ended, read_output(self.output)
            self.prepare()
        self.whole, self.expected = runs.uninterrupted[str(case)]

    def set_up(self, state: str) -> None:
        """Prepares the state from which runs start after `reset`.

        `new`: nothing has run. `generated`: the process died after generating everything and before writing the output. `changed`: the output is
        finished, and its input has more rows since then. `raised`: it is to be continued with a larger `--max-tokens`.
        """
        self.prepare()
        if state == "generated":
            assert self.run(how="kill", at=1, only="write " + self.partial).code == -9
            self.keep_state()
        elif state != "new":
            self.run()
            self.old = self.expected
            if state == "changed":
                write_common_input(self.folder, 30)
            else:
                more = ("--max-tokens", "14", "--retry", "length")
                self.case = replace(self.case, options=(*self.case.options, *more))
            self.keep_state()
            self.whole = self.run()
            self.expected = read_output(self.output)
            assert self.expected != self.old

    def prepare(self) -> None:
        """Makes the folder of a new job."""
        self.old: Any = None
        """The output that exists until the new one replaces it."""
        self._state: Path | None = None
        shutil.rmtree(self.folder, ignore_errors=True)
        write_common_input(self.folder)
        (self.folder / "more.csv").write_text("prompt,n\nA line of a table,1\nAnother,2\n")
        (self.folder / "work").mkdir()

    def keep_state(self) -> None:
        self._state = self.folder.with_suffix(".state")
        shutil.copytree(self.folder, self._state)

    def reset(self) -> None:
        """Restores the state that was kept, with the files' times of change."""
        if self._state is None:
            self.prepare()
        else:
            shutil.rmtree(self.folder)
            shutil.copytree(self._state, self.folder)

    def run(self, *more: str | Path, **plan: Any) -> Ended:
        """Runs the job to its end. `more` are options beyond the case's."""
        return self.start(*more, **plan).wait()

    def calls(self) -> tuple[str, ...]:
        """The calls of a run from the kept state to the end."""
        if self._state is None:
            return self.whole.calls
        self.reset()
        return self.run().calls

    def start(self, *more: str | Path, quiet: bool = True, **plan: Any) -> Running:
        # Results are committed after every step, so that a run has many moments to be killed at.
        arguments = [*self.case.arguments, "--flush-every", "0", *more, *(["-q"] if quiet else [])]
        return self.runs.start(self.folder, arguments, settings=self.case.settings, model=self.case.model, **plan)

    def start_up_to(self, rng: random.Random) -> Running:
        """Starts a run. Returns it at a random one of its calls, or when it has ended."""
        running = self.start()
        upto = rng.randrange(len(self.whole.calls))
        while running.calls() < upto and not running.ended():
            time.sleep(0.0005)
        return running

    def check_output(self, *, finished: bool) -> None:
        """Checks that the output is absent, old or complete; complete if `finished`."""
        there = read_output(self.output) if self.output.exists() else None
        if finished or (there is not None and there != self.old):
            assert there == self.expected
        else:
            assert there is None or there == self.old

    def is_in_place(self) -> bool:
        """Whether the new output is written, so that only the clean-up is left."""
        return self.output.exists() and read_output(self.output) != self.old

    def go_on(self) -> Ended:
        """Runs the same command again to its end, and checks the output and the files that are left."""
        ended = self.run()
        assert ended.code == self.case.code, ended.err
        self.check_output(finished=True)
        left = {p.name for p in self.job_folder.iterdir()}
        assert left == set(FINISHED_FILES)
        assert {p.name for p in self.folder.iterdir()} <= {
            "in.jsonl", "more.csv", "work", self.output.name, f"{self.output.name}.job",
        }  # fmt: skip
        return ended
