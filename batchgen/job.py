"""The story of a job: rows become requests, requests are planned in windows, the engine generates, and the results are written.

Read it from top to bottom.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from batchgen.assembly import JobReport, is_last_shard, merge_job, write_output
from batchgen.config import JobConfig, check_config
from batchgen.devices import AnyEngine, Workers, open_engine
from batchgen.errors import (
    DevicesLost,
    InputCorrupt,
    Interrupted,
    OutputLocked,
    TooManyErrors,
    UsageError,
    memory_errors,
)
from batchgen.jobs.base import Job, Store
from batchgen.jobs.disk import write_stats
from batchgen.jobs.identity import command_digest, date_of_job, dtype_name, job_settings, local_identity
from batchgen.jobs.job_folder import JobFolder
from batchgen.jobs.lease import Lease
from batchgen.jobs.manifest import as_stored
from batchgen.jobs.opening import find_finished, open_job
from batchgen.jobs.outcomes import Outcomes
from batchgen.jobs.place import output_of
from batchgen.jobs.requests import FirstReading, RequestReader, RowStream, asked_of
from batchgen.jobs.shards import ShardFolder, open_shard, write_plan
from batchgen.jobs.stdout_job import StdoutJob
from batchgen.jobs.windows import Planned, PlannedWindows, Planner, outlined
from batchgen.prefix import Outline
from batchgen.preflight import check_job
from batchgen.process.collector import few_collections
from batchgen.process.signals import Signals
from batchgen.progress import GENERATING, Progress, Tracker, shown_progress
from batchgen.prompts import LoadedTokenizer, PromptBuilder, load_tokenizer
from batchgen.push import push_output
from batchgen.recording import RunRecorder, tree_record
from batchgen.records import DatasetChoice, Input, Row, open_input, row_form, window_rows
from batchgen.records.inputs import CHECKED_ROWS
from batchgen.report import check_report_file
from batchgen.request import Request, TokenArray
from batchgen.result import Result
from batchgen.sampling.grammars import GrammarCheck
from batchgen.stats import EngineStats, RunFigures, Setting, check_stats_file, counted, figures, versions

KEEP_SECONDS = 0.25
"""Minimum time between two writes of unfinished completions."""
KEEP_SHARE = 0.02
"""Maximum share of a run's time that these writes take, unless `--flush-every` asks for more."""
QUANTIZED_TEXTS = 4
"""Rows on which `--quantize` is measured."""


def run_job(config: JobConfig, progress: Progress | None = None) -> JobReport:
    """Runs a job, or one shard of it, to its end, or continues it where an earlier run stopped. Merges the shards and pushes the output if asked to.

    Without a `progress`, a notebook shows a bar, and any other program nothing. Raises `BatchgenError`; the rows that were finished by then
    are kept.
    """
    check_config(config)
    with shown_progress(progress) as shown:
        report = replace(_run_job(config, shown), work_dir=config.work_dir)
        if config.merge and report.shard and is_last_shard(report.output, config.work_dir):
            with suppress(OutputLocked):  # another shard that ended at the same moment merges
                report = merge_job(report.output, work_dir=config.work_dir, stats=config.stats, progress=shown)
        if config.report is not None:
            report.page().save(config.report)
            shown.note(f"the report is in {config.report}")
        if config.push is not None and not report.shard:
            report = replace(report, pushed=push_output(config, report.output, report.stats, shown.note))
        return report


