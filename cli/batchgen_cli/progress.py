"""What is seen while a job runs: a bar on a terminal, a line now and then in a log. All on standard error."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from batchgen_cli.failures import printable

if TYPE_CHECKING:
    from batchgen.progress import Progress

REFRESH_SECONDS = 0.2
LINE_SECONDS = 10.0


class Notes:
    """Shows notes and nothing else."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.generated = 0
        self._started = 0.0

    def note(self, text: str) -> None:
        self.write(f"batchgen: {printable(text)}")

    def phase(self, name: str) -> None:
        if name == "generating" and not self._started:
            self._started = time.monotonic()

    def rows(self, done: int, failed: int, total: int | None) -> None: ...

    def tokens(self, prompt: int, completion: int) -> None:
        self.generated = completion

    def passed(self, rows: int) -> None: ...

    def write(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()

    def close(self) -> None: ...

    def tokens_per_second(self) -> float:
        elapsed = time.monotonic() - self._started if self._started else 0.0
        return self.generated / elapsed if elapsed else 0.0


class Nothing(Notes):
    """Shows not even notes (-q)."""

    def note(self, text: str) -> None: ...


class Lines(Notes):
    """A plain line every `every` seconds, and one at each new phase that takes its time."""

    def __init__(self, stream: TextIO, every: float = LINE_SECONDS) -> None:
        super().__init__(stream)
        self._every = every
        self._last = time.monotonic()
        self._phase = ""

    def phase(self, name: str) -> None:
        super().phase(name)
        if name != self._phase and name.startswith("loading model"):
            self.write(f"batchgen: {name}")
        self._phase = name

    def rows(self, done: int, failed: int, total: int | None) -> None:
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        of = "" if total is None else f" of {total:,} ({done / max(total, 1):.0%})"
        bad = f", {failed:,} failed" if failed else ""
        self.write(
            f"batchgen: {done:,} rows{of}{bad}, {self.tokens_per_second():,.0f} tokens/s{self._remaining(done, total, now)}"
        )

    def _remaining(self, done: int, total: int | None, now: float) -> str:
        if total is None or not done or not self._started:
            return ""
        seconds = (total - done) * (now - self._started) / done
        return f", {seconds:,.0f} s left" if seconds < 120 else f", {seconds / 60:,.0f} min left"


class Bar(Notes):
    """A bar of rows, with tokens per second and what is left."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        from tqdm import tqdm

        self._bar: Any = tqdm(file=stream, unit=" rows", dynamic_ncols=True, leave=False, mininterval=REFRESH_SECONDS)
        self._drawn = 0.0

    def phase(self, name: str) -> None:
        if name == "generating" and not self._started:
            self._bar.reset()  # its rate and what is left are those of generating, not of loading
        super().phase(name)
        self._bar.set_description_str(name)

    def rows(self, done: int, failed: int, total: int | None) -> None:
        self._bar.n, self._bar.total = done, total
        now = time.monotonic()
        if now - self._drawn < REFRESH_SECONDS:
            return
        self._drawn = now
        bad = f", {failed:,} failed" if failed else ""
        self._bar.set_postfix_str(f"{self.tokens_per_second():,.0f} tokens/s{bad}", refresh=True)

    def write(self, line: str) -> None:
        self._bar.clear()
        super().write(line)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


@contextmanager
def progress_for(wanted: bool | None, *, quiet: bool) -> Iterator[Progress]:
    """The progress to show: `wanted` is --progress, --no-progress or neither."""
    stream = sys.stderr
    shown: Notes
    if quiet:
        shown = Nothing(stream)
    elif wanted is False:
        shown = Notes(stream)
    elif stream.isatty():
        shown = Bar(stream)
    else:
        shown = Lines(stream)
    try:
        yield shown
    finally:
        shown.close()


@contextmanager
def calm_libraries(*, verbose: bool) -> Iterator[None]:
    """Keeps the advice and bars of libraries off standard error, unless -v asks for them."""
    if verbose:
        yield
        return
    # Read when the libraries are imported, which happens inside.
    calm = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    added = {name: value for name, value in calm.items() if name not in os.environ}
    os.environ.update(added)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in added:
            os.environ.pop(name, None)
