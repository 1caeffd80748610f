"""Limits on time and size for templates, which are programs: the user's own, and a stranger's that came with the model.

A render is stopped by an exception that a watchdog thread raises in the thread that renders. It arrives between two steps of the interpreter: one step that
takes long by itself (a sort, a power) is not cut short. Works in every thread, and leaves signals alone.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from batchgen.errors import TooManyErrors

SECONDS = 10.0
"""What one render may take; it may be a tenth more."""
CHARACTERS = 10_000_000
"""What one render may give. No prompt is as long as this; a template that loops wild is."""
LATE_IN_A_ROW = 20
"""So many renders one after the other that do not end: the template never does, and a long file would take months to tell."""


class LimitError(Exception):
    """A template went beyond a limit; the words are for the row's message."""

    @classmethod
    def size(cls) -> LimitError:
        return cls(f"more than {CHARACTERS} characters come out")

    @classmethod
    def time(cls) -> LimitError:
        return cls(f"it takes more than {SECONDS:g} seconds")


class Limited:
    """Runs the renders of one template, called `what` ("chat template")."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._late = 0

    def __call__(self, render: Callable[[], str]) -> str:
        """What `render` gives, or raises. Raises `LimitError`, and `TooManyErrors` where renders never end."""
        try:
            text = _WATCHDOG.run(render)
        except _TimeUpError:
            self._late += 1
            if self._late >= LATE_IN_A_ROW:
                raise TooManyErrors(
                    f"the {self._what} took more than {SECONDS:g} seconds for each of {self._late} rows, one after the other",
                    "mend it, or the rows, so that it comes to an end",
                ) from None
            raise LimitError.time() from None
        self._late = 0
        if len(text) > CHARACTERS:
            raise LimitError.size()
        return text


class _TimeUpError(BaseException):
    """Not an `Exception`: nothing that a template calls must take it for one of its own."""


class _Render:
    """A render under way, and whose turn it is to end it: the first to `claim` decides, both are told."""

    __slots__ = ("_claims", "deadline")

    def __init__(self) -> None:
        self.deadline = time.monotonic() + SECONDS
        self._claims: dict[str, bool] = {}

    def claim(self, *, late: bool) -> bool:
        """Whether it is late. One step for the interpreter, so that the two threads cannot differ, and may be asked again."""
        return self._claims.setdefault("late", late)

    @property
    def claimed(self) -> bool:
        return bool(self._claims)


class _Watchdog:
    """One thread for the whole process, started by the first render, that looks ten times in `SECONDS` for renders past their deadline."""

    def __init__(self) -> None:
        self._renders: dict[int, _Render] = {}
        """Under way, by thread."""
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def run(self, render: Callable[[], str]) -> str:
        """What `render` gives. Raises `_TimeUpError`; it never comes later, wherever this is left."""
        this, thread = _Render(), threading.get_ident()
        try:
            self._renders[thread] = this
            if self._thread is None or not self._thread.is_alive():  # it is not after a fork
                self._start()
            text = render()
            if this.claim(late=False):
                _await()
        except _TimeUpError:
            raise
        except BaseException:  # the template's, or a signal's
            if this.claim(late=False):
                with suppress(_TimeUpError):
                    _await()
            raise
        finally:
            self._renders.pop(thread, None)
        return text

    def _start(self) -> None:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="batchgen-templates", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(SECONDS / 10)
            now = time.monotonic()
            for thread, render in list(self._renders.items()):
                if now >= render.deadline and not render.claimed and render.claim(late=True):
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TimeUpError))


def _await() -> None:
    """The watchdog has claimed the render: its exception is under way to this thread, and must arrive here."""
    for _ in range(1000):
        time.sleep(0.001)


_WATCHDOG = _Watchdog()
