"""A progress that records what the user is told, and does something at a moment of the job; what is logged; and a clock that a test sets."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby

from batchgen.progress import Silent, Snapshot


class Recorder(Silent):
    """Records notes and snapshots, and calls `action` once, at the first snapshot for which `when` is true."""

    def __init__(
        self, when: Callable[[Snapshot], bool] = lambda now: False, action: Callable[[], object] = lambda: None
    ) -> None:
        self.notes: list[str] = []
        self.seen: list[Snapshot] = []
        self._when, self._action = when, action
        self._acted = False

    def note(self, text: str) -> None:
        self.notes.append(text)

    def update(self, now: Snapshot) -> None:
        self.seen.append(now)
        if not self._acted and self._when(now):
            self._acted = True
            self._action()

    @property
    def phases(self) -> list[str]:
        return [phase for phase, _ in groupby(now.phase for now in self.seen)]


@contextmanager
def logged(name: str, level: str) -> Iterator[list[str]]:
    """The messages of a logger and those below it, from this level on."""
    logger, handler, messages = logging.getLogger(name), logging.Handler(), list[str]()
    before = logger.level
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class Clock:
    """Seconds, as `time.monotonic` returns them."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def rows_done(rows: int) -> Callable[[Snapshot], bool]:
    """At least so many: rows of one step are counted together."""
    return lambda now: now.rows_done >= rows


def in_phase(name: str) -> Callable[[Snapshot], bool]:
    return lambda now: now.phase == name


def interrupt(signum: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), signum)
