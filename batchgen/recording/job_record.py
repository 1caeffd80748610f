"""The record of a job, `report.json` in its folder: its runs over time, its prefix tree, and sums over the rows of its output. All are of bounded size.

Only the report depends on it. A record that is missing or damaged counts as empty, and one that cannot be written is not written.
"""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.prefix import PrefixOutline
from batchgen.process.machine import memory_bytes
from batchgen.stats import EngineStats

FILE = "report.json"
FILES = (FILE, f"{FILE}.new")
SCHEMA = "batchgen.record/1"
MAX_RUNS = 64
"""Runs that are kept; the newest."""
MAX_POINTS = 6400
"""Points of all runs together. When there are more, every second one of each run is dropped."""
MAX_POINTS_OF_A_RUN = 400
"""When there are so many points, every second one is dropped, and from then on they are twice as far apart."""
FIRST_INTERVAL = 0.05
"""Seconds between two points at first."""
SAVE_SECONDS = 10.0
"""Seconds between two writes of the record to the job's folder, while the job runs."""
COLUMNS = ("seconds", "completion_tokens", "prefill_tokens", "scored_tokens", "memory_bytes", "kv_bytes")
TEXT_CHARACTERS = 300_000
"""All texts of a tree together, about. Nodes that save more tokens get their text first."""
MAX_TEXT = 4000
MIN_TEXT = 120


@dataclass(slots=True)
class JobRecord:
    runs: list[dict[str, Any]] = field(default_factory=list)
    """What a `RunRecorder` made of each run that generated something, in the order in which they began."""
    tree: dict[str, Any] | None = None
    """`tree_record` of the run that planned the most rows."""
    rows: dict[str, Any] | None = None
    """`RowFigures.as_dict` of the output; None until it is finished."""

    @classmethod
    def load(cls, folder: Path) -> JobRecord:
        """Returns the record in a folder; an empty one if there is none."""
        try:
            value = json.loads((folder / FILE).read_bytes())
            if value.pop("schema") == SCHEMA:
                return cls(**value)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
        return cls()

    def keep(self, run: Mapping[str, Any] | None, tree: Mapping[str, Any] | None) -> None:
        """Takes the record of a run, which replaces an earlier one of the same run, and its tree if that has more rows than the present one."""
        if run is not None:
            same = (run["label"], run["started"])
            others = [r for r in self.runs if (r["label"], r["started"]) != same]
            self.runs = [*others, dict(run)][-MAX_RUNS:]
            while sum(len(r["seconds"]) for r in self.runs) > MAX_POINTS:
                self.runs = [_thinned(r) for r in self.runs]
        if tree is not None and (self.tree is None or tree["rows"] >= self.tree["rows"]):
            self.tree = dict(tree)

    def save(self, folder: Path) -> None:
        """Writes the record. Ignores errors: a full disk is reported by the files that the job needs."""
        value = {"schema": SCHEMA, "runs": self.runs, "tree": self.tree, "rows": self.rows}
        new = folder / FILES[1]
        with suppress(OSError):
            new.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8", errors="backslashreplace")
            new.replace(folder / FILE)


def _thinned(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run with every second point, the first and the last among them."""
    count = len(run["seconds"])
    places = sorted({*range(0, count, 2), max(0, count - 1)}) if count > 2 else [0]
    return {**run, **{name: [run[name][i] for i in places] for name in COLUMNS}}


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
        max_points: int = MAX_POINTS_OF_A_RUN,
    ) -> None:
        """`label` names the run beside others of the same job: `2/4` for a shard. `keep` takes the record of the run and that of its tree."""
        self._label, self._clock, self._memory, self._max_points = label, clock, memory, max_points
        self._tree, self._decode, self._keep = tree, decode, keep
        self._began = clock()
        self._interval = FIRST_INTERVAL
        self._next = 0.0
        self._next_save = self._began + 1.0
        self._points: list[tuple[float, ...]] = []
        self._started = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        self._kept_tree: PrefixOutline | None = None

    def see(self, stats: EngineStats) -> None:
        """Must be called between steps, with the engine's figures."""
        now = self._clock()
        if now - self._began >= self._next:
            self._look(stats)
        if now >= self._next_save:
            self._save()
            self._next_save = now + SAVE_SECONDS

    def end(self, stats: EngineStats) -> None:
        """Must be called at the end of a run that has an engine."""
        self._look(stats)
        self._save()

    def _look(self, stats: EngineStats) -> None:
        """Adds a point."""
        seconds = self._clock() - self._began
        self._points.append(
            (
                round(seconds, 3),
                stats.completion_tokens,
                stats.prefill_tokens,
                stats.scored_tokens,
                self._memory() + stats.process_bytes_peak,
                stats.kv_bytes,
            )
        )
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


def tree_record(outline: PrefixOutline, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Returns the outline as JSON: sums, and a list for each field of a node. `decode` turns token ids to text."""
    nodes = outline.nodes
    intervals = [node.interval for node in nodes]
    texts = [""] * len(nodes)
    left = TEXT_CHARACTERS
    for place in sorted(range(len(nodes)), key=lambda i: -intervals[i].saved_tokens):
        tokens = nodes[place].text_tokens
        limit = MAX_TEXT if left > 0 else MIN_TEXT
        text = decode(tokens[:limit].tolist())
        texts[place] = text[:limit]
        if len(text) > limit or intervals[place].tokens > len(tokens[:limit]):
            texts[place] += "…"
        left -= len(texts[place])
    return {
        "rows": outline.rows,
        "prompt_tokens": outline.prompt_tokens,
        "saved_tokens": outline.saved_tokens,
        "node_count": outline.node_count,
        "lone_rows": outline.lone_rows,
        "parents": [node.parent for node in nodes],
        "node_rows": [node.rows for node in intervals],
        "ending_rows": [node.ending_rows for node in intervals],
        "tokens": [node.tokens for node in intervals],
        "saved": [node.saved_tokens for node in intervals],
        "nodes_below": [node.nodes_below for node in intervals],
        "saved_below": [node.saved_below for node in intervals],
        "texts": texts,
    }
