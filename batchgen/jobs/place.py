"""The place of a job on the disk: the files of its folder, and whether the folder and the output are batchgen's."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from batchgen.config import JobConfig
from batchgen.errors import UsageError
from batchgen.jobs.files.results import RESULTS_FILES
from batchgen.jobs.files.row_keys import KNOWN_FILES
from batchgen.jobs.files.target import Target
from batchgen.jobs.shards import CLAIMS, SHARDS_FOLDER, forget_plan
from batchgen.recording import job_record
from batchgen.records.inputs import Input
from batchgen.records.output import default_output, jobs_folder, output_format
from batchgen.records.remote import is_url

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
_OURS = {
    *WORK_FILES,
    "manifest.json",
    "manifest.json.new",
    "stats.json",
    "stats.json.new",
    "keys",
    CLAIMS,
    KEPT_FILE,
    *KNOWN_FILES,
    PUSH_FOLDER,
    *job_record.FILES,
}


def output_of(config: JobConfig, source: Input) -> str:
    """Returns the output of a job: the one that is named, else one beside the input. Raises `UsageError` if it must be named."""
    parquet = config.push is not None
    return config.output or default_output(config.inputs, source.is_stdin, config.input_format, parquet=parquet)


def check_place(output: str, target: Target, folder: Path, overwrite: bool) -> None:
    """Raises `UsageError` if the output or its folder is not batchgen's, or if the folder that would hold it does not exist."""
    if is_url(output):
        output_format(output)
        target.check()
    else:  # what is there says more than a suffix
        target.check()
        output_format(output)
    if not folder.parent.is_dir() and folder.parent != jobs_folder():
        raise UsageError(f"there is no folder {folder.parent} to write to", f"create it with mkdir -p {folder.parent}")
    if (folder / "manifest.json").exists():
        return
    if folder.exists():
        others = {p.name for p in folder.iterdir()} - _OURS if folder.is_dir() else {folder.name}
        if others:
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
