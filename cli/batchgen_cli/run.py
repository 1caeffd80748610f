"""`batchgen run`: generates a completion for every row."""

from __future__ import annotations

from typing import Any

from batchgen_cli.options import Command, Display, build, job_config, job_options
from batchgen_cli.progress import calm_libraries, progress_for
from batchgen_cli.stderr import exit_code_of


def _run(values: dict[str, Any]) -> int:
    from batchgen.job import run_job
    from batchgen_cli.report import show_report

    display = build(Display, values)
    as_json = display.log_format == "json"
    config = job_config(values)
    showing = progress_for(display.progress, quiet=display.quiet, as_json=as_json)
    with calm_libraries(verbose=display.verbose), showing as shown:
        report = run_job(config, shown)
    if not display.quiet:
        show_report(report, as_json=as_json)
    return report.exit_code


run = Command(
    "run",
    params=job_options(),
    callback=lambda **values: exit_code_of(
        lambda: _run(values), verbose=bool(values["verbose"]), as_json=values["log_format"] == "json"
    ),
    short_help="Generate a completion for every row of INPUT, or label or score it.",
    help="Generate a completion for every row of INPUT, label it (--choices), or score the one it has (--score).\n\n"
    "The same command again does nothing when the output is complete, and continues where it stopped when it is not.",
)
run.example = "batchgen run prompts.jsonl --model ./model -o answers.jsonl --max-tokens 64"
