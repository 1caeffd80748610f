"""The rows of a job, a window at a time."""

from __future__ import annotations

from collections.abc import Iterator

from batchgen.config import JobConfig
from batchgen.errors import InputCorrupt
from batchgen.records import Input, Row, windows

WINDOW_ROWS = 50_000
STDIN_WINDOW_ROWS = 4_096
CHECKED_ROWS = 1_000
"""A column that none of the first rows has is wrong use, not a failure of every row."""


def window_rows(config: JobConfig, source: Input) -> int:
    return config.window or (STDIN_WINDOW_ROWS if source.is_stdin else WINDOW_ROWS)


def read_windows(source: Input, config: JobConfig) -> Iterator[list[Row]]:
    """The rows to do, a window at a time. Where the input breaks, the rows before come first, then the `InputCorrupt`."""
    broken: list[InputCorrupt] = []

    def rows() -> Iterator[Row]:
        try:
            yield from source.rows(config.limit)
        except InputCorrupt as e:
            broken.append(e)

    yield from windows(rows(), window_rows(config, source))
    if broken:
        raise broken[0]
