"""The progress of a job: notes, and snapshots of how far it is. The command and a notebook show them. A program may pass its own `Progress`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from batchgen.stats import RunFigures, reasons_in_order

GENERATING = "generating"
"""The phase in which the model runs. Speed and remaining time refer to this phase."""
TELL_SECONDS = 1.0
"""Seconds between two updates of the progress in the job's folder."""
REFRESH_SECONDS = 0.2
"""Seconds between two drawings of a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """How far a run is. Counts are totals of this run so far."""

    phase: str = ""
    """What the run is doing: `reading`, `planning`, `loading model`, `generating`, `writing`…"""
    rows_total: int | None = None
    """Number of rows of the output; None until they are counted."""
    rows_done: int = 0
    """Rows that have a result, from this run or an earlier one."""
    rows_failed: int = 0
    rows_kept: int = 0
    """Rows among `rows_done` whose results come from earlier runs."""
    rows_passed: int | None = None
    """Rows read or written in this phase; None if the phase does more than that."""
    prompt_tokens: int = 0
    """Prompt tokens of the rows that this run has finished."""
    completion_tokens: int = 0
    """Completion tokens of the rows that this run has finished and of those that are running."""
    rows_under_way: float = 0.0
    """By how many rows the part of the work that is done exceeds the finished rows' part: rows that run, and prompts that were read for others."""
    completion_tokens_per_s: float = 0.0
    rows_per_s: float = 0.0
    """Rows generated per second; in a phase that only reads or writes rows, these rows."""
    seconds: float = 0.0
    """Seconds since the run started."""
    seconds_left: float | None = None
    """Estimated seconds until the last row is generated. Until the first row finishes, every row is expected to need all of its `max_tokens`."""
    finish_reasons: tuple[tuple[str, int], ...] = ()
    """Number of finished rows by the reason why they ended."""
    workers: list[dict[str, Any]] | None = None
    """How far each of several workers is; only in the snapshots that are passed to `Tracker.tell`."""

    @property
    def share(self) -> float | None:
        """The finished part of this phase's work, from 0 to 1; None if the number of rows is not known."""
        if self.rows_total is None:
            return None
        done = self.rows_done + self.rows_under_way if self.rows_passed is None else float(self.rows_passed)
        return min(1.0, done / self.rows_total) if self.rows_total else 1.0

    @property
    def percent(self) -> int:
        """The same as a percentage, which is 100 only if all rows are done. It has no meaning until the number of rows is known."""
        if self.rows_passed is not None or not self.rows_total or self.rows_done == self.rows_total:
            return percentage(self.rows_done if self.rows_passed is None else self.rows_passed, self.rows_total or 0)
        return min(99, int(100 * (self.share or 0.0)))

    def figures(self) -> dict[str, Any]:
        """Returns how far the run is, in the form that docs/status.md describes."""
        return {
            "phase": self.phase,
            "rows_total": self.rows_total,
            "rows_done": self.rows_done,
            "rows_failed": self.rows_failed,
            "rows_kept": self.rows_kept,
            "rows_passed": self.rows_passed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "completion_tokens_per_s": round(self.completion_tokens_per_s, 3),
            "rows_per_s": round(self.rows_per_s, 3),
            "seconds": round(self.seconds, 3),
            "eta_seconds": None if self.seconds_left is None else round(self.seconds_left, 1),
            "finish_reasons": dict(self.finish_reasons),
        }


def percentage(done: int, total: int) -> int:
    """Returns a percentage, which is 100 only if all are done."""
    return 100 * done // total if total else 100


