"""A row of the input, and windows of rows. Knows nothing about files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from batchgen.errors import RowError

MAX_WINDOW_BYTES = 1 << 28
"""A window ends with the row that reaches this size. As Python objects, rows take a few times the memory that they take in a file."""


@dataclass(frozen=True, slots=True)
class Row:
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


def windows(rows: Iterator[Row], size: int, max_bytes: int = MAX_WINDOW_BYTES) -> Iterator[list[Row]]:
    """Yields lists of `size` rows. A list is shorter if its rows reach `max_bytes`, or if it is the last one.

    Only one list is in memory at a time.
    """
    window: list[Row] = []
    read = 0
    for row in rows:
        window.append(row)
        read += row.size
        if len(window) >= size or read >= max_bytes:
            yield window
            window, read = [], 0
    if window:
        yield window
