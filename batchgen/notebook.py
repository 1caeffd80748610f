"""Progress bars in a notebook: of a job, and of the prompts of one call."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from batchgen.progress import REFRESH_SECONDS, Progress, Silent, Snapshot, facts


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
    with closing(NotebookBar()) as bar:
        yield bar


@contextmanager
def prompt_bar(prompts: int, wanted: bool | None) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that shows how many prompts of a call are done, and how many tokens it has generated. It shows nothing if it is not `wanted`;
    None means only in a notebook."""
    if not (in_notebook() if wanted is None else wanted):
        yield lambda done, tokens: None
        return
    began = time.monotonic()
    with closing(NotebookBar("prompts")) as bar:

        def update(done: int, tokens: int) -> None:
            seconds = max(time.monotonic() - began, 1e-9)
            bar.update(
                Snapshot(
                    rows_total=prompts,
                    rows_done=done,
                    completion_tokens_per_s=tokens / seconds,
                    rows_per_s=done / seconds,
                )
            )

        yield update


class NotebookBar:
    """The progress of a job or of a call in a notebook (`Progress`): a bar of tqdm, which stays on the page at the end."""

    def __init__(self, noun: str = "rows") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm warns that it shows text if ipywidgets is not installed
            from tqdm.auto import tqdm

        self._tqdm: Any = tqdm(total=1, bar_format=" ")
        self._noun = noun
        self._now = Snapshot()
        self._drawn_at = 0.0

    def note(self, text: str) -> None:
        self._tqdm.write(text)

    def update(self, now: Snapshot) -> None:
        due = now.phase != self._now.phase or time.monotonic() - self._drawn_at >= REFRESH_SECONDS
        self._now = now
        if due:
            self._draw()

    def close(self) -> None:
        self._draw()
        self._tqdm.close()

    def _draw(self) -> None:
        now, self._drawn_at = self._now, time.monotonic()
        count = now.rows_done if now.rows_passed is None else now.rows_passed
        of = "" if now.rows_total is None else f"/{now.rows_total:,}"
        head = ": ".join([*filter(None, [now.phase]), *([] if now.rows_total is None else [f"{now.percent}%"])])
        texts = head, ", ".join([f"{count:,}{of} {self._noun}", *facts(now)])
        self._tqdm.bar_format = "|{bar}| ".join(text.replace("{", "{{").replace("}", "}}") for text in texts)
        self._tqdm.n = now.share or 0.0
        self._tqdm.refresh()
