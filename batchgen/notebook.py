"""Progress bars in a notebook: of a job, and of the prompts of one call."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchgen.progress import REFRESH_SECONDS, Progress, Silent, Snapshot, facts, percentage, speed


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel, whose output is shown on a page."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


@contextmanager
def shown_progress(progress: Progress | None) -> Iterator[Progress]:
    """Yields `progress` if it is given; otherwise a bar in a notebook, and elsewhere an object that shows nothing."""
    if progress is not None or not in_notebook():
        yield progress or Silent()
        return
    bar = JobBar()
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def prompt_bar(prompts: int, wanted: bool | None) -> Iterator[PromptBar]:
    """Yields the bar of a call, which shows nothing if it is not `wanted`. None means only in a notebook."""
    bar = PromptBar(prompts, shown=in_notebook() if wanted is None else wanted)
    try:
        yield bar
    finally:
        bar.close()


class _TqdmBar:
    """A bar of tqdm, between two texts. It is drawn a few times a second, and stays on the page at the end."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm warns that it shows text if ipywidgets is not installed
            from tqdm.auto import tqdm

        self._tqdm: Any = tqdm(total=1, bar_format=" ")
        self._drawn_at = 0.0

    def is_due(self) -> bool:
        """Whether the bar was drawn long enough ago."""
        return time.monotonic() - self._drawn_at >= REFRESH_SECONDS

    def draw(self, before: str, share: float, after: str) -> None:
        self._drawn_at = time.monotonic()
        texts = (text.replace("{", "{{").replace("}", "}}") for text in (before, after))
        self._tqdm.bar_format = "|{bar}| ".join(texts)
        self._tqdm.n = share
        self._tqdm.refresh()

    def write(self, text: str) -> None:
        """Writes a line beside the bar."""
        self._tqdm.write(text)

    def close(self) -> None:
        self._tqdm.close()


class JobBar:
    """The progress of a job in a notebook (`Progress`)."""

    def __init__(self) -> None:
        self._bar = _TqdmBar()
        self._now = Snapshot()

    def note(self, text: str) -> None:
        self._bar.write(text)

    def update(self, now: Snapshot) -> None:
        new_phase = now.phase != self._now.phase
        self._now = now
        if new_phase or self._bar.is_due():
            self._draw()

    def close(self) -> None:
        self._draw()
        self._bar.close()

    def _draw(self) -> None:
        now = self._now
        count = now.rows_done if now.rows_passed is None else now.rows_passed
        of = "" if now.rows_total is None else f"/{now.rows_total:,}"
        head = now.phase if now.rows_total is None else f"{now.phase}: {now.percent}%"
        self._bar.draw(head, now.share or 0.0, ", ".join([f"{count:,}{of} rows", *facts(now)]))


class PromptBar:
    """The progress of the prompts of one call."""

    def __init__(self, prompts: int, *, shown: bool) -> None:
        self._bar = _TqdmBar() if shown else None
        self._prompts = prompts
        self._began = time.monotonic()
        self._done = self._tokens = 0

    def update(self, done: int, tokens: int) -> None:
        """Sets the number of finished prompts, and of tokens generated since the beginning."""
        self._done, self._tokens = done, tokens
        if self._bar is not None and self._bar.is_due():
            self._draw(self._bar)

    def close(self) -> None:
        if self._bar is not None:
            self._draw(self._bar)
            self._bar.close()

    def _draw(self, bar: _TqdmBar) -> None:
        seconds = max(time.monotonic() - self._began, 1e-9)
        after = f"{self._done:,}/{self._prompts:,} prompts, {speed(self._tokens / seconds, self._done / seconds)}"
        bar.draw(f"{percentage(self._done, self._prompts)}%", self._done / max(1, self._prompts), after)
