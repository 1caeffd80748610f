"""The story of a job: rows to requests, a prefix plan, the engine, results, the output. Read it from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchgen.collector import few_collections
from batchgen.config import JobConfig
from batchgen.devices import AnyEngine, open_engine
from batchgen.errors import DevicesLost, InputCorrupt, Interrupted, OutputError, TooManyErrors, memory_errors
from batchgen.jobs.base import Job
from batchgen.jobs.identity import dtype_name, job_settings
from batchgen.jobs.job_folder import JobFolder, open_job
from batchgen.jobs.outcomes import Outcomes
from batchgen.jobs.requests import FirstReading, RequestReader, RowStream
from batchgen.jobs.stdout_job import StdoutJob
from batchgen.jobs.windows import Planned, PlannedWindows, Planner
from batchgen.preflight import check_job
from batchgen.progress import GENERATING, Progress, Silent, Tracker
from batchgen.prompts import LoadedTokenizer, PromptBuilder, load_tokenizer
from batchgen.records import Input, Row, default_output, open_input, row_form, window_rows
from batchgen.records.inputs import CHECKED_ROWS, READ_ROWS
from batchgen.result import Result
from batchgen.sampling.grammars import GrammarCheck
from batchgen.signals import Signals
from batchgen.stats import EngineStats, RunFigures, Setting, check_stats_file, figures, versions, write_stats


@dataclass(frozen=True, slots=True)
class JobReport:
    """What became of a job that came to its end."""

    stats: dict[str, Any]
    output: str
    exit_code: int
    """0, or 3 if some rows failed"""
    already_finished: bool
    chat: bool = False
    """Whether prompts went through a chat template."""
    failures: tuple[str, ...] = ()
    """The first few failed rows of this run: where, and why."""


def run_job(config: JobConfig, progress: Progress | None = None) -> JobReport:
    """Runs a job to its end, or continues it where an earlier run stopped.

    Raises `BatchgenError`; what was finished by then is kept.
    """
    run = RunFigures()
    tracker = Tracker(progress or Silent(), run)
    with Signals(config.grace) as signals, memory_errors(), few_collections():
        with signals.interruptible():
            check_stats_file(config.stats)
            source = open_input(config.inputs, format=config.input_format, output=config.output)
            output = config.output or default_output(config.inputs, source.is_stdin, config.input_format) or "-"
            check_job(config, source, output)
            tracker.phase("loading tokenizer")
            with run.timed("load"):
                tokenizer = load_tokenizer(config.model)
            prompts = PromptBuilder(tokenizer, config.prompts, config.sampling)
            grammars = GrammarCheck(tokenizer.hf_tokenizer, tokenizer.vocab_size)
            grammars.of_command(config.sampling)
            tracker.phase("reading")
            window_size = window_rows(config, source, output)
            stream = RowStream(source)
            rows = source.first_rows(config.limit) if window_size is None else stream.take(window_size, config.limit)
            prompts.check_columns(rows[:CHECKED_ROWS], config.named_columns)
            settings = job_settings(replace(config, sampling=prompts.sampling), tokenizer.hf_config, chat=prompts.chat)
        with open_job(
            output,
            settings=settings,
            mentions=versions(),
            input=source,
            limit=config.limit,
            form=row_form(
                config, output, chat=prompts.chat, reasoning=prompts.reasoning, tool_calls=prompts.tool_calls
            ),
            work_dir=config.work_dir,
            overwrite=config.overwrite,
            flush_every=config.flush_every,
            order=config.order,
            retry=config.retried,
            prune=config.prune,
            optional=prompts.optional_results({} if source.schema is None else {f.name: f.type for f in source.schema}),
        ) as job:
            for note in source.notes:
                tracker.note(note)
            _tell_notes(job, tracker)
            if job.finished is not None:
                return _already_finished(job.finished, output, config, chat=prompts.chat)
            tracker.tell = job.tell
            outcomes = Outcomes(run, tracker, config.max_errors)
            reader = RequestReader(config, prompts, grammars.of_row, job, outcomes)
            planner = Planner(config.engine.chunk_size, share=config.engine.share, under_way=job.under_way())
            model = _Model(config, tokenizer, signals, tracker, run)
            generation = _Generation(job, model, outcomes, signals)
            try:
                if window_size is not None:
                    _run_as_rows_come(stream, rows, window_size, reader, planner, generation)
                    job.check_dropped(prune=config.prune)
                else:
                    assert isinstance(job, JobFolder), "standard output has windows"
                    _run_in_prefix_order(config, source, job, reader, planner, generation)
                _tell_notes(job, tracker)
                outcomes.note_cut_rows()
            except (Interrupted, InputCorrupt, TooManyErrors, DevicesLost) as e:
                _keep(job, config, model, run)
                if isinstance(e, Interrupted) and isinstance(job, JobFolder):
                    generation.note_kept()
                raise
            finally:
                model.close()
            return _finish(job, output, config, model, outcomes, chat=prompts.chat)


def _run_in_prefix_order(
    config: JobConfig, source: Input, job: JobFolder, reader: RequestReader, planner: Planner, generation: _Generation
) -> None:
    """Reads the input once to sort all requests, generates them in prefix order, and reads it a second time to write the output."""
    outcomes, signals = generation.outcomes, generation.signals
    outcomes.tracker.phase("planning")
    with FirstReading(config, source, reader, job, outcomes) as reading:
        with signals.interruptible(), outcomes.run.timed("plan"):
            needs_a_model = reading.needs_a_model()
        if needs_a_model:
            reading.announce("loading model")
            generation.model.load()  # the reading goes on meanwhile
            reading.announce(None)
        with signals.interruptible(), outcomes.run.timed("plan"):
            requests = reading.result()
    in_order = config.prompts.priority_column is None
    with PlannedWindows(requests.windows(), planner, job, outcomes, fresh=reading.fresh, in_order=in_order) as windows:
        while True:
            with signals.interruptible():
                window = windows.next()
            if window is None:
                break
            generation.run(window, windows)
            signals.check()
    if reading.broken is not None:
        raise reading.broken
    outcomes.tracker.phase("writing")
    with signals.interruptible(), outcomes.run.timed("write"):
        _write_output(source, job, reading, outcomes)


def _write_output(source: Input, job: JobFolder, reading: FirstReading, outcomes: Outcomes) -> None:
    """The second reading: the rows in input order, each with its result."""
    reading.check_input()
    stream, left, passed = RowStream(source), job.row_count, 0
    while left:
        rows = stream.take(READ_ROWS)
        if stream.broken is not None:
            raise stream.broken
        if not rows:
            raise reading.changed()
        keys, results = job.rows(rows[0].number, rows[-1].number)
        stored = job.stored(list(keys.values()))
        lost = sum(1 for key in keys.values() if key not in stored)
        if lost:
            job.forget_reading()  # the next run is to look at every row
            raise OutputError(
                f"the results of {job.output} are damaged: {lost:,} of them cannot be read",
                "run the same command again: they are generated again",
            )
        results.update({number: replace(stored[key], row=number) for number, key in keys.items()})
        job.write([row for row in rows if row.number in results], results, keys)
        left -= len(results)
        passed += len(rows)
        outcomes.tracker.passed(passed)
    reading.check_input()


def _run_as_rows_come(
    stream: RowStream,
    rows: list[Row],
    size: int,
    reader: RequestReader,
    planner: Planner,
    generation: _Generation,
) -> None:
    """Generates each window of `size` rows, the first of which is read already, and writes it before the next one is read."""
    job, outcomes, signals = generation.job, generation.outcomes, generation.signals
    tracker = outcomes.tracker
    job.begin_rows()
    if not rows:  # --limit 0: later rows that have a result are in the output all the same
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
            if isinstance(job, StdoutJob):  # it keeps nothing, so what is done goes out now
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
    if stream.broken is not None:
        raise stream.broken


class _Generation:
    """The loop in which windows become results."""

    def __init__(self, job: Job, model: _Model, outcomes: Outcomes, signals: Signals) -> None:
        self.job, self.model, self.outcomes, self.signals = job, model, outcomes, signals
        self._keys: dict[int, bytes] = {}
        """By row number, of the rows that the engine has."""
        self._results: dict[int, Result] | None = None
        self._kept = 0
        """Completion tokens of unfinished rows that were kept last."""
        self._tokens_asked = self._rows_asked = 0

    def run(
        self, window: Planned, windows: PlannedWindows | None = None, results: dict[int, Result] | None = None
    ) -> None:
        """Generates a window. Results go to the job as they come, and into `results`.

        As long as `windows` has more, the next window is added when the last row of this one has started. So both run together for a while.
        """
        engine = self.model.engine()
        tracker = self.outcomes.tracker
        tracker.phase(GENERATING)
        self._results = results
        self._add(engine, window)

        def between_steps() -> str | None:
            self.model.tell_notes()
            tracker.generated(engine.stats.completion_tokens, max(1, engine.unfinished - engine.waiting))
            wish = self.signals.stop()
            if wish == "now" or self.job.flush_due:
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
            self.model.tell_notes()

    def _add(self, engine: AnyEngine, window: Planned) -> None:
        run, tracker = self.outcomes.run, self.outcomes.tracker
        run.prefill_tokens_min += window.prefill_tokens_min
        run.groups += len(window.plan.groups)
        run.prefix_nodes += len(window.plan.nodes)
        for request in window.requests:
            self._keys[request.row] = request.key
            self._rows_asked += 1
            self._tokens_asked += 0 if request.texts else request.max_tokens * request.leaves
            run.begun_tokens += sum(len(c.token_ids) for c in request.begun.values())
        tracker.expected_tokens = self._tokens_asked / self._rows_asked
        tracker.begun_tokens = run.begun_tokens
        engine.add(window.leaves, window.plan, self._keep)

    def _keep(self, result: Result) -> None:
        """A row is done."""
        self.job.append(self._keys.pop(result.row), result)
        if self._results is not None:
            self._results[result.row] = result
        self.outcomes.done(result)

    def _keep_under_way(self, engine: AnyEngine) -> None:
        rows = {self._keys[row]: completions for row, completions in engine.under_way().items()}
        self._kept = sum(len(c.token_ids) for completions in rows.values() for c in completions.values())
        self.job.keep_under_way(rows)

    def note_kept(self) -> None:
        """Says what an interrupted run leaves to the next."""
        run, total = self.outcomes.run, self.outcomes.tracker.total
        of = "" if total is None else f" of {total:,}"
        begun = f", and {self._kept:,} tokens of unfinished rows" if self._kept else ""
        self.outcomes.tracker.note(f"{run.done:,}{of} rows are done{begun}: all of that is kept")


class _Model:
    """The engine, loaded when the first row needs it: a job that has nothing left to generate never loads it."""

    def __init__(
        self, config: JobConfig, tokenizer: LoadedTokenizer, signals: Signals, tracker: Tracker, run: RunFigures
    ) -> None:
        self._config, self._tokenizer = config, tokenizer
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
            self._engine = open_engine(self._config.model, self._tokenizer, self._config.engine)
        self.ready_at = self.last_token_at = time.perf_counter()

    def tell_notes(self) -> None:
        """What the engine has to say, each once."""
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
        )
        return figures(self._run, engine.stats if engine else EngineStats(), setting, earlier=previous)


def _finish(job: Job, output: str, config: JobConfig, model: _Model, outcomes: Outcomes, *, chat: bool) -> JobReport:
    """The output takes its name, the figures are written."""
    with outcomes.run.timed("write"):
        job.flush()
    stats = model.figures(job.previous)
    job.finish(stats)
    _tell_notes(job, outcomes.tracker)
    write_stats(config.stats, stats)
    code = 3 if outcomes.run.failed else 0
    return JobReport(stats, output, code, False, chat, tuple(outcomes.failures))


def _keep(job: Job, config: JobConfig, model: _Model, run: RunFigures) -> None:
    """The job ends before its end: what is finished is kept, and the figures so far."""
    job.flush()
    stats = model.figures(job.previous)
    job.save_stats(stats)
    write_stats(config.stats, stats)


def _already_finished(stats: dict[str, Any], output: str, config: JobConfig, *, chat: bool) -> JobReport:
    write_stats(config.stats, stats)
    code = 3 if stats["job"]["rows_failed"] else 0
    return JobReport(stats, output, code, True, chat)


def _tell_notes(job: Job, tracker: Tracker) -> None:
    while job.notes:
        tracker.note(job.notes.pop(0))
