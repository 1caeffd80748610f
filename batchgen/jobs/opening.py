"""Opens the job of an output: begins it, continues it, or finds it finished. Refuses an output that is not ours or was made with other settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchgen.config import RETRY_REASONS
from batchgen.errors import UsageError
from batchgen.jobs import results as results_files
from batchgen.jobs.base import Job
from batchgen.jobs.disk import sync_folder, writing
from batchgen.jobs.job_folder import JobFolder, Opened
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
from batchgen.jobs.place import KEPT_FILE, WORK_FILES, check_place, check_space, min_bytes, remove_files
from batchgen.jobs.results import read_facts
from batchgen.jobs.shards import CLAIMS, check_no_shard_runs, load_plan, read_stats, stores
from batchgen.jobs.stdout_job import StdoutJob
from batchgen.jobs.target import Target, open_target
from batchgen.recording import job_record
from batchgen.records.inputs import Input
from batchgen.records.output import INPUT_FILE, RowForm, job_path, jobs_folder
from batchgen.stats import counted

_START_AGAIN = "use --overwrite to start again, or another -o"
_RAISE_LIMIT = (
    "add --retry length to generate the rows again that were cut, and keep all others; --overwrite starts again"
)


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

    Returns None if there is something to do, or if only `open_job` can tell. The arguments are those of `open_job`. Changes nothing, and needs
    neither the job's lock nor a tokenizer or a model.
    """
    if output == "-":
        return None
    folder, target = job_path(output, work_dir), open_target(output)
    manifest = load_manifest(folder / "manifest.json")
    if manifest is None or not command or (manifest.command, manifest.output) != (command, target.address):
        return None
    if any((folder / name).exists() for name in WORK_FILES) or not target.exists():
        return None
    if target.known_as(manifest.outputs) is None or not _keys_are_whole(folder, manifest):
        return None
    # The rest of the request follows from the command.
    asked = manifest.request | as_stored(_request_of(input, limit, order))
    figures = _complete_figures(folder, manifest, asked, retry=sorted(retry), prune=prune)
    return None if figures is None else (figures, bool(manifest.settings["chat"]))


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
            state="running", output=target.address, command=command,
            settings=as_stored(settings), mentions=as_stored(mentions), request=as_stored(request),
        )  # fmt: skip
        opening = _Opening(output, target, folder, manifest, sorted(retry), prune)
        if lock.taken_over is not None:
            opening.notes.append(f"an earlier run (process {lock.taken_over}) was killed; this run continues it")
        with nullcontext() if lease else _shards_held(opening), writing(folder):
            opened = opening.opened(overwrite, named_by_output=work_dir is None)
            job = JobFolder(
                output, target, folder, lock, input, opened,
                form=form, order=order, retry=retry, prune=prune, optional=optional, lease=lease, merging=merging,
            )  # fmt: skip
            job.start(flush_every)
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
def _shards_held(opening: _Opening) -> Iterator[None]:
    """Keeps shards from starting while the job takes over their results."""
    if load_plan(opening.folder) is None:
        yield
        return
    lease = Lease(opening.folder / CLAIMS, f"the shards of {opening.output}", opening.notes.append)
    try:
        yield
    finally:
        lease.release()


