"""What a job needs before its first row is generated: input, tokenizer, the settings that its results depend on, and the place of the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from batchgen.config import JobConfig
from batchgen.errors import UsageError
from batchgen.jobs.base import FinishedJob, JobSpec
from batchgen.jobs.files.disk import check_file
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.manifest import Manifest, as_stored
from batchgen.jobs.identity import command_digest, date_of_job, job_settings, local_identity
from batchgen.jobs.job_folder import Job, JobFolder, Store, open_job
from batchgen.jobs.opening import IMAGES_FOLDER, request_of
from batchgen.jobs.order.requests import FirstReading, RequestReader, asked_of
from batchgen.jobs.order.sorted_requests import SortedRequests, evenly, in_window_order
from batchgen.jobs.outcomes import Outcomes
from batchgen.jobs.shards import ShardPlan, input_facts, open_shard, write_plan
from batchgen.parsers.json_schemas import closes
from batchgen.prefix import Outline
from batchgen.preflight import check_job
from batchgen.process.signals import Signals
from batchgen.progress import Tracker
from batchgen.prompts import LoadedTokenizer, PromptBuilder, load_tokenizer
from batchgen.recording import tree_record
from batchgen.records import Input, Row, RowStream, open_input, output_of, row_form, window_rows
from batchgen.report import check_report_file
from batchgen.request import Request, TokenArray
from batchgen.sampling.grammars import Vocabulary
from batchgen.version import versions

QUANTIZED_TEXTS = 4
"""Rows on which `--quantize` is measured."""


@dataclass(frozen=True, slots=True)
class JobCommand:
    """The parts of a job that are known before its tokenizer is loaded."""

    config: JobConfig
    source: Input
    output: str
    model_files: dict[str, Any] | None
    """The identity of the model's files; None if the hub has to be asked."""
    digest: str
    """`command_digest`, by which a finished job is recognised; empty if there is none."""


def check_command(config: JobConfig) -> JobCommand:
    """Opens the input, and checks all that can be checked without a tokenizer."""
    source, output = open_input(config, config.output), output_of(config)
    check_file("--stats", config.stats, (output, *(file.name for file in source.files)))
    if config.report is not None:
        check_report_file(config.report, "--report")
        if output == "-":
            raise UsageError(
                "--report is for a job with an output file: standard output keeps nothing", "name one with -o"
            )
    check_job(config, source, output)
    model_files = local_identity(config.model)
    digest = "" if model_files is None or config.shard_of is not None else command_digest(config, model_files)
    return JobCommand(config, source, output, model_files, digest)


@dataclass(frozen=True, slots=True)
class JobSetup:
    """The parts of a job that are known before its results are opened: the tokenizer, and what the job is asked for (`spec`)."""

    config: JobConfig
    tokenizer: LoadedTokenizer
    prompts: PromptBuilder
    grammars: Vocabulary
    spec: JobSpec
    window_size: int | None
    """Number of rows in a window; None if all rows are put in prefix order."""
    stream: RowStream
    rows: list[Row]
    """The first rows of the stream: the first window. Without windows, rows to check the columns of."""

    def reader(self, job: Job, outcomes: Outcomes) -> RequestReader:
        self.prompts.first_max_tokens = job.first_max_tokens
        if isinstance(job, JobFolder):
            self.prompts.images.store.folder = job.folder / IMAGES_FOLDER
        ahead = self.window_size is None
        self.prompts.images.store.fail_once = ahead
        return RequestReader(self.config, self.prompts, self.grammars.checked, job, outcomes, ahead=ahead)

    def quantized_texts(self) -> list[TokenArray]:
        """Returns the prompts on which `--quantize` is measured, without images: a few of the first rows, at equal distances."""
        if self.config.model.quantize == "none":
            return []
        chosen = evenly(self.rows, QUANTIZED_TEXTS)
        return [built.text_tokens for built in self.prompts.build(chosen) if isinstance(built, Request)]


def set_up_job(command: JobCommand, signals: Signals, tracker: Tracker) -> tuple[JobSetup, Store | FinishedJob]:
    """Sets a job up and opens the place of its results: its folder, standard output, or a shard. Raises `UsageError` for a job with other settings."""
    config = command.config
    with signals.interruptible():
        setup = _set_up(command, tracker)
    try:
        return setup, _open_store(setup, signals, tracker)
    except UsageError:
        # Shards that start together find no date: each takes the time of its own start, and the first to open the job decides.
        begun = date_of_job(command.output, config.work_dir)
        if config.shard is None or setup.prompts.date is None or begun in (None, setup.prompts.date):
            raise
    with signals.interruptible():
        setup = _set_up(command, tracker)
    return setup, _open_store(setup, signals, tracker)


