"""`progress.json` in a job's folder: how far the run is that is at it, for whoever looks from another process (`status`)."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SCHEMA = "batchgen.progress/1"
NAME = "progress.json"
_BLOCK = 1 << 20


class ProgressFile:
    """Keeps the figures of a run (`Counts.figures`) beside its journal. For the holder of the folder's lock alone."""

    def __init__(self, folder: Path) -> None:
        self._path, self._journal = folder / NAME, folder / "journal"
        # An earlier run has counted the results as far as its file says.
        before = read_progress(folder) or {"journal_bytes": 0, "journal_results": 0}
        self._bytes, self._results = before["journal_bytes"], before["journal_results"]

    def tell(self, figures: Mapping[str, Any]) -> None:
        """Replace the file. One that cannot be written is left as it was: the journal's own write, to the same disk, ends the job and says why."""
        with suppress(OSError):
            self._count()
            value = {
                "schema": SCHEMA,
                **figures,
                "journal_results": self._results,
                "journal_bytes": self._bytes,
                "updated": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            }
            new = self._path.with_name(f"{NAME}.new")
            new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")  # no fsync: the journal is what counts
            new.replace(self._path)

    def _count(self) -> None:
        """The results that have come since the last time, and how long the journal is with them."""
        if self._journal.stat().st_size < self._bytes:  # a power cut took what was counted
            self._bytes = self._results = 0
        lines, self._bytes = count_lines(self._journal, self._bytes)
        self._results += lines


def read_progress(folder: Path) -> dict[str, Any] | None:
    """What the last run has left or keeps up to date; None where there is nothing that can be used."""
    try:
        value = json.loads((folder / NAME).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        return None
    whole = all(isinstance(value.get(name), int) for name in ("rows_done", "journal_results", "journal_bytes"))
    return value if whole else None


def count_lines(path: Path, start: int = 0, most: int | None = None) -> tuple[int, int]:
    """The whole lines of a file from byte `start` on, in at most `most` bytes, and where the last of them ends."""
    lines, end = 0, start
    at = start
    with path.open("rb") as file:
        file.seek(start)
        while most is None or at - start < most:
            block = file.read(_BLOCK)
            if not block:
                break
            if last := block.rfind(b"\n") + 1:
                lines += block.count(b"\n")
                end = at + last
            at += len(block)
    return lines, end
