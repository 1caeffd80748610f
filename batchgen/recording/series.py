"""The figures of a run over time: tokens, rows and memory, as sums so far, at a bounded number of moments."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchgen.prefix import PrefixOutline
from batchgen.recording.tree import tree_record
from batchgen.stats import EngineStats, memory_bytes

MAX_POINTS = 400
"""When there are so many points, every second one is dropped, and from then on they are twice as far apart."""
FIRST_INTERVAL = 0.05
"""Seconds between two points at first."""
SAVE_SECONDS = 10.0
"""Seconds between two writes of the record to the job's folder, while the job runs."""
COLUMNS = (
    "seconds", "completion_tokens", "prefill_tokens", "scored_tokens", "rows_done", "memory_bytes", "kv_bytes",
)  # fmt: skip


class RunRecorder:
    """Looks at the figures of a run now and then, and hands its record to the job every few seconds."""

    def __init__(
        self,
        label: str,
        *,
        tree: Callable[[], PrefixOutline | None],
        decode: Callable[[Sequence[int]], str],
        keep: Callable[[Mapping[str, Any] | None, Mapping[str, Any] | None], None],
        clock: Callable[[], float] = time.perf_counter,
        memory: Callable[[], int] = memory_bytes,
        max_points: int = MAX_POINTS,
    ) -> None:
        """`label` names the run beside others of the same job: `2/4` for a shard. `keep` takes the record of the run and that of its tree."""
        self._label, self._clock, self._memory, self._max_points = label, clock, memory, max_points
        self._tree, self._decode, self._keep = tree, decode, keep
        self._began = clock()
        self._interval = FIRST_INTERVAL
        self._next = 0.0
        self._next_save = self._began + 1.0
        self._points: list[tuple[float, ...]] = []
        self._last_is_early = False
        self._started = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        self._kept_tree: PrefixOutline | None = None

    def see(self, stats: EngineStats, rows_done: int, *, always: bool = False) -> None:
        """Must be called between steps, with the engine's figures. `always`: this moment is kept, at least until the next one."""
        now = self._clock()
        due = now - self._began >= self._next
        if always or due:
            self._look(stats, rows_done, early=not due)
        if now >= self._next_save:
            self._save()
            self._next_save = now + SAVE_SECONDS

    def end(self) -> None:
        """Must be called at the end of the run. If nothing was generated, nothing is recorded."""
        if self._points:
            self._save()

    def _look(self, stats: EngineStats, rows_done: int, *, early: bool) -> None:
        """Adds a point. An early one gives its place to the next: otherwise the ends of many windows would crowd out the start of the run."""
        seconds = self._clock() - self._began
        if self._last_is_early:
            self._points.pop()
        self._last_is_early = early
        self._points.append(
            (
                round(seconds, 3),
                stats.completion_tokens,
                stats.prefill_tokens,
                stats.scored_tokens,
                rows_done,
                self._memory() + stats.process_bytes_peak,
                stats.kv_bytes,
            )
        )
        if early:
            return
        if len(self._points) >= self._max_points:
            del self._points[1:-1:2]
            self._interval *= 2
        self._next = seconds + self._interval

    def _save(self) -> None:
        tree = self._tree()
        changed = None if tree is None or tree is self._kept_tree else tree_record(tree, self._decode)
        self._kept_tree = tree
        run = dict(zip(COLUMNS, map(list, zip(*self._points, strict=True)), strict=True))
        self._keep({"label": self._label, "started": self._started, **run}, changed)
