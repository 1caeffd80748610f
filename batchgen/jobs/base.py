"""What a command asks of a job, and the results that a run keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.errors import OutputLocked
from batchgen.jobs.files.disk import write_json, writing
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.results import Results
from batchgen.records import Input, RowForm
from batchgen.result import Completion, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a command asks of the job of an output."""

    output: str
    """As the user named it; `-` is standard output."""
    input: Input
    form: RowForm
    settings: dict[str, Any]
    """Everything that changes results, a flat dictionary of plain values: a job continues with equal ones only (`identity.job_settings`)."""
    mentions: dict[str, Any]
    """Versions. A difference is only noted."""
    digest: str = ""
    """`identity.command_digest`, by which the next run may find the job finished; empty where it cannot be known."""
    limit: int | None = None
    order: str = "input"
    work_dir: str | None = None
    overwrite: bool = False
    flush_every: float = 0.0
    retry: list[str] = field(default_factory=list)
    """`JobConfig.retried`: the results of rows that ended so are forgotten, and these rows run again."""
    prune: bool = False
    """The output may lose any number of rows, and results that no row asks for are removed when it is finished."""
    expect: str | None = None
    """The column that results are compared with, for the figures."""


class StoredResults:
    """What a job's folder and a shard's folder have in common: the results in their database. Leaving the context keeps what was appended."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        """Messages to show once."""
        self.finished: dict[str, Any] | None = None
        """The figures of the finished job if there is nothing to do; then no method may be called."""
        self.previous: dict[str, Any] | None = None
        """The figures of the last run, if this run continues it."""
        self.folder = folder
        self._results: Results
        self._lease: Lease

    def stored(self, keys: Sequence[bytes]) -> dict[bytes, Result]:
        with writing(self.folder):
            return self._results.stored(keys)

    def under_way(self) -> dict[bytes, dict[int, Completion]]:
        with writing(self.folder):
            return self._results.under_way()

    def append(self, key: bytes, result: Result) -> None:
        """Stores the result of row `result.row`. `commit` must follow soon."""
        self._results.append(key, result)

    def commit(self) -> None:
        """Makes the results that were appended survive the end of this process."""
        self._check_held()
        with writing(self.folder):
            self._results.commit()

    def equal_rows(self, key: bytes) -> int:
        """Returns how many further rows wait for the result of this key. A shard does not know them: the merge counts them."""
        return 0

    def keep_under_way(self, completions: Mapping[bytes, Mapping[int, Completion]]) -> None:
        self._check_held()
        with writing(self.folder):
            self._results.keep_under_way(completions)

    @property
    def tokens_under_way(self) -> int:
        with writing(self.folder):
            return self._results.tokens_under_way

    def flush(self) -> None:
        """Writes all results to disk."""
        self._check_held()
        with writing(self.folder):
            self._results.flush()

    def save_stats(self, stats: dict[str, Any]) -> None:
        """Stores the figures of a run that did not finish the job; they are `previous` for the next run."""
        with writing(self.folder):
            write_json(self.folder / "stats.json", stats)

    def _check_held(self) -> None:
        """Called before every write. Raises `OutputLocked` if another process has taken over the lease; drops what was not committed then."""
        try:
            self._lease.check()
        except OutputLocked:
            self._results.discard()
            raise
