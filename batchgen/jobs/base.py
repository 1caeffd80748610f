"""What a command asks of a job, and the results that a run keeps."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from batchgen.jobs.files.disk import write_json, writing
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.manifest import Manifest
from batchgen.jobs.files.results import RESULTS_FILE, Results
from batchgen.recording import JobRecord
from batchgen.records import Input, RowForm
from batchgen.stats import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a command asks of the job of an output."""

    output: str
    """As the user named it; `-` is standard output."""
    input: Input
    form: RowForm
    manifest: Manifest
    """That of a job that this command begins."""
    work_dir: str | None = None
    overwrite: bool = False
    flush_every: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job, or one of its shards, for which a command has nothing to do."""

    figures: dict[str, Any]
    chat: bool
    """Whether its prompts go through a chat template."""
    is_shard: bool = False
    notes: list[str] = field(default_factory=list)
    """Messages to show once."""


class HeldResults(Results):
    """The results of a job or of one of its shards, whose lease this process holds. A context manager; leaving it keeps what was appended."""

    def __init__(self, folder: Path, flush_every: float, lease: Lease) -> None:
        self.notes: list[str] = []
        """Messages to show once."""
        self.previous: dict[str, Any] | None = None
        """The figures of the last run, if this run continues it."""
        self.results_at_hand = 0
        """Number of rows that results of earlier runs are for, as far as it is known."""
        self._lease, self._record = lease, JobRecord.load(folder)
        super().__init__(folder, flush_every, lease)

    def note_damaged(self) -> None:
        if self.damaged:
            found = f"{counted(self.damaged, 'result')} in {self.folder / RESULTS_FILE}"
            dropped = "are damaged and were dropped: their rows are"
            if self.damaged == 1:
                dropped = "is damaged and was dropped: its row is"
            self.notes.append(f"{found} {dropped} generated again")

    def keep_record(self, run: Mapping[str, Any] | None, tree: Mapping[str, Any] | None) -> None:
        """Stores what the report shows of this run (`recording`), each part unless it is None."""
        self._record.keep(run, tree)
        self._record.save(self.folder)

    def save_stats(self, stats: dict[str, Any]) -> None:
        """Stores the figures of a run that did not finish the job; they are `previous` for the next run."""
        with writing(self.folder):
            write_json(self.folder / "stats.json", stats)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Closes the job. An error of the database becomes an `OutputError`."""
        with writing(self.folder):
            try:
                self.close()
            finally:
                if isinstance(error, sqlite3.Error):
                    raise error
