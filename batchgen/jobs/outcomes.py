"""Counts how the rows of a run ended, keeps the first failures, and stops the run if too many rows have failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.config import parse_max_errors
from batchgen.errors import TooManyErrors
from batchgen.parsers.repetition import repeats
from batchgen.progress import Tracker
from batchgen.recording import Agreement
from batchgen.records import Input, Row
from batchgen.records.schema_metadata import class_names
from batchgen.result import Result
from batchgen.stats import counted

ERROR_SHARE_FROM = 100
"""`--max-errors P%` applies from this many finished rows on."""
SUGGESTED_REPEATS = 4
"""The `--max-repeats` that is suggested where many rows that were cut repeat themselves so often."""
FAILURES_KEPT = 5
"""Number of failed rows that are shown."""
_MANY = 10
"""A note says that rows were cut by `--max-tokens` if they are at least this many and more than one row in this many."""


def agreement_with(column: str | None, source: Input) -> Agreement | None:
    """Returns what compares results with a column of the input; None without a column."""
    return None if column is None else Agreement(column, class_names(source.schema, column))


def failure_line(result: Result, source: str) -> str:
    """Returns where and why a row failed, as one line. `source` is its place in its file; empty if that is not known."""
    where = source or f"row {result.row}"
    message = str(result.error_message).removeprefix(f"{where}: ")
    return f"{where}: {result.error_type}: {message}"


class Outcomes:
    """Counts rows as they finish and reports them to the progress."""

    def __init__(self, tracker: Tracker, max_errors: str | None, agreement: Agreement | None = None) -> None:
        """`agreement` counts the rows that are written, if they are compared with a column."""
        self.tracker, self.run = tracker, tracker.run
        self._agreement = agreement
        self.failures: list[str] = []
        """The first few failed rows of this run: place and reason."""
        self._max_errors = max_errors

    def done(self, result: Result, source: str = "", *, rows: int = 1, equal: int = 0) -> None:
        """Counts a row that this run has finished or that failed. The caller tells the tracker. `source` is its place in its file, if known. Raises `TooManyErrors`.

        `rows`: the number of rows that have this result, of which `equal` have it because they are equal to another one.
        """
        self.run.new.add(result, rows, equal)
        if result.finish_reason == "length" and repeats(result.token_ids, SUGGESTED_REPEATS):
            self.run.rows_repeating += rows
        if not result.failed:
            return
        last = failure_line(result, source)
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(last)
        self._check_errors(last)

    def _check_errors(self, last: str) -> None:
        """Raises `TooManyErrors` if more rows have failed than `--max-errors` allows: a number of rows, or a share of those that are done."""
        if self._max_errors is None:
            return
        limit, failed, done = parse_max_errors(self._max_errors), self.run.failed, self.run.done
        over = failed > limit if isinstance(limit, int) else done >= ERROR_SHARE_FROM and failed > limit * done
        if over:
            raise TooManyErrors(
                f"{counted(failed, 'row')} failed of {done:,} done so far, more than --max-errors {self._max_errors} allows; the last one: {last}",
                "correct the input, or allow more errors, and run the same command again to continue",
            )

    def resumed(self, result: Result, *, rows: int = 1, equal: int = 0) -> None:
        """Counts rows whose result comes from an earlier run, as `done` does. The caller tells the tracker."""
        self.run.resumed.add(result, rows, equal)

    def written(self, rows: Sequence[Row], results: Mapping[int, Result]) -> None:
        """Counts rows of the output. `results` are by row number."""
        if self._agreement is not None:
            for row in rows:
                self._agreement.add(results[row.number], row.columns)

    def figures(self) -> dict[str, Any]:
        """Returns the figures of the rows that were written."""
        return {} if self._agreement is None else {"expect": self._agreement.as_dict()}

    def note_cut_rows(self, *, endless: bool = False) -> None:
        """Adds notes at the end of a run if rows have no answer, or were cut by `--row-timeout`, or many by `--max-tokens`.

        `endless`: nothing but `--max-tokens` was to end the rows (`--ignore-eos`).
        """
        reasons, done = self.run.all_reasons, self.run.done
        if reasons["timeout"]:
            were = "was" if reasons["timeout"] == 1 else "were"
            self.tracker.note(
                f"{reasons['timeout']:,} of {counted(done, 'row')} {were} cut by --row-timeout; "
                "run again with --retry timeout and a longer --row-timeout to finish"
            )
        json = self.run.new.json + self.run.resumed.json
        cut = json["cut"]
        if cut and reasons["length"]:
            self.tracker.note(
                f"{cut:,} of {counted(json.total(), 'completion')} {'ends' if cut == 1 else 'end'} in the middle of {'its' if cut == 1 else 'their'} JSON; "
                f"run again with --retry length and a larger --max-tokens to finish {'it' if cut == 1 else 'them'}{self._of_them_repeat()}"
            )
        elif not endless and _MANY * reasons["length"] > done and reasons["length"] >= _MANY:
            self.tracker.note(
                f"{reasons['length']:,} of {done:,} rows were cut by their length (--max-tokens, or the end of the context); "
                f"run again with --retry length and a larger --max-tokens to finish them{self._of_them_repeat()}"
            )

        if unanswered := self.run.new.unanswered + self.run.resumed.unanswered:
            self.tracker.note(
                f"{unanswered:,} of {counted(done, 'row')} {'has' if unanswered == 1 else 'have'} no answer (text is null), because the completion ended "
                "inside its thoughts; a larger --max-tokens with --retry length continues those that were cut, --reasoning-budget N makes room for an answer"
            )

    def _of_them_repeat(self) -> str:
        count = self.run.rows_repeating
        if count < _MANY:
            return ""
        return f"; {count:,} of them repeat themselves, which --max-repeats {SUGGESTED_REPEATS} ends early"
