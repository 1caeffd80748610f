"""Where a job's folder is, what it holds, and whether an output and its folder may be written."""

from __future__ import annotations

from pathlib import Path

from batchgen.errors import UsageError
from batchgen.records.output import output_format

REMADE_FILES = ("index.sqlite", "output.partial", "keys.partial", "spool.jsonl")
"""Of a run: each makes them anew, none leaves them."""
WORK_FILES = ("journal", "journal.new", "passes", *REMADE_FILES)
"""Of a job that is under way; a finished one has none of them."""
_OURS = {*WORK_FILES, "manifest.json", "manifest.json.new", "stats.json", "stats.json.new", "keys", "lock"}


def job_path(output: str, work_dir: str | None) -> Path:
    """Where the job's folder of an output is, whether it exists or not."""
    return Path(f"{output}.job") if work_dir is None else Path(work_dir) / f"{Path(output).name}.job"


def check_place(output: str, folder: Path, overwrite: bool) -> None:
    """Raises `UsageError` where the output or its folder is somebody else's, or has no place to be."""
    output_format(output)
    path = Path(output)
    if path.is_dir():
        raise UsageError(f"the output {output} is a folder", "name a file in it")
    for parent in (path.parent, folder.parent):
        if not parent.is_dir():
            raise UsageError(f"there is no folder {parent} to write to", f"make it with mkdir -p {parent}")
    if folder.exists() and not (folder / "manifest.json").exists():
        others = {p.name for p in folder.iterdir()} - _OURS if folder.is_dir() else {folder.name}
        if others:
            raise UsageError(f"{folder} is in the way: it is not a job's folder", "move it, or use another -o")
    if path.exists() and not (folder / "manifest.json").exists() and not overwrite:
        raise UsageError(
            f"{output} exists and has no job folder, so it is not known to be batchgen's",
            "use --overwrite to replace it, or another -o",
        )
