"""A job's folder: everything that makes a killed job go on, and a finished one known again.

`OUTPUT.job/` (or `NAME.job/` under the work folder) holds

    manifest.json    the settings, what was asked for, the state (`manifest`)
    lock             who is at it (`lock`)
    journal          results as they come (`journal`)
    keys             of a finished job: 16 bytes for every row of the output, by which it is known again (`take_back`)
    stats.json       the figures of the last run
    passes/          while it is under way: the input as it was read first, where all of it is put in prefix order (`passes`)

and, while a process is at it, made anew from the journal at every start

    index.sqlite     where the journal has a key (`index`)
    output.partial   the rows of finished windows, and their keys in keys.partial
    spool.jsonl      the same rows, while a Parquet output waits for its columns' types (`writers`)

The order of steps in `finish` makes every moment safe: until the manifest says finished, the journal has every result, and from before the
output is put in its place the manifest knows both what stood there and what will. In a store that is size and digest, its version only after
the upload (`target`): a run killed in between finds an object that it knows by its content.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from batchgen.errors import UsageError
from batchgen.records.disk import sync_folder, write_json, writing
from batchgen.records.index import Index
from batchgen.records.inputs import Input
from batchgen.records.journal import Journal
from batchgen.records.lock import Lock
from batchgen.records.manifest import Manifest, as_stored, differences, file_digest, load_manifest
from batchgen.records.output import INPUT_FILE, RowForm, job_path, output_format
from batchgen.records.passes import Passes
from batchgen.records.place import REMADE_FILES, WORK_FILES, check_place, make_folder
from batchgen.records.rows import Row
from batchgen.records.space import check_space, least_bytes
from batchgen.records.stdout_job import DoneOrder, StdoutJob
from batchgen.records.take_back import NO_KEY, take_back
from batchgen.records.target import Target, open_target
from batchgen.records.writers import DigestFile, open_writer
from batchgen.result import Result

_WAY_OUT = "use --overwrite to start anew, or another -o"


def open_job(
    output: str,
    *,
    settings: dict[str, Any],
    mentions: dict[str, Any],
    input: Input,
    limit: int | None,
    form: RowForm,
    work_dir: str | None,
    overwrite: bool,
    flush_every: float,
    order: str,
    retry_errors: bool = False,
    optional: Collection[str] = (),
) -> JobFolder | StdoutJob:
    """The job of an output, begun, taken up again or already finished; held by this process until it is closed.

    `settings`, a flat dictionary of plain values, is what changes results: a job goes on with equal ones only. `mentions`: a difference is only noted.
    `retry_errors`: the results of rows that failed are forgotten, so that these run again.
    `optional`: the parts of a result, of those that only some have, that a Parquet output has columns for from the start (`open_writer`).
    Raises `UsageError` (an output that is not ours, other settings), `OutputLocked`, `OutputError`.
    """
    named = form.keep is None or INPUT_FILE in form.keep
    form = replace(form, input_file=named and len(input.files) > 1)
    if output == "-":
        return StdoutJob(form, order=order)
    target, folder = open_target(output), job_path(output, work_dir)
    check_place(output, target, folder, overwrite)
    with writing(folder):
        make_folder(folder)
        sync_folder(folder.parent)
        lock = Lock(folder / "lock", output)
    try:
        formats = [f.format for f in input.files]
        request = {"inputs": input.fingerprint(), "formats": formats, "limit": limit, "order": order}
        request |= asdict(form)
        manifest = Manifest(
            state="running",
            output=target.address,
            settings=as_stored(settings),
            mentions=as_stored(mentions),
            request=as_stored(request),
        )
        job = JobFolder(
            output,
            target,
            folder,
            lock,
            input,
            manifest,
            form=form,
            order=order,
            retry_errors=retry_errors,
            optional=optional,
        )
        job._open(overwrite, named_by_output=work_dir is None, flush_every=flush_every)
    except BaseException:
        lock.release()
        raise
    return job


class JobFolder:
    """One job, from its first window to the rename of its output. A context manager: leaving it keeps what is there and releases the lock."""

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
        retry_errors: bool,
        optional: Collection[str],
    ) -> None:
        self.notes: list[str] = []
        """What the user should hear once: a dead run's lock, other versions, damaged records."""
        self.finished: dict[str, Any] | None = None
        """The figures of the finished job where there is nothing to do; no other method may be called then."""
        self.previous: dict[str, Any] | None = None
        """The figures that the job's last run left, where this one goes on from it."""
        self.output, self._target = output, target
        self._folder, self._lock, self._input = folder, lock, input
        self._manifest = manifest
        self._form, self._optional = form, optional
        self._order = DoneOrder(order)
        self._retry_errors = retry_errors
        self._opened: ExitStack | None = None

    def _open(self, overwrite: bool, *, named_by_output: bool, flush_every: float) -> None:
        if self._lock.taken_over is not None:
            self.notes.append(
                f"the run before (process {self._lock.taken_over}) ended without finishing: going on from there"
            )
        with writing(self._folder):
            old = None if overwrite else load_manifest(self._folder / "manifest.json")
            if old is None:
                self._start_anew()
            else:
                if not self._holds_nothing(old):
                    self._compare(old, named_by_output)
                self._take_up(old)
            if self.finished is None:
                self._start(flush_every)

    def _holds_nothing(self, old: Manifest) -> bool:
        """Whether the run before ended before its first result, on an option that the model does not take, say: it binds nobody."""
        journal = self._folder / "journal"
        return old.state == "running" and not old.outputs and not (journal.exists() and journal.stat().st_size)

    def _compare(self, old: Manifest, named_by_output: bool) -> None:
        if not named_by_output and old.output != self._manifest.output:
            raise UsageError(
                f"{self._folder} is the job folder of {old.output}", "use another --work-dir, or another -o"
            )
        if said := differences(old.settings, self._manifest.settings):
            raise UsageError(f"{self.output} was made with other settings: {said}", _WAY_OUT)
        if said := differences(old.mentions, self._manifest.mentions):
            self.notes.append(f"{self.output} was begun with other versions: {said}")

    def _take_up(self, old: Manifest) -> None:
        there = self._target.exists()
        standing = self._target.known_as(old.outputs) if there else None
        if there and standing is None:
            raise UsageError(
                f"{self.output} was changed since batchgen wrote it", "move it away, or use --overwrite to start anew"
            )
        self.previous = self._stats()
        self._manifest = replace(self._manifest, outputs=[standing] if standing else [])
        if old.state != "finished":
            return
        if not there:
            self.notes.append(f"{self.output} is gone: starting anew")
            self._start_anew()
        elif self._is_complete(old):
            self.finished, self.previous = self.previous, None
            self._remove(WORK_FILES)
        elif (self._folder / "keys").exists() and file_digest(self._folder / "keys") == old.keys:
            taken = take_back(self._target.name, self._folder / "keys", self._folder / "journal")
            self.notes.append(f"{self.output} was finished: {taken} of its results are at hand")
        else:
            self.notes.append(
                f"{self._folder / 'keys'} is damaged, so the rows of {self.output} are not known: starting anew"
            )
            self._start_anew()

    def _is_complete(self, old: Manifest) -> bool:
        """Whether there is nothing to do."""
        if self.previous is None or old.request != self._manifest.request or not old.request["inputs"]:
            return False
        if file_digest(self._folder / "stats.json") != old.stats:
            return False
        return not (self._retry_errors and self.previous["job"]["rows_failed"])

    def _start_anew(self) -> None:
        """Forget all results; the output that is there stays until the new one replaces it."""
        self.previous = None
        self._remove((*WORK_FILES, "keys", "stats.json"))
        sync_folder(self._folder)
        there = [self._target.identity()] if self._target.exists() else []
        self._manifest = replace(self._manifest, outputs=there)

    def _start(self, flush_every: float) -> None:
        tight = check_space(self._folder, least_bytes(self._input, self.output, self._form))
        if tight is not None:
            self.notes.append(tight)
        self._manifest.save(self._folder / "manifest.json")
        with ExitStack() as opened:
            self._open_files(opened, flush_every)
            sync_folder(self._folder)  # a synced journal is of no use in a folder that does not name it
            self._opened = opened.pop_all()

    def _open_files(self, opened: ExitStack, flush_every: float) -> None:
        self._index = opened.enter_context(closing(Index(self._folder / "index.sqlite")))
        self._journal = opened.enter_context(
            closing(Journal(self._folder / "journal", self._index, flush_every, without_failed=self._retry_errors))
        )
        self.passes = opened.enter_context(
            closing(
                Passes(self._folder / "passes", self._journal, self._manifest.settings, trusted=not self._retry_errors)
            )
        )
        if self._journal.damaged:
            self.notes.append(
                f"{self._journal.damaged} damaged records of the journal were left out: their rows are generated again"
            )
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
        """Keep what is there and release the lock. Does nothing the second time."""
        try:
            self._close_files()
        finally:
            self._lock.release()

    def _close_files(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with writing(self._folder):
                with opened:
                    self._journal.flush()
                self._remove(REMADE_FILES)

    def occurrences(self, digests: Sequence[bytes]) -> list[int]:
        """How often each digest has come before in this run: call it once for every row, in row order."""
        with writing(self._folder):
            return self._index.occurrences(digests)

    def stored(self, keys: Sequence[bytes]) -> dict[bytes, Result]:
        """The results that are at hand for `keys`. Their row numbers mean nothing."""
        with writing(self._folder):
            return self._journal.results(keys)

    def append(self, key: bytes, result: Result) -> None:
        """Keep one result (of row `result.row`)."""
        with writing(self._folder):
            self._journal.append(key, result)
        self._order.done(result.row)

    def write(self, rows: Sequence[Row], results: Mapping[int, Result], keys: Mapping[int, bytes]) -> None:
        """Add the output rows of a window. `results` and `keys` by row number; rows that never became requests have no key."""
        ordered = self._order.sort(rows)
        with writing(self._folder):
            self._writer.write((row, results[row.number]) for row in ordered)
            self._keys.write(b"".join(keys.get(row.number, NO_KEY) for row in ordered))

    def flush(self) -> None:
        """Put the journal on disk."""
        with writing(self._folder):
            self._journal.flush()

    def save_stats(self, stats: dict[str, Any]) -> None:
        """Keep the figures of a run that ends before the job does: the next one's `previous`."""
        with writing(self._folder):
            write_json(self._folder / "stats.json", stats)

    def finish(self, stats: dict[str, Any]) -> None:
        """Every row is written: put the output in its place and forget the journal. The job is closed then."""
        with writing(self.output):
            self._writer.close()
            self.notes += self._writer.notes
            self._keys.sync()
            self._keys.close()
            write_json(self._folder / "stats.json", stats)
            partial = self._folder / "output.partial"
            new = self._target.to_be(partial, self._file.hexdigest())
            self._manifest = replace(
                self._manifest,
                outputs=[*self._manifest.outputs, new],
                keys=self._keys.hexdigest(),
                stats=file_digest(self._folder / "stats.json"),
            )
            self._manifest.save(self._folder / "manifest.json")
            (self._folder / "keys.partial").replace(self._folder / "keys")
            there = self._target.put(partial, self._file.hexdigest())
            self._manifest = replace(self._manifest, state="finished", outputs=[there])
            self._manifest.save(self._folder / "manifest.json")
        self._close_files()
        with writing(self._folder):
            self._remove(WORK_FILES)
        self.finished = stats
        self._lock.release()

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _stats(self) -> dict[str, Any] | None:
        try:
            stats = json.loads((self._folder / "stats.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return stats if isinstance(stats, dict) else None
