"""`batchgen run`: generates a completion for every row."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from inspect import Signature
from typing import Any

from batchgen.process.stdout import discard
from batchgen_cli.options import Display, build, job_config, job_parameters
from batchgen_cli.progress import progress_for


def run(**given: Any) -> int:
    """Generate a completion for every row of INPUT, label the row (--choices), or score the completion that it already has (--score).

    If the job was stopped, the same command continues it. If the output is complete, the same command does nothing.
    """
    if given["dry_run"]:
        from batchgen_cli.plan import plan

        return plan(**given)
    display = build(Display, given)
    config = job_config(given | {"output": _named_output(given["output"])})
    from batchgen.job import run_job  # after the options are known to be good: it takes half a second
    from batchgen_cli.summary import show_summary

    with progress_for(display) as shown:
        report = run_job(config, shown)
    if given["output"] == os.devnull:
        report = replace(report, output=os.devnull)
    if not display.quiet:
        show_summary(report, as_json=display.as_json)
    return report.exit_code


run.__signature__ = Signature(job_parameters())  # type: ignore[attr-defined]


def _named_output(name: str | None) -> str | None:
    """Returns the output, with `-` for the names of standard output. Rows for /dev/null are discarded."""
    if name == os.devnull:
        discard(sys.stdout)
        return "-"
    return "-" if name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1") else name
