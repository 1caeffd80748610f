"""The summary at the end of a run: a table of its figures on standard error."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from batchgen.recording.agreement import confusion_table, other_spellings
from batchgen.stats import counted
from batchgen.stats import size_text as size
from batchgen_cli.stderr import Stderr, event, printable, write_line

if TYPE_CHECKING:
    from batchgen.assembly import JobReport


CONFUSION_LABELS = 8
CONFUSION_WIDTH = 20
"""A table shows which of at most 8 labels are taken for which, if no label has more characters than this."""
LOG_WIDTH = 140
"""Width of the summary if standard error is not a terminal."""
_EVENT = ("output", "exit_code", "already_finished", "shard", "pushed", "chat", "failures", "stats")
"""The parts of a report that the event `summary` has."""


def show_summary(report: JobReport, *, as_json: bool = False) -> None:
    if as_json:
        write_line(event("summary", **{name: getattr(report, name) for name in _EVENT}))
        return
    if report.already_finished:
        job = report.stats["job"]
        also = f", {job['rows_failed']:,} of them failed" if job["rows_failed"] else ""
        write_line(
            printable(f"batchgen: {_place(report)} is complete ({counted(job['rows'], 'row')}{also}): nothing to do")
        )
        if report.stats.get("expect"):
            _show_table(_expected(report.stats["expect"]))
        return
    _show_table(summary(report))
    if report.failures:
        write_line("the first rows that failed:")
        for line in report.failures:
            write_line(f"  {printable(line)}")


def _show_table(lines: list[tuple[str, str]]) -> None:
    """Names in bold on a terminal, values folded to its width."""
    from rich import box  # imported for a summary alone: a start need not wait for it
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(name, Text(printable(value)))
    stream = Stderr()
    drawn = io.StringIO()
    width = stream.width() if stream.isatty() else LOG_WIDTH
    console = Console(file=drawn, force_terminal=stream.isatty(), highlight=False, width=width)
    console.print(table)
    for line in drawn.getvalue().splitlines():
        write_line(re.sub(r"\s+(\x1b\[0m)?$", r"\1", line), stream)


def _place(report: JobReport) -> str:
    if report.shard:
        return f"shard {report.shard} of {report.output}"
    return "standard output" if report.output == "-" else report.output


def summary(report: JobReport) -> list[tuple[str, str]]:
    """Returns the lines of the table: names and values. If nothing was generated, the figures of generating are left out."""
    s = report.stats
    if "shards" in s:
        return _merged(report)
    lines = [
        ("output", _place(report)),
        *([("pushed", report.pushed)] if report.pushed else []),
        ("rows", _rows_line(s)),
        *_ended_line(s),
        ("prompts", "through the chat template" if report.chat else "raw text"),
    ]
    if s["sampling"] and s["steps"]:
        lines.append(("sampling", _sampling_line(s["sampling"])))
    lines += _expected(s.get("expect"))
    if s["steps"]:
        lines += _generation(s)
    seconds = s["seconds"]
    parts = f"load {seconds['load']:.1f}, plan {seconds['plan']:.1f}, generate {seconds['generate']:.1f}"
    parts += f" (in the model {seconds['forward']:.1f}), write {seconds['write']:.1f}"
    return [
        *lines,
        ("time", f"{seconds['total']:.1f} s: {parts}"),
        ("memory", f"{size(s['memory_bytes_peak'])} at most{_read_again(s)}"),
        ("model", _model(s)),
        *_quantization(s["quantization"]),
    ]


def _read_again(s: dict[str, Any]) -> str:
    read = s.get("weight_bytes_read")  # which figures of an older version lack
    return f"; {size(read)} of weights were read again in {counted(s['steps'], 'step')}" if read else ""


def _merged(report: JobReport) -> list[tuple[str, str]]:
    """Returns the lines of a merged job: the sums over all of its shards."""
    s = report.stats
    job, shards = s["job"], s["shards"]
    failed = f", {job['rows_failed']:,} failed" if job["rows_failed"] else ""
    tokens = f"{job['prompt_tokens']:,}, of which {job['prefill_tokens']:,} were run"
    seconds = job["seconds"]
    lines = [
        ("output", _place(report)),
        ("rows", f"{job['rows_ok']:,} done{failed}, by {counted(len(shards), 'shard')}"),
        *_ended_line(job),
        *_expected(s.get("expect")),
        ("prompt tokens", tokens),
        *_images(job),
    ]
    if job["completion_tokens"]:
        lines.append(("completion tokens", f"{job['completion_tokens']:,}"))
    return [
        *lines,
        ("time", f"{seconds['total']:,.1f} s of all machines together (in the model {seconds['forward']:,.1f})"),
        ("memory", f"{size(job['memory_bytes_peak'])} at most, of one process"),
        ("model", _model(s)),
    ]


def _quantization(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Returns the effect of `--quantize`, if it was given and a model was loaded."""
    if found is None:
        return []
    made = f"{counted(found['layers'], 'linear layer')}, {found['weights']:.0%} of the weights; all take {size(found['weight_bytes'])}"
    if found["mean_kl"] is not None:
        made += (
            f"; on {counted(found['tokens'], 'token')} of {counted(found['rows'], 'row')}, beside the unquantized model: mean KL divergence "
            f"{found['mean_kl']:.4f} nats, {found['equal_tokens']:.1%} of the likeliest tokens the same"
        )
    return [(found["method"], made)]


