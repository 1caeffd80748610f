"""What a command asks of a job, and where a run puts its results: a job's folder keeps them, standard output does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from batchgen.errors import OutputLocked
from batchgen.jobs.files.disk import write_json, writing
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.results import Results
from batchgen.jobs.files.row_memory import KnownRequest
from batchgen.progress import Snapshot
from batchgen.records import Input, Row, RowForm
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
    optional: Collection[str] = ()
    """The parts of a result, of those that only some have, that a Parquet output has columns for from the start (`open_writer`)."""


class Store(Protocol):
    """Where the results of a job, or of one of its shards, go. A context manager; leaving it keeps everything that was appended."""

    notes: list[str]
    """Messages to show once."""
    finished: dict[str, Any] | None
    """The figures of the finished job if there is nothing to do; then no method may be called."""
    previous: dict[str, Any] | None
    """The figures of the last run, if this run continues it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...

    def stored(self, keys: Sequence[bytes]) -> dict[bytes, Result]:
        """Returns the stored results of `keys`. Their row numbers are meaningless."""
        ...

    def under_way(self) -> dict[bytes, dict[int, Completion]]:
        """Returns the unfinished completions of earlier runs, by row key and by the completion's number."""
        ...

    def append(self, key: bytes, result: Result) -> None:
        """Stores the result of row `result.row`. `commit` must follow soon."""
        ...

    def commit(self) -> None:
        """Makes the results that were appended survive the end of this process."""
        ...

    def equal_rows(self, key: bytes) -> int:
        """Returns how many further rows wait for the result of this key. A shard does not know them: the merge counts them."""
        ...

    def keep_under_way(self, completions: Mapping[bytes, Mapping[int, Completion]]) -> None:
        """Stores the tokens so far of unfinished completions, by row key and the completion's number."""
        ...

    @property
    def tokens_under_way(self) -> int:
        """Completion tokens that are kept of rows that are not finished."""
        ...

    def tell(self, progress: Snapshot) -> None:
        """Stores how far the run is, for `batchgen status` in another process."""
        ...

    def keep_record(self, run: Mapping[str, Any] | None, tree: Mapping[str, Any] | None) -> None:
        """Stores what the report shows of this run (`recording`), each part unless it is None."""
        ...

    def flush(self) -> None:
        """Writes all results to disk."""
        ...

    def save_stats(self, stats: dict[str, Any]) -> None:
        """Stores the figures of a run that did not finish the job; they are `previous` for the next run."""
        ...

    def finish(self, stats: dict[str, Any]) -> None:
        """Puts the output in its place. Every row has a result by then, and all rows of a job are written."""
        ...


class Job(Store, Protocol):
    """A job, from its first window to its output."""

    kept_rows: int
    """Number of rows of the existing output. Rows before this number stay in the output despite `--limit`, if they have a result or failed."""
    results_at_hand: int
    """Number of results of earlier runs."""

    @property
    def first_max_tokens(self) -> int | None:
        """The `max_tokens` with which the job began, if `--retry length` has raised it since; else None. Rows keep the keys that they had then."""
        ...

    def occurrences(self, digests: Sequence[bytes]) -> list[int]:
        """Returns how often each digest has been asked about before in this run."""
        ...

    def keys(
        self, digests: Sequence[bytes], ids: Sequence[bytes | None], sampled: Sequence[bool]
    ) -> list[tuple[bytes, bool]]:
        """Returns the keys of rows, and whether an earlier row has the same key (`RowKeys.keys`). Must be called once for every row, in row order."""
        ...

    def row_digest(self, row: Row) -> bytes | None:
        """Returns the digest of a row by which the job remembers what it has become; None if it does not."""
        ...

    def known_requests(self, rows: Sequence[bytes]) -> dict[bytes, KnownRequest]:
        """Returns what earlier runs have made of rows, by their digests."""
        ...

    def remember(self, rows: Iterable[tuple[bytes, KnownRequest]]) -> None:
        """Remembers what rows have become, by their digests."""
        ...

    def of_this_run(self, keys: Sequence[bytes]) -> set[bytes]:
        """Returns those of `keys` that have a result of this run."""
        ...

    def add_equal(self, rows: Mapping[bytes, int]) -> None:
        """Adds numbers of rows that wait for the result of an equal row, by key (`Store.equal_rows`)."""
        ...

    def begin_rows(self) -> None:
        """Must be called when the input is read from its start. Drops all rows added before."""
        ...

    def add_rows(self, rows: Sequence[int], keys: Mapping[int, bytes], failed: Mapping[int, Result]) -> None:
        """Adds rows to the output, by their numbers: each has a key in `keys`, or a result in `failed` if it never became a request."""
        ...

    def check_dropped(self, *, prune: bool) -> None:
        """Must be called when all rows are known. Raises `UsageError` if many rows of the finished output would be removed without `prune`."""
        ...

    def write(self, rows: Sequence[Row], results: Mapping[int, Result], keys: Mapping[int, bytes]) -> None:
        """Writes output rows. `results` and `keys` are by row number; rows that never became requests have no key."""
        ...


class StoredResults:
    """The part of a `Store` that a job's folder and a shard's folder have in common: the results in their database."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        self.finished: dict[str, Any] | None = None
        self.previous: dict[str, Any] | None = None
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
        self._results.append(key, result)

    def commit(self) -> None:
        self._check_held()
        with writing(self.folder):
            self._results.commit()

    def equal_rows(self, key: bytes) -> int:
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
        self._check_held()
        with writing(self.folder):
            self._results.flush()

    def save_stats(self, stats: dict[str, Any]) -> None:
        with writing(self.folder):
            write_json(self.folder / "stats.json", stats)

    def _check_held(self) -> None:
        """Called before every write. Raises `OutputLocked` if another process has taken over the lease; drops what was not committed then."""
        try:
            self._lease.check()
        except OutputLocked:
            self._results.discard()
            raise
