"""`batchgen merge`: writes the output of a job that ran in shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from batchgen.config import JobConfig
from batchgen_cli.options import Command, Display, option_of
from batchgen_cli.progress import progress_for
from batchgen_cli.stderr import exit_code_of


@dataclass(kw_only=True)
class MergeOptions:
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="The output of the shards.", show_default=False)]
    work_dir: Annotated[str | None, option_of(JobConfig, "work_dir")] = None
    stats: Annotated[str | None, option_of(JobConfig, "stats")] = None
    quiet: Annotated[bool, option_of(Display, "quiet")] = False


class MergeCommand(Command):
    short = "Write the output of a job that ran in shards (run --shard I/N)."
    text = """Write OUTPUT after all shards of batchgen run --shard I/N are done. Loads no model.

    The output is that of a run without shards, in the order of the input, and appears by one atomic rename."""
    example = "batchgen merge answers.jsonl"

    def invoke(self, ctx: typer.Context) -> int:  # type: ignore[override]
        given = ctx.params
        return exit_code_of(lambda: _merge(given["output"], given["work_dir"], given["stats"], quiet=given["quiet"]))


def _merge(output: str, work_dir: str | None, stats: str | None, *, quiet: bool) -> int:
    from batchgen.process.lean_imports import import_arrow

    import_arrow()
    from batchgen.assembly import merge_job
    from batchgen_cli.report import show_report

    with progress_for(None, quiet=quiet) as shown:
        report = merge_job(output, work_dir=work_dir, stats=stats, progress=shown)
    if not quiet:
        show_report(report)
    return report.exit_code
