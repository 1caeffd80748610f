"""A job whose rows go to standard output. It keeps results only for later rows that are equal, and cannot be resumed."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from typing import Any

from batchgen.jobs.files.disk import writing
from batchgen.jobs.files.results import encode
from batchgen.jobs.files.row_keys import RowKeys
from batchgen.jobs.files.row_memory import RowMemory
from batchgen.process.stdout import write_stdout
from batchgen.progress import Snapshot
from batchgen.records.jsonl import to_json
from batchgen.records.output import RowForm, output_row
from batchgen.records.result_values import result_of_values
from batchgen.records.rows import Row
from batchgen.result import Completion, Result

_COUNTS = "the temporary file of the rows' keys"
_RECENT_BYTES = 1 << 26
"""Results of this size in all are kept for rows that are equal to earlier ones."""
_NOTHING_KEPT = "nothing is kept of a job without an output file: name one with -o"


class StdoutJob:
    """A job for `-o -`, with the methods of `JobFolder`. Raises `ClosedPipe` when the reader has closed the pipe."""

    def __init__(self, form: RowForm) -> None:
        self.notes: list[str] = []
        self.previous: dict[str, Any] | None = None
        self.kept_rows = 0
        self.first_max_tokens: int | None = None
        self.results_at_hand = 0
        self.tokens_under_way = 0
        self._form = form
        self._recent: dict[bytes, bytes] = {}
        """By key: the newest results. They serve equal rows too."""
        self._bytes = 0
        self._equal: dict[bytes, int] = {}
        with writing(_COUNTS):
            self.row_keys = RowKeys()
        self.row_memory: RowMemory | None = None
        self._stream, self._redirected = sys.stdout, ExitStack()

    def __enter__(self) -> StdoutJob:
        # Ray prints messages of its cluster to standard output, and a model's own code may print anything.
        self._redirected.enter_context(redirect_stdout(sys.stderr))
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._redirected.close()
        self.row_keys.close()
        if isinstance(error, sqlite3.Error):
            with writing(_COUNTS):
                raise error

    def of_this_run(self, keys: Sequence[bytes]) -> set[bytes]:
        return set(keys)

    def forgotten(self, keys: Sequence[bytes]) -> set[bytes]:
        return set()

    def rows_of_output(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        return {}

    def add_equal(self, rows: Mapping[bytes, int]) -> None:
        self._equal = dict(rows)

    def equal_rows(self, key: bytes) -> int:
        return self._equal.get(key, 0)

    def stored(self, keys: Sequence[bytes]) -> dict[bytes, Result]:
        return {key: result_of_values(json.loads(self._recent[key])) for key in keys if key in self._recent}

    def under_way(self) -> dict[bytes, dict[int, Completion]]:
        return {}

    def append(self, key: bytes, result: Result) -> None:
        self._recent[key] = value = encode(result)
        self._bytes += len(value)
        while self._bytes > _RECENT_BYTES:
            self._bytes -= len(self._recent.pop(next(iter(self._recent))))

    def keep_under_way(self, completions: Mapping[bytes, Mapping[int, Completion]]) -> None: ...
    def commit(self) -> None: ...
    def tell(self, progress: Snapshot) -> None: ...
    def keep_record(self, run: Mapping[str, Any] | None, tree: Mapping[str, Any] | None) -> None: ...
    def begin_rows(self) -> None: ...
    def add_rows(self, rows: Sequence[int], keys: Mapping[int, bytes], results: Mapping[int, Result]) -> None: ...
    def check_dropped(self, failures: Sequence[str]) -> None: ...

    def write(self, rows: Sequence[Row], results: Mapping[int, Result], keys: Mapping[int, bytes]) -> None:
        for row in rows:
            line = to_json(output_row(row, results[row.number], self._form)) + b"\n"
            write_stdout(self._stream, line, _NOTHING_KEPT, flush=False)
        self.flush()

    def flush(self) -> None:
        write_stdout(self._stream, b"", _NOTHING_KEPT)

    end_output = flush

    def save_stats(self, stats: dict[str, Any]) -> None:
        self.flush()

    def finish(self, stats: dict[str, Any]) -> None:
        self.flush()
