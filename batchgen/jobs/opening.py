"""Compares the folder of a job, whose files are named here, with what a command asks for: the job begins, continues or is finished. Refuses an output that is not ours or was made with other settings."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchgen.config import RETRY_REASONS, JobConfig
from batchgen.errors import UsageError
from batchgen.jobs.base import FinishedJob, JobSpec
from batchgen.jobs.files.disk import check_parent, sync_folder
from batchgen.jobs.files.manifest import (
    FIRST_LIMIT,
    LIMIT,
    Manifest,
    as_stored,
    differences,
    file_digest,
    is_larger_limit,
    load_manifest,
)
from batchgen.jobs.files.results import RESULTS_FILE, RESULTS_FILES, read_facts
from batchgen.jobs.files.row_keys import KNOWN_FILES
from batchgen.jobs.files.target import Target, known_as, open_target
from batchgen.jobs.identity import with_defaults
from batchgen.jobs.shards import CLAIMS, SHARDS_FOLDER, check_no_shard_runs, forget_plan, load_plan, read_stats, stores
from batchgen.recording import job_record
from batchgen.records.inputs import Input
from batchgen.records.output import in_jobs_folder, job_path, output_format
from batchgen.records.remote import is_url
from batchgen.stats import counted

KEPT_FILE = "kept.sqlite"
"""The results of a finished job that its output does not hold, or not whole."""
SORTED_FOLDER = "sorted"
IMAGES_FOLDER = "images"
"""Images of rows that are not local files."""
PUSH_FOLDER = "push"
"""Files on their way to the Hub (`push.upload`)."""
REMADE_FILES = ("run.sqlite", "output.partial", "keys.partial", "spool.jsonl")
"""Files that every run makes new and none leaves behind."""
WORK_FILES = (*RESULTS_FILES, SORTED_FOLDER, IMAGES_FOLDER, SHARDS_FOLDER, *REMADE_FILES)
"""Files of a job that is not finished."""
_START_AGAIN = "use --overwrite to start again, or another -o"
_RAISE_LIMIT = (
    "add --retry length to generate the rows again that were cut, and keep all others; --overwrite starts again"
)


def check_place(output: str, target: Target, folder: Path, overwrite: bool) -> None:
    """Raises `UsageError` if the output or its folder is not batchgen's, or if the folder that would hold it does not exist."""
    if is_url(output):
        output_format(output)
        target.check()
    else:  # what is there says more than a suffix
        target.check()
        output_format(output)
    if not in_jobs_folder(folder):
        check_parent(folder)
    if (folder / "manifest.json").exists():
        return
    # A run makes the folder of claims before anything else.
    if folder.exists() and not (folder / CLAIMS).is_dir() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not a job's folder", "move it, or use another -o")
    if not overwrite and target.exists():
        lacks = "a job folder without manifest.json" if folder.exists() else "no job folder"
        raise UsageError(
            f"{output} exists and has {lacks}, so batchgen does not know whether it may replace it",
            "use the --work-dir of its run if it had one, --overwrite to replace it, or another -o",
        )


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Removes these files and folders from a job's folder, those that are there."""
    for name in names:
        path = folder / name
        if name == SHARDS_FOLDER:
            forget_plan(folder)  # the plan before its files: a killed run must not leave it without them
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def find_finished(output: str, *, digest: str, input: Input, config: JobConfig) -> FinishedJob | None:
    """Returns an output's job if this command has finished it, and `open_job` would find nothing to do.

    Returns None if there is something to do, or if only `open_job` can tell. `digest`: `identity.command_digest`. Changes nothing, and needs
    neither the job's lease nor a tokenizer or a model.
    """
    if output == "-" or config.overwrite:
        return None
    folder, target = job_path(output, config.work_dir), open_target(output)
    manifest = load_manifest(folder / "manifest.json")
    if manifest is None or not digest or (manifest.command, manifest.output) != (digest, target.address):
        return None
    if any((folder / name).exists() for name in WORK_FILES) or not target.exists():
        return None
    if known_as(target, manifest.outputs) is None or not _keys_are_whole(folder, manifest):
        return None
    # The rest of the request follows from the command.
    figures = _complete_figures(folder, manifest, manifest.request | as_stored(request_of(config, input)))
    return None if figures is None else FinishedJob(figures, bool(manifest.settings["chat"]))


def request_of(config: JobConfig, input: Input) -> dict[str, Any]:
    """Returns what a command asks of a job beside the form of its rows. Results that it does not ask for are kept, unless `prune` is true."""
    return {
        "inputs": input.fingerprint(),
        "formats": [file.format for file in input.files],
        "limit": config.limit,
        "order": config.order,
        "retry": config.retried,
        "prune": config.prune,
        "expect": config.expect,
    }


def continued_settings(
    old: Mapping[str, Any], new: Mapping[str, Any], retry: Sequence[str]
) -> tuple[dict[str, Any], bool, str]:
    """Returns the settings with which a job goes on that was begun with `old` ones, and whether its limit is raised.

    The third value says how the settings differ, if a run must not continue the job; else it is empty.
    """
    old = with_defaults(old, new)
    raised = is_larger_limit(old, new) and "length" in retry
    first = old.get(FIRST_LIMIT) or (old[LIMIT] if raised else None)
    settings = dict(new) if first is None else {**new, FIRST_LIMIT: first}
    return settings, raised, "" if raised else differences(old, settings)