def _run_job(config: JobConfig, progress: Progress) -> JobReport:
    run = RunFigures()
    tracker = Tracker(progress, run)
    with Signals(config.grace) as signals, memory_errors(), few_collections():
        with signals.interruptible():
            asked = _ask(config)
            if (done := asked.finished()) is not None:
                _tell_notes(asked.source, tracker)
                return _already_finished(asked, *done)
        setup, store = _open(asked, signals, tracker, run, progress)
        with store as job:
            _tell_notes(asked.source, tracker)
            _tell_notes(job, tracker)
            if job.finished is not None:
                return _already_finished(asked, job.finished, setup.prompts.chat, _shard_name(config, job))
            tracker.tell = job.tell
            outcomes = Outcomes(run, tracker, config.max_errors)
            planner = Planner(config.engine.chunk_size, share=config.engine.share, under_way=job.under_way())
            model = _Model(setup, signals, tracker, run)
            recorder = RunRecorder(
                config.shard or "",
                tree=lambda: planner.tree,
                decode=setup.tokenizer.hf_tokenizer.decode,
                keep=job.keep_record,
            )
            generation = _Generation(job, model, outcomes, signals, config.flush_every, recorder)
            try:
                if isinstance(job, ShardFolder):
                    _run_shard(config, job, planner, generation)
                elif setup.window_size is not None:
                    _run_as_rows_come(setup, job, planner, generation)
                else:
                    assert isinstance(job, JobFolder), "standard output has windows"
                    _run_in_prefix_order(setup, job, planner, generation)
                _tell_notes(job, tracker)
                outcomes.note_cut_rows()
            except (Interrupted, InputCorrupt, TooManyErrors, DevicesLost) as e:
                _keep_stopped(job, config, model, run)
                tracker.stopped()
                if isinstance(e, Interrupted) and not isinstance(job, StdoutJob):
                    generation.note_kept()
                raise
            finally:
                model.close()
                recorder.end()
            return _finish_job(job, setup, model, outcomes)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The parts of a job that are known before its tokenizer is loaded."""

    config: JobConfig
    source: Input
    output: str
    model_files: dict[str, Any] | None
    """The identity of the model's files; None if the hub has to be asked."""
    command: str
    """Digest of the command, by which a finished job is recognised; empty if there is none."""

    def finished(self) -> tuple[dict[str, Any], bool] | None:
        """Figures of the job that this command has finished, and whether its prompts are chats; None if there may be something to do."""
        config = self.config
        if config.overwrite or not self.command:
            return None
        return find_finished(
            self.output,
            command=self.command,
            input=self.source,
            limit=config.limit,
            order=config.order,
            work_dir=config.work_dir,
            retry=config.retried,
            prune=config.prune,
        )


def _ask(config: JobConfig) -> _Asked:
    """Opens the input, and checks all that can be checked without a tokenizer."""
    check_stats_file(config.stats)
    source = open_input(
        config.inputs,
        format=config.input_format,
        output=config.output,
        choice=DatasetChoice(config.dataset_config, config.split),
    )
    output = output_of(config, source)
    if config.report is not None:
        check_report_file(config.report, "--report")
        if output == "-":
            raise UsageError(
                "--report is for a job with an output file: standard output keeps nothing", "name one with -o"
            )
    check_job(config, source, output)
    model_files = local_identity(config.model)
    command = "" if model_files is None or config.shard_of is not None else command_digest(config, model_files)
    return _Asked(config, source, output, model_files, command)


