"""What a run needs of the place that its results go to: a job's folder, or standard output, which keeps nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from batchgen.progress import Snapshot
from batchgen.records import Row
from batchgen.result import Completion, Result

RETRIES = {"errors": "error", "timeout": "timeout", "length": "length", "repetition": "repetition"}
"""What `--retry` can name, and the reason with which such results ended."""


class Store(Protocol):
    """Where results go, of a job or of one shard of it. A context manager: leaving it keeps what is there."""

    notes: list[str]
    """What the user should hear once."""
    finished: dict[str, Any] | None
    """The figures of the finished job if there is nothing to do; no other method may be called then."""
    previous: dict[str, Any] | None
    """The figures that the last run left, if this one continues it."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def stored(self, keys: Sequence[bytes]) -> dict[bytes, Result]:
        """The results that are there for `keys`. Their row numbers mean nothing."""
        ...

    def under_way(self) -> dict[bytes, dict[int, Completion]]:
        """The completions that earlier runs began and did not finish: by the key of the row, and the number of the completion."""
        ...

    def append(self, key: bytes, result: Result) -> None:
        """Keep one result (of row `result.row`)."""
        ...

    def keep_under_way(self, completions: Mapping[bytes, Mapping[int, Completion]]) -> None:
        """Keep what there is of completions that are not finished, by the key of the row and the number of the completion."""
        ...

    @property
    def tokens_under_way(self) -> int:
        """Completion tokens that are kept of rows that are not finished."""
        ...

    def tell(self, progress: Snapshot) -> None:
        """Keep how far the run is, for whoever looks from another process."""
        ...

    def flush(self) -> None:
        """Put all results on disk."""
        ...

    def save_stats(self, stats: dict[str, Any]) -> None:
        """Keep the figures of a run that ends before the job does: they are the next run's `previous`."""
        ...

    def finish(self, stats: dict[str, Any]) -> None:
        """Every row has a result, and those of a job are written: put the output in its place."""
        ...


class Job(Store, Protocol):
    """A job, from its first window to its output."""

    kept_rows: int
    """Rows of the output that stands: rows up to there stay in the output whatever `--limit` says, if they have a result or failed."""

    @property
    def results_at_hand(self) -> int:
        """Number of results that earlier runs left."""
        ...

    def occurrences(self, digests: Sequence[bytes]) -> list[int]:
        """How often each digest has come before in this run. Call it once for every row, in row order."""
        ...

    def begin_rows(self) -> None:
        """The rows of the output are read from the start."""
        ...

    def add_rows(self, rows: Sequence[int], keys: Mapping[int, bytes], failed: Mapping[int, Result]) -> None:
        """These rows, by their numbers, are in the output: each has a key, or else failed before it became a request."""
        ...

    def check_dropped(self, *, prune: bool) -> None:
        """Called when all rows are known. Raises `UsageError` if much of the finished output would go and `prune` is not given."""
        ...

    def write(self, rows: Sequence[Row], results: Mapping[int, Result], keys: Mapping[int, bytes]) -> None:
        """Add output rows. `results` and `keys` by row number; rows that never became requests have no key."""
        ...
