"""The page of a report: HTML with its data, its style and its program inside. It loads nothing, and its security policy forbids it to.

The tables are in the HTML, so that the page can be read without charts: by a screen reader, or where JavaScript is off. plotly draws the
charts from the data. The page contains plotly's code, compressed, with only the kinds of charts that a report needs. A browser
compiles it in a fifth of the time that the whole plotly takes.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from batchgen.errors import OutputError, UsageError
from batchgen.jobs.files.disk import check_file, write_whole
from batchgen.report.sections import body
from batchgen.version import __version__

POLICY = "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""The content security policy: the browser refuses every request of the page."""
_FRAME_HEIGHT = 900


@dataclass(frozen=True)
class ReportPage:
    """A report. In a notebook it displays itself."""

    data: Mapping[str, Any]

    @property
    def missing(self) -> str:
        """What the report cannot show, in one line; empty if nothing is missing."""
        return str(self.data["missing"])

    @cached_property
    def html(self) -> str:
        """The page."""
        return page(self.data)

    def save(self, file: str | Path) -> None:
        """Writes the page to a file. Raises `UsageError` for a name that does not end in .html, `OutputError` if it cannot be written."""
        check_report_file(str(file))
        try:
            write_whole(file, self.html)
        except OSError as e:
            raise OutputError(f"the report {file} cannot be written: {e.strerror}", "name another file") from e

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" title="{html.escape(_title(self.data))}" width="100%" '
            f'height="{_FRAME_HEIGHT}" style="border: 0; color-scheme: light dark"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<{_title(self.data)}: display it in a notebook, or .save('report.html')>"


def report_plan(title: str, plan: Mapping[str, Any], tree: Mapping[str, Any] | None) -> ReportPage:
    """Returns the report of a plan. `plan` is `PlanReport.as_dict`, `tree` the record of its prefix tree; None if sharing is off."""
    return ReportPage(
        {
            "kind": "plan",
            "title": title,
            "state": "planned",
            "missing": "" if tree else "no prefix tree (sharing is off, or there are no prompts)",
            "plan": {name: value for name, value in plan.items() if name != "tree"},
            "tree": tree,
            "memory": _memory_bars(plan),
        }
    )


def _memory_bars(plan: Mapping[str, Any]) -> Sequence[tuple[str, int]]:
    """Returns the memory that a run needs, in bytes, as far as it is known."""
    bars = [
        ("weights", plan["weight_bytes"]),
        ("KV of the longest row", plan["kv_bytes_least"]),
        ("KV of all rows, shared", plan["kv_bytes_shared"]),
        ("KV of all rows, unshared", plan["kv_bytes_unshared"]),
    ]
    return [(name, count) for name, count in bars if count]


def check_report_file(file: str, option: str = "") -> None:
    """Raises `UsageError` unless a report can be written to `file`. `option` is put before its name in messages."""
    name = f"{option} {file}".strip()
    if Path(file).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{name} is not the name of a page", "name a file that ends in .html")
    check_file(option, file)


def page(data: Mapping[str, Any]) -> str:
    """Returns the page of a report's data."""
    style, program = _asset("page.css"), _asset("page.js")
    # In a script element, only `<` can end or hide the data.
    plain = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="batchgen {__version__}">
<title>{html.escape(_title(data))}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
{body(data)}
<script type="application/json" id="data">{plain}</script>
<script type="text/plain" id="plotly">{_packed_plotly()}</script>
<script>
{program}
</script>
</body>
</html>
"""


def _title(data: Mapping[str, Any]) -> str:
    return f"{data['title']}: {'plan' if data['kind'] == 'plan' else 'report'}"


def _asset(name: str) -> str:
    return (files("batchgen.report") / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _packed_plotly() -> str:
    """plotly.js as gzip, in base64."""
    return base64.b64encode(gzip.compress(_asset("plotly/plotly.min.js").encode(), 9, mtime=0)).decode()
