"""Where a job's folder is, what it holds, and whether an output and its folder may be written."""

from __future__ import annotations

from pathlib import Path

from batchgen.errors import UsageError
from batchgen.records.output import jobs_folder, output_format
from batchgen.records.target import Target

REMADE_FILES = ("index.sqlite", "output.partial", "keys.partial", "spool.jsonl")
"""Of a run: each makes them anew, none leaves them."""
WORK_FILES = ("journal", "journal.new", "passes", "progress.json", "progress.json.new", *REMADE_FILES)
"""Of a job that is under way; a finished one has none of them."""
_OURS = {*WORK_FILES, "manifest.json", "manifest.json.new", "stats.json", "stats.json.new", "keys", "lock"}


def make_folder(folder: Path) -> None:
    """Make a job's folder where it is not yet; of those around it only the cache, the others are the user's."""
    folder.mkdir(parents=folder.parent == jobs_folder(), exist_ok=True)


def check_place(output: str, target: Target, folder: Path, overwrite: bool) -> None:
    """Raises `UsageError` where the output or its folder is somebody else's, or has no place to be."""
    output_format(output)
    target.check()
    if not folder.parent.is_dir() and folder.parent != jobs_folder():
        raise UsageError(f"there is no folder {folder.parent} to write to", f"make it with mkdir -p {folder.parent}")
    if folder.exists() and not (folder / "manifest.json").exists():
        others = {p.name for p in folder.iterdir()} - _OURS if folder.is_dir() else {folder.name}
        if others:
            raise UsageError(f"{folder} is in the way: it is not a job's folder", "move it, or use another -o")
    if not (folder / "manifest.json").exists() and not overwrite and target.exists():
        raise UsageError(
            f"{output} exists and has no job folder, so it is not known to be batchgen's",
            "use --overwrite to replace it, or another -o",
        )