@dataclass(frozen=True, slots=True)
class _Setup:
    """The parts of a job that are needed before its results are opened: input, tokenizer, and the settings that results depend on."""

    config: JobConfig
    source: Input
    output: str
    command: str
    """`_Asked.command`."""
    tokenizer: LoadedTokenizer
    prompts: PromptBuilder
    grammars: GrammarCheck
    settings: dict[str, Any]
    window_size: int | None
    """Number of rows in a window; None if all rows are put in prefix order."""
    stream: RowStream
    rows: list[Row]
    """The first rows of the stream: the first window. Without windows, rows to check the columns of."""

    def reader(self, job: Job, outcomes: Outcomes) -> RequestReader:
        self.prompts.keep_keys(job.first_max_tokens)
        return RequestReader(self.config, self.prompts, self.grammars.of_row, job, outcomes)

    def quantized_texts(self) -> list[TokenArray]:
        """Returns the prompts on which `--quantize` is measured: a few of the first rows, at equal distances."""
        if self.config.model.quantize == "none":
            return []
        count = min(len(self.rows), QUANTIZED_TEXTS)
        chosen = [self.rows[i * len(self.rows) // count] for i in range(count)]
        return [built.tokens for built in self.prompts.build(chosen) if isinstance(built, Request)]

    def open_store(self, signals: Signals, tracker: Tracker, run: RunFigures, progress: Progress) -> Job | ShardFolder:
        """Opens the place of the results: the job's folder, standard output, or a shard. Raises `UsageError` for a job with other settings."""
        config = self.config
        if config.shard_of is None:
            return self._open_folder()
        asked = asked_of(config, self.source.fingerprint()) | {
            "settings": as_stored(self.settings),
            "keep": config.keep,
            "id_column": config.id_column,
            "token_ids": config.token_ids,
            "output_format": config.output_format,
        }

        def waiting(text: str) -> None:
            tracker.phase("waiting")
            tracker.note(text)

        with signals.interruptible(), run.timed("plan"):
            return open_shard(
                *config.shard_of,
                output=self.output,
                work_dir=config.work_dir,
                asked=as_stored(asked),
                retry=sorted(config.retried),
                flush_every=config.flush_every,
                open_folder=self._open_folder,
                read=lambda job: _plan_shards(self, job, asked, progress),
                tell=waiting,
            )

    def _open_folder(self, lease: Lease | None = None) -> Job:
        config, prompts, schema = self.config, self.prompts, self.source.schema
        return open_job(
            self.output,
            command=self.command,
            settings=self.settings,
            mentions=versions(),
            input=self.source,
            limit=config.limit,
            form=row_form(
                config,
                self.output,
                chat=prompts.chat,
                reasoning=prompts.reasoning,
                tool_calls=prompts.tool_calls,
                head=self.tokenizer.head,
            ),
            work_dir=config.work_dir,
            overwrite=config.overwrite,
            flush_every=config.flush_every,
            order=config.order,
            retry=config.retried,
            prune=config.prune,
            optional=prompts.optional_results({} if schema is None else {f.name: f.type for f in schema}),
            lease=lease,
        )


def _open(
    asked: _Asked, signals: Signals, tracker: Tracker, run: RunFigures, progress: Progress
) -> tuple[_Setup, Job | ShardFolder]:
    """Sets a job up and opens the place of its results. Raises `UsageError` as `_Setup.open_store` does."""
    config = asked.config
    with signals.interruptible():
        setup = _set_up(asked, tracker, run)
    try:
        return setup, setup.open_store(signals, tracker, run, progress)
    except UsageError:
        # Shards that start together find no date: each takes the time of its own start, and the first to open the job decides.
        begun = date_of_job(asked.output, config.work_dir)
        if config.shard is None or setup.prompts.date is None or begun in (None, setup.prompts.date):
            raise
    with signals.interruptible():
        setup = _set_up(asked, tracker, run)
    return setup, setup.open_store(signals, tracker, run, progress)


def _set_up(asked: _Asked, tracker: Tracker, run: RunFigures) -> _Setup:
    """Loads the tokenizer, and checks all that can be checked before a row is generated."""
    config, source, output = asked.config, asked.source, asked.output
    tracker.phase("loading tokenizer")
    with run.timed("load"):
        tokenizer = load_tokenizer(config.model)
    date = None if config.overwrite else date_of_job(output, config.work_dir)
    now = datetime.now().replace(microsecond=0)
    prompts = PromptBuilder(tokenizer, config.prompts, config.sampling, now=date or now)
    if date is not None and date.date() != now.date():
        again = "--overwrite" if config.shard is None else "deleting the output and its .job folder"
        tracker.note(
            f"the chat template writes the date into prompts; it stays {date:%Y-%m-%d}, the day on which this job began "
            f"({again} starts again with today's date)"
        )
    grammars = GrammarCheck(tokenizer.hf_tokenizer, tokenizer.vocab_size)
    grammars.of_command(config.sampling)
    tracker.phase("reading")
    window_size = window_rows(config, source, output)
    stream = RowStream(source)
    rows = source.first_rows(config.limit) if window_size is None else stream.take(window_size, config.limit)
    prompts.check_columns(rows[:CHECKED_ROWS], config.named_columns)
    resolved = replace(config, sampling=prompts.sampling)
    settings = job_settings(
        resolved,
        tokenizer.hf_config,
        chat=prompts.chat,
        model=asked.model_files,
        head=tokenizer.head,
        date=prompts.date,
    )
    return _Setup(
        config, source, output, asked.command, tokenizer, prompts, grammars, settings, window_size, stream, rows
    )


def _run_in_prefix_order(setup: _Setup, job: JobFolder, planner: Planner, generation: _Generation) -> None:
    """Reads the input once to sort all requests, generates them in prefix order, and reads it a second time to write the output."""
    outcomes, signals = generation.outcomes, generation.signals
    outcomes.tracker.phase("planning")
    with FirstReading(setup.config, setup.source, setup.reader(job, outcomes), job, outcomes) as reading:
        with signals.interruptible(), outcomes.run.timed("plan"):
            needs_a_model = reading.needs_a_model()
        if needs_a_model:
            reading.announce("loading model")
            generation.model.load()  # another thread goes on reading
            reading.announce(None)
        with signals.interruptible(), outcomes.run.timed("plan"):
            requests = reading.result()
    _run_windows(setup.config, requests.windows(), planner, generation, fresh=reading.fresh)
    if reading.broken is not None:
        raise reading.broken
    outcomes.tracker.phase("writing")
    with signals.interruptible(), outcomes.run.timed("write"):
        write_output(setup.source, job, reading.input, outcomes, read_rows=setup.config.limits.read_rows)


def _run_windows(
    config: JobConfig, requests: Iterator[list[Request]], planner: Planner, generation: _Generation, *, fresh: bool
) -> None:
    """Plans and generates all windows. `fresh`: none of the requests has a result yet."""
    job, outcomes, signals = generation.job, generation.outcomes, generation.signals
    consecutive = config.prompts.priority_column is None
    with PlannedWindows(requests, planner, job, outcomes, fresh=fresh, consecutive=consecutive) as windows:
        while True:
            with signals.interruptible():
                window = windows.next()
            if window is None:
                break
            generation.run(window, windows)
            signals.check()


def _plan_shards(setup: _Setup, job: Job, asked: dict[str, Any], progress: Progress) -> None:
    """Reads the input of a job that runs in shards: puts all requests in prefix order and cuts them into shards."""
    config = setup.config
    assert isinstance(job, JobFolder), "shards have a folder"
    run = RunFigures()
    outcomes = Outcomes(run, Tracker(progress, run), config.max_errors)
    outcomes.tracker.phase("planning")
    with FirstReading(config, setup.source, setup.reader(job, outcomes), job, outcomes) as reading:
        requests = reading.result()
    _tell_notes(job, outcomes.tracker)
    if reading.broken is not None:
        raise reading.broken
    windows = requests.windows() if reading.fresh else job.without_results(requests.windows())
    outline = Outline()
    if config.engine.share and config.prompts.priority_column is None:
        windows = outlined(windows, outline)
    count = config.shard_of[1] if config.shard_of else 1
    write_plan(
        job.folder,
        windows,
        count,
        config.engine.chunk_size,
        asked=as_stored(asked),
        rows=job.row_count,
        output=job.output_facts(),
        limits=config.limits,
    )
    tree = outline.tree()
    if tree.rows:
        job.keep_record(None, tree_record(tree, setup.tokenizer.hf_tokenizer.decode))
    job.end_reading()


def _run_shard(config: JobConfig, shard: ShardFolder, planner: Planner, generation: _Generation) -> None:
    tracker = generation.outcomes.tracker
    tracker.total = shard.rows
    tracker.phase("planning")
    _run_windows(config, shard.windows(), planner, generation, fresh=not shard.results_at_hand)


def _run_as_rows_come(setup: _Setup, job: Job, planner: Planner, generation: _Generation) -> None:
    """Generates windows of rows in the order of the input, and writes each one before the next one is read."""
    outcomes, signals = generation.outcomes, generation.signals
    tracker, reader, stream, rows = outcomes.tracker, setup.reader(job, outcomes), setup.stream, setup.rows
    size = setup.window_size
    assert size is not None
    job.begin_rows()
    if not rows:  # with --limit 0, rows that have a result from an earlier run are still written
        rows = reader.take(stream, size)
    while rows:
        with signals.interruptible():
            tracker.phase(f"planning rows {rows[0].number + 1:,}–{rows[-1].number + 1:,}")
            with outcomes.run.timed("plan"):
                read = reader.requests(rows, reader.build(rows))
                window = planner.plan(read.requests) if read.requests else None
        if len(rows) < size and stream.next_number == len(rows):
            tracker.total = len(read.rows)
        results = dict(read.results)
        try:
            if window is not None:
                generation.run(window, results=results)
            signals.check()
        except BaseException:
            if isinstance(job, StdoutJob):  # it keeps nothing, so the rows that are done are written now
                job.write([row for row in read.rows if row.number in results], results, read.keys)
            raise
        tracker.phase("writing")
        with outcomes.run.timed("write"):
            failed = {number: result for number, result in results.items() if number not in read.keys}
            job.add_rows([row.number for row in read.rows], read.keys, failed)
            job.write(read.rows, results, read.keys)
        rows.clear()  # freed before the next ones are read
        del read, results, window
        with signals.interruptible():
            rows = reader.take(stream, size)
    reader.note_same_ids()
    if stream.broken is not None:
        raise stream.broken
    job.check_dropped(prune=setup.config.prune)


class _Generation:
    """Turns windows into results."""

    def __init__(
        self,
        job: Store,
        model: _Model,
        outcomes: Outcomes,
        signals: Signals,
        flush_every: float,
        recorder: RunRecorder,
    ) -> None:
        self.job, self.model, self.outcomes, self.signals = job, model, outcomes, signals
        self._flush_every, self._recorder = flush_every, recorder
        self._keep_next = 0.0
        """When unfinished rows are kept next (`time.monotonic`)."""
        self._running: dict[int, tuple[bytes, str]] = {}
        """The keys and the sources of the rows that the engine has, by row number."""
        self._results: dict[int, Result] | None = None
        self._tokens_asked = self._rows_asked = 0

    def run(
        self, window: Planned, windows: PlannedWindows | None = None, results: dict[int, Result] | None = None
    ) -> None:
        """Generates a window. Each result goes to the job at once, and into `results`.

        If `windows` has more, the next window is added when the last row of this one has started, and both run together for a while.
        """
        engine = self.model.engine()
        tracker = self.outcomes.tracker
        tracker.phase(GENERATING)
        self._results = results
        self._add(engine, window)

        def between_steps() -> str | None:
            self.model.tell_notes()
            tracker.generated(engine.stats.completion_tokens, max(1, engine.unfinished - engine.waiting))
            self._recorder.see(engine, self.outcomes.run.done)
            wish = self.signals.stop()
            if not isinstance(self.job, StdoutJob) and (wish == "now" or time.monotonic() >= self._keep_next):
                self._keep_under_way(engine)
            if wish is None and windows is not None:
                another = windows.next_if_ready(engine.waiting)
                if another is not None:
                    self._add(engine, another)
            return wish

        try:
            engine.run(between_steps)
        finally:
            self.model.last_token_at = time.perf_counter()
            self._recorder.see(engine, self.outcomes.run.done, always=True)
            self.model.tell_notes()

    def _add(self, engine: AnyEngine, window: Planned) -> None:
        run, tracker = self.outcomes.run, self.outcomes.tracker
        run.prefill_tokens_min += window.prefill_tokens_min
        run.groups += len(window.plan.groups)
        run.prefix_nodes += len(window.plan.nodes)
        for request in window.requests:
            self._running[request.row] = request.key, request.source
            self._rows_asked += 1
            self._tokens_asked += 0 if request.texts else request.max_tokens * request.leaves
            run.begun_tokens += sum(len(c.token_ids) for c in request.begun.values())
        tracker.expected_tokens = self._tokens_asked / self._rows_asked
        tracker.begun_tokens = run.begun_tokens
        engine.add(window.leaves, window.plan, self._keep)

    def _keep(self, result: Result) -> None:
        """Takes the result of a row."""
        key, source = self._running.pop(result.row)
        self.job.append(key, result)
        if self._results is not None:
            self._results[result.row] = result
        self.outcomes.done(result, source)

    def _keep_under_way(self, engine: AnyEngine) -> None:
        """Stores unfinished completions, in case the run is killed. Done as often as possible without taking more than `KEEP_SHARE` of the run."""
        began = time.monotonic()
        self.job.keep_under_way({self._running[row][0]: parts for row, parts in engine.under_way().items()})
        now = time.monotonic()
        self._keep_next = now + min(self._flush_every, max(KEEP_SECONDS, (now - began) / KEEP_SHARE))

    def note_kept(self) -> None:
        """Notes what an interrupted run keeps for the next one."""
        run, total = self.outcomes.run, self.outcomes.tracker.total
        tokens = self.job.tokens_under_way
        if not run.done and not tokens:
            self.outcomes.tracker.note("no row was done yet, so there is nothing to keep")
            return
        done = counted(run.done, "row") if total is None else f"{run.done:,} of {counted(total, 'row')}"
        begun = f", and {counted(tokens, 'token')} of unfinished rows" if tokens else ""
        self.outcomes.tracker.note(f"{done} {'is' if run.done == 1 else 'are'} done{begun}: everything is kept")


class _Model:
    """The engine. It is loaded when the first row needs it, so a job with nothing left to generate does not load it."""

    def __init__(
        self,
        setup: _Setup,
        signals: Signals,
        tracker: Tracker,
        run: RunFigures,
    ) -> None:
        self._config, self._tokenizer, self._texts = setup.config, setup.tokenizer, setup.quantized_texts()
        self._sampling = setup.prompts.sampling_from
        self._signals, self._tracker, self._run = signals, tracker, run
        self._engine: AnyEngine | None = None
        self.ready_at = self.last_token_at = 0.0

    def engine(self) -> AnyEngine:
        if self._engine is None:
            self._tracker.phase("loading model")
            self.load()
            self.tell_notes()
        assert self._engine is not None
        return self._engine

    def load(self) -> None:
        with self._signals.interruptible(), self._run.timed("load"):
            engine = open_engine(self._config.model, self._tokenizer, self._config.engine, self._texts)
        self._engine = engine
        if isinstance(engine, Workers):
            self._tracker.workers = engine.progress
        self.ready_at = self.last_token_at = time.perf_counter()

    def tell_notes(self) -> None:
        """Shows the engine's messages, each once."""
        while self._engine is not None and self._engine.notes:
            self._tracker.note(self._engine.notes.pop(0))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def figures(self, previous: Mapping[str, Any] | None) -> dict[str, Any]:
        engine = self._engine
        self._run.seconds["generate"] = max(0.0, self.last_token_at - self.ready_at)
        setting = Setting(
            model=self._config.model.model,
            dtype=engine.dtype if engine else dtype_name(self._config.model, self._tokenizer.hf_config),
            device=engine.device if engine else "",
            attention=engine.attention if engine else "",
            sampling=self._sampling,
        )
        stats = figures(self._run, engine.stats if engine else EngineStats(), setting, earlier=previous)
        return stats | ({"workers": engine.by_worker} if isinstance(engine, Workers) else {})


def _finish_job(job: Store, setup: _Setup, model: _Model, outcomes: Outcomes) -> JobReport:
    """Gives the output its name and writes the figures."""
    with outcomes.run.timed("write"):
        job.flush()
    stats = model.figures(job.previous)
    job.finish(stats)
    _tell_notes(job, outcomes.tracker)
    write_stats(setup.config.stats, stats)
    if isinstance(job, ShardFolder):
        outcomes.tracker.note(job.what_is_left(merges=setup.config.merge))
    return JobReport(
        stats,
        setup.output,
        already_finished=False,
        chat=setup.prompts.chat,
        failures=tuple(outcomes.failures),
        shard=_shard_name(setup.config, job),
    )


def _keep_stopped(job: Store, config: JobConfig, model: _Model, run: RunFigures) -> None:
    """Keeps the results and the figures of a run that stops early."""
    job.flush()
    stats = model.figures(job.previous)
    job.save_stats(stats)
    write_stats(config.stats, stats)


def _already_finished(asked: _Asked, stats: dict[str, Any], chat: bool, shard: str = "") -> JobReport:
    write_stats(asked.config.stats, stats)
    return JobReport(
        stats,
        asked.output,
        already_finished=True,
        chat=chat,
        shard=shard,
    )


def _shard_name(config: JobConfig, job: Store) -> str:
    """`I/N` for a shard; empty for a whole job, and for a shard of a job that is already merged."""
    return str(config.shard) if isinstance(job, ShardFolder) else ""


def _tell_notes(of: Store | Input, tracker: Tracker) -> None:
    while of.notes:
        tracker.note(of.notes.pop(0))