def _set_up(command: JobCommand, tracker: Tracker) -> JobSetup:
    """Loads the tokenizer, and checks all that can be checked before a row is generated."""
    config, source, output = command.config, command.source, command.output
    tracker.phase("loading tokenizer")
    date = None if config.overwrite else date_of_job(output, config.work_dir)
    now = datetime.now().replace(microsecond=0)
    with tracker.run.timed("load"):
        tokenizer = load_tokenizer(config.model)
        prompts = PromptBuilder(tokenizer, config.prompts, config.sampling, now=date or now)
    if date is not None and date.date() != now.date():
        again = "--overwrite" if config.shard is None else "deleting the output and its .job folder"
        tracker.note(
            f"the chat template writes the date into prompts; it stays {date:%Y-%m-%d}, the day on which this job began "
            f"({again} starts again with today's date)"
        )
    if config.expect is not None and tokenizer.head is not None and tokenizer.head.result_name == "reward":
        raise UsageError("--expect compares texts, and the model's head gives rewards", "leave --expect out")
    grammars = Vocabulary(tokenizer.hf_tokenizer, tokenizer.vocab_size)
    grammars.check(config.sampling)
    if config.sampling.json_schema is not None and closes(config.sampling.json_schema):
        tracker.note(
            'objects of the JSON schema have no other keys than those of their properties; "additionalProperties": true in the schema allows more'
        )
    tracker.phase("reading")
    window_size = window_rows(config, source)
    stream = RowStream(source.rows())
    rows = source.first_rows(config.limit) if window_size is None else stream.take(window_size, config.limit)
    prompts.columns.check(
        rows if window_size is None else source.rows_to_check(rows, config.limit), config.named_columns
    )
    return JobSetup(
        config=config,
        tokenizer=tokenizer,
        prompts=prompts,
        grammars=grammars,
        spec=_spec_of(command, tokenizer, prompts),
        window_size=window_size,
        stream=stream,
        rows=rows,
    )


def _spec_of(command: JobCommand, tokenizer: LoadedTokenizer, prompts: PromptBuilder) -> JobSpec:
    config, schema = command.config, command.source.schema
    form = row_form(
        config,
        command.output,
        chat=prompts.chat,
        reasoning=prompts.reasoning,
        tool_calls=prompts.tool_calls,
        head=tokenizer.head,
        optional=prompts.optional_results({} if schema is None else {f.name: f.type for f in schema}),
        several_files=len(command.source.files) > 1,
    )
    manifest = Manifest(
        settings=as_stored(job_settings(config, tokenizer, prompts, command.model_files)),
        mentions=versions(),
        request=as_stored(request_of(config, command.source) | asdict(form)),
        command=command.digest,
    )
    return JobSpec(
        output=command.output,
        input=command.source,
        form=form,
        manifest=manifest,
        work_dir=config.work_dir,
        overwrite=config.overwrite,
        flush_every=config.flush_every,
    )


def _open_store(setup: JobSetup, signals: Signals, tracker: Tracker) -> Store | FinishedJob:
    config = setup.config
    if config.shard_of is None:
        return open_job(setup.spec, tell=tracker.note)
    asked = as_stored(
        asked_of(config, setup.spec.manifest.request["inputs"])
        | {"settings": setup.spec.manifest.settings, "expect": config.expect, "rows": asdict(setup.spec.form)}
    )

    def read(lease: Lease) -> FinishedJob | None:
        opened = open_job(setup.spec, lease)
        if isinstance(opened, FinishedJob):
            return opened
        with opened as job:
            _plan_shards(setup, job, asked, Tracker(tracker.shown))
        return None

    def waiting(text: str) -> None:
        tracker.phase("waiting")
        tracker.note(text)

    with signals.interruptible(), tracker.run.timed("plan"):
        return open_shard(*config.shard_of, setup.spec, asked=asked, read=read, tell=waiting)


def _plan_shards(setup: JobSetup, job: Job, asked: dict[str, Any], tracker: Tracker) -> None:
    """Reads the input of a job that runs in shards: puts all requests in prefix order and cuts them into shards."""
    config = setup.config
    assert isinstance(job, JobFolder), "shards have a folder"
    outcomes = Outcomes(tracker, config.max_errors)
    tracker.phase("planning")
    with FirstReading(config, setup.spec.input, setup.reader(job, outcomes), job, outcomes) as reading:
        requests = reading.result()
    tracker.show_notes(job.notes)
    if reading.broken is not None:
        raise reading.broken
    outline = Outline()
    consecutive = config.engine.share and config.prompts.priority_column is None
    windows = _windows_to_cut(job, requests, fresh=reading.fresh, outline=outline if consecutive else None)
    plan = ShardPlan(
        asked=asked,
        rows=job.row_count,
        output=input_facts(setup.spec.input),
        earlier=job.previous["job"] if job.previous else None,
    )
    write_plan(job.folder, plan, windows, config)
    tree = outline.tree()
    if tree.rows:
        job.keep_record(None, tree_record(tree, setup.tokenizer.decode))
    job.end_reading()


def _windows_to_cut(
    job: JobFolder, requests: SortedRequests, *, fresh: bool, outline: Outline | None
) -> Iterator[list[Request]]:
    """Yields the requests that have no result, in order, and adds their prompts to `outline`. `fresh`: none has one."""
    for window in requests.windows():
        stored = {} if fresh else job.stored([request.key for request in window])
        lacking = in_window_order([request for request in window if request.key not in stored])
        if outline is not None:
            for request in lacking:
                outline.add(request.tokens, long=request.long)
        if lacking:
            yield lacking