def _generation(s: dict[str, Any]) -> list[tuple[str, str]]:
    preempted = f", {counted(s['preemptions'], 'preemption')}" if s["preemptions"] else ""
    sequences = f"{s['mean_decode_batch']:,.1f} sequences and " if s["mean_decode_batch"] else ""
    unshared = f" (unshared: {size(s['kv_bytes_unshared'])})" if s["kv_bytes_unshared"] else ""
    rows = f"{s['rows_per_s']:,.1f} rows/s"
    # Labels and scores are not completions; their speed is given in rows.
    tokens, speed = [], f"{rows}, {s['total_tokens_per_s']:,.0f} prompt tokens/s"
    if s["completion_tokens"]:
        tokens.append(("completion tokens", f"{s['completion_tokens']:,}"))
        whole = f"{s['total_tokens_per_s']:,.0f} with the prompts'"
        speed = f"{s['completion_tokens_per_s']:,.0f} completion tokens/s, {whole}, {rows}"
    if s["scored_tokens"]:
        tokens.append(("scored tokens", f"{s['scored_tokens']:,} of labels or completions"))
    shared = f"(minimum: {s['prefill_tokens_min']:,}): {max(0, s['shared_fraction']):.1%} shared"
    on_average = f"{sequences}{s['attention_parts_per_step']:,.1f} parts of attention"
    return [
        ("prompt tokens", f"{s['prompt_tokens']:,}, of which {s['prefill_tokens']:,} were run {shared}"),
        *_images(s),
        *tokens,
        ("speed", speed),
        ("steps", f"{s['steps']:,}, on average {on_average}{preempted}"),
        *_drafts(s),
        ("prefix tree", f"{counted(s['prefix_nodes'], 'node')}, {counted(s['groups'], 'group')}"),
        ("KV memory", f"{size(s['kv_bytes_peak'])} at most{unshared}"),
        *([("state memory", f"{size(s['state_bytes_peak'])} at most")] if s["state_bytes_peak"] else []),
    ]


