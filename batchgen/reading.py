"""The rows of a job, a window at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing

from batchgen.config import JobConfig
from batchgen.errors import InputCorrupt, UsageError
from batchgen.records import Input, Row, windows

DONE_WINDOW_ROWS = 50_000
PIPE_WINDOW_ROWS = 4_096
BLOCK_ROWS = 2_000
"""Rows read at a time where the input is read twice."""
CHECKED_ROWS = 1_000
"""A column that none of the first rows has is wrong use, not a failure of every row."""


def window_rows(config: JobConfig, source: Input, output: str | None = None) -> int | None:
    """Rows of a window; None: all of the input is put in prefix order. Raises `UsageError` where that was asked for and cannot be."""
    once = not source.fingerprint()
    if config.window is None:
        if once or output == "-":
            return PIPE_WINDOW_ROWS
        return DONE_WINDOW_ROWS if config.order == "done" else None
    if config.window != "all":
        return config.window
    if once:
        raise UsageError(
            f"--window all reads the input twice, which {source.files[0].shown} does not allow",
            "use --window ROWS, or a file",
        )
    if output == "-":
        raise UsageError("--window all has no row to write before all are done", "name an output with -o")
    if config.order == "done":
        raise UsageError("--window all cannot be combined with --order done", "use --window ROWS")
    return None


def first_rows(source: Input, config: JobConfig) -> list[Row]:
    """The first rows, for a look at their columns."""
    with closing(_unbroken(source, config, [])) as rows:
        return next(windows(rows, CHECKED_ROWS), [])


def read_windows(source: Input, config: JobConfig, size: int) -> Iterator[list[Row]]:
    """The rows to do, a window at a time. Where the input breaks, the rows before come first, then the `InputCorrupt`."""
    broken: list[InputCorrupt] = []
    yield from windows(_unbroken(source, config, broken), size)
    if broken:
        raise broken[0]


def _unbroken(source: Input, config: JobConfig, broken: list[InputCorrupt]) -> Generator[Row, None, None]:
    try:
        yield from source.rows(config.limit)
    except InputCorrupt as e:
        broken.append(e)
