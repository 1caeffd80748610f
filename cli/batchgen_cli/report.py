"""The summary at the end of a run: a table of its figures on standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from batchgen_cli.failures import printable

if TYPE_CHECKING:
    from batchgen.job import JobReport


LOG_WIDTH = 140
"""Where standard error is no terminal: a line is a line."""


def size(count: float) -> str:
    """Bytes as people read them: 512 B, 3.1 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def show_report(report: JobReport) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    output = "standard output" if report.output == "-" else report.output
    if report.already_finished:
        failed = report.stats["job"]["rows_failed"]
        also = f", {failed:,} of them failed" if failed else ""
        rows = report.stats["job"]["rows"]
        sys.stderr.write(f"batchgen: {printable(output)} is complete ({rows:,} rows{also}): nothing to do\n")
        return
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary(report):
        table.add_row(name, Text(printable(value)))
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else LOG_WIDTH)
    console.print(table)
    if report.failures:
        sys.stderr.write("the first rows that failed:\n")
        sys.stderr.writelines(f"  {printable(line)}\n" for line in report.failures)


def summary(report: JobReport) -> list[tuple[str, str]]:
    """The lines of the table; where nothing was generated, what that would have cost is left out."""
    s = report.stats
    lines = [
        ("output", "standard output" if report.output == "-" else report.output),
        ("rows", _rows(s)),
        ("prompts", "through the chat template" if report.chat else "raw text"),
    ]
    if s["steps"]:
        lines += _generation(s)
    seconds = s["seconds"]
    parts = f"load {seconds['load']:.1f}, plan {seconds['plan']:.1f}, generate {seconds['generate']:.1f}"
    lines += [
        (
            "time",
            f"{seconds['total']:.1f} s: {parts} (in the model {seconds['forward']:.1f}), write {seconds['write']:.1f}",
        ),
        ("memory", f"{size(s['memory_bytes_peak'])} at the most"),
        ("model", _model(s)),
    ]
    return lines


def _generation(s: dict[str, Any]) -> list[tuple[str, str]]:
    preempted = f", {s['preemptions']:,} preemptions" if s["preemptions"] else ""
    sequences = f"{s['mean_decode_batch']:,.1f} sequences and " if s["mean_decode_batch"] else ""
    unshared = f" (unshared: {size(s['kv_bytes_unshared'])})" if s["kv_bytes_unshared"] else ""
    rows = f"{s['rows_per_s']:,.1f} rows/s"
    # Labels and scores are no completions, and what they are paid for is rows.
    tokens, speed = [], f"{rows}, {s['total_tokens_per_s']:,.0f} prompt tokens/s"
    if s["completion_tokens"]:
        tokens.append(("completion tokens", f"{s['completion_tokens']:,}"))
        whole = f"{s['total_tokens_per_s']:,.0f} with the prompts'"
        speed = f"{s['completion_tokens_per_s']:,.0f} completion tokens/s, {whole}, {rows}"
    if s["scored_tokens"]:
        tokens.append(("scored tokens", f"{s['scored_tokens']:,} of choices or completions were run"))
    return [
        (
            "prompt tokens",
            f"{s['prompt_tokens']:,}, of which {s['prefill_tokens']:,} were run (the least possible: "
            f"{s['prefill_tokens_min']:,}): {s['shared_fraction']:.1%} shared",
        ),
        *tokens,
        ("speed", speed),
        (
            "steps",
            f"{s['steps']:,}, on average {sequences}{s['attention_parts_per_step']:,.1f} parts of attention{preempted}",
        ),
        ("prefix tree", f"{s['prefix_nodes']:,} nodes, {s['groups']:,} groups"),
        ("KV memory", f"{size(s['kv_bytes_peak'])} at the most{unshared}"),
    ]


def _rows(s: dict[str, Any]) -> str:
    parts = [f"{s['rows_ok']:,} done"]
    if s["rows_failed"]:
        parts.append(f"{s['rows_failed']:,} failed")
    if s["rows_resumed"]:
        parts.append(f"{s['rows_resumed']:,} kept from an earlier run")
    return ", ".join(parts)


def _model(s: dict[str, Any]) -> str:
    where = f" on {s['device']}" if s["device"] else ""
    how = f", attention {s['attention']}" if s["attention"] else ""
    return f"{s['model']}, {s['dtype']}{where}{how}"
