"""Handles the signals of a running job: the engine asks before every step whether to stop. Knows nothing about rows."""

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

from batchgen.errors import Interrupted

_AGAIN_SECONDS = 0.02
"""A signal whose exception Python dropped is sent again after this time."""


class Signals:
    """A context manager. Inside it, SIGINT asks to stop at the next step; SIGTERM and SIGHUP let running rows finish for `grace` seconds; a
    second signal stops at once.

    A signal that was ignored from the start stays ignored (SIGHUP under nohup, SIGINT of a background job). Outside the main thread,
    where Python allows no handlers, none are installed.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._before: dict[int, Any] = {}
        self._first: int | None = None
        self._drain_until = 0.0
        self._at_once = False
        self._dropped = False
        self._in_hook = False
        """Whether Python's hook for exceptions that it drops is running. It would drop an exception of the handler, too."""
        self._lock = threading.Lock()
        """Held while a signal is sent again, so that none is on its way when the context that it is meant for has ended."""

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
        if self._in_hook:
            return  # `_send_again` sends it once more
        second = self._first is not None and not self._dropped
        self._dropped = False
        if not second:
            self._first = signum
            self._drain_until = time.monotonic() + self._grace
        if self._at_once or second:
            raise Interrupted(self._first or signum)

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
            raise Interrupted(self._first)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A context in which the first signal raises `Interrupted` at once, even in a blocking read. For work with nothing to lose: loading, reading, planning."""
        self.check()
        hook = sys.unraisablehook
        if self._before:  # else no exception of ours is ever dropped
            sys.unraisablehook = partial(self._raise_again, hook)
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
            with self._lock:
                self._dropped = False
        self.check()

    def _raise_again(self, hook: Callable[[Any], Any], unraisable: Any) -> None:
        """Takes what Python could not raise, such as an exception in a `__del__`. If it is the handler's, the signal comes once more."""
        if isinstance(unraisable.exc_value, Interrupted):
            self._dropped = self._in_hook = True
            try:
                threading.Timer(_AGAIN_SECONDS, self._send_again).start()
            finally:
                self._in_hook = False
        else:
            hook(unraisable)

    def _send_again(self) -> None:
        """Sends the first signal to the main thread until the job has seen it."""
        main = threading.main_thread().ident
        while True:
            with self._lock:
                if not self._at_once or not self._dropped or self._first is None or main is None:
                    return
                signal.pthread_kill(main, self._first)
            time.sleep(_AGAIN_SECONDS)


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
