"""Work done in another thread while this one goes on: what is needed later, and nothing that a row's result depends on."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

T = TypeVar("T")

STOP_SECONDS = 5.0


class StoppedError(SystemExit):
    """Raised in the thread of an `Ahead` that is stopped. A `SystemExit`, of which a thread that ends by it says nothing."""


class Ahead(Generic[T]):
    """What `make` gives, made in a thread of its own from now on."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: list[T] = []
        self._error: BaseException | None = None
        self.began = self.ended = time.perf_counter()
        """When it was begun, and when it was done."""
        self._thread = threading.Thread(target=self._run, name="batchgen-ahead", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether it is made."""
        return bool(self._made) and not self._thread.is_alive()

    def result(self) -> T:
        """Waits for it; a signal's exception goes through. Raises what `make` raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._made[0]

    def stop(self) -> None:
        """It is not wanted any more: ends between two steps of the interpreter. One step that takes long is waited for, but not for ever."""
        give_up = time.monotonic() + STOP_SECONDS
        with _silently():
            while self._thread.is_alive() and time.monotonic() < give_up:
                thread = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(StoppedError))
                # And again: what it met with may have been a callback, which ends no more than itself.
                self._thread.join(0.05)

    def _run(self) -> None:
        with suppress(StoppedError):
            try:
                self._made.append(self._make())
            except BaseException as e:  # noqa: BLE001 - whoever asks for the result has it raised
                self._error = e
            self.ended = time.perf_counter()


@contextmanager
def _silently() -> Iterator[None]:
    """Callbacks that a `StoppedError` ends are not told of."""
    before = sys.unraisablehook

    def hook(raised: sys.UnraisableHookArgs) -> None:
        if raised.exc_type is not StoppedError:
            before(raised)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
