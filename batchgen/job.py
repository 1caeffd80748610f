"""The story of a job: rows → requests → prefix plan → engine → results → output. It alone knows all the parts; reads from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from batchgen.config import JobConfig
from batchgen.errors import DevicesLost, InputCorrupt, Interrupted, TooManyErrors
from batchgen.generation import Generation
from batchgen.guards import few_collections, memory_errors
from batchgen.jobs.identity import job_settings
from batchgen.preflight import check_job
from batchgen.progress import Progress, Silent, Told
from batchgen.prompts import PromptBuilder, load_tokenizer
from batchgen.records import (
    JobFolder,
    ProgressFile,
    StdoutJob,
    default_output,
    job_path,
    open_input,
    open_job,
    row_form,
    window_rows,
)
from batchgen.records.inputs import CHECKED_ROWS
from batchgen.sampling.grammars import GrammarCheck
from batchgen.signals import Signals
from batchgen.stats import RunFigures, check_stats_file, versions, write_stats
from batchgen.whole import Whole
from batchgen.windowed import Windowed


@dataclass(frozen=True, slots=True)
class JobReport:
    """What became of a job that came to its end."""

    stats: dict[str, Any]
    output: str
    exit_code: int
    """0, or 3 when some rows failed"""
    already_finished: bool
    chat: bool = False
    """Whether prompts went through a chat template."""
    failures: tuple[str, ...] = ()
    """The first few failed rows of this run: where, and why."""


def run_job(config: JobConfig, progress: Progress | None = None) -> JobReport:
    """Runs a job to its end, or goes on with it where an earlier run stopped.

    Raises `BatchgenError`; what was finished by then is kept.
    """
    progress = progress or Silent()
    run = RunFigures()
    with Signals(config.grace) as signals, memory_errors(), few_collections():
        with signals.interruptible():
            check_stats_file(config.stats)
            source = open_input(config.inputs, format=config.input_format, output=config.output)
            output = config.output or default_output(config.inputs, source.is_stdin, config.input_format) or "-"
            check_job(config, source, output)
            progress.phase("loading tokenizer")
            with run.timed("load"):
                tokenizer = load_tokenizer(config.model)
            prompts = PromptBuilder(tokenizer, config.prompts, config.sampling)
            grammars = GrammarCheck(tokenizer)
            grammars.of_command(config.sampling)
            progress.phase("reading")
            size = window_rows(config, source, output)
            waiting = None if size is None else source.windows(size, config.limit)
            rows = source.first_rows(config.limit) if waiting is None else next(waiting, [])
            prompts.check_columns(rows[:CHECKED_ROWS], config.named_columns)
            settings = job_settings(replace(config, sampling=prompts.sampling), tokenizer.hf_config, chat=prompts.chat)
        with open_job(
            output,
            settings=settings,
            mentions=versions(),
            input=source,
            limit=config.limit,
            form=row_form(config, output, chat=prompts.chat, reasoning=prompts.reasoning),
            work_dir=config.work_dir,
            overwrite=config.overwrite,
            flush_every=config.flush_every,
            order=config.order,
            retry_errors=config.retry_errors,
            optional=prompts.optional_results({} if source.schema is None else {f.name: f.type for f in source.schema}),
        ) as job:
            for note in (*source.notes, *job.notes):
                progress.note(note)
            if job.finished is not None:
                return _already_finished(job.finished, output, config, chat=prompts.chat)
            if isinstance(job, JobFolder):
                progress = Told(progress, ProgressFile(job_path(output, config.work_dir)).tell)
            work = Generation(config, tokenizer, prompts, grammars, job, run, signals, progress)
            way: Windowed | Whole
            if waiting is not None and size is not None:
                way = Windowed(work, rows, waiting, size)
            else:
                assert isinstance(job, JobFolder), "standard output has windows"
                way = Whole(work, job, source)
            try:
                way.run()
            except (Interrupted, InputCorrupt, TooManyErrors, DevicesLost):
                way.keep()
                _keep(work, job)
                raise
            finally:
                work.close()
            return _finish(work, job, output)


def _finish(work: Generation, job: JobFolder | StdoutJob, output: str) -> JobReport:
    """The output takes its name, the figures are written."""
    with work.run.timed("write"):
        job.flush()
    stats = work.figures()
    told = len(job.notes)
    job.finish(stats)
    for note in job.notes[told:]:
        work.progress.note(note)
    write_stats(work.config.stats, stats)
    code = 3 if work.run.failed else 0
    return JobReport(stats, output, code, False, work.prompts.chat, tuple(work.failures))


def _keep(work: Generation, job: JobFolder | StdoutJob) -> None:
    """The job ends before its end: what is finished is kept, and the figures so far."""
    job.flush()
    stats = work.figures()
    job.save_stats(stats)
    write_stats(work.config.stats, stats)


def _already_finished(stats: dict[str, Any], output: str, config: JobConfig, *, chat: bool) -> JobReport:
    write_stats(config.stats, stats)
    code = 3 if stats["job"]["rows_failed"] else 0
    return JobReport(stats, output, code, True, chat)
