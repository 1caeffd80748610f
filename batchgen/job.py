"""The story of a job: rows become requests, requests are planned in windows, the engine generates, and the results are written.

Read it from top to bottom.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
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
from batchgen.job_setup import JobCommand, JobSetup, check_command, set_up_job
from batchgen.jobs.base import FinishedJob
from batchgen.jobs.files.disk import write_stats
from batchgen.jobs.identity import dtype_name
from batchgen.jobs.job_folder import Job, JobFolder, Store
from batchgen.jobs.opening import find_finished
from batchgen.jobs.order.advice import SAMPLE_ROWS, advice_for
from batchgen.jobs.order.requests import FirstReading
from batchgen.jobs.order.sorted_requests import bounded_windows, evenly, spread
from batchgen.jobs.order.windows import Planned, PlannedWindows, Planner
from batchgen.jobs.outcomes import Outcomes, agreement_with
from batchgen.jobs.shards import ShardFolder
from batchgen.jobs.stdout_job import StdoutJob
from batchgen.notebook import shown_progress
from batchgen.process.collector import few_collections
from batchgen.process.signals import Signals
from batchgen.progress import GENERATING, REFRESH_SECONDS, Progress, Tracker
from batchgen.push import push_output
from batchgen.recording import RunRecorder
from batchgen.request import Request
from batchgen.result import Result
from batchgen.scheduling.duration import TimeLeft
from batchgen.stats import EngineStats, Setting, counted, figures

KEEP_SECONDS = 0.25
"""Minimum time between two commits of results and unfinished completions."""
KEEP_SHARE = 0.02
"""Maximum share of a run's time that these commits take, unless `--flush-every` asks for more."""

ADVICE_BELOW = 0.5
"""A run that shares less of its prompt tokens than this looks for what would share more."""

_STDOUT_KEEPS_NOTHING = "standard output keeps nothing: the same command begins again"