@dataclass(slots=True)
class _Opening:
    """Compares a job's folder with what a command asks for."""

    output: str
    target: Target
    folder: Path
    manifest: Manifest
    """That of this run. It takes over what stays of the earlier one's."""
    retry: list[str]
    prune: bool
    notes: list[str] = field(default_factory=list)
    limit_raised: bool = False
    finished: dict[str, Any] | None = None
    previous: dict[str, Any] | None = None

    def opened(self, overwrite: bool, *, named_by_output: bool) -> Opened:
        """Drops all results if there is no job to continue. Raises `UsageError` if this command must not continue the job, `OutputLocked`."""
        check_no_shard_runs(self.folder, self.output, self.notes.append)
        old = None if overwrite else load_manifest(self.folder / "manifest.json")
        if old is None:
            self._check_nothing_lost(overwrite)
            self._start_again()
        else:
            if not self._holds_nothing(old):
                self._compare(old, named_by_output)
            self._take_up(old)
        return Opened(
            manifest=self.manifest,
            old=old,
            limit_raised=self.limit_raised,
            finished=self.finished,
            previous=self.previous,
            notes=self.notes,
        )

    def _check_nothing_lost(self, overwrite: bool) -> None:
        """Raises `UsageError` if there are results whose settings are not known."""
        count = sum(read_facts(place, ())[1] or 0 for place in (self.folder, *stores(self.folder)))
        if not overwrite and count:
            raise UsageError(
                f"{self.folder} has {counted(count, 'result')} but no manifest.json, so the settings that made them are not known",
                f"put it back, {_START_AGAIN}",
            )

    def _start_again(self) -> None:
        """Drops all results. The output that exists stays until the new one replaces it."""
        remove_files(self.folder, (*WORK_FILES, KEPT_FILE, "keys", "stats.json", *job_record.FILES))
        sync_folder(self.folder)
        there = [self.target.identity()] if self.target.exists() else []
        self.manifest = replace(self.manifest, outputs=there)

    def _holds_nothing(self, old: Manifest) -> bool:
        """Whether the earlier run has left no result, for example because the model refused an option. Then its settings do not matter."""
        if old.state != "running" or old.outputs or (self.folder / KEPT_FILE).exists():
            return False
        if load_plan(self.folder) or stores(self.folder):
            return False
        return not (self.folder / results_files.FILE).exists() or read_facts(self.folder, ())[1] == 0

    def _compare(self, old: Manifest, named_by_output: bool) -> None:
        if not named_by_output and old.output != self.manifest.output:
            raise UsageError(
                f"{self.folder} is the job folder of {old.output}", "use another --work-dir, or another -o"
            )
        larger = is_larger_limit(old.settings, self.manifest.settings)
        self.limit_raised = larger and "length" in self.retry
        first = old.settings.get(FIRST_LIMIT) or (old.settings[LIMIT] if self.limit_raised else None)
        if first is not None:
            self.manifest = replace(self.manifest, settings=self.manifest.settings | {FIRST_LIMIT: first})
        said = differences(old.settings, self.manifest.settings)
        if said and not self.limit_raised:
            hint = _RAISE_LIMIT if larger else _START_AGAIN
            raise UsageError(f"{self.output} was made with other settings: {said}", hint)
        if said := differences(old.mentions, self.manifest.mentions):
            self.notes.append(f"{self.output} was started with other versions: {said}")

    def _take_up(self, old: Manifest) -> None:
        there = self.target.exists()
        standing = self.target.known_as(old.outputs) if there else None
        if there and standing is None:
            raise UsageError(
                f"{self.output} was changed since batchgen wrote it", "move it away, or use --overwrite to start again"
            )
        self.previous = read_stats(self.folder)
        self.manifest = replace(self.manifest, outputs=[standing] if standing else [])
        if there and _keys_are_whole(self.folder, old):
            self.manifest = replace(self.manifest, keys=old.keys)
        if old.state != "finished":
            return
        if there and not self.limit_raised:
            self.finished = _complete_figures(
                self.folder, old, self.manifest.request, retry=self.retry, prune=self.prune
            )
        if self.finished is not None:
            self.previous = None
        elif not there:
            self.notes.append(f"{self.output} no longer exists: its rows are generated again")
            self.previous = None
        elif not self.manifest.keys:
            self.notes.append(
                f"{self.folder / 'keys'} is damaged, so the rows of {self.output} cannot be recognised: they are generated again"
            )
            self.previous = None


def _complete_figures(
    folder: Path, manifest: Manifest, request: Mapping[str, Any], *, retry: Sequence[str], prune: bool
) -> dict[str, Any] | None:
    """The figures of a finished job if `request` (`Manifest.request`) asks for nothing else, else None. The output is not looked at."""
    stats = read_stats(folder)
    if manifest.state != "finished" or stats is None or not manifest.request["inputs"]:
        return None
    if manifest.request | {"retry": []} != dict(request) | {"retry": []}:
        return None
    if prune and (folder / KEPT_FILE).exists():
        return None
    if file_digest(folder / "stats.json") != manifest.stats:
        return None
    if any(stats["job"]["finish_reasons"].get(RETRY_REASONS[name]) for name in retry):
        return None
    return stats


def _keys_are_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether the file of the keys of the output's rows is the one that the manifest knows."""
    keys = folder / "keys"
    return keys.exists() and file_digest(keys) == manifest.keys
