"""A row of input, and windows of them: of so many rows, and of no more bytes than fit into memory. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from batchgen.errors import RowError

WINDOW_BYTES = 1 << 28
"""A window ends with the row that passes this. As Python's objects rows take a few times what they take in a file."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the input: its columns, or why it has none."""

    number: int
    """Its place in the whole input, from 0."""
    columns: dict[str, Any]
    """Empty where the row is malformed."""
    error: RowError | None
    """`invalid_row` where the row is malformed; the message names its source and the reason."""
    source: str
    """Where it stands, for messages: `prompts.jsonl:17` (the line, from 1) or `x.parquet:row 17` (from 0)."""
    size: int = 0
    """About how many bytes it takes in its file, decompressed."""
    file: str = ""
    """Its file, as the user would name it: a path or a URL."""


def windows(rows: Iterator[Row], size: int, most_bytes: int = WINDOW_BYTES) -> Iterator[list[Row]]:
    """The rows in lists of `size`, or of fewer where they pass `most_bytes`, the last one shorter; only one list is held at a time."""
    window: list[Row] = []
    read = 0
    for row in rows:
        window.append(row)
        read += row.size
        if len(window) >= size or read >= most_bytes:
            yield window
            window, read = [], 0
    if window:
        yield window
