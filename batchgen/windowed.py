"""A job window by window, in input order: for what can be read only once, and for rows that are wanted as they are done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchgen.generation import Generation
from batchgen.records import Row, StdoutJob


class Windowed:
    """Generates each window of rows and writes it before the next one is read."""

    def __init__(self, work: Generation, first: list[Row], more: Iterator[list[Row]], size: int) -> None:
        """`first` is the first window, `more` the others, of `size` rows but for the last."""
        self._work, self._first, self._more = work, first, more
        self._rows: Sequence[Row] = ()
        """The window's, until they are written."""
        work.total = len(first) if len(first) < size else None

    def run(self) -> None:
        rows = self._first
        while rows:
            self._window(rows)
            rows.clear()  # freed before the next ones are read
            with self._work.signals.interruptible():
                rows = next(self._more, [])

    def _window(self, rows: Sequence[Row]) -> None:
        work, self._rows = self._work, rows
        with work.signals.interruptible():
            work.progress.phase(f"planning rows {rows[0].number + 1:,}–{rows[-1].number + 1:,}")
            with work.run.timed("plan"):
                requests = work.requests(rows, work.built(rows))
                window = work.planned(requests) if requests else None
        if window is not None:
            work.generate(window)
        work.signals.check()
        self._write(rows)

    def _write(self, rows: Sequence[Row]) -> None:
        work, self._rows = self._work, ()
        work.progress.phase("writing")
        with work.run.timed("write"):
            work.job.write(rows, work.results, work.keys)
        work.forget()

    def keep(self) -> None:
        """The job ends before its end."""
        if isinstance(self._work.job, StdoutJob):  # which keeps nothing, so that it goes out now
            self._write([row for row in self._rows if row.number in self._work.results])
