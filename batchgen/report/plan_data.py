"""What the report of a plan shows: the prefix tree before anything runs, and the memory and the work that a run would need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.report.page import ReportPage


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
