"""Shows a running job on standard error: as a bar on a terminal, as a line every few seconds in a log, or as events."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from batchgen.progress import GENERATING, REFRESH_SECONDS, Snapshot, facts, rounded_duration
from batchgen.stats import counted
from batchgen_cli.options import Display
from batchgen_cli.stderr import Stderr, Stream, event, printable, write_line

LINE_SECONDS = 10.0
SILENT_SECONDS = 2.0
"""A phase that counts nothing is shown with its time once it has taken this long."""
TICK_SECONDS = 0.5
_MIN_BAR = 8


class Notes:
    """Shows only notes, unless -q asks for none, and, like all its subclasses, the lines that libraries write (`Relay`)."""

    def __init__(self, stream: Stream, clock: Callable[[], float] = time.monotonic, *, notes: bool = True) -> None:
        self.stream, self.clock, self.notes = stream, clock, notes
        self.now = Snapshot()

    def note(self, text: str) -> None:
        if self.notes:
            self.write(f"batchgen: {text}")

    def update(self, now: Snapshot) -> None:
        new_phase = now.phase != self.now.phase
        self.now = now
        self.show(new_phase=new_phase)

    def show(self, *, new_phase: bool) -> None:
        """Called at every change, many times a second."""

    def tick(self) -> None:
        """Called in a thread of its own twice a second, also while nothing changes."""

    def write(self, line: str) -> None:
        write_line(printable(line), self.stream)

    def close(self) -> None: ...


def _counts(now: Snapshot) -> bool:
    """Whether the phase has something to count by which it is seen to move."""
    return now.phase == GENERATING or now.rows_passed is not None


class Lines(Notes):
    """Writes a line every `every` seconds. A phase that counts nothing has its first line after two seconds."""

    def __init__(
        self, stream: Stream, every: float = LINE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream, clock)
        self._every = every
        self._last = self._phase_began = clock()
        self._told = False
        """Whether this phase, which counts nothing, was named."""
        self._showing = threading.RLock()

    def show(self, *, new_phase: bool) -> None:
        with self._showing:
            if new_phase:
                self._phase_began, self._told = self.clock(), False
            elif self.clock() - self._last >= self._every:
                self._show_rows()

    def tick(self) -> None:
        with self._showing:
            now, time = self.now, self.clock()
            if _counts(now):
                self.show(new_phase=False)
            elif now.phase and not self._told and time - self._phase_began >= SILENT_SECONDS:
                self._last, self._told = time, True
                self.write(f"batchgen: {now.phase}")
            elif self._told and time - self._last >= self._every:
                self._last = time
                self.write(f"batchgen: {now.phase}, {rounded_duration(time - self._phase_began)} so far")

    def _show_rows(self) -> None:
        now = self.now
        self._last = self.clock()
        phase = "" if now.phase == GENERATING else f"{now.phase}, "
        count = now.rows_done if now.rows_passed is None else now.rows_passed
        of = "" if now.rows_total is None else f" of {now.rows_total:,} ({now.percent}%)"
        self.write(f"batchgen: {phase}{', '.join((counted(count, 'row') + of, *facts(self.now)))}")


class Events(Notes):
    """Writes every line as a JSON object (docs/status.md). `every` is the number of seconds between progress events; None for none."""

    def __init__(
        self,
        stream: Stream,
        every: float | None = LINE_SECONDS,
        *,
        notes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream, clock, notes=notes)
        self._every = every
        self._last = clock()

    def note(self, text: str) -> None:
        if self.notes:
            write_line(event("note", text=text), self.stream)

    def show(self, *, new_phase: bool) -> None:
        if self._every is None:
            return
        if new_phase:
            write_line(event("phase", phase=self.now.phase), self.stream)
        elif self.clock() - self._last >= self._every:
            self._last = self.clock()
            write_line(event("progress", **self.now.figures()), self.stream)

    def tick(self) -> None:
        if self.now.phase:
            self.show(new_phase=False)

    def write(self, line: str) -> None:
        write_line(event("log", text=line), self.stream)


class Bar(Notes):
    """Shows a bar of the finished rows, or of the rows read or written in a phase that only does that."""

    def __init__(self, stream: Stderr, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock)
        from tqdm import tqdm

        self._terminal = stream
        self._bar: Any = tqdm(file=stream, leave=False, position=0, bar_format=" ", ncols=stream.width())
        self._bar.sp = self._draw
        self._written = 0
        """Columns of the terminal's line that were written since it was wiped."""
        self._shown_at = 0.0
        self._phase_began = clock()
        self._lock = threading.RLock()  # a library's thread may write a line

    def show(self, *, new_phase: bool) -> None:
        if new_phase:
            self._phase_began = self.clock()
        if new_phase or self.clock() - self._shown_at >= REFRESH_SECONDS:
            self._refresh()

    def tick(self) -> None:
        if self.now.phase and not _counts(self.now):
            self._refresh()

    def write(self, line: str) -> None:
        with self._lock:
            self._wipe()
            super().write(line)
            self._bar.refresh()

    def close(self) -> None:
        self._bar.close()
        self._wipe()

    def _draw(self, line: str) -> None:
        """Writes the line over the one before it."""
        if self._written > self._terminal.width():
            self._wipe()
        self._terminal.write("\r" + line + " " * (self._written - len(line)))
        self._terminal.flush()
        self._written = max(len(line), self._written)

    def _wipe(self) -> None:
        width = self._terminal.width()
        if (wrapped := max(0, self._written - 1) // width) and _wraps_lines_anew():
            self._terminal.write(f"\x1b[{wrapped}A\r\x1b[J")
        # Blanks, because TERM=dumb knows no escapes. They remove a ^C, too.
        self._terminal.write("\r" + " " * (width - 1) + "\r")
        self._terminal.flush()
        self._written = 0

    def _refresh(self) -> None:
        with self._lock:
            self._shown_at = self.clock()
            bar, width = self._bar, self._terminal.width()
            bar.ncols = width
            now = self.now
            # The bar moves by tokens, of prompts too: those of unfinished rows are counted as parts of rows.
            # Its part is at most 1: tqdm draws an empty bar for more.
            bar.n, bar.total = now.share or 0.0, 1
            # Leaves four columns for the ^C^C that a terminal shows. A wrapped line would leave the bar on the line above.
            bar.bar_format = self._layout(width - 5)
            bar.refresh()

    def _layout(self, width: int) -> str:
        """Returns the line, with `{bar}` for the bar of tqdm. Parts that do not fit are left out whole, because half a number would be wrong."""
        now = self.now
        name, total = printable(now.phase), now.rows_total
        count = now.rows_done if now.rows_passed is None else now.rows_passed
        nothing_yet = now.rows_passed is None and count in (0, total)
        if nothing_yet and now.phase != GENERATING:
            seconds = self.clock() - self._phase_began
            waited = f" {rounded_duration(seconds)}" if seconds >= SILENT_SECONDS else ""
            return _literal(f"{name}…{waited}"[:width])
        if total is None:
            return _literal(_fitted_line(f"{name}: {counted(count, 'row')}", facts(self.now), width)[:width])
        head = f"{name}: {now.percent:3d}%"
        room = width - len(head)
        most = facts(self.now)
        tail = _fitted_line(
            f" {count:,}/{total:,}", most[:1], room
        )  # remaining time is more important than the bar, the bar more than the rest
        tail = _fitted_line(tail, most[1:], room - _MIN_BAR)
        left = room - len(tail)
        bar = f"|{{bar:{left - 2}}}|" if left >= _MIN_BAR else ""
        return _literal(head) + bar + _literal(tail if left >= 0 else "")


def _wraps_lines_anew() -> bool:
    """Whether this terminal wraps the lines that it shows when it becomes narrower, as most do. The others cut them."""
    return os.environ.get("TERM") not in (None, "dumb", "linux") and "XTERM_VERSION" not in os.environ


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _fitted_line(line: str, facts: list[str], width: int) -> str:
    for fact in facts:
        if len(line) + 2 + len(fact) <= width:
            line += f", {fact}"
    return line


class Relay(io.TextIOBase):
    """Replaces standard error while a job runs: passes what libraries write to `write`, in whole lines."""

    def __init__(self, write: Callable[[str], None], stream: Stderr) -> None:
        self._write: Callable[[str], None] | None = write
        self._stream = stream
        self._rest = ""
        self._writing = threading.RLock()

    def write(self, text: str, /) -> int:
        with self._writing:
            if self._write is None:  # a library still uses this object
                return 0 if sys.stderr in (None, self) else sys.stderr.write(text)
            *lines, rest = (self._rest + text).split("\n")
            self._rest = _last_frame(rest)
            for line in map(_last_frame, lines):
                if line.strip():
                    self._write(line)
        return len(text)

    def fileno(self) -> int:
        return self._stream.fileno()

    def end(self) -> None:
        """Stops replacing standard error."""
        if self._rest.strip():
            self.write("\n")
        self._write = None


def _last_frame(line: str) -> str:
    """Returns the visible part of a line that was overwritten with carriage returns."""
    return next((frame for frame in reversed(line.split("\r")) if frame), "")


class _NoteHandler(logging.Handler):
    """Shows log messages of the package as notes, for example that kernels are being compiled."""

    def __init__(self, shown: Notes) -> None:
        super().__init__()
        self._shown = shown

    def emit(self, record: logging.LogRecord) -> None:
        self._shown.note(record.getMessage())


@contextmanager
def progress_for(display: Display) -> Iterator[Notes]:
    """Yields the progress to show. Shows what libraries write, too, but their warnings and progress bars only with -v."""
    stream = Stderr()
    shown: Notes
    if display.as_json:
        silent = display.quiet or display.progress is False
        shown = Events(stream, None if silent else LINE_SECONDS, notes=not display.quiet)
    elif display.quiet or display.progress is False:
        shown = Notes(stream, notes=not display.quiet)
    elif stream.isatty():
        shown = Bar(stream)
    else:
        shown = Lines(stream)
    relay = Relay(shown.write, stream)
    notes = _NoteHandler(shown)
    logger = logging.getLogger("batchgen")
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    ended = threading.Event()
    ticker = threading.Thread(target=_tick, args=(shown, ended), name="batchgen-progress", daemon=True)
    ticker.start()
    try:
        with calm_libraries(verbose=display.verbose), redirect_stderr(relay):
            yield shown
    finally:
        ended.set()
        ticker.join()
        logger.removeHandler(notes)
        relay.end()
        shown.close()


def _tick(shown: Notes, ended: threading.Event) -> None:
    while not ended.wait(TICK_SECONDS):
        shown.tick()


@contextmanager
def calm_libraries(*, verbose: bool) -> Iterator[None]:
    """Keeps warnings and progress bars of libraries off standard error, unless -v asks for them."""
    if verbose:
        yield
        return
    # The libraries read these when they are imported, which happens inside this context.
    calm = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    added = {name: value for name, value in calm.items() if name not in os.environ}
    os.environ.update(added)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in added:
            os.environ.pop(name, None)
