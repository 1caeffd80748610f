"""A job's folder: everything that lets a killed job continue and a finished job be recognised.

`OUTPUT.job/` (or `NAME.job/` under the work folder) holds

    manifest.json    the settings, what was asked for, the state (`manifest`)
    lock             which process works on it (`lock`)
    results.sqlite   while the job is not finished: finished results, rows under way, progress (`results`)
    sorted/          while the job is not finished: the requests of a large input, sorted
    keys             one key of 16 bytes for every row of the finished output (`reuse_output`)
    kept.sqlite      results that the finished output does not hold, or not whole; only if there are any
    stats.json       the figures of the last run
    report.json      what the report shows: runs over time, prefix tree, sums over the rows (`recording`)
    shards/, claims/ of a job that runs in shards (`shards`)
    push/            while the output is pushed to the Hub (`push`)

and, while a process works on it (made new at every start),

    run.sqlite       tables that serve this run only
    output.partial   the rows of finished windows, and their keys in keys.partial
    spool.jsonl      the same rows, while a Parquet output waits for the types of its columns (`writers`)

The order of steps in `finish` makes a kill safe at every moment. Until the manifest says "finished", the database has every result. Before
the output takes its place, the manifest names the file that stood there and the file that will. For an output in a store these are size and
digest, because the version is known only after the upload (`target`).
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from batchgen.config import RETRY_REASONS
from batchgen.errors import UsageError
from batchgen.jobs import results as results_files
from batchgen.jobs.base import Job
from batchgen.jobs.disk import sync_folder, write_json, writing
from batchgen.jobs.finished import KEPT_FILE, complete_figures, finished_manifest, keys_are_whole
from batchgen.jobs.lease import Lease
from batchgen.jobs.lock import Lock
from batchgen.jobs.manifest import (
    FIRST_LIMIT,
    LIMIT,
    Manifest,
    as_stored,
    differences,
    file_digest,
    is_larger_limit,
    load_manifest,
)
from batchgen.jobs.place import REMADE_FILES, SORTED_FOLDER, WORK_FILES, check_place, check_space, min_bytes
from batchgen.jobs.results import Results, read_facts
from batchgen.jobs.reuse_output import KEY_BYTES, NO_KEY, is_held_whole, read_keys, results_of_output
from batchgen.jobs.shards import (
    CLAIMS,
    SHARDS_FOLDER,
    check_no_shard_runs,
    forget_plan,
    load_plan,
    output_facts,
    read_stats,
    stores,
    take_results,
    take_runs,
)
from batchgen.jobs.stdout_job import DoneOrder, StdoutJob
from batchgen.jobs.target import Target, open_target
from batchgen.progress import Snapshot
from batchgen.recording import JobRecord, RowFigures, job_record
from batchgen.records.inputs import Input
from batchgen.records.output import INPUT_FILE, RowForm, job_path, jobs_folder, output_format, output_row
from batchgen.records.rows import Row
from batchgen.records.writers import DigestFile, open_writer
from batchgen.request import Request
from batchgen.result import Completion, Result
from batchgen.stats import counted

_START_AGAIN = "use --overwrite to start again, or another -o"
_RAISE_LIMIT = (
    "add --retry length to generate the rows again that were cut, and keep all others; --overwrite starts again"
)
_FEW = 10
"""An output of fewer finished rows than this may lose all of them at once without `--prune`."""


def find_finished(
    output: str,
    *,
    command: str,
    input: Input,
    limit: int | None,
    order: str,
    work_dir: str | None,
    retry: Collection[str] = (),
    prune: bool = False,
) -> tuple[dict[str, Any], bool] | None:
    """Returns the figures of an output's job, and whether its prompts are chats, if this command has finished it and `open_job` would find nothing to do.

    Returns None if there is something to do, or if only `open_job` can tell. The arguments are those of `open_job`. Changes nothing.
    """
    if output == "-":
        return None
    found = finished_manifest(
        output,
        work_dir,
        command=command,
        request=_request_of(input, limit, order),
        retry=sorted(retry),
        prune=prune,
        leftovers=WORK_FILES,
    )
    return None if found is None else (found[1], bool(found[0].settings["chat"]))


def _request_of(input: Input, limit: int | None, order: str) -> dict[str, Any]:
    formats = [f.format for f in input.files]
    return {"inputs": input.fingerprint(), "formats": formats, "limit": limit, "order": order}


def open_job(
    output: str,
    *,
    command: str = "",
    settings: dict[str, Any],
    mentions: dict[str, Any],
    input: Input,
    limit: int | None,
    form: RowForm,
    work_dir: str | None,
    overwrite: bool,
    flush_every: float,
    order: str,
    retry: Collection[str] = (),
    prune: bool = False,
    optional: Collection[str] = (),
    lease: Lease | None = None,
    merging: bool = False,
) -> Job:
    """Opens the job of an output: begins it, continues it or finds it finished. This process holds its lock until it is closed.

    `command`: `identity.command_digest`, by which the next run may find the job finished (`find_finished`); empty where it cannot be known.
    `settings`, a flat dictionary of plain values, is what changes results: a job continues with equal ones only. `mentions`: a difference is only noted.
    `retry` names reasons of `RETRIES`: the results of rows that ended so are forgotten, and these rows run again.
    `prune`: the output may lose any number of rows, and results that no row asks for are removed when it is finished.
    `optional`: the parts of a result, of those that only some have, that a Parquet output has columns for from the start (`open_writer`).
    `lease`: held by this process, for a job that runs in shards. `merging`: the plan of the shards stays until the output is written;
    otherwise it is forgotten. Their results become the job's in both cases.
    Raises `UsageError` (an output that is not ours, other settings), `OutputLocked`, `OutputError`.
    """
    named = form.keep is None or INPUT_FILE in form.keep
    form = replace(form, input_file=named and len(input.files) > 1)
    if output == "-":
        return StdoutJob(form, order=order)
    target, folder = open_target(output), job_path(output, work_dir)
    check_place(output, target, folder, overwrite)
    with writing(folder):
        _make_folder(folder, min_bytes(input, output, form))
        lock = Lock(folder / "lock", output, leased=lease is not None)
    try:
        request = _request_of(input, limit, order) | asdict(form) | {"retry": sorted(retry)}
        manifest = Manifest(
            state="running",
            output=target.address,
            settings=as_stored(settings),
            mentions=as_stored(mentions),
            request=as_stored(request),
            command=command,
        )
        job = JobFolder(
            output, target, folder, lock, input, manifest,
            form=form, order=order, retry=retry, prune=prune, optional=optional, lease=lease, merging=merging,
        )  # fmt: skip
        with nullcontext() if lease else _shards_held(job):
            job._open(overwrite, named_by_output=work_dir is None, flush_every=flush_every)
    except BaseException:
        lock.release()
        raise
    return job


def _make_folder(folder: Path, needed: int) -> None:
    """Makes a job's folder unless there is one. Raises `OutputError`, and makes none, if the output of `needed` bytes cannot fit on the disk."""
    if not folder.exists():
        if folder.parent.exists():
            check_space(folder, needed)
        folder.mkdir(parents=folder.parent == jobs_folder(), exist_ok=True)  # other parents are the user's to make
        sync_folder(folder.parent)