@dataclass(slots=True, kw_only=True)
class Opening:
    """What a job's folder holds, compared with what a command asks for."""

    spec: JobSpec
    target: Target
    folder: Path
    manifest: Manifest
    """That of this run. It takes over what stays of the earlier one's."""
    old: Manifest | None = None
    """That of the run before, which this one continues; None if the job begins."""
    limit_raised: bool = False
    """Whether this run continues the job with a larger `max_tokens`."""
    finished: dict[str, Any] | None = None
    """The figures of the job if there is nothing to do."""
    previous: dict[str, Any] | None = None
    """The figures of the run before."""
    notes: list[str] = field(default_factory=list)

    def compare(self) -> None:
        """Drops all results if there is no job to continue. Raises `UsageError` if this command must not continue the job, `OutputLocked`."""
        check_no_shard_runs(self.folder, self.spec.output, self.notes.append)
        old = self._earlier_manifest()
        is_others = old is not None and self.spec.work_dir is not None and old.output != self.manifest.output
        if old is not None and is_others and not self._holds_nothing(old):
            raise UsageError(
                f"{self.folder} is the job folder of {old.output}", "use another --work-dir, or another -o"
            )
        if old is None or self.spec.overwrite:
            self._check_nothing_lost()
            self._start_again()
            return
        self.old = old
        if not self._holds_nothing(old):
            self._compare_settings(old)
        self._take_up(old)

    def _earlier_manifest(self) -> Manifest | None:
        """Returns the manifest of the run before. Raises `UsageError` if it is damaged, unless the job starts again anyway."""
        try:
            return load_manifest(self.folder / "manifest.json")
        except UsageError:
            if not self.spec.overwrite:
                raise
            return None

    def _check_nothing_lost(self) -> None:
        """Raises `UsageError` if there are results whose settings are not known."""
        count = sum(read_facts(place, ())[1] or 0 for place in (self.folder, *stores(self.folder)))
        if not self.spec.overwrite and count:
            raise UsageError(
                f"{self.folder} has {counted(count, 'result')} but no manifest.json, so the settings that made them are not known",
                f"put it back, {_START_AGAIN}",
            )

    def _start_again(self) -> None:
        """Drops all results. The output that exists stays until the new one replaces it."""
        remove_files(self.folder, (*WORK_FILES, KEPT_FILE, *KNOWN_FILES, "keys", "stats.json", *job_record.FILES))
        sync_folder(self.folder)
        self._set(outputs=[self.target.identity()] if self.target.exists() else [])

    def _set(self, **values: Any) -> None:
        """Sets fields of this run's manifest."""
        self.manifest = replace(self.manifest, **values)

    def _holds_nothing(self, old: Manifest) -> bool:
        """Whether the earlier run has left no result, for example because the model refused an option. Then its settings do not matter."""
        if old.state != "running" or old.outputs or (self.folder / KEPT_FILE).exists():
            return False
        if load_plan(self.folder) or stores(self.folder):
            return False
        return not (self.folder / RESULTS_FILE).exists() or read_facts(self.folder, ())[1] == 0

    def _compare_settings(self, old: Manifest) -> None:
        manifest, output = self.manifest, self.spec.output
        settings, self.limit_raised, said = continued_settings(
            old.settings, manifest.settings, manifest.request["retry"]
        )
        self._set(settings=settings)
        if said:
            larger = is_larger_limit(with_defaults(old.settings, settings), settings)
            hint = _RAISE_LIMIT if larger else _START_AGAIN
            raise UsageError(f"{output} was made with other settings: {said}", hint)
        if said := differences(old.mentions, manifest.mentions):
            self.notes.append(f"{output} was started with other versions: {said}")

    def _take_up(self, old: Manifest) -> None:
        spec = self.spec
        there = self.target.exists()
        standing = known_as(self.target, old.outputs) if there else None
        if there and standing is None:
            raise UsageError(
                f"{spec.output} was changed since batchgen wrote it", "move it away, or use --overwrite to start again"
            )
        self.previous = read_stats(self.folder)
        self._set(outputs=[standing] if standing else [])
        if there and _keys_are_whole(self.folder, old):
            self._set(keys=old.keys)
        if old.state != "finished":
            return
        if there and not self.limit_raised:
            self.finished = _complete_figures(self.folder, old, self.manifest.request)
        if self.finished is not None:
            self.previous = None
        elif not there:
            self.notes.append(f"{spec.output} no longer exists: its rows are generated again")
            self.previous = None
        elif not self.manifest.keys:
            self.notes.append(
                f"{self.folder / 'keys'} is damaged, so the rows of {spec.output} cannot be recognised: they are generated again"
            )
            self.previous = None


def _complete_figures(folder: Path, manifest: Manifest, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The figures of a finished job if `request` (`Manifest.request`) asks for nothing else, else None. The output is not looked at."""
    stats = read_stats(folder)
    if manifest.state != "finished" or stats is None or not manifest.request["inputs"]:
        return None
    runs = {"retry": [], "prune": False}  # may differ from run to run
    if manifest.request | runs != dict(request) | runs:
        return None
    if request["prune"] and (folder / KEPT_FILE).exists() and not manifest.request.get("prune"):
        return None
    if file_digest(folder / "stats.json") != manifest.stats:
        return None
    if any(stats["job"]["finish_reasons"].get(RETRY_REASONS[name]) for name in request["retry"]):
        return None
    return stats


def _keys_are_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether the file of the keys of the output's rows is the one that the manifest knows."""
    keys = folder / "keys"
    return keys.exists() and file_digest(keys) == manifest.keys
