"""The record of a job, `report.json` in its folder: its runs over time, its prefix tree, and sums over the rows of its output.

Only the report depends on it. A record that is missing or damaged counts as empty, and one that cannot be written is not written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.recording.series import COLUMNS

FILE = "report.json"
FILES = (FILE, f"{FILE}.new")
SCHEMA = "batchgen.record/1"
MAX_RUNS = 64
"""Runs that are kept; the newest."""
MAX_POINTS = 6400
"""Points of all runs together. When there are more, every second one of each run is dropped."""


@dataclass(slots=True)
class JobRecord:
    runs: list[dict[str, Any]] = field(default_factory=list)
    """`RunRecorder.record` of each run that generated something, in the order in which they began."""
    tree: dict[str, Any] | None = None
    """`tree_record` of the run that planned the most rows."""
    rows: dict[str, Any] | None = None
    """`RowFigures.as_dict` of the output; None until it is finished."""

    @classmethod
    def load(cls, folder: Path) -> JobRecord:
        """Returns the record in a folder; an empty one if there is none."""
        try:
            value = json.loads((folder / FILE).read_bytes())
            if value.pop("schema") == SCHEMA:
                return cls(**value)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
        return cls()

    def keep(self, run: Mapping[str, Any] | None, tree: Mapping[str, Any] | None) -> None:
        """Takes the record of a run, which replaces an earlier one of the same run, and its tree if that has more rows than the present one."""
        if run is not None:
            same = (run["label"], run["started"])
            others = [r for r in self.runs if (r["label"], r["started"]) != same]
            self.runs = [*others, dict(run)][-MAX_RUNS:]
            while sum(len(r["seconds"]) for r in self.runs) > MAX_POINTS:
                self.runs = [_thinned(r) for r in self.runs]
        if tree is not None and (self.tree is None or tree["rows"] >= self.tree["rows"]):
            self.tree = dict(tree)

    def save(self, folder: Path) -> None:
        """Writes the record. Ignores errors: a full disk is reported by the files that the job needs."""
        value = {"schema": SCHEMA, "runs": self.runs, "tree": self.tree, "rows": self.rows}
        new = folder / FILES[1]
        with suppress(OSError):
            new.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8", errors="backslashreplace")
            new.replace(folder / FILE)


def _thinned(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run with every second point, the first and the last among them."""
    count = len(run["seconds"])
    places = sorted({*range(0, count, 2), max(0, count - 1)}) if count > 2 else [0]
    return {**run, **{name: [run[name][i] for i in places] for name in COLUMNS}}
