"""`batchgen report`: writes the report of a running, stopped or finished job, a page for a browser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from batchgen.config import JobConfig
from batchgen_cli.options import Command, JobOutput, option_of
from batchgen_cli.stderr import exit_code_of, printable, write_line


@dataclass(kw_only=True)
class ReportOptions:
    output: JobOutput
    file: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.html",
            help="The page to write.",
            show_default="beside OUTPUT, <stem>.report.html",
        ),
    ] = None
    work_dir: Annotated[str | None, option_of(JobConfig, "work_dir")] = None


class ReportCommand(Command):
    short = "Write a report of a job: a page with its prefix tree, speed, lengths and errors."
    text = """Write a report of the job of OUTPUT, which may be running, stopped or finished: one page for a browser, which needs no network.

    It shows the prefix tree, tokens per second, where the time went, lengths, how rows ended with sample rows, labels and memory."""
    example = "batchgen report answers.jsonl -o answers.html"

    def invoke(self, ctx: typer.Context) -> int:  # type: ignore[override]
        given = ctx.params
        return exit_code_of(lambda: _report(given["output"], given["file"], given["work_dir"]))


def _report(output: str, file: str | None, work_dir: str | None) -> int:
    from batchgen.report import check_report_file, default_report_file, report_job

    file = file or default_report_file(output)
    check_report_file(file, "-o")
    report = report_job(output, work_dir)
    report.save(file)
    if report.missing:
        write_line(printable(f"batchgen: missing in the report: {report.missing}"))
    write_line(printable(f"batchgen: the report is in {file}"))
    return 0
