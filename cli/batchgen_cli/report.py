"""`batchgen report`: writes the report of a running, stopped or finished job, a page for a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from batchgen.config import JobConfig
from batchgen_cli.options import JobOutput, option_of
from batchgen_cli.stderr import printable, write_line


def report(
    *,
    output: JobOutput,
    file: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.html",
            help="The page to write.",
            show_default="beside OUTPUT, <stem>.report.html",
        ),
    ] = None,
    work_dir: Annotated[str | None, option_of(JobConfig, "work_dir")] = None,
) -> int:
    """Write a report of the job of OUTPUT, which may be running, stopped or finished: one page for a browser, which needs no network.

    It shows the prefix tree, tokens per second, where the time went, lengths, how rows ended with sample rows, labels and memory.
    """
    from batchgen.report import check_report_file, default_report_file, report_job

    file = file or default_report_file(output)
    check_report_file(file, "-o")
    found = report_job(output, work_dir)
    found.save(file)
    if found.missing:
        write_line(printable(f"batchgen: missing in the report: {found.missing}"))
    write_line(printable(f"batchgen: the report is in {file}"))
    return 0
