"""A job's folder: everything that lets a killed job continue and a finished job be recognised.

`OUTPUT.job/` (or `NAME.job/` under the work folder) holds

    manifest.json    the settings, what was asked for, the state (`manifest`)
    claims/          which process works on it (`lease`)
    results.sqlite   while the job is not finished: finished results, rows under way, progress (`results`)
    sorted/          while the job is not finished: the requests of a large input, sorted
    images/          while the job is not finished: images of rows that are not local files
    keys             one key of 16 bytes for every row of the finished output (`reuse_output`)
    known.sqlite     what rows have become (`row_memory`)
    kept.sqlite      results that the finished output does not hold, or not whole; only if there are any
    stats.json       the figures of the last run
    report.json      what the report shows: runs over time, prefix tree, sums over the rows (`recording`)
    shards/          of a job that runs in shards (`shards`)
    push/            while the output is pushed to the Hub (`push`)

and, while a process works on it (made new at every start),

    run.sqlite       tables that serve this run only
    output.partial   the rows of finished windows, and their keys in keys.partial
    spool.jsonl      the same rows, while a table waits for its columns and their types (`writers`)

The order of steps in `finish` makes a kill safe at every moment. Until the manifest says "finished", the database has every result. Before
the output takes its place, the manifest names the file that stood there and the file that will. For an output in a store these are size and
digest, because the version is known only after the upload (`target`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from batchgen.config import RETRY_REASONS
from batchgen.errors import OutputError, UsageError
from batchgen.jobs.base import FinishedJob, HeldResults, JobSpec
from batchgen.jobs.files.disk import json_digest, sync_folder, write_json, writing
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.manifest import FIRST_LIMIT, Manifest, as_stored, file_digest
from batchgen.jobs.files.results import RESULTS_FILE, Results
from batchgen.jobs.files.target import is_known, open_target
from batchgen.jobs.opening import (
    KEPT_FILE,
    REMADE_FILES,
    SORTED_FOLDER,
    WORK_FILES,
    Opening,
    check_place,
    remove_files,
)
from batchgen.jobs.reuse_output import KEY_BYTES, NO_KEY, is_held_whole, read_keys, results_of_output
from batchgen.jobs.shards import (
    CLAIMS,
    SHARDS_FOLDER,
    ShardFolder,
    figures_so_far,
    forget_plan,
    load_plan,
    stores,
    take_runs,
)
from batchgen.jobs.stdout_job import StdoutJob
from batchgen.progress import Snapshot
from batchgen.recording import RowFigures
from batchgen.records.images import thumbnails
from batchgen.records.output import in_jobs_folder, job_path, output_format, output_row
from batchgen.records.rows import Row
from batchgen.records.writers import DigestFile, open_writer
from batchgen.result import Result
from batchgen.stats import counted

_FEW = 10
"""An output of fewer finished rows than this may lose all of them at once without `--prune`."""


class JobFolder(HeldResults):
    """One job, from its first window to the rename of its output (`Job`). `open_job` makes it."""

    def __init__(self, opened: Opening, lease: Lease, *, merging: bool) -> None:
        """Opens the job's database and the files of its output, and takes over the results that there are."""
        remove_files(opened.folder, REMADE_FILES)
        kept, file = opened.folder / KEPT_FILE, opened.folder / RESULTS_FILE
        if kept.exists() and not file.exists():
            kept.replace(file)
        super().__init__(opened.folder, opened.spec.flush_every, lease)
        self.notes, self.previous = opened.notes, opened.previous
        self.kept_rows = 0
        """Number of rows of the existing output. Rows before this number stay in the output despite `--limit`, if they have a result or failed."""
        self.output = opened.spec.output
        self._spec, self._target, self._manifest = opened.spec, opened.target, opened.manifest
        self._old, self._limit_raised = opened.old, opened.limit_raised
        self.merging = merging
        self._row_figures = RowFigures()
        with ExitStack() as files:
            files.callback(super().close)
            self.row_keys = self.keys_of_rows()
            rendering = json_digest({"settings": self._manifest.settings, "versions": self._manifest.mentions})
            self.row_memory = self.memory_of_rows(rendering.encode())
            self._take_results()
            sync_folder(self.folder)  # a synced database is lost if its folder's entry is not synced
            self._manifest.save(self.folder / "manifest.json")
            self._open_files(files)
            self._files: ExitStack | None = files.pop_all()

    def _take_results(self) -> None:
        """Gathers the results that this run may use: those of the database, of shards, and of a finished output."""
        old = self._old
        plan = load_plan(self.folder)
        places = stores(self.folder)
        if plan is not None or places:
            taken = sum(self.take_from(place) for place in places)
            take_runs(self.folder, self._record)
            if not self.merging:
                if plan is not None:
                    self.previous = figures_so_far(self.folder, plan)
                forget_plan(self.folder)
                self.forget_reading()
                self.notes.append(f"{self.output} was under way in shards: {taken} of their results are at hand")
        self.note_damaged()
        if self._manifest.keys:
            self.kept_rows = (self.folder / "keys").stat().st_size // KEY_BYTES
            self.know_finished(key for key in read_keys(self.folder / "keys") if key != NO_KEY)
            self.know_taken()
            if old is not None and old.state == "finished":
                held = results_of_output(self._target.name, self.folder / "keys", self._spec.form.asked)
                self.add_missing(() if old.request["openai"] else held)
        retry = self._manifest.request["retry"]
        interrupted = bool(retry) and self.fact("retry") == retry
        if not interrupted and _fits_forgotten(self._manifest):
            self.settle_forgotten(usable=True)  # of a run that was killed, and that this one does not continue
        if retry and (self._limit_raised or not interrupted):  # an interrupted run has dropped them already
            self.forget([RETRY_REASONS[name] for name in retry])
            self.set_fact("retry", retry)
        if self._limit_raised:
            self.forget_cut()
        if self._manifest.keys and old is not None and old.state == "finished":
            self.notes.append(f"{self.output} was finished: {self.finished_at_hand:,} of its results are used again")
        self.results_at_hand = self.count + self.forgotten_count + self.equal_rows_of_output

    def _open_files(self, opened: ExitStack) -> None:
        self._keys = DigestFile(self.folder / "keys.partial")
        opened.callback(self._keys.abandon)
        self._file = DigestFile(self.folder / "output.partial")
        opened.callback(self._file.abandon)
        self._writer = open_writer(
            self._file,
            self.output,
            schema=self._spec.input.schema if output_format(self.output)[0] == "parquet" else None,
            spool=self.folder / "spool.jsonl",
            form=self._spec.form,
            headers=self._spec.input.headers,
            in_order=self._manifest.request["order"] == "input",
        )
        opened.callback(self._writer.abandon)

    def close(self) -> None:
        """Writes everything to disk and releases the lease. Does nothing the second time."""
        try:
            self._close_files()
        finally:
            self._lease.release()

    def _close_files(self) -> None:
        opened, self._files = self._files, None
        if opened is not None:
            with writing(self.folder):
                with opened:
                    self.row_memory.flush()
                    self.flush()
                remove_files(self.folder, REMADE_FILES)

    # -- results

    @property
    def first_max_tokens(self) -> int | None:
        """The `max_tokens` with which the job began, if `--retry length` has raised it since; else None. Rows keep the keys that they had then."""
        first: int | None = self._manifest.settings.get(FIRST_LIMIT)
        return first

    def tell(self, progress: Snapshot) -> None:
        """Stores how far the run is, for `batchgen status`. Ignores errors: a full disk is reported by the next result that cannot be written."""
        with suppress(sqlite3.Error):
            self.keep_progress(progress.figures() | {"workers": progress.workers})

    # -- the rows of the output

    def check_dropped(self, failures: Sequence[str]) -> None:
        """Must be called when all rows are known. Raises `UsageError` if many rows of the finished output would be removed without `--prune`.

        `failures`: the first rows that failed in this run. They may be rows of the output, whose images or parameters are not what they were.
        """
        prune = self._manifest.request["prune"]
        finished, gone, new, unasked = self.compared()
        if not gone:
            return
        lost = max(0, gone - new)  # as many rows as are new were changed, not removed
        others = gone == finished >= _FEW and not self._made_with_another_limit
        if not prune and (10 * lost > finished or others):
            if self._old is not None and self._old.state == "finished":
                self._put_back(self._old)
            fail = " or fail now" if failures else ""
            first = f", where rows fail (the first: {failures[0]})" if failures else ""
            raise UsageError(
                f"{gone:,} of the {finished:,} finished rows of {self.output} are no longer in the input{fail} and would be removed from the output",
                f"check the input{first}; --prune removes them, another -o keeps them",
            )
        if unasked:
            what = "removed" if prune else f"kept in {self.folder} and used again if the row comes back"
            fail = ", or with one that fails now" if failures else ""
            self.notes.append(f"{counted(unasked, 'result')} of {self.output} without a row in the input{fail}: {what}")

    @property
    def _made_with_another_limit(self) -> bool:
        """Whether the finished output may have been written before `max_tokens` was raised. The new limit can have given
        any row a new key: rows with shortened prompts, and rows whose own limit is the job's first or new one."""
        interrupted = self._old is not None and self._old.state == "running" and self.first_max_tokens is not None
        return self._limit_raised or interrupted

    def _put_back(self, old: Manifest) -> None:
        """Restores the finished job as it was before this run. What this run has generated is kept for later ones, unless they cannot use it."""
        with writing(self.folder):
            if self._limit_raised:
                self.drop_new()
            self.restore_forgotten()
            self.flush()
            self._manifest = replace(old, request=old.request | {"prune": False})
            self._manifest.save(self.folder / "manifest.json")
            self._end()

    def _end(self) -> None:
        """Closes the files, and removes what the finished output holds."""
        left = _shrink(self)
        self._close_files()
        self.notes += _clean_up(self.folder, left)

    def write(self, rows: Sequence[Row], results: Mapping[int, Result], keys: Mapping[int, bytes]) -> None:
        """Writes output rows in this order. `results` and `keys` are by row number; rows that never became requests have no key."""
        with writing(self.folder):
            self._writer.write((row, results[row.number]) for row in rows)
            self._keys.write(b"".join(keys.get(row.number, NO_KEY) for row in rows))
            form, kind = self._spec.form, output_format(self.output)[0]
            beside = [key for number, key in keys.items() if not is_held_whole(results[number], form, kind)]
            self.keep_beside_output(beside)
        image_columns = self._manifest.settings.get("image_column", ())
        for row in rows:
            result = results[row.number]
            shown = partial(thumbnails, row.columns, image_columns, row.file)
            self._row_figures.add(result, partial(output_row, row, result, self._spec.form), shown)

    def _check_replaced(self) -> None:
        """Raises `OutputError` if the file at the output's place is not the one that was there when the job was opened. With `--overwrite`, any is replaced."""
        if self._spec.overwrite:
            return
        again = "run the same command again: finished rows are kept"
        try:
            known = not self._target.exists() or is_known(self._target, self._manifest.outputs)
        except UsageError as e:  # of a store that cannot be reached
            raise OutputError(e.message, again) from None
        if not known:
            raise OutputError(f"{self.output} appeared or was changed while the job ran", f"move it away and {again}")

    def end_output(self) -> None:
        """Writes what the output has after its last row. A table whose types are known only then is written as a whole."""
        self.flush()
        with writing(self.output):
            self._writer.close()
            self.notes += self._writer.notes

    def finish(self, stats: dict[str, Any]) -> None:
        """Puts the output, which `end_output` has ended, in its place and closes the job."""
        self._lease.check()
        self._check_replaced()
        self.row_memory.forget_unasked(self.row_count)
        with writing(self.output):
            self._keys.close()
            self._record.rows = self._row_figures.as_dict()
            self._record.save(self.folder)
            self.settle_forgotten(usable=_fits_forgotten(self._manifest))
            write_json(self.folder / "stats.json", stats)
            partial = self.folder / "output.partial"
            new = self._target.to_be(partial, self._file.hexdigest())
            self._manifest = replace(
                self._manifest,
                outputs=[*self._manifest.outputs, new],
                keys=self._keys.hexdigest(),
                stats=file_digest(self.folder / "stats.json"),
            )
            self.flush()
            self._manifest.save(self.folder / "manifest.json")
            (self.folder / "keys.partial").replace(self.folder / "keys")
            there = self._target.put(partial, self._file.hexdigest())
            self._manifest = replace(self._manifest, state="finished", outputs=[there])
            self._manifest.save(self.folder / "manifest.json")
        with writing(self.folder):
            # The output may have taken the last space on the disk, and `_shrink` needs a little.
            remove_files(self.folder, (SORTED_FOLDER, SHARDS_FOLDER))
            if self._manifest.request["prune"]:
                self.forget_unasked()
            self._end()
        self._lease.release()

    # -- the first reading of the input, of a job that reads it twice

    @property
    def sorted_folder(self) -> Path:
        """The folder for sorted requests."""
        return self.folder / SORTED_FOLDER

    def earlier_reading(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns what an earlier run's first reading saved (`keep_reading`); None unless input and settings are the same and all of it is whole."""
        with writing(self.folder):
            reading: dict[str, Any] | None = self.fact("reading")
            if reading is None or reading["asked"] != self._with_settings(asked):
                return None
            for name, digest in reading["digests"].items():
                path = self.sorted_folder / name
                if not path.exists() or file_digest(path) != digest:
                    return None
            if None in self.failed_rows():
                return None
            return reading

    def begin_reading(self) -> None:
        """Removes an earlier reading."""
        with writing(self.folder):
            self.begin_rows()
            self.flush()
            remove_files(self.folder, (SORTED_FOLDER,))
            self.sorted_folder.mkdir()

    def keep_reading(self, asked: Mapping[str, Any], reading: Mapping[str, Any]) -> None:
        """Saves a complete first reading, so that a later run may use it. `reading["digests"]` holds the digest of each file of sorted requests."""
        with writing(self.folder):
            sync_folder(self.sorted_folder)
            sync_folder(self.folder)
            self.set_fact("reading", {**reading, "asked": self._with_settings(asked)})
            self.flush()

    def forget_first_reading(self) -> None:
        """Removes the first reading, and the plan of the shards, whose results the job has taken over."""
        self.forget_reading()
        self.flush()
        forget_plan(self.folder)

    def end_reading(self) -> None:
        """Removes the first reading and its sorted requests: the plan of the shards holds them now."""
        with writing(self.folder):
            self.forget_reading()
            remove_files(self.folder, (SORTED_FOLDER,))

    def _with_settings(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return as_stored({**asked, "settings": self._manifest.settings})


def _finished_job(opened: Opening, figures: dict[str, Any]) -> FinishedJob:
    """Removes what an earlier run has left beside the finished output."""
    left: bool | None = False
    if (opened.folder / RESULTS_FILE).exists():
        with closing(Results(opened.folder, 0.0)) as results:
            # Of a run that was killed before it began.
            results.settle_forgotten(usable=_fits_forgotten(opened.manifest))
            left = _shrink(results)
    notes = opened.notes + _clean_up(opened.folder, left)
    return FinishedJob(figures, bool(opened.manifest.settings.get("chat")), notes=notes)


def _fits_forgotten(manifest: Manifest) -> bool:
    """Whether results that `--retry` has dropped fit the settings. Once the limit was raised, rows that an earlier limit has cut must run again."""
    return manifest.settings.get(FIRST_LIMIT) is None


def _shrink(results: Results) -> bool | None:
    """Removes from the database what the finished output holds. Returns whether results remain; None if the disk is too full for that."""
    return results.shrink(key for key in read_keys(results.folder / "keys") if key != NO_KEY)


def _clean_up(folder: Path, left: bool | None) -> list[str]:
    """Removes the files of the work. If results are `left` in the database, they stay as `kept.sqlite`. If that is not known, the next run removes it.

    Returns notes for the user.
    """
    if left is None:
        return [f"the disk is full, so {folder / RESULTS_FILE} stays; the same command removes it once there is space"]
    if left:
        (folder / RESULTS_FILE).replace(folder / KEPT_FILE)
    remove_files(folder, WORK_FILES)
    sync_folder(folder)
    return []


Job: TypeAlias = JobFolder | StdoutJob
"""A job, from its first window to its output."""
Store: TypeAlias = Job | ShardFolder
"""Where the results of a job, or of one of its shards, go."""


def open_job(
    spec: JobSpec, lease: Lease | None = None, *, merging: bool = False, tell: Callable[[str], None] = lambda _: None
) -> Job | FinishedJob:
    """Opens the job of an output: begins it, continues it or finds it finished. This process holds its lease until the job is closed.

    `lease`: the job's, if this process holds it already (shards). `tell` is called with a sentence before a wait for a holder that may be dead.
    `merging`: the plan of the shards stays until the output is written;
    otherwise it is forgotten. Their results become the job's in both cases.
    Raises `UsageError` (an output that is not ours, other settings), `OutputLocked`, `OutputError`.
    """
    output = spec.output
    if output == "-":
        return StdoutJob(spec.form)
    target, folder = open_target(output), job_path(output, spec.work_dir)
    check_place(output, target, folder, spec.overwrite)
    with writing(folder):
        if not folder.exists():
            folder.mkdir(parents=in_jobs_folder(folder), exist_ok=True)
            sync_folder(folder.parent)
    held = lease or Lease(folder / CLAIMS, output, tell, unsharded=True)
    try:
        manifest = replace(spec.manifest, output=target.address)
        opening = Opening(spec=spec, target=target, folder=folder, manifest=manifest)
        if held.taken_over is not None:
            opening.notes.append(
                f"an earlier run (process {held.taken_over.get('pid')}) was killed; this run continues it"
            )
        with writing(folder):
            opening.compare()
            if opening.finished is None:
                return JobFolder(opening, held, merging=merging)
            finished = _finished_job(opening, opening.finished)
        held.release()
        return finished
    except BaseException:
        held.release()
        raise
