"""Whether a disk has room for a job, before anything is done."""

from __future__ import annotations

import shutil
from pathlib import Path

from batchgen.errors import OutputError
from batchgen.records.inputs import Input
from batchgen.records.output import RowForm, output_format

TIGHT = 3
"""Less than so many times the least that a job takes is worth a word: there are the results too, and the sorted requests."""


def least_bytes(input: Input, output: str, form: RowForm) -> int:
    """The least that an output takes: all the columns of the input, where they go from JSON lines to JSON lines; else it cannot be known, and is 0."""
    if form.keep is not None or form.openai is not None or output_format(output) != ("jsonl", None):
        return 0
    if any((file.format, file.compression) != ("jsonl", None) for file in input.files):
        return 0
    return sum(int(f.get("size") or 0) for f in input.fingerprint())


def check_space(folder: Path, least: int) -> str | None:
    """What to say where the disk of `folder` may fill up. Raises `OutputError` where the job cannot fit."""
    free = shutil.disk_usage(folder).free
    if free >= TIGHT * least:
        return None
    facts = f"the disk of {folder} has {_size(free)} free"
    if free < least:
        raise OutputError(
            f"{facts}, and the output alone will take {_size(least)}",
            "free some, carry fewer columns with --keep, or write elsewhere with -o and --work-dir",
        )
    return f"{facts}, and the output alone will take {_size(least)}: it may fill up (what is finished would be kept)"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
