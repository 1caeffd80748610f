"""What has become of the rows of a run so far: counts, the first failures, and when too many rows have failed."""

from __future__ import annotations

from batchgen.config import parse_max_errors
from batchgen.errors import TooManyErrors
from batchgen.parsers.repetition import repeats
from batchgen.progress import Tracker
from batchgen.result import Result
from batchgen.stats import RunFigures

ERROR_SHARE_FROM = 100
"""`--max-errors P%` is looked at once this many rows are done."""
SUGGESTED_REPEATS = 4
"""The `--max-repeats` that is suggested where many rows that were cut repeat themselves so often."""
_FAILURES_KEPT = 5
_MANY = 10
"""Rows cut by `--max-tokens` are worth a note if they are at least this many, and more than one in this many."""


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
                "correct the input, or allow more, and run the same command again to go on",
            )


class Outcomes:
    """Counts rows as they are done, and shows them."""

    def __init__(self, run: RunFigures, tracker: Tracker, max_errors: str | None) -> None:
        self.run, self.tracker = run, tracker
        self.failures: list[str] = []
        """The first few rows that failed in this run: where, and why."""
        self._limit = ErrorLimit(max_errors)

    def done(self, result: Result, source: str = "") -> None:
        """A row of this run is done, well or not; `source` is its place in its file, if that is known. Raises `TooManyErrors`."""
        self.run.count(result)
        self.tracker.rows_changed()
        if result.finish_reason == "length" and repeats(result.token_ids, SUGGESTED_REPEATS):
            self.run.rows_repeating += 1
        if result.error_type is None:
            return
        where = source or f"row {result.row}"
        message = str(result.error_message).removeprefix(f"{where}: ")
        last = f"{where}: {result.error_type}: {message}"
        if len(self.failures) < _FAILURES_KEPT:
            self.failures.append(last)
        self._limit.check(failed=self.run.failed, done=self.run.done, last=last)

    def resumed(self, result: Result) -> None:
        """The result of a row is at hand from an earlier run."""
        self.run.count_resumed(result)
        self.tracker.rows_changed()

    def note_cut_rows(self) -> None:
        """Says once, at the end, that rows ran into `--row-timeout`, or many into `--max-tokens`."""
        reasons, done = self.run.all_reasons, self.run.done
        if reasons["timeout"]:
            self.tracker.note(
                f"{reasons['timeout']:,} of {done:,} rows were cut by --row-timeout; "
                "--retry timeout, with a longer one, runs them again"
            )
        if _MANY * reasons["length"] > done and reasons["length"] >= _MANY:
            self.tracker.note(
                f"{reasons['length']:,} of {done:,} rows were cut by their length (--max-tokens, or the end of the context){self._of_them_repeat()}"
            )

    def _of_them_repeat(self) -> str:
        count = self.run.rows_repeating
        if count < _MANY:
            return ""
        return f"; {count:,} of them repeat themselves, which --max-repeats {SUGGESTED_REPEATS} ends early"
