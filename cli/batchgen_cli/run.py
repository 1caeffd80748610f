"""`batchgen run`: generates a completion for every row."""

from __future__ import annotations

from dataclasses import replace

import typer

from batchgen_cli import values as v
from batchgen_cli.arguments import RunOptions, takes
from batchgen_cli.failures import reported
from batchgen_cli.progress import calm_libraries, progress_for


@takes(RunOptions)
def run(given: RunOptions) -> None:
    """Generate a completion for every row of INPUT, label it (--choices), or score the one it has (--score).

    The same command again does nothing when the output is complete, and goes on where it stopped when it is not.
    """
    with reported(verbose=given.verbose, as_json=given.log_format == "json"):
        from batchgen.config import JobConfig
        from batchgen.job import run_job
        from batchgen_cli.report import show_report

        as_json = v.as_json(given.log_format)
        config = JobConfig(
            inputs=tuple(given.inputs),
            output=given.output,
            input_format=given.input_format,
            id_column=given.id_column,
            model=replace(
                v.model_config(given), device=given.device, device_map=given.device_map, compile=given.compile
            ),
            prompts=replace(v.prompt_config(given), priority_column=given.priority_column),
            sampling=v.sampling_params(**v.shared_sampling(given), **v.run_sampling(given)),
            engine=v.engine_config(given),
            window=v.window(given.window),
            limit=given.limit,
            order=given.order,
            overwrite=given.overwrite,
            retry_errors=given.retry_errors,
            max_errors=given.max_errors,
            keep=v.kept_columns(given.keep),
            token_ids=given.token_ids,
            output_format=given.output_format,
            flush_every=given.flush_every,
            grace=given.grace,
            work_dir=given.work_dir,
            stats=given.stats,
        )
        showing = progress_for(given.progress, quiet=given.quiet, as_json=as_json)
        with calm_libraries(verbose=given.verbose), showing as shown:
            report = run_job(config, shown)
        if not given.quiet:
            show_report(report, as_json=as_json)
        raise typer.Exit(report.exit_code)
