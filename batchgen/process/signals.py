"""The signals that end a process. In a running job the engine asks before every step whether to stop; child processes leave that to the job's
process. Knows nothing about rows."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from batchgen.errors import CONTINUES, Interrupted

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """A context manager. Inside it, SIGINT asks to stop at the next step; SIGTERM and SIGHUP let running rows finish for `grace` seconds; a
    second signal stops at once.

    A signal that was ignored from the start stays ignored (SIGHUP under nohup, SIGINT of a background job). Outside the main thread,
    where Python allows no handlers, none are installed.
    """

    def __init__(self, grace: float, after: str = CONTINUES) -> None:
        """`after`: that of `Interrupted`."""
        self._grace, self._after = grace, after
        self._before: dict[int, Any] = {}
        self._first: int | None = None
        self._drain_until = 0.0
        self._at_once = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                # None is a handler that is not Python's; it could not be restored
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
        if self._at_once or second:
            raise Interrupted(self._first or signum, self._after)

    def stop(self) -> str | None:
        """Returns what the engine must do: None to go on, "drain" to start nothing new, "now" to stop at this step."""
        if self._first is None:
            return None
        if self._first == signal.SIGINT or time.monotonic() >= self._drain_until:
            return "now"
        return "drain"

    def check(self) -> None:
        """Raises `Interrupted` if a signal has arrived."""
        if self._first is not None:
            raise Interrupted(self._first, self._after)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A context in which the first signal raises `Interrupted` at once, even in a blocking read. For work with nothing to lose: loading, reading, planning.

        Python drops an exception in a `__del__`. Then `Interrupted` is raised at the end of the context.
        """
        self.check()
        hook = sys.unraisablehook
        if self._before:  # else no exception of ours is ever dropped
            sys.unraisablehook = partial(_without_ours, hook)
        self._at_once = True
        try:
            try:
                yield
            finally:
                self._at_once = False
        except BaseException:
            self._at_once = False  # a second signal may have come in between
            self.check()  # a library may have turned the handler's exception into another one
            raise
        finally:
            sys.unraisablehook = hook
        self.check()


def _without_ours(hook: Callable[[Any], Any], unraisable: Any) -> None:
    """Tells `hook` of an exception that Python dropped, unless it is the handler's."""
    if not isinstance(unraisable.exc_value, Interrupted):
        hook(unraisable)


def ignore_stop_signals() -> None:
    """For the start of a child process: a terminal sends Ctrl-C to all of its processes, and the parent decides when this one ends."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@contextmanager
def noted_interrupt() -> Iterator[Callable[[], bool]]:
    """A context in which the first Ctrl-C is only noted. Yields a function that tells whether it has come. The second one raises `KeyboardInterrupt`.

    Changes nothing outside the main thread, and in a program that handles the signal itself.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    noted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal noted
        noted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