def _drafts(s: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns how many guesses of next tokens came true, by source; nothing if there were none."""
    if not s["drafted_tokens"]:
        return []
    names = {"grammar": "forced by a grammar", "outputs": "as in other outputs", "prompt": "as in the prompt"}
    drafts = {names[source]: of for source, of in s["drafts"].items() if of["drafted"]}
    sources = ", ".join(f"{of['accepted']:,} of {of['drafted']:,} {name}" for name, of in drafts.items())
    return [("drafts", f"{s['accepted_tokens']:,} of {counted(s['drafted_tokens'], 'token')} came true: {sources}")]


def _expected(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Returns how the rows agree with the column of `--expect`: accuracy, calibration, and who is taken for whom."""
    if found is None:
        return []
    others = [(found["rows_failed"], "failed"), (found["rows_without"], f"without a value in {found['column']!r}")]
    more = "".join(f"; {count:,} {what}" for count, what in others if count)
    share = f" ({found['accuracy']:.1%})" if found["rows"] else ""
    right = f"{found['rows_right']:,} of {counted(found['rows'], 'row')}"
    lines = [("accuracy", f"{right} as in {found['column']!r}{share}{more}")]
    calibration = found["calibration"]
    if calibration is not None:
        means = f"mean probability {calibration['mean_probability']:.1%}, right {calibration['accuracy']:.1%}"
        lines.append(("calibration", f"{means}: expected calibration error {calibration['error']:.1%}"))
    if spellings := other_spellings(found):
        shown = [f"{one!r} for {other!r} ({counted(rows, 'row')})" for (one, other), rows in spellings.items()]
        more = f", and {len(shown) - CONFUSION_LABELS:,} more" if len(shown) > CONFUSION_LABELS else ""
        has = f"{found['column']!r} has {', '.join(shown[:CONFUSION_LABELS])}{more}"
        lines.append(("spelling", f"{has}: such rows count as wrong"))
    return lines + [("confusion" if place == 0 else "", line) for place, line in enumerate(_confusion(found))]


def _confusion(found: dict[str, Any]) -> list[str]:
    """Returns the lines of a table for a few short labels, else the most frequent mistakes; nothing if all rows are right."""
    if found["rows_right"] == found["rows"]:
        return []
    table = confusion_table(found, CONFUSION_LABELS)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if not table or max(widths) > CONFUSION_WIDTH:
        wrong = [pair for pair in found["confusion"] if pair["expected"] != pair["given"]]
        return [
            f"expected {pair['expected']!r}, given {pair['given']!r}: {counted(pair['rows'], 'row')}"
            for pair in wrong[:CONFUSION_LABELS]
        ]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]


def _images(s: dict[str, Any]) -> list[tuple[str, str]]:
    if not s["images"]:
        return []
    return [("images", f"{s['images']:,} of {s['image_tokens']:,} tokens, {s['images_encoded']:,} encoded")]


def _rows_line(s: dict[str, Any]) -> str:
    parts = [f"{s['rows_ok']:,} done"]
    if s["rows_equal"]:
        parts[0] += f" ({s['rows_equal']:,} with the result of an equal row)"
    if s["rows_failed"]:
        parts.append(f"{s['rows_failed']:,} failed")
    if s["rows_resumed"]:
        parts.append(f"{s['rows_resumed']:,} kept from an earlier run")
    return ", ".join(parts)


def _ended_line(s: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns how this run's rows ended, unless all ended with `stop` and whole prompts. The line `rows` already counts failed rows."""
    counts = {name: n for name, n in s["finish_reasons"].items() if n and name != "error"}
    truncated, texts = s["rows_truncated"], s.get("json") or {}
    json = [("JSON", ", ".join(f"{n:,} {name}" for name, n in texts.items()))] if any(texts.values()) else []
    if not truncated and counts.keys() <= {"stop", "scored"}:
        return json
    parts = [f"{n:,} {name}" for name, n in counts.items()]
    if truncated:
        parts.append(f"{truncated:,} with a truncated prompt")
    return [("ended", ", ".join(parts)), *json]


def _sampling_line(values: dict[str, Any]) -> str:
    """The values that were used, and where those are from that the command does not name."""
    origins = {"model": " (the model's)", "auto": " (auto)"}
    return ", ".join(f"{name} {value['value']:,}{origins.get(value['from'], '')}" for name, value in values.items())


def _model(s: dict[str, Any]) -> str:
    where = f" on {s['device']}" if s["device"] else ""
    how = f", attention {s['attention']}" if s["attention"] else ""
    return f"{s['model']}, {s['dtype']}{where}{how}"
