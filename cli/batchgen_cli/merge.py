"""`batchgen merge`: writes the output of a job that ran in shards."""

from __future__ import annotations

from typing import Annotated

import typer

from batchgen.config import JobConfig
from batchgen_cli.options import Display, option_of
from batchgen_cli.progress import progress_for


def merge_shards(
    *,
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="The output of the shards.", show_default=False)],
    work_dir: Annotated[str | None, option_of(JobConfig, "work_dir")] = None,
    stats: Annotated[str | None, option_of(JobConfig, "stats")] = None,
    quiet: Annotated[bool, option_of(Display, "quiet")] = False,
) -> int:
    """Write OUTPUT after all shards of batchgen run --shard I/N are done. Loads no model.

    The output is that of a run without shards, in the order of the input, and appears by one atomic rename.
    """
    from batchgen.assembly import merge_job
    from batchgen_cli.summary import show_summary

    with progress_for(Display(quiet=quiet)) as shown:
        report = merge_job(output, work_dir=work_dir, stats=stats, progress=shown)
    if not quiet:
        show_summary(report)
    return report.exit_code
