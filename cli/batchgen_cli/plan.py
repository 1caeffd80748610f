"""`batchgen plan`: what a run would share and cost; loads the tokenizer, not the weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from batchgen_cli import values as v
from batchgen_cli.arguments import PlanOptions, takes
from batchgen_cli.failures import reported
from batchgen_cli.progress import calm_libraries, progress_for
from batchgen_cli.report import size
from batchgen_cli.stderr import printable

if TYPE_CHECKING:
    from batchgen.planning import PlanReport

EXCERPT_CHARACTERS = 48


@takes(PlanOptions)
def plan(given: PlanOptions) -> None:
    """Show what a run over INPUT would share and the memory it needs, without loading the model's weights."""
    with reported(verbose=given.verbose, as_json=given.log_format == "json"):
        from batchgen.config import EngineConfig, JobConfig
        from batchgen.planning import plan_job

        as_json = v.as_json(given.log_format)
        config = JobConfig(
            inputs=tuple(given.inputs),
            input_format=given.input_format,
            model=v.model_config(given),
            prompts=v.prompt_config(given),
            sampling=v.sampling_params(**v.shared_sampling(given)),
            engine=EngineConfig(chunk_size=given.chunk_size),
            window=v.window(given.window),
            limit=given.limit,
        )
        showing = progress_for(None, quiet=given.quiet, as_json=as_json)
        with calm_libraries(verbose=given.verbose), showing as shown:
            report = plan_job(config, shown)
        if given.as_json:
            typer.echo(json.dumps(report.as_dict(), ensure_ascii=False))
        else:
            for line in plan_lines(report):
                typer.echo(printable(line))


def plan_lines(report: PlanReport) -> list[str]:
    """The plan as people read it."""
    f = report.figures
    bad = f" ({report.rows_failed:,} cannot be run)" if report.rows_failed else ""
    lines = [
        f"rows               {report.rows:,}{bad}, {'through the chat template' if report.chat else 'as raw text'}",
        f"prompt tokens      {f.prompt_tokens:,}",
        f"to be prefilled    {f.prefill_tokens_min:,} ({f.shared_fraction:.1%} of the prompt tokens are shared and run once)",
        f"groups             {f.groups:,} with {f.grouped_requests:,} rows",
        f"prefix nodes       {f.prefix_nodes:,}",
    ]
    if report.bytes_per_token:
        lines += [
            f"KV per token       {size(report.bytes_per_token)}",
            f"KV for all rows    {size(f.kv_bytes_shared)} (unshared: {size(f.kv_bytes_unshared)}), prompts and whole completions",
            f"KV for the longest {size(f.kv_bytes_least)}; with less, that row cannot be run",
        ]
    if report.windows > 1:
        tree = "" if report.whole else ", the tree below the first one's"
        lines.append(f"windows            {report.windows:,}; memory is the largest one's{tree}")
    if report.tree:
        lines += ["", "the prefixes that save the most (tokens × rows):"]
    for line in report.tree:
        text = line.text if len(line.text) <= EXCERPT_CHARACTERS else line.text[: EXCERPT_CHARACTERS - 1] + "…"
        lines.append(
            f"{'  ' * (line.level + 1)}{line.tokens:,} × {line.rows:,}  {json.dumps(text, ensure_ascii=False)}"
        )
    return lines
