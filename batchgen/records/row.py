"""A row of input, and windows of them. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from batchgen.errors import RowError


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


def windows(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    """The rows in lists of `size`, the last one shorter; only one list is held at a time."""
    while window := list(islice(rows, size)):
        yield window
