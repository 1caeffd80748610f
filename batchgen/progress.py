"""What a job tells while it runs. The command shows it, the job's folder keeps it; a program may pass its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

GENERATING = "generating"
"""The phase in which the model works: speed, and what is left, are of it alone."""
TELL_SECONDS = 1.0
"""What is kept of a run in its job's folder is at most this old, while rows or steps go by."""


class Progress(Protocol):
    """What is shown while a job runs. Counts are totals of this run so far."""

    def note(self, text: str) -> None:
        """Something that the user should hear once."""

    def phase(self, name: str) -> None:
        """What the run is at from now on; the same name again is the same phase."""

    def passed(self, rows: int) -> None:
        """So many rows have gone by in this phase, one that only reads rows (planning) or writes them."""

    def kept(self, rows: int) -> None:
        """So many of the rows that are done came from earlier runs. Told before `rows`."""

    def rows(self, done: int, failed: int, total: int | None) -> None:
        """So many rows have a result, from this run or an earlier one. Followed by `tokens`."""

    def tokens(self, prompt: int, completion: int) -> None:
        """Of the rows that this run has finished."""

    def running(self, tokens: int) -> None:
        """So many completion tokens the unfinished rows have; told before every step."""


class Silent:
    """A `Progress` that shows nothing."""

    def note(self, text: str) -> None: ...
    def phase(self, name: str) -> None: ...
    def passed(self, rows: int) -> None: ...
    def kept(self, rows: int) -> None: ...
    def rows(self, done: int, failed: int, total: int | None) -> None: ...
    def tokens(self, prompt: int, completion: int) -> None: ...
    def running(self, tokens: int) -> None: ...


class Counts:
    """A `Progress` that counts what it is told: how far a run is, how fast, and what is left. Shows nothing; `changed` is there for that."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.name = ""
        """The phase."""
        self.total: int | None = None
        self.rows_done = self.rows_failed = self.rows_kept = 0
        self.rows_passed: int | None = None
        """In this phase, where it only reads or writes rows."""
        self.prompt_tokens = self.completion_tokens = self.running_tokens = 0
        self._began = self._phase_began = clock()
        self._generating_from: float | None = None
        self._generated_until = 0.0
        self._new = self._without_model = 0
        """Rows done in this run, and those of them that were not generated: they failed before they became requests."""

    def note(self, text: str) -> None: ...

    def phase(self, name: str) -> None:
        if name == self.name:
            return
        now = self.clock()
        if self.name == GENERATING:
            self._generated_until = now
        if name == GENERATING and self._generating_from is None:
            self._generating_from = now
        self.name, self.rows_passed, self.running_tokens, self._phase_began = name, None, 0, now

    def passed(self, rows: int) -> None:
        self.rows_passed = rows
        self.changed()

    def kept(self, rows: int) -> None:
        self.rows_kept = rows

    def rows(self, done: int, failed: int, total: int | None) -> None:
        new = done - self.rows_kept
        if self.name != GENERATING:
            self._without_model += new - self._new
        self._new = new
        self.rows_done, self.rows_failed, self.total = done, failed, total

    def tokens(self, prompt: int, completion: int) -> None:
        self.prompt_tokens, self.completion_tokens = prompt, completion
        self.changed()

    def running(self, tokens: int) -> None:
        self.running_tokens = tokens
        self.changed()

    def changed(self) -> None:
        """Called whenever counts have changed, many times a second."""

    @property
    def rows_generated(self) -> int:
        """Rows that the model finished in this run."""
        return self._new - self._without_model

    @property
    def generating_seconds(self) -> float:
        """Since the first step; what comes after the last one (so far) is not in it."""
        if self._generating_from is None:
            return 0.0
        return (self.clock() if self.name == GENERATING else self._generated_until) - self._generating_from

    @property
    def tokens_per_second(self) -> float:
        seconds = self.generating_seconds
        return (self.completion_tokens + self.running_tokens) / seconds if seconds else 0.0

    @property
    def rows_per_second(self) -> float:
        """Of the rows that go by, in a phase that only reads or writes them; else of those generated."""
        if self.rows_passed is not None:
            seconds = self.clock() - self._phase_began
            return self.rows_passed / seconds if seconds else 0.0
        seconds = self.generating_seconds
        return self.rows_generated / seconds if seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until the last row is generated; None where it is not known: outside of generating, or before a first row is finished."""
        seconds, finished = self.generating_seconds, self.rows_generated
        if self.name != GENERATING or self.total is None or finished <= 0 or not seconds:
            return None
        # What unfinished rows have counts in rows of the mean length, but as no more than was finished: the first to finish are the
        # shortest, and by their length alone much would seem done.
        mean = self.completion_tokens / finished
        unfinished = min(self.running_tokens / mean, finished) if mean else 0.0
        left = max(0.0, self.total - self.rows_done - unfinished)
        return left * seconds / (finished + unfinished)

    def figures(self) -> dict[str, Any]:
        """How far the run is, as it is written down (docs/status.md)."""
        left = self.seconds_left
        return {
            "phase": self.name,
            "rows_total": self.total,
            "rows_done": self.rows_done,
            "rows_failed": self.rows_failed,
            "rows_kept": self.rows_kept,
            "rows_passed": self.rows_passed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens + self.running_tokens,
            "completion_tokens_per_s": round(self.tokens_per_second, 3),
            "rows_per_s": round(self.rows_per_second, 3),
            "seconds": round(self.clock() - self._began, 3),
            "eta_seconds": None if left is None else round(left, 1),
        }


class Told(Counts):
    """Passes on to `progress` all that it is told, and gives its figures to `keep`: every second, and at each new phase."""

    def __init__(
        self,
        progress: Progress,
        keep: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._progress, self._keep = progress, keep
        self._told = clock()

    def note(self, text: str) -> None:
        self._progress.note(text)

    def phase(self, name: str) -> None:
        new = name != self.name
        super().phase(name)
        self._progress.phase(name)
        if new:
            self._tell()

    def passed(self, rows: int) -> None:
        self._progress.passed(rows)
        super().passed(rows)

    def kept(self, rows: int) -> None:
        self._progress.kept(rows)
        super().kept(rows)

    def rows(self, done: int, failed: int, total: int | None) -> None:
        self._progress.rows(done, failed, total)
        super().rows(done, failed, total)

    def tokens(self, prompt: int, completion: int) -> None:
        self._progress.tokens(prompt, completion)
        super().tokens(prompt, completion)

    def running(self, tokens: int) -> None:
        self._progress.running(tokens)
        super().running(tokens)

    def changed(self) -> None:
        if self.clock() - self._told >= TELL_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self._told = self.clock()
        self._keep(self.figures())


def job_status(output: str, work_dir: str | None = None) -> dict[str, Any]:
    """How far the job of an output is, told from its folder (schema `batchgen.status/1`, docs/status.md); changes nothing, waits for nobody.

    Raises `UsageError` where there is no job, or its folder cannot be read.
    """
    from batchgen.records.status import read_status  # slow to import

    return read_status(output, work_dir)
