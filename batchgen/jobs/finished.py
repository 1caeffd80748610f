"""Whether a finished output is what a command asks for, as the job's folder tells it: without its lock, a tokenizer or a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen.config import RETRY_REASONS
from batchgen.jobs.manifest import Manifest, as_stored, file_digest, load_manifest
from batchgen.jobs.shards import read_stats
from batchgen.jobs.target import open_target
from batchgen.records.output import job_path

KEPT_FILE = "kept.sqlite"


def finished_manifest(
    output: str,
    work_dir: str | None,
    *,
    command: str,
    request: Mapping[str, Any],
    retry: Sequence[str],
    prune: bool,
    leftovers: Collection[str],
) -> tuple[Manifest, dict[str, Any]] | None:
    """Returns the manifest and the figures of the job if this command has finished it and its output is unchanged; None if there is, or may be, something to do.

    `command`: what `identity.command_digest` gives. `request`: some entries of `Manifest.request`; the others follow from the command.
    `leftovers`: files of the folder that a run removes when it is finished.
    """
    folder, target = job_path(output, work_dir), open_target(output)
    manifest = load_manifest(folder / "manifest.json")
    if manifest is None or not command or (manifest.command, manifest.output) != (command, target.address):
        return None
    if any((folder / name).exists() for name in leftovers) or not target.exists():
        return None
    if target.known_as(manifest.outputs) is None or not keys_are_whole(folder, manifest):
        return None
    asked = manifest.request | as_stored(dict(request))
    figures = complete_figures(folder, manifest, asked, retry=retry, prune=prune)
    return None if figures is None else (manifest, figures)


def complete_figures(
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


def keys_are_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether the file of the keys of the output's rows is the one that the manifest knows."""
    keys = folder / "keys"
    return keys.exists() and file_digest(keys) == manifest.keys
