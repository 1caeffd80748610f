"""Warns of a step that does not return from an accelerator. It ends nothing: a slow step is not always a lost one."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref

SLOW_STEP_SECONDS = 600.0
"""A call to the device that takes longer is reported. The first steps compile kernels, which takes a minute or two."""
LOOK_SECONDS = 10.0

_logger = logging.getLogger("batchgen")


class StepWatch:
    """Measures in its own thread how long the engine's call to the device takes, and logs one warning if that is too long.

    The thread that waits for the device cannot warn. The watch's thread ends with this object.
    """

    def __init__(self, device: str, seconds: float = SLOW_STEP_SECONDS, every: float = LOOK_SECONDS) -> None:
        """Warns after `seconds`, and looks every `every` seconds. `device` is its name in the warning."""
        self.since: float | None = None
        """When the present call began (`time.perf_counter`); None between two calls. The engine's thread writes it."""
        self._device = device
        self._seconds = seconds
        self._warned = False
        ended = threading.Event()
        weakref.finalize(self, ended.set)
        self.thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), ended, every), name="batchgen-step-watch", daemon=True
        )
        self.thread.start()

    def look(self, now: float) -> None:
        """Logs the warning if the present call began more than `seconds` before `now`, the first time that it sees this."""
        since = self.since
        if since is None or now - since <= self._seconds or self._warned:
            return
        self._warned = True
        _logger.warning(
            "%s: a step has not returned for %g minutes; a kernel may hang. Ctrl-C cannot end it: use kill -9 %d, then run the same command "
            "again, which continues the job (--attention torch runs it without batchgen's kernels)",
            self._device,
            round(self._seconds / 60, 1),
            os.getpid(),
        )


def _watch(watch: weakref.ref[StepWatch], ended: threading.Event, every: float) -> None:
    while not ended.wait(every):
        there = watch()
        if there is not None:
            there.look(time.perf_counter())
        del there
