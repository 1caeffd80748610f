"""What is around a job: when it gives up (too many rows failed, memory ran out), and how seldom Python looks for cycles. No torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from batchgen.config import parse_max_errors
from batchgen.errors import BatchgenError, OutOfMemory, TooManyErrors, is_out_of_memory

ERROR_SHARE_FROM = 100
"""`--max-errors P%` is looked at once this many rows are done."""


class ErrorLimit:
    """`--max-errors`: a number of rows, or a share of the rows done. None: no limit."""

    def __init__(self, text: str | None) -> None:
        self._text = text
        self._limit = None if text is None else parse_max_errors(text)

    def check(self, *, failed: int, done: int, last: str) -> None:
        """Raises `TooManyErrors`; `last` says what failed last."""
        limit = self._limit
        if limit is None:
            return
        over = failed > limit if isinstance(limit, int) else done >= ERROR_SHARE_FROM and failed > limit * done
        if over:
            raise TooManyErrors(
                f"{failed:,} of {done:,} rows failed, more than --max-errors {self._text} allows; the last: {last}",
                "mend the input, or allow more, and run the same command again to go on",
            )


@contextmanager
def few_collections() -> Iterator[None]:
    """Python's collector runs a hundred times less often: a job makes millions of small objects and no cycles, and looking for some was a fifth
    of the time of reading rows."""
    before = gc.get_threshold()
    gc.set_threshold(70_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Memory that ran out is one error, whoever noticed it: Python, or torch on the CPU or a device."""
    try:
        yield
    except BatchgenError:
        raise
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        said = str(e)
        first = said.splitlines()[0] if said else "no more memory"
        raise OutOfMemory(f"out of memory: {first}", "lower --kv-memory, --batch-size or --window") from e
