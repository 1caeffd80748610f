"""`batchgen plan`: what a run would share and cost; loads the tokenizer, not the weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from batchgen_cli import options as o
from batchgen_cli import values as v
from batchgen_cli.failures import printable, reported
from batchgen_cli.progress import calm_libraries, progress_for
from batchgen_cli.report import size

if TYPE_CHECKING:
    from batchgen.planning import PlanReport

EXCERPT_CHARACTERS = 48


def plan(
    inputs: o.Inputs,
    model: o.Model,
    revision: o.Revision = None,
    dtype: o.DtypeOption = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    prompt_column: o.PromptColumn = "prompt",
    messages_column: o.MessagesColumn = "messages",
    template: o.Template = None,
    prefix: o.Prefix = None,
    chat: o.Chat = None,
    system: o.System = None,
    chat_template: o.ChatTemplate = None,
    chat_template_kwargs: o.ChatTemplateKwargs = None,
    on_long_prompt: o.OnLongPrompt = "error",
    row_params: o.RowParams = None,
    max_tokens: o.MaxTokens = 256,
    chunk_size: o.ChunkSize = 16,
    window: o.Window = None,
    input_format: o.InputFormat = None,
    limit: o.Limit = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.", rich_help_panel="Job")
    ] = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Show what a run over INPUT would share and the memory it needs, without loading the model's weights."""
    with reported(verbose=verbose):
        from batchgen.config import EngineConfig, JobConfig
        from batchgen.planning import plan_job

        config = JobConfig(
            inputs=tuple(inputs),
            input_format=input_format,
            model=v.model_config(model, revision, dtype, "auto", trust_remote_code),
            prompts=v.prompt_config(
                prompt_column=prompt_column,
                messages_column=messages_column,
                template=template,
                prefix=prefix,
                chat=chat,
                system=system,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                on_long_prompt=on_long_prompt,
                row_params=row_params,
            ),
            sampling=v.sampling_params(max_tokens=max_tokens),
            engine=EngineConfig(chunk_size=chunk_size),
            window=window,
            limit=limit,
        )
        with calm_libraries(verbose=verbose), progress_for(None, quiet=quiet) as shown:
            report = plan_job(config, shown)
        if as_json:
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
        lines.append(
            f"windows            {report.windows:,}; memory is the largest one's, the tree below the first one's"
        )
    if report.tree:
        lines += ["", "the prefixes that save the most (tokens × rows):"]
    for line in report.tree:
        text = line.text if len(line.text) <= EXCERPT_CHARACTERS else line.text[: EXCERPT_CHARACTERS - 1] + "…"
        lines.append(
            f"{'  ' * (line.level + 1)}{line.tokens:,} × {line.rows:,}  {json.dumps(text, ensure_ascii=False)}"
        )
    return lines
