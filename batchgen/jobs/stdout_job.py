"""A job whose rows go to standard output. It stores nothing and cannot be resumed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from batchgen.errors import ClosedPipe, OutputError
from batchgen.jobs.disk import writing
from batchgen.jobs.results import occurrences, temporary_counts
from batchgen.progress import Snapshot
from batchgen.records.jsonl import to_json
from batchgen.records.output import RowForm, output_row
from batchgen.records.rows import Row
from batchgen.result import Completion, Result

_COUNTS = "the temporary file of the rows' keys"


class DoneOrder:
    """Remembers in which order the rows of a window finished. Rows that were not generated in this run come first, in input order."""

    def __init__(self, order: str) -> None:
        self._by_time = order == "done"
        self._places: dict[int, int] = {}
        self._next = 0

    def done(self, row: int) -> None:
        if self._by_time:
            self._places[row] = self._next
            self._next += 1

    def sort(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Returns the rows in the order in which to write them, and forgets their order."""
        if not self._by_time:
            return rows
        places = {row.number: self._places.pop(row.number, -1) for row in rows}
        return sorted(rows, key=lambda row: places[row.number])


class StdoutJob:
    """A `Job` for `-o -`. Raises `ClosedPipe` when the reader has closed the pipe."""

    def __init__(self, form: RowForm, *, order: str) -> None:
        self.notes: list[str] = []
        self.finished: dict[str, Any] | None = None
        self.previous: dict[str, Any] | None = None
        self.kept_rows = 0
        self.first_max_tokens: int | None = None
        self.results_at_hand = 0
        self.tokens_under_way = 0
        self._form = form
        self._order = DoneOrder(order)
        with writing(_COUNTS):
            self._counts = temporary_counts()

    def __enter__(self) -> StdoutJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._counts.close()

    def occurrences(self, digests: Sequence[bytes]) -> list[int]:
        with writing(_COUNTS):
            return occurrences(self._counts, digests)

    def stored(self, keys: Sequence[bytes]) -> dict[bytes, Result]:
        return {}

    def under_way(self) -> dict[bytes, dict[int, Completion]]:
        return {}

    def append(self, key: bytes, result: Result) -> None:
        self._order.done(result.row)

    def keep_under_way(self, completions: Mapping[bytes, Mapping[int, Completion]]) -> None: ...
    def tell(self, progress: Snapshot) -> None: ...
    def keep_record(self, run: Mapping[str, Any] | None, tree: Mapping[str, Any] | None) -> None: ...
    def begin_rows(self) -> None: ...
    def add_rows(self, rows: Sequence[int], keys: Mapping[int, bytes], failed: Mapping[int, Result]) -> None: ...
    def check_dropped(self, *, prune: bool) -> None: ...

    def write(self, rows: Sequence[Row], results: Mapping[int, Result], keys: Mapping[int, bytes]) -> None:
        for row in self._order.sort(rows):
            write_stdout(to_json(output_row(row, results[row.number], self._form)) + b"\n")
        self.flush()

    def flush(self) -> None:
        write_stdout(b"", flush=True)

    def save_stats(self, stats: dict[str, Any]) -> None:
        self.flush()

    def finish(self, stats: dict[str, Any]) -> None:
        self.flush()


def write_stdout(data: bytes, *, flush: bool = False) -> None:
    """Writes to standard output. Raises `ClosedPipe` if its reader has closed it, `OutputError` if it cannot be written."""
    if sys.stdout is None:
        raise OutputError("standard output is closed", "name an output with -o")
    try:
        sys.stdout.buffer.write(data)
        if flush:
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        _discard_stdout()
        raise ClosedPipe from None
    except OSError as e:
        _discard_stdout()
        hint = "nothing is kept of a job without an output file: name one with -o"
        raise OutputError(f"standard output cannot be written: {e.strerror or e}", hint) from e


def _discard_stdout() -> None:
    """Points standard output to /dev/null. Otherwise Python flushes it at exit and complains (see "Note on SIGPIPE" in its documentation)."""
    try:
        fd = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file, in a test say
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
