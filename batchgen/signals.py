"""Signals of a running job, turned into an answer to the engine's question "stop?". Knows nothing of rows."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from batchgen.errors import Interrupted


class Signals:
    """While entered, SIGINT asks to stop at the next step, SIGTERM and SIGHUP to drain for `grace` seconds; a second signal stops at once.

    A signal that was ignored from the start stays so (SIGHUP under nohup, SIGINT of a shell's background job).
    Outside the main thread, where Python allows no handlers, nothing is installed.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._before: dict[int, Any] = {}
        self._first: int | None = None
        self._drain_until = 0.0
        self._at_once = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # None: a handler that is not Python's, which could not be put back
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        second = self._first is not None
        if not second:
            self._first = signum
            self._drain_until = time.monotonic() + self._grace
        if second or self._at_once:
            raise Interrupted(self._first or signum)

    def stop(self) -> str | None:
        """What the engine is to do now: None to go on, "drain" to admit nothing new, "now" to stop at this step."""
        if self._first is None:
            return None
        if self._first == signal.SIGINT or time.monotonic() >= self._drain_until:
            return "now"
        return "drain"

    def check(self) -> None:
        """Raises `Interrupted` if a signal has come."""
        if self._first is not None:
            raise Interrupted(self._first)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """For what has nothing to lose (loading, reading, planning): the first signal ends it at once, even a read that waits."""
        self.check()
        self._at_once = True
        try:
            yield
        except BaseException:
            self.check()  # whatever a library on the way made of the exception that the handler raised
            raise
        finally:
            self._at_once = False
        self.check()