def run_job(config: JobConfig, progress: Progress | None = None) -> JobReport:
    """Runs a job, or one shard of it, to its end, or continues it where an earlier run stopped. Merges the shards and pushes the output if asked to.

    Without a `progress`, a notebook shows a bar, and any other program nothing. Raises `BatchgenError`, and `KeyboardInterrupt` when Ctrl-C,
    SIGTERM or SIGHUP stops it; the rows that were finished by then are kept.
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


def measure_job(config: JobConfig, rows: int, progress: Progress | None = None) -> dict[str, Any] | None:
    """Generates a few rows from all over the prefix order and keeps their results: the run of the job does not compute them again.

    Returns figures of these rows, whose `seconds` begin when the model is loaded; None if the job is finished. Raises what `run_job` raises, and `UsageError` if nothing could be kept.
    """
    check_config(config)
    if config.shard is not None:
        raise UsageError("--measure is for a whole job, not for a shard", "leave out --shard")
    if config.output == "-" or "-" in config.inputs:
        raise UsageError(
            "--measure keeps the results for the run, so it needs an input that can be read again, and an output file",
            "use a file, and -o FILE",
        )
    with shown_progress(progress) as shown:
        report = _run_job(replace(config, window="all", order="input"), shown, rows)
    if report.already_finished:
        return None
    done, seconds = report.stats["rows_ok"], report.stats["seconds"]["generate"]  # a row that failed may never have run
    found = {"rows": done, "seconds": seconds, "rows_per_s": done / seconds if seconds else 0.0}
    return found | {name: report.stats[name] for name in ("completion_tokens", "completion_tokens_per_s")}


def _run_job(config: JobConfig, progress: Progress, measured: int | None = None) -> JobReport:
    """Runs a job to its end; with `measured`, only so many of its rows."""
    tracker = Tracker(progress)
    with Signals(config.grace) as signals, memory_errors(), few_collections():
        with signals.interruptible():
            command = check_command(config)
            done = find_finished(command.output, digest=command.digest, input=command.source, config=config)
            if done is not None:
                return _already_finished(command, done, tracker)
        setup, store = set_up_job(command, signals, tracker)
        if isinstance(store, FinishedJob):
            return _already_finished(command, store, tracker)
        with store as job:
            tracker.show_notes(command.source.notes)
            tracker.show_notes(job.notes)
            tracker.tell = job.tell
            generation = _Generation(setup, job, signals, tracker)
            try:
                if isinstance(job, ShardFolder):
                    _run_shard(job, generation)
                elif setup.window_size is not None:
                    _run_as_rows_come(setup, job, generation)
                else:
                    assert isinstance(job, JobFolder), "standard output has windows"
                    _run_in_prefix_order(setup, job, generation, measured)
                tracker.show_notes(job.notes)
                asked = config.sampling
                generation.outcomes.note_cut_rows(endless=asked.ignore_eos and not (asked.stop or asked.stop_token_ids))
            except (Interrupted, InputCorrupt, TooManyErrors, DevicesLost) as e:
                _keep_stopped(job, generation)
                tracker.stopped()
                if isinstance(e, Interrupted):
                    if isinstance(job, StdoutJob):
                        raise Interrupted(e.signum, _STDOUT_KEEPS_NOTHING) from None
                    generation.note_kept()
                raise
            finally:
                generation.end()
            if measured:
                return JobReport(_keep_stopped(job, generation), setup.spec.output, already_finished=False)
            return _finish_job(setup, job, generation)


def _run_in_prefix_order(setup: JobSetup, job: JobFolder, generation: _Generation, measured: int | None = None) -> None:
    """Reads the input once to sort all requests, generates them in prefix order, and reads it a second time to write the output.

    With `measured`, generates only so many, at equal distances in the order, and writes no output.
    """
    outcomes, signals = generation.outcomes, generation.signals
    outcomes.tracker.phase("planning")
    with FirstReading(setup.config, setup.spec.input, setup.reader(job, outcomes), job, outcomes) as reading:
        with signals.interruptible(), outcomes.run.timed("plan"):
            needs_a_model = reading.needs_a_model()
        if needs_a_model:
            reading.announce("loading model")
            generation.load_model()  # another thread goes on reading
            reading.announce(None)
        with signals.interruptible(), outcomes.run.timed("plan"):
            requests = reading.result()
            windows = requests.windows()
            if measured is not None:
                chosen = spread(windows, measured)
                outcomes.tracker.total = outcomes.run.done + sum(1 + job.equal_rows(r.key) for r in chosen)
                windows = bounded_windows(chosen, setup.config.limits)
    _run_windows(windows, generation, fresh=reading.fresh)
    if reading.broken is not None:
        raise reading.broken
    if measured is not None:
        outcomes.tracker.total = job.row_count
        outcomes.tracker.stopped()
        return
    outcomes.tracker.phase("writing")
    with signals.interruptible(), outcomes.run.timed("write"):
        write_output(setup.spec.input, job, reading.fingerprint, outcomes, read_rows=setup.config.limits.read_rows)


def _run_windows(requests: Iterator[list[Request]], generation: _Generation, *, fresh: bool) -> None:
    """Plans and generates all windows. `fresh`: none of the requests has a result yet."""
    job, outcomes, signals = generation.job, generation.outcomes, generation.signals
    with PlannedWindows(requests, generation.planner, job, outcomes, signals, fresh=fresh) as windows:
        for window in windows:
            generation.run(window, windows)
            signals.check()


def _run_shard(shard: ShardFolder, generation: _Generation) -> None:
    tracker = generation.outcomes.tracker
    tracker.total = shard.request_count
    tracker.phase("planning")
    _run_windows(shard.windows(), generation, fresh=not shard.results_at_hand)


def _run_as_rows_come(setup: JobSetup, job: Job, generation: _Generation) -> None:
    """Generates windows of rows in the order of the input, and writes each one before the next one is read."""
    outcomes, signals = generation.outcomes, generation.signals
    tracker, reader, stream, rows = outcomes.tracker, setup.reader(job, outcomes), setup.stream, setup.rows
    size, order = setup.window_size, setup.config.order
    assert size is not None
    job.begin_rows()
    if not rows:  # with --limit 0, rows that have a result from an earlier run are still written
        rows = reader.take(stream, size)
    while rows:
        with signals.interruptible():
            tracker.phase(f"planning rows {rows[0].number + 1:,}–{rows[-1].number + 1:,}")
            with outcomes.run.timed("plan"):
                read = reader.requests(rows, reader.build(rows, reader.known(rows)))
        if stream.ended and stream.next_number == len(rows):
            tracker.total = len(read.rows)
        results = dict(read.results)
        try:
            for requests in bounded_windows(read.requests, setup.config.limits):
                with signals.interruptible(), outcomes.run.timed("plan"):
                    window = generation.planner.plan(requests)
                generation.run(window, results=results)
                signals.check()
        except BaseException:
            if isinstance(job, StdoutJob):  # it keeps nothing, so the rows that are done are written now
                job.write(read.answered(results, order), results, read.keys)
            raise
        tracker.phase("writing")
        with outcomes.run.timed("write"):
            answered = read.answered(results, order)
            job.add_rows([row.number for row in read.rows], read.keys, read.results)
            job.write(answered, results, read.keys)
            outcomes.written(answered, results)
        rows.clear()  # freed before the next ones are read
        del read, results, answered
        with signals.interruptible():
            rows = reader.take(stream, size)
    reader.note_same_ids()
    if stream.broken is not None:
        raise stream.broken
    job.check_dropped(outcomes.failures)


class _Generation:
    """Turns windows into results. The model is loaded when the first row needs it, so a job with nothing left to generate does not load it."""

    def __init__(self, setup: JobSetup, job: Store, signals: Signals, tracker: Tracker) -> None:
        self._setup, self._texts, self.config = setup, setup.quantized_texts(), setup.config
        self.job, self.signals = job, signals
        expect = None if self.config.shard else self.config.expect  # a shard writes no rows
        self.outcomes = Outcomes(tracker, self.config.max_errors, agreement_with(expect, setup.spec.input))
        self.planner = planner = Planner(
            self.config.engine.chunk_size,
            share=self.config.engine.share,
            consecutive=setup.window_size is None and self.config.prompts.priority_column is None,
            under_way=job.under_way(),
        )
        self._recorder = RunRecorder(
            self.config.shard or "",
            tree=lambda: planner.tree,
            decode=setup.tokenizer.decode,
            keep=job.keep_record,
        )
        self._engine: AnyEngine | None = None
        self._ready_at = self._last_token_at = 0.0
        self._keep_next = 0.0
        """When unfinished rows are kept next (`time.monotonic`)."""
        self._running: dict[int, tuple[bytes, str]] = {}
        """The keys and the sources of the rows that the engine has, by row number."""
        self._results: dict[int, Result] | None = None
        self._time_left, self._estimate_next = TimeLeft(), 0.0
        self._rows_asked = self._rows_answered = 0
        """Rows of all windows so far, those that wait for the result of an equal row included, and those of them that have a result."""

    def run(
        self, window: Planned, windows: PlannedWindows | None = None, results: dict[int, Result] | None = None
    ) -> None:
        """Generates a window. Each result goes to the job at once, and into `results`.

        If `windows` has more, the next window is added when the last row of this one has started, and both run together for a while.
        """
        tracker = self.outcomes.tracker
        if self._engine is None:
            tracker.phase("loading model")
        engine = self._engine or self.load_model()
        tracker.phase(GENERATING)
        self._results = results
        self._add(engine, window)

        def between_steps() -> str | None:
            tracker.show_notes(engine.notes)
            stats = engine.stats
            self._estimate(engine, stats)
            tracker.generated(stats.completion_tokens)
            self._recorder.see(stats)
            wish = self.signals.stop()
            if wish == "now" or time.monotonic() >= self._keep_next:
                self._keep_under_way(engine)
            if wish is None and windows is not None:
                another = windows.next_if_ready(engine.waiting)
                if another is not None:
                    self._add(engine, another)
            return wish

        try:
            engine.run(between_steps)
        finally:
            self._last_token_at = time.perf_counter()
            self.job.commit()
            tracker.changed()
            tracker.show_notes(engine.notes)

    def _add(self, engine: AnyEngine, window: Planned) -> None:
        run = self.outcomes.run
        run.prefill_tokens_min += window.prefill_tokens_min
        run.groups += window.plan.groups
        run.prefix_nodes += len(window.plan.nodes)
        self._time_left.add(window.requests, window.tokens_to_run)
        for request in window.requests:
            self._running[request.row] = request.key, request.source
            self._rows_asked += 1 + self.job.equal_rows(request.key)
            if request.images:
                run.images += len(request.images)
                run.image_tokens += sum(image.count for image in request.images)
            if request.begun:
                run.begun_tokens += sum(len(c.token_ids) for c in request.begun.values())
        engine.add(window.leaves, window.plan, self._keep)

    def _keep(self, result: Result) -> None:
        """Takes the result of a row, which is that of all equal rows."""
        key, source = self._running.pop(result.row)
        self.job.append(key, result)
        if self._results is not None:
            self._results[result.row] = result
        equal = self.job.equal_rows(key)
        self._time_left.ended(result.lengths)
        self._rows_answered += 1 + equal
        self.outcomes.done(result, source, rows=1 + equal, equal=equal)

    def _estimate(self, engine: AnyEngine, stats: EngineStats) -> None:
        """Tells the tracker what to expect, a few times a second. The rows of windows that are not planned yet take as long as the others."""
        now = time.monotonic()
        if now < self._estimate_next:
            return
        self._estimate_next = now + REFRESH_SECONDS
        tracker, run = self.outcomes.tracker, self.outcomes.run
        open_rows = self._rows_asked - self._rows_answered
        left = self._time_left.completions_left(run.begun_tokens + stats.completion_tokens, engine.waiting)
        elapsed = tracker.generating_seconds
        prefill = stats.prefill_tokens + stats.scored_tokens
        share, seconds = self._time_left.expect(engine.prices, prefill, stats.completion_tokens, left, elapsed)
        if seconds is not None and tracker.total is not None:
            seconds += (elapsed + seconds) * max(0, tracker.total - run.done - open_rows) / max(1, self._rows_asked)
        under_way = share * self._rows_asked - self._rows_answered
        tracker.expect(min(max(0.0, under_way), open_rows), None if tracker.total is None else seconds)

    def _keep_under_way(self, engine: AnyEngine) -> None:
        """Commits results and unfinished completions, in case the run is killed. Done as often as possible without taking more than `KEEP_SHARE` of the run."""
        began = time.monotonic()
        self.job.keep_under_way({self._running[row][0]: parts for row, parts in engine.under_way().items()})
        now = time.monotonic()
        self._keep_next = now + min(self.config.flush_every, max(KEEP_SECONDS, (now - began) / KEEP_SHARE))

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

    def load_model(self) -> AnyEngine:
        config, tracker = self.config, self.outcomes.tracker
        with self.signals.interruptible(), self.outcomes.run.timed("load"):
            engine = open_engine(config.model, self._setup.tokenizer, config.engine, self._texts)
        self._engine = engine
        tracker.show_notes(engine.notes)
        if isinstance(engine, Workers):
            tracker.workers = engine.progress
        self._ready_at = self._last_token_at = time.perf_counter()
        return engine

    def end(self) -> None:
        if self._engine is not None:
            stats = self._engine.stats
            self._engine.close()
            self._recorder.end(stats)

    def figures(self) -> dict[str, Any]:
        engine, run, model = self._engine, self.outcomes.run, self.config.model
        run.seconds["generate"] = max(0.0, self._last_token_at - self._ready_at)
        setting = Setting(
            model=model.model,
            dtype=engine.dtype if engine else dtype_name(model, self._setup.tokenizer.hf_config),
            device=engine.device if engine else "",
            attention=engine.attention if engine else "",
            sampling=self._setup.prompts.sampling_from,
        )
        stats = figures(run, engine.stats if engine else EngineStats(), setting, earlier=self.job.previous)
        return stats | ({"workers": engine.by_worker} if isinstance(engine, Workers) else {})


def _finish_job(setup: JobSetup, job: Store, generation: _Generation) -> JobReport:
    """Gives the output its name and writes the figures."""
    outcomes = generation.outcomes
    with outcomes.run.timed("write"):
        job.end_output()
    stats = generation.figures() | outcomes.figures()
    in_order, advice = isinstance(job, JobFolder) and setup.window_size is None, None
    if in_order and stats["rows"] >= SAMPLE_ROWS and stats["shared_fraction"] < ADVICE_BELOW:
        # While the folder has the rows' images. A signal ends the search, and the job is finished all the same.
        with suppress(Interrupted), generation.signals.interruptible():
            advice = advice_for(setup.config, setup.tokenizer, setup.prompts, evenly(setup.rows, SAMPLE_ROWS))
    job.finish(stats)
    outcomes.tracker.show_notes(job.notes)
    write_stats(setup.config.stats, stats)
    if isinstance(job, ShardFolder):
        outcomes.tracker.note(job.what_is_left(merges=setup.config.merge))
    outcomes.tracker.show_notes([] if advice is None else [advice.text])
    return JobReport(
        stats,
        setup.spec.output,
        already_finished=False,
        chat=setup.prompts.chat,
        failures=tuple(outcomes.failures),
        shard=str(setup.config.shard) if isinstance(job, ShardFolder) else "",
    )


def _keep_stopped(job: Store, generation: _Generation) -> dict[str, Any]:
    """Keeps the results and the figures of a run that stops early. Returns the figures."""
    job.flush()
    stats = generation.figures()
    job.save_stats(stats)
    write_stats(generation.config.stats, stats)
    return stats


def _already_finished(command: JobCommand, job: FinishedJob, tracker: Tracker) -> JobReport:
    tracker.show_notes(command.source.notes)
    tracker.show_notes(job.notes)
    write_stats(command.config.stats, job.figures)
    shard = str(command.config.shard) if job.is_shard else ""  # not for one of a job that is merged already
    return JobReport(job.figures, command.output, already_finished=True, chat=job.chat, shard=shard)
