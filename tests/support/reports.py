"""The data of a small report, and a parser for its page."""

import json
from html.parser import HTMLParser
from typing import Any

from batchgen.recording.row_figures import RowFigures
from batchgen.report.job_data import run_over_time, time_bars
from batchgen.result import Result
from batchgen.stats import EngineStats, RunFigures, Setting, figures


class Parsed(HTMLParser):
    """The parts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[tuple[str, str, str]] = []
        """Attributes that may name another resource: tag, name and value."""
        self.policies: list[tuple[str, str]] = []
        self.headings: list[str] = []
        self.captions: list[str] = []
        self.cells: list[str] = []
        self.tiles: list[str] = []
        """The figures at the top, each after its name."""
        self.labels: dict[str, str] = {}
        """The words of each chart, by its id."""
        self.title = self.text = self.language = ""
        self.data: Any = None
        self._texts = dict.fromkeys(("h1", "h2", "h3", "h4"), self.headings) | dict.fromkeys(("dt", "dd"), self.tiles)
        self._texts |= {"caption": self.captions, "td": self.cells}
        self._open: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        for name in (
            "src",
            "href",
            "srcset",
            "data",
            "action",
            "poster",
            "background",
            "ping",
            "formaction",
            "xlink:href",
        ):
            if name in values:
                self.references.append((tag, name, values[name] or ""))
        if tag == "html":
            self.language = values.get("lang") or ""
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policies.append((tag, values["content"] or ""))
        if values.get("role") == "img":
            self.labels[values["id"] or ""] = values["aria-label"] or ""
        if tag in self._texts:
            self._texts[tag].append("")
        if tag not in ("meta", "link", "br", "img", "hr", "input"):
            self._open.append((tag, values))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1][0] == tag, (tag, self._open)
        self._open.pop()

    def handle_data(self, data: str) -> None:
        tag, values = self._open[-1] if self._open else ("", {})
        if tag == "script" and values.get("id") == "data":
            self.data = json.loads(data)
        elif tag == "title":
            self.title += data
        elif tag in self._texts:
            self._texts[tag][-1] += data
        elif tag not in ("script", "style"):
            self.text += data


def parsed(page: str) -> Parsed:
    """Parses a page. Fails if its elements are not nested."""
    found = Parsed()
    found.feed(page)
    assert found._open == []
    return found


def job_page_data(title: str = "answers.jsonl", text: str = "What they share") -> dict[str, Any]:
    """The data of a small job: three rows that stopped and one that failed."""
    run, rows = RunFigures(), RowFigures()
    results = [
        Result(row=i, text=text, finish_reason="stop", prompt_tokens=5, completion_tokens=10) for i in range(3)
    ] + [Result(row=3, text=None, finish_reason="error", error_type="prompt_too_long", error_message="too long")]
    for result in results:
        run.new.add(result)
        rows.add(result, lambda result=result: {"id": result.row, "text": result.text})
    run.seconds = {"load": 3.0, "plan": 0.5, "generate": 2.0, "write": 0.25}
    engine = EngineStats(prefill_tokens=14, completion_tokens=30, forward_seconds=1.5, kv_bytes_peak=4096, steps=10)
    stats = figures(run, engine, Setting(model="models/tiny", dtype="float32", device="cpu"))
    stats["job"]["seconds"]["total"] = 6.0
    over_time = {
        "label": "", "started": "2026-11-22T09:00:00+00:00", "seconds": [1.0, 2.0, 3.0], "completion_tokens": [0, 15, 30],
        "prefill_tokens": [0, 14, 14], "scored_tokens": [0, 0, 0], "memory_bytes": [1000, 2000, 3000], "kv_bytes": [0, 4096, 2048],
    }  # fmt: skip
    tree = {
        "rows": 4, "prompt_tokens": 20, "saved_tokens": 6, "node_count": 1, "lone_rows": 0, "parents": [-1], "node_rows": [4],
        "ending_rows": [4], "tokens": [2], "saved": [6], "nodes_below": [0], "saved_below": [0], "texts": [text],
    }  # fmt: skip
    return {
        "kind": "job",
        "title": title,
        "state": "finished",
        "missing": "",
        "status": {"rows_total": 4, "rows_done": 4, "rows_failed": 1, "shards": None},
        "stats": stats,
        "tree": tree,
        "runs": [run_over_time(over_time)],
        "rows": rows.as_dict(),
        "time": time_bars(stats["job"]["seconds"]),
    }
