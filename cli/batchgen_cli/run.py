"""`batchgen run`: generates a completion for every row."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from batchgen.process.stdout import discard
from batchgen_cli.options import Command, Display, build, job_config, run_options
from batchgen_cli.progress import calm_libraries, progress_for
from batchgen_cli.stderr import exit_code_of

RunOptions = run_options()


class RunCommand(Command):
    short = "Generate a completion for every row of INPUT, or label or score it."
    text = """Generate a completion for every row of INPUT, label the row (--choices), or score the completion that it already has (--score).

    If the job was stopped, the same command continues it. If the output is complete, the same command does nothing."""
    example = "batchgen run prompts.jsonl --model ./model -o answers.jsonl --max-tokens 64"

    def invoke(self, ctx: typer.Context) -> int:  # type: ignore[override]
        given = ctx.params
        as_json = given["log_format"] == "json"
        return exit_code_of(lambda: _run(given), verbose=bool(given["verbose"]), as_json=as_json)


def _run(given: dict[str, Any]) -> int:
    if given["dry_run"]:
        from batchgen_cli.plan import show_plan

        return show_plan(given)
    display = build(Display, given)
    as_json = display.log_format == "json"
    config = job_config(given | {"output": _named_output(given["output"])})
    from batchgen.process.lean_imports import import_arrow

    import_arrow()
    from batchgen.job import run_job
    from batchgen_cli.report import show_report  # takes half a second, so only after the options are checked

    showing = progress_for(display.progress, quiet=display.quiet, as_json=as_json)
    with calm_libraries(verbose=display.verbose), showing as shown:
        report = run_job(config, shown)
    if not display.quiet:
        show_report(report, as_json=as_json)
    return report.exit_code


def _named_output(name: str | None) -> str | None:
    """Returns the output, with `-` for the names of standard output. Rows for /dev/null are discarded."""
    if name == os.devnull:
        discard(sys.stdout)
        return "-"
    return "-" if name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1") else name