@contextmanager
def _shards_held(job: JobFolder) -> Iterator[None]:
    """Keeps shards from starting while the job takes over their results."""
    if load_plan(job.folder) is None:
        yield
        return
    lease = Lease(job.folder / CLAIMS, f"the shards of {job.output}", job.notes.append)
    try:
        yield
    finally:
        lease.release()


class JobFolder:
    """One job, from its first window to the rename of its output (`Job`)."""

    def __init__(
        self,
        output: str,
        target: Target,
        folder: Path,
        lock: Lock,
        input: Input,
        manifest: Manifest,
        *,
        form: RowForm,
        order: str,
        retry: Collection[str],
        prune: bool,
        optional: Collection[str],
        lease: Lease | None,
        merging: bool,
    ) -> None:
        self.notes: list[str] = []
        self.finished: dict[str, Any] | None = None
        self.previous: dict[str, Any] | None = None
        self.kept_rows = 0
        self.results_at_hand = 0
        self.output, self._target = output, target
        self._folder, self._lock, self._input = folder, lock, input
        self._manifest = manifest
        self._form, self._optional = form, optional
        self._lease, self._merging = lease, merging
        self._order = DoneOrder(order)
        self._retry, self._prune = sorted(retry), prune
        self._old: Manifest | None = None
        self._limit_raised = False
        """Whether this run continues the job with a larger `max_tokens`."""
        self._appended = False
        """Whether this run has a result of its own."""
        self._opened: ExitStack | None = None
        self._record = JobRecord()
        self._row_figures = RowFigures()

    # -- opening

    def _open(self, overwrite: bool, *, named_by_output: bool, flush_every: float) -> None:
        if self._lock.taken_over is not None:
            self.notes.append(f"an earlier run (process {self._lock.taken_over}) was killed; this run continues it")
        with writing(self._folder):
            check_no_shard_runs(self._folder, self.output, self.notes.append)
            self._old = None if overwrite else load_manifest(self._folder / "manifest.json")
            if self._old is None:
                self._check_nothing_lost(overwrite)
                self._start_again()
            else:
                if not self._holds_nothing(self._old):
                    self._compare(self._old, named_by_output)
                self._take_up(self._old)
            if self.finished is None:
                self._start(flush_every)
            else:
                self._clean_up(self._shrunk())

    def _check_nothing_lost(self, overwrite: bool) -> None:
        """Raises `UsageError` if there are results whose settings are not known."""
        count = sum(read_facts(place, ())[1] or 0 for place in (self._folder, *stores(self._folder)))
        if not overwrite and count:
            raise UsageError(
                f"{self._folder} has {counted(count, 'result')} but no manifest.json, so the settings that made them are not known",
                f"put it back, {_START_AGAIN}",
            )

    def _holds_nothing(self, old: Manifest) -> bool:
        """Whether the earlier run has left no result, for example because the model refused an option. Then its settings do not matter."""
        if old.state != "running" or old.outputs or (self._folder / KEPT_FILE).exists():
            return False
        if load_plan(self._folder) or stores(self._folder):
            return False
        return not (self._folder / results_files.FILE).exists() or read_facts(self._folder, ())[1] == 0

    def _compare(self, old: Manifest, named_by_output: bool) -> None:
        if not named_by_output and old.output != self._manifest.output:
            raise UsageError(
                f"{self._folder} is the job folder of {old.output}", "use another --work-dir, or another -o"
            )
        larger = is_larger_limit(old.settings, self._manifest.settings)
        self._limit_raised = larger and "length" in self._retry
        first = old.settings.get(FIRST_LIMIT) or (old.settings[LIMIT] if self._limit_raised else None)
        if first is not None:
            self._manifest = replace(self._manifest, settings=self._manifest.settings | {FIRST_LIMIT: first})
        said = differences(old.settings, self._manifest.settings)
        if said and not self._limit_raised:
            hint = _RAISE_LIMIT if larger else _START_AGAIN
            raise UsageError(f"{self.output} was made with other settings: {said}", hint)
        if said := differences(old.mentions, self._manifest.mentions):
            self.notes.append(f"{self.output} was started with other versions: {said}")

    def _take_up(self, old: Manifest) -> None:
        there = self._target.exists()
        standing = self._target.known_as(old.outputs) if there else None
        if there and standing is None:
            raise UsageError(
                f"{self.output} was changed since batchgen wrote it", "move it away, or use --overwrite to start again"
            )
        self.previous = read_stats(self._folder)
        self._manifest = replace(self._manifest, outputs=[standing] if standing else [])
        if there and keys_are_whole(self._folder, old):
            self._manifest = replace(self._manifest, keys=old.keys)
        if old.state != "finished":
            return
        if there and not self._limit_raised:
            self.finished = complete_figures(
                self._folder, old, self._manifest.request, retry=self._retry, prune=self._prune
            )
        if self.finished is not None:
            self.previous = None
        elif not there:
            self.notes.append(f"{self.output} no longer exists: its rows are generated again")
            self.previous = None
        elif not self._manifest.keys:
            self.notes.append(
                f"{self._folder / 'keys'} is damaged, so the rows of {self.output} cannot be recognised: they are generated again"
            )
            self.previous = None

    def _start_again(self) -> None:
        """Drops all results. The output that exists stays until the new one replaces it."""
        self.previous = None
        self._remove((*WORK_FILES, KEPT_FILE, "keys", "stats.json", *job_record.FILES))
        sync_folder(self._folder)
        there = [self._target.identity()] if self._target.exists() else []
        self._manifest = replace(self._manifest, outputs=there)

    def _start(self, flush_every: float) -> None:
        self._record = JobRecord.load(self._folder)
        tight = check_space(self._folder, min_bytes(self._input, self.output, self._form))
        if tight is not None:
            self.notes.append(tight)
        self._remove(REMADE_FILES)
        kept, file = self._folder / KEPT_FILE, self._folder / results_files.FILE
        if kept.exists() and not file.exists():
            kept.replace(file)
        with ExitStack() as opened:
            self._results = opened.enter_context(closing(Results(self._folder, flush_every)))
            self._take_results()
            sync_folder(self._folder)  # a synced database is lost if its folder's entry is not synced
            self._manifest.save(self._folder / "manifest.json")
            self._open_files(opened)
            self._opened = opened.pop_all()

    def _take_results(self) -> None:
        """Gathers the results that this run may use: those of the database, of shards, and of a finished output."""
        old, results = self._old, self._results
        if load_plan(self._folder) or stores(self._folder):
            taken = take_results(self._folder, results)
            take_runs(self._folder, self._record)
            if not self._merging:
                forget_plan(self._folder)
                results.forget_reading()
                self.notes.append(f"{self.output} was under way in shards: {taken} of their results are at hand")
        if results.damaged:
            self.notes.append(
                f"{results.damaged} results in {self._folder / results_files.FILE} are damaged and were dropped: their rows are generated again"
            )
        if self._manifest.keys:
            self.kept_rows = (self._folder / "keys").stat().st_size // KEY_BYTES
            results.know_finished(key for key in read_keys(self._folder / "keys") if key != NO_KEY)
            if old is not None and old.state == "finished":
                taken = results.add_missing(
                    results_of_output(self._target.name, self._folder / "keys", self._form.asked)
                )
                self.notes.append(f"{self.output} was finished: {taken} of its results are used again")
        interrupted = old is not None and old.state == "running" and old.request.get("retry") == self._retry
        if self._retry and (self._limit_raised or not interrupted):  # an interrupted run has dropped them already
            results.forget([RETRY_REASONS[name] for name in self._retry])
        if self._limit_raised:
            results.forget_cut()
        self.results_at_hand = results.count

    def _open_files(self, opened: ExitStack) -> None:
        self._keys = DigestFile(self._folder / "keys.partial")
        opened.callback(self._keys.abandon)
        self._file = DigestFile(self._folder / "output.partial")
        opened.callback(self._file.abandon)
        self._writer = open_writer(
            self._file,
            self.output,
            schema=self._input.schema if output_format(self.output)[0] == "parquet" else None,
            spool=self._folder / "spool.jsonl",
            form=self._form,
            optional=self._optional,
        )
        opened.callback(self._writer.abandon)

    def __enter__(self) -> JobFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Writes everything to disk and releases the lock. Does nothing the second time."""
        try:
            self._close_files()
        finally:
            self._lock.release()

    def _close_files(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with writing(self._folder):
                with opened:
                    self._results.flush()
                self._remove(REMADE_FILES)

    # -- results

    @property
    def first_max_tokens(self) -> int | None:
        first: int | None = self._manifest.settings.get(FIRST_LIMIT)
        return first

    def occurrences(self, digests: Sequence[bytes]) -> list[int]:
        with writing(self._folder):
            return self._results.occurrences(digests)

    def stored(self, keys: Sequence[bytes]) -> dict[bytes, Result]:
        with writing(self._folder):
            return self._results.stored(keys)

    def under_way(self) -> dict[bytes, dict[int, Completion]]:
        with writing(self._folder):
            return self._results.under_way()

    def append(self, key: bytes, result: Result) -> None:
        self._appended = True
        with writing(self._folder):
            self._results.append(key, result)
            if self._results.due:
                self._results.flush()
        self._order.done(result.row)

    def keep_under_way(self, completions: Mapping[bytes, Mapping[int, Completion]]) -> None:
        with writing(self._folder):
            self._results.keep_under_way(completions)
            if self._results.due:
                self._results.flush()

    @property
    def tokens_under_way(self) -> int:
        with writing(self._folder):
            return self._results.tokens_under_way

    def tell(self, progress: Snapshot) -> None:
        """Ignores errors: a full disk is reported by the next result that cannot be written."""
        try:
            self._results.tell(progress.figures() | {"workers": progress.workers})
        except sqlite3.Error:
            return

    def keep_record(self, run: Mapping[str, Any] | None, tree: Mapping[str, Any] | None) -> None:
        self._record.keep(run, tree)
        self._record.save(self._folder)

    def flush(self) -> None:
        with writing(self._folder):
            self._results.flush()

    # -- the rows of the output

    def begin_rows(self) -> None:
        with writing(self._folder):
            self._results.begin_rows()

    def add_rows(self, rows: Sequence[int], keys: Mapping[int, bytes], failed: Mapping[int, Result]) -> None:
        with writing(self._folder):
            self._results.add_rows(rows, keys, failed)

    def check_dropped(self, *, prune: bool) -> None:
        with writing(self._folder):
            finished, gone, new = self._results.compared()
        if not gone:
            return
        lost = max(0, gone - new)  # as many rows as are new were changed, not removed
        # A raised limit can give any row a new key: rows with shortened prompts, and rows whose own limit is the job's first or new one.
        others = gone == finished >= _FEW and self.first_max_tokens is None
        if not prune and (10 * lost > finished or others):
            if self._old is not None and self._old.state == "finished" and not self._appended:
                self._put_back(self._old)
            raise UsageError(
                f"{gone:,} of the {finished:,} finished rows of {self.output} are no longer in the input and would be removed from the output",
                "check the input; --prune removes them, another -o keeps them",
            )
        what = "removed" if prune else f"kept in {self._folder} and used again if the row comes back"
        self.notes.append(f"{counted(gone, 'result')} of {self.output} without a row in the input: {what}")

    def _put_back(self, old: Manifest) -> None:
        """Restores the finished job as it was before this run."""
        with writing(self._folder):
            self._manifest = old
            self._manifest.save(self._folder / "manifest.json")
            left = self._shrink(self._results)
            self._close_files()
            self._clean_up(left)

    def write(self, rows: Sequence[Row], results: Mapping[int, Result], keys: Mapping[int, bytes]) -> None:
        ordered = self._order.sort(rows)
        with writing(self._folder):
            self._writer.write((row, results[row.number]) for row in ordered)
            self._keys.write(b"".join(keys.get(row.number, NO_KEY) for row in ordered))
            beside = [
                key
                for number, key in keys.items()
                if not is_held_whole(results[number], self._form, output_format(self.output)[0])
            ]
            self._results.keep_beside_output(beside)
        for row in ordered:
            result = results[row.number]
            self._row_figures.add(result, partial(output_row, row, result, self._form))

    def save_stats(self, stats: dict[str, Any]) -> None:
        with writing(self._folder):
            write_json(self._folder / "stats.json", stats)

    def finish(self, stats: dict[str, Any]) -> None:
        """Puts the output in its place and closes the job."""
        if self._lease is not None:
            self._lease.check()
        with writing(self.output):
            self._writer.close()
            self.notes += self._writer.notes
            self._keys.sync()
            self._keys.close()
            self._record.rows = self._row_figures.as_dict()
            self._record.save(self._folder)
            write_json(self._folder / "stats.json", stats)
            partial = self._folder / "output.partial"
            new = self._target.to_be(partial, self._file.hexdigest())
            self._manifest = replace(
                self._manifest,
                outputs=[*self._manifest.outputs, new],
                keys=self._keys.hexdigest(),
                stats=file_digest(self._folder / "stats.json"),
            )
            self._results.flush()
            self._manifest.save(self._folder / "manifest.json")
            (self._folder / "keys.partial").replace(self._folder / "keys")
            there = self._target.put(partial, self._file.hexdigest())
            self._manifest = replace(self._manifest, state="finished", outputs=[there])
            self._manifest.save(self._folder / "manifest.json")
        with writing(self._folder):
            if self._prune:
                self._results.forget_unasked()
            left = self._shrink(self._results)
            self._close_files()
            self._clean_up(left)
        self.finished = stats
        self._lock.release()

    # -- the folder

    def _shrink(self, results: Results) -> bool:
        """Removes from the database what the finished output holds. Returns whether results remain."""
        return results.shrink(key for key in read_keys(self._folder / "keys") if key != NO_KEY)

    def _shrunk(self) -> bool:
        """Opens the database that an earlier run left with its finished output, if there is one, for `_shrink`."""
        if not (self._folder / results_files.FILE).exists():
            return False
        with closing(Results(self._folder, 0.0)) as results:
            return self._shrink(results)

    def _clean_up(self, left: bool) -> None:
        """Removes the files of the work. If results are left in the database, they stay as `kept.sqlite`."""
        if left:
            (self._folder / results_files.FILE).replace(self._folder / KEPT_FILE)
        self._remove(WORK_FILES)
        sync_folder(self._folder)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._folder / name
            if name == SHARDS_FOLDER:
                forget_plan(self._folder)  # the plan before its files: a killed run must not leave it without them
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    # -- the first reading of the input, of a job that reads it twice

    @property
    def sorted_folder(self) -> Path:
        """The folder for sorted requests."""
        return self._folder / SORTED_FOLDER

    def earlier_reading(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns what an earlier run's first reading saved (`keep_reading`); None unless input and settings are the same and all files are whole."""
        with writing(self._folder):
            reading: dict[str, Any] | None = self._results.fact("reading")
            if reading is None or reading["asked"] != self._asked(asked):
                return None
            for name, digest in reading["digests"].items():
                path = self.sorted_folder / name
                if not path.exists() or file_digest(path) != digest:
                    return None
            return reading

    def begin_reading(self) -> None:
        """Removes an earlier reading."""
        with writing(self._folder):
            self._results.begin_rows()
            self._results.flush()
            self._remove((SORTED_FOLDER,))
            self.sorted_folder.mkdir()

    def keep_reading(self, asked: Mapping[str, Any], reading: Mapping[str, Any]) -> None:
        """Saves a complete first reading, so that a later run may use it. `reading["digests"]` holds the digest of each file of sorted requests."""
        with writing(self._folder):
            sync_folder(self.sorted_folder)
            sync_folder(self._folder)
            self._results.set_fact("reading", {**reading, "asked": self._asked(asked)})
            self._results.flush()

    def forget_reading(self) -> None:
        """Removes the first reading, and the plan of the shards, whose results the job has taken over."""
        with writing(self._folder):
            self._results.forget_reading()
            self._results.flush()
            forget_plan(self._folder)

    def end_reading(self) -> None:
        """Removes the first reading and its sorted requests: the plan of the shards holds them now."""
        with writing(self._folder):
            self._results.forget_reading()
            self._remove((SORTED_FOLDER,))

    @property
    def folder(self) -> Path:
        return self._folder

    def without_results(self, windows: Iterator[list[Request]]) -> Iterator[list[Request]]:
        """Yields the requests of these windows that have no result yet."""
        for window in windows:
            stored = self.stored([request.key for request in window])
            if lacking := [request for request in window if request.key not in stored]:
                yield lacking

    def output_facts(self) -> dict[str, Any]:
        """Returns what a merge needs to write this job's output (`shards.ShardPlan.output`)."""
        return output_facts(self._input, asdict(self._form), tuple(self._optional), prune=self._prune)

    def rows(self, first: int, last: int) -> tuple[dict[int, bytes], dict[int, Result]]:
        """Returns the rows from `first` to `last` that are in the output: the keys of those that became requests, and the results of the others."""
        with writing(self._folder):
            return self._results.rows(first, last)

    def failed_rows(self) -> Iterator[Result]:
        """The results of the rows that never became requests, in input order."""
        with writing(self._folder):
            yield from self._results.failed_rows()

    @property
    def row_count(self) -> int:
        """Number of rows added to the output so far."""
        with writing(self._folder):
            return self._results.row_count

    def _asked(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return as_stored({**asked, "settings": self._manifest.settings})
