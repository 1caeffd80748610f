"""`batchgen plan`: shows what a run would share and cost. Loads the tokenizer, not the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchgen.errors import UsageError
from batchgen.options import whole_number
from batchgen.progress import rounded_duration
from batchgen.stats import counted
from batchgen.stats import size_text as size
from batchgen_cli.models import memory_lines
from batchgen_cli.options import AsJson, Command, Display, build, job_config, job_parameters
from batchgen_cli.progress import progress_for
from batchgen_cli.stderr import printable, write_answer

if TYPE_CHECKING:
    from batchgen.dry_run import PlanReport

EXCERPT_CHARACTERS = 48


class PlanCommand(Command):
    """Its help leaves out the options of `batchgen run`, except --model."""

    brief = True


def plan(**given: Any) -> int:
    """Show what a run over INPUT would share and the memory it needs, without loading the model's weights.

    Takes all options of `batchgen run` (see batchgen run --help), so you only replace run by plan in a command. With --report FILE.html
    it also writes a page for a browser that shows the prefix tree.
    """
    display = build(Display, given)
    config = job_config(given)
    shards, rows = _count("--shards", given.get("shards")), _count("--measure", given.get("measure"))
    from batchgen.dry_run import plan_job  # after the options are known to be good: it takes half a second

    with progress_for(display) as shown:
        measured = None
        if rows is not None:
            from batchgen.job import measure_job

            measured = measure_job(config, rows, shown)
            config = replace(config, overwrite=False)  # the measured rows stay
        report = plan_job(config, shown, shards=shards, write_template=given.get("write_template"), measured=measured)
    if given.get("as_json"):
        write_answer(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        write_answer("\n".join(map(printable, plan_lines(report))))
    return 0


_SHARDS = typer.Option("--shards", metavar="N", help="Show what it costs to run the job in N shards.", show_default="")
_WRITE = typer.Option(
    "--write-template",
    metavar="FILE",
    help="Write the template in the order that shares the most prompt tokens.",
    show_default="",
)
_MEASURE = typer.Option(
    "--measure",
    metavar="[ROWS]",
    help="Load the model and run a few rows from all over the job (32), to say how long it takes. The run uses their results.",
    show_default="",
)
plan.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        *job_parameters(),
        Parameter("as_json", Parameter.KEYWORD_ONLY, annotation=AsJson, default=False),
        Parameter("shards", Parameter.KEYWORD_ONLY, annotation=Annotated[str | None, _SHARDS], default=None),
        Parameter("measure", Parameter.KEYWORD_ONLY, annotation=Annotated[str | None, _MEASURE], default=None),
        Parameter("write_template", Parameter.KEYWORD_ONLY, annotation=Annotated[str | None, _WRITE], default=None),
    ]
)


def _count(option: str, text: str | None) -> int | None:
    count = None if text is None else whole_number(option, text)
    if count is not None and count < 1:
        raise UsageError(f"{option} must be at least 1, not {count}")
    return count


def _sharing(f: Mapping[str, Any]) -> str:
    if f["prefill_tokens"] > f["prefill_tokens_min"]:
        return f"nothing is shared; with sharing it would be {f['prefill_tokens_min']:,}"
    return f"{f['shared_fraction']:.1%} of the prompt tokens are shared and run once"


def plan_lines(report: PlanReport) -> list[str]:
    """Returns the plan as lines of text."""
    f = report.figures
    counts = {"would fail": f["rows_failed"], "would have the result of an equal row": f["rows_equal"]}
    parts = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    some = f" ({parts})" if parts else ""
    lines = [
        f"rows               {f['rows']:,}{some}, {'through the chat template' if report.chat else 'as raw text'}",
        f"prompt tokens      {f['prompt_tokens']:,}",
        f"to be prefilled    {f['prefill_tokens']:,} ({_sharing(f)})",
        f"groups             {f['groups']:,} with {counted(f['grouped_rows'], 'row')}",
        f"prefix nodes       {f['prefix_nodes']:,}",
    ]
    if f["memory"] is not None:
        lines += memory_lines(f["memory"], 19, f["kv_bytes_batch"])
    state = f["state_bytes_per_sequence"]
    if f["kv_bytes_per_token"]:
        enough = "with less KV memory that row fails, or is cut with --max-tokens auto"
        if state:
            enough = f"it fits --kv-memory {report.sufficient_memory}, which recurrent states share"
        lines += [
            f"KV per token       {size(f['kv_bytes_per_token'])}",
            f"KV for a batch     {size(f['kv_bytes_batch'])}; a run holds a batch of rows",
            f"KV for all rows    {size(f['kv_bytes_shared'])} (unshared: {size(f['kv_bytes_unshared'])}) if all ran at once, each to its full length",
            f"KV for longest row {size(f['kv_bytes_least'])}; {enough}",
        ]
    if state:
        peak = f"{size(f['state_bytes_peak'])} at most: {size(state)} per running sequence or node"
        lines.append(f"recurrent states   {peak}, whatever its length")
    if f["windows"] > 1:
        tree = "" if report.whole else ", and the tree is that of the first one"
        lines.append(f"windows            {f['windows']:,}; memory is that of the largest one{tree}")
    if f["shards"] is not None:
        again, shares = f["shards"]["prefill_tokens_again"], f["shards"]["cost"]
        lines.append(
            f"{'in ' + counted(len(shares), 'shard'):<18} {counted(again, 'prompt token')} {'is' if again == 1 else 'are'} run again "
            f"({again / max(1, f['prefill_tokens_min']):.2%} of those to be prefilled); the largest shard is {max(shares):.1%} of the work"
        )
    lines += [f"{name:<18} {text}" for name, text in time_lines(report)]
    if report.advice is not None:
        lines.append(f"advice             {report.advice.text}")
    if f["failures"]:
        lines += ["", "the first rows that would fail:", *(f"  {line}" for line in f["failures"])]
    if f["tree"]:
        lines += ["", "the prefixes that save the most (tokens × rows):"]
    for node in f["tree"]:
        text = node["text"]
        text = text if len(text) <= EXCERPT_CHARACTERS else text[: EXCERPT_CHARACTERS - 1] + "…"
        indent = "  " * (node["level"] + 1)
        lines.append(f"{indent}{node['tokens']:,} × {node['rows']:,}  {json.dumps(text, ensure_ascii=False)}")
    return lines


def time_lines(report: PlanReport) -> list[tuple[str, str]]:
    """Returns what is known of the time that a job takes, as names and texts."""
    lines = []
    if (measured := report.figures["measured"]) is not None:
        speed = f"{measured['rows_per_s']:.3g} rows/s"
        if measured["completion_tokens"]:
            speed += f", {measured['completion_tokens_per_s']:,.0f} completion tokens/s"
        text = f"{counted(measured['rows'], 'row')} in {duration(measured['seconds'])}: {speed}"
        lines.append(("measured", f"{text}; the run keeps their results"))
    if (lengths := report.figures["lengths"]) is not None:
        cut = f", {lengths['cut']:,} of them cut by --max-tokens" if lengths["cut"] else ""
        text = f"{lengths['mean']:,.0f} tokens on average, half at most {lengths['half']:,}, 9 in 10 at most {lengths['most']:,}"
        so_far = f"{counted(lengths['completions'], 'completion')} so far{cut}"
        lines.append(("lengths", f"{text}, the longest {lengths['max']:,} ({so_far})"))
    estimate = report.estimate
    if estimate is None:
        text = "not known: no steps of this model on this machine were measured yet (--measure does that)"
        return [*lines, ("time", text)]
    if not estimate.rows:
        return [
            *lines,
            ("time", f"none: every row has its result{' or would fail' if report.figures['rows_failed'] else ''}"),
        ]
    low, seconds, high = (duration(s) for s in (estimate.low, estimate.seconds, estimate.high))
    rows = f"to generate {counted(estimate.rows, 'row')}"
    if estimate.lengths == "max_tokens":
        at_least = f" (at least {low})" if estimate.low >= 0.05 else ""  # not "at least 0.0 s"
        text = f"at most about {seconds} {rows}{at_least}: how long completions get is not known (--measure runs a few rows)"
    else:
        text = f"about {seconds} {rows} (between {low} and {high})"
    return [*lines, ("time", text)]


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else rounded_duration(seconds)