def rounded_duration(seconds: float) -> str:
    """Returns a duration as text: 90 s, 10 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    return f"{minutes // 60} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def speed(tokens_per_second: float, rows_per_second: float) -> str:
    """Returns the speed as text: in tokens, or in rows if no tokens are generated (labels and scores)."""
    if tokens_per_second:
        return f"{tokens_per_second:,.0f} tokens/s"
    return f"{rows_per_second:,.0f} rows/s" if rows_per_second >= 10 else f"{rows_per_second:.1f} rows/s"


def facts(now: Snapshot) -> list[str]:
    """Returns remaining time, failures and speed, the most useful first."""
    if now.rows_passed is not None:
        return [speed(0, now.rows_per_s)]
    found = []
    if now.seconds_left is not None:
        found.append(f"{rounded_duration(now.seconds_left)} left")
    if now.rows_failed:
        found.append(f"{now.rows_failed:,} failed")
    if now.completion_tokens_per_s or now.rows_per_s or now.phase == GENERATING:
        found.append(speed(now.completion_tokens_per_s, now.rows_per_s))
    return found


class Progress(Protocol):
    """Shows the progress of a job."""

    def note(self, text: str) -> None:
        """Shows a message once."""

    def update(self, now: Snapshot) -> None:
        """Shows how far the run is. Called at every change, many times a second."""


class Silent:
    """A `Progress` that shows nothing."""

    def note(self, text: str) -> None: ...
    def update(self, now: Snapshot) -> None: ...


class Tracker:
    """Makes the snapshots of a run. Shows each of them, and passes one per second and the first of each phase to `tell`."""

    def __init__(self, shown: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown = shown
        self.run = RunFigures()
        self.tell: Callable[[Snapshot], None] | None = None
        self.workers: Callable[[], list[dict[str, Any]]] | None = None
        """Returns how far each worker is, if there are several."""
        self.total: int | None = None
        """Rows of the output, once they are counted."""
        self._clock = clock
        self._phase = ""
        self._passed: int | None = None
        self._tokens, self._rows_under_way = 0, 0.0
        self._end: float | None = None
        """When the last row will be generated, as far as that is known."""
        self._began = self._phase_began = self._told = clock()
        self._generating_from: float | None = None
        self._generated_until = 0.0
        self._generated_before = 0
        """Rows that the model had finished when this phase started. Rows that failed before they became requests are not included."""
        self._new_before = 0
        """Rows of this run that were done when this phase started."""

    def note(self, text: str) -> None:
        self.shown.note(text)

    def show_notes(self, notes: list[str]) -> None:
        """Shows these messages, and takes them out of the list."""
        while notes:
            self.shown.note(notes.pop(0))

    def phase(self, name: str) -> None:
        """Starts a phase. The same name again continues the phase."""
        if name == self._phase:
            return
        now = self._clock()
        if self._phase == GENERATING:
            self._generated_until = now
            self._generated_before = self._generated_rows
        if name == GENERATING and self._generating_from is None:
            self._generating_from = now
        self._new_before = self.run.new.rows
        self._phase, self._passed, self._rows_under_way, self._end, self._phase_began = name, None, 0.0, None, now
        self.changed(new_phase=True)

    def passed(self, rows: int) -> None:
        """Sets the number of rows that this phase, which only reads or writes rows, has read or written."""
        self._passed = rows
        self.changed()

    def generated(self, tokens: int) -> None:
        """Sets the number of tokens that the engine has generated in this run."""
        self._tokens = tokens
        self.changed()

    def expect(self, rows_under_way: float, seconds_left: float | None) -> None:
        """Sets what `Snapshot` tells under these names. The time goes down until it is set again."""
        self._rows_under_way = rows_under_way
        self._end = None if seconds_left is None else self._clock() + seconds_left

    def stopped(self) -> None:
        """Must be called when a run ends early: the last snapshot is passed to `tell`."""
        self._tell(self.snapshot())

    def snapshot(self) -> Snapshot:
        run = self.run
        new = run.new
        under_way = max(0, run.begun_tokens + self._tokens - (new.completion_tokens - new.equal_tokens))
        seconds, now = self.generating_seconds, self._clock()
        if self._passed is not None:
            phase_seconds = now - self._phase_began
            rows_per_s = self._passed / phase_seconds if phase_seconds else 0.0
        else:
            rows_per_s = self._generated_rows / seconds if seconds else 0.0
        return Snapshot(
            phase=self._phase,
            rows_total=self.total,
            rows_done=run.done,
            rows_failed=run.failed,
            rows_kept=run.resumed.rows,
            rows_passed=self._passed,
            prompt_tokens=new.prompt_tokens,
            completion_tokens=new.completion_tokens + under_way,
            rows_under_way=self._rows_under_way,
            completion_tokens_per_s=self._tokens / seconds if seconds else 0.0,
            rows_per_s=rows_per_s,
            seconds=now - self._began,
            seconds_left=None if self._end is None else max(0.0, self._end - now),
            finish_reasons=tuple((name, n) for name, n in reasons_in_order(run.all_reasons).items() if n),
        )

    @property
    def _generated_rows(self) -> int:
        """Rows that the model has finished in this run."""
        return self._generated_before + (self.run.new.rows - self._new_before if self._phase == GENERATING else 0)

    @property
    def generating_seconds(self) -> float:
        """Seconds from the first step to the last one so far."""
        if self._generating_from is None:
            return 0.0
        return (self._clock() if self._phase == GENERATING else self._generated_until) - self._generating_from

    def changed(self, *, new_phase: bool = False) -> None:
        """Must be called when a row is done, and when the number of rows becomes known."""
        now = self.snapshot()
        self.shown.update(now)
        if new_phase or self._clock() - self._told >= TELL_SECONDS:
            self._tell(now)

    def _tell(self, now: Snapshot) -> None:
        self._told = self._clock()
        if self.tell is not None:
            self.tell(now if self.workers is None else replace(now, workers=self.workers()))
