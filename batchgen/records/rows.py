"""A row of the input, and a stream of rows that is read a list at a time. Knows nothing about files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from batchgen.errors import InputCorrupt, RowError

MAX_WINDOW_BYTES = 1 << 28
"""A window ends with the row that reaches this size. As Python objects, rows take a few times the memory that they take in a file."""


class Row(NamedTuple):
    """One row of the input: its columns, or the reason why it has none."""

    number: int
    """Its place in the whole input, from 0."""
    columns: dict[str, Any]
    """Empty if the row is malformed."""
    error: RowError | None
    """`invalid_row` if the row is malformed. The message names the source and the reason."""
    source: str
    """Where the row is, for messages: `prompts.jsonl:17` (line, from 1) or `x.parquet:row 17` (from 0)."""
    size: int = 0
    """Approximate number of bytes that the row takes in its file, decompressed."""
    file: str = ""
    """The file of the row, as a user would name it: a path or a URL."""
    typed: bool = False
    """Whether the row is one of a table with types, in which an object has null for each field that only others have."""


class RowStream:
    """Rows from their start, a list at a time, so that only one list is in memory."""

    def __init__(self, rows: Iterator[Row], max_bytes: int = MAX_WINDOW_BYTES) -> None:
        """A list ends with the row that reaches `max_bytes`."""
        self._rows: Iterator[Row] | None = rows
        self._max_bytes = max_bytes
        self.next_number = 0
        self.ended = False
        """Whether there are no more rows, or none before the limit."""
        self.broken: InputCorrupt | None = None
        """The error of an input that breaks off, set once all rows before that place are read."""

    def take(self, size: int, limit: int | None = None) -> list[Row]:
        """Returns the next `size` rows; fewer if they are large, at the end, and before row `limit`, which is not read. Empty if there are none."""
        rows: list[Row] = []
        taken = 0
        while self._rows is not None and len(rows) < size and taken < self._max_bytes:
            if limit is not None and self.next_number >= limit:
                self.ended = True
                break
            try:
                row = next(self._rows, None)
            except InputCorrupt as e:
                self.broken, row = e, None
            if row is None:
                self._rows, self.ended = None, True
                break
            rows.append(row)
            taken += row.size
            self.next_number = row.number + 1
        return rows
