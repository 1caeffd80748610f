"""The story of a job: rows → requests → prefix plan → engine → results → output. It alone knows all the parts; reads from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batchgen.config import JobConfig
from batchgen.errors import InputCorrupt, Interrupted, TooManyErrors
from batchgen.grammar_check import GrammarCheck
from batchgen.guards import ErrorLimit, memory_errors
from batchgen.identity import dtype_name, job_settings
from batchgen.kept import KeptPrefixes
from batchgen.prefix import plan_prefixes
from batchgen.progress import Progress, Silent
from batchgen.prompts import Draft, LoadedTokenizer, PromptBuilder, load_tokenizer
from batchgen.prompts.tokenizer import quiet
from batchgen.reading import CHECKED_ROWS, read_windows, window_rows
from batchgen.records import JobFolder, Row, RowForm, StdoutJob, default_output, open_input, open_job
from batchgen.request import Request, leaves_of, row_key
from batchgen.result import Result
from batchgen.signals import Signals
from batchgen.stats import EngineStats, RunFigures, Setting, check_stats_file, figures, versions, write_stats

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine

FAILURES_KEPT = 5


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
    with Signals(config.grace) as signals, memory_errors():
        with signals.interruptible():
            check_stats_file(config.stats)
            source = open_input(config.inputs, format=config.input_format, output=config.output)
            output = config.output or default_output(config.inputs, source.is_stdin, config.input_format) or "-"
            progress.phase("loading tokenizer")
            with run.timed("load"):
                text = load_tokenizer(config.model)
            prompts = PromptBuilder(text, config.prompts, config.sampling)
            grammars = GrammarCheck(text)
            grammars.of_command(config.sampling)
            progress.phase("reading")
            waiting = read_windows(source, config)
            rows = next(waiting, [])
            prompts.check_columns(rows[:CHECKED_ROWS])
            settings = job_settings(config, text, chat=prompts.chat)
        with open_job(
            output,
            settings=settings,
            mentions=versions(),
            input=source,
            limit=config.limit,
            form=RowForm(keep=config.keep, id_column=config.id_column, token_ids=config.token_ids),
            work_dir=config.work_dir,
            overwrite=config.overwrite,
            flush_every=config.flush_every,
            order=config.order,
            optional=prompts.optional_results({} if source.schema is None else {f.name: f.type for f in source.schema}),
        ) as job:
            for note in (*source.notes, *job.notes):
                progress.note(note)
            if job.finished is not None:
                return _already_finished(job.finished, output, config, chat=prompts.chat)
            work = _Work(config, text, prompts, grammars, job, run, signals, progress)
            work.total = len(rows) if len(rows) < window_rows(config, source) else None
            try:
                while rows:
                    work.window(rows)
                    rows.clear()  # freed before the next ones are read
                    with signals.interruptible():
                        rows = next(waiting, [])
            except (Interrupted, InputCorrupt, TooManyErrors):
                work.keep()
                raise
            return work.finish(output)


class _Work:
    """One run of a job: what is done to each window of rows, and what is counted on the way."""

    def __init__(
        self,
        config: JobConfig,
        text: LoadedTokenizer,
        prompts: PromptBuilder,
        grammars: GrammarCheck,
        job: JobFolder | StdoutJob,
        run: RunFigures,
        signals: Signals,
        progress: Progress,
    ) -> None:
        self.config, self.text, self.prompts, self.grammars, self.job = config, text, prompts, grammars, job
        self.run, self.signals, self.progress = run, signals, progress
        self.total: int | None = None
        """Rows of the input, where that is known."""
        self.engine: Engine | None = None
        self.ready_at = self.last_token_at = 0.0
        self.failures: list[str] = []
        self.last_failure = ""
        self.max_errors = ErrorLimit(config.max_errors)
        self.keys: dict[int, bytes] = {}
        self.sources: dict[int, str] = {}
        self.notes_told = 0
        self.kept = KeptPrefixes()
        self.unwritten: Sequence[Row] = ()
        """The window's rows, until they are written."""
        self.results: dict[int, Result] = {}
        """Of this window's rows, by number."""

    def window(self, rows: Sequence[Row]) -> None:
        """Generates what these rows still lack and writes them."""
        self.unwritten = rows
        self.sources = {row.number: row.source for row in rows}
        with self.signals.interruptible():
            self.progress.phase(f"planning rows {rows[0].number + 1:,}–{rows[-1].number + 1:,}")
            with self.run.timed("plan"):
                requests = self._requests(rows)
        if requests:
            self._generate(requests)
        self.signals.check()
        self._write(rows)

    def _requests(self, rows: Sequence[Row]) -> list[Request]:
        """The rows that are to be generated; the results of the others are put where they belong."""
        drafts = []
        for built in self.prompts.build(rows):
            checked = self.grammars.of_row(built) if isinstance(built, Draft) else built
            if isinstance(checked, Draft):
                drafts.append(checked)
            else:
                self._done(checked)
        for note in self.prompts.notes[self.notes_told :]:
            self.progress.note(note)
        self.notes_told = len(self.prompts.notes)
        occurrences = self.job.occurrences([draft.digest for draft in drafts])
        keys = [row_key(draft.digest, n) for draft, n in zip(drafts, occurrences, strict=True)]
        stored = self.job.stored(keys)
        requests = []
        for draft, key in zip(drafts, keys, strict=True):
            self.keys[draft.row] = key
            if key in stored:
                self._resumed(replace(stored[key], row=draft.row))
            else:
                requests.append(request_of(draft, key))
        return requests

    def _generate(self, requests: list[Request]) -> None:
        engine = self._engine()
        with self.signals.interruptible(), self.run.timed("plan"):
            leaves = leaves_of(requests)
            prompts = [leaf.tokens for leaf in leaves]
            plan = plan_prefixes(prompts, self.config.engine.chunk_size, share=self.config.engine.share)
            carried = self.kept.carried(plan, prompts)
            least = plan.prefill_tokens_min
            if any(request.texts for request in requests):  # whose tokens are in the plan, and are no prompt's
                least = plan_prefixes([r.tokens for r in requests], plan.chunk_size, share=False).prefill_tokens_min
        self.run.prefill_tokens_min += max(0, least - carried)
        self.run.groups += len(plan.groups)
        self.run.prefix_nodes += len(plan.nodes)
        self.progress.phase("generating")
        try:
            engine.generate(leaves, plan, on_result=self._generated, stop=self.signals.stop)
        finally:
            self.last_token_at = time.perf_counter()
            self._tell(engine)

    def _engine(self) -> Engine:
        """The model is loaded when the first row needs it: a job that has nothing left to generate never does."""
        if self.engine is None:
            self.progress.phase("loading model")
            with self.signals.interruptible(), self.run.timed("load"):
                with quiet():  # torchao, where it is installed, has much to say
                    from batchgen.engine.engine import Engine  # imports torch
                    from batchgen.engine.loading import load_model

                self.engine = Engine(load_model(self.config.model, self.text), self.text, self.config.engine)
            self._tell(self.engine)
            self.ready_at = time.perf_counter()
        return self.engine

    def _tell(self, engine: Engine) -> None:
        """What the engine has to say, each once."""
        while engine.notes:
            self.progress.note(engine.notes.pop(0))

    def _generated(self, result: Result) -> None:
        self.job.append(self.keys[result.row], result)
        self._done(result)

    def _done(self, result: Result) -> None:
        """A row of this run is done, well or not."""
        self.results[result.row] = result
        failed = result.error_type is not None
        self.run.count(failed=failed, prompt_tokens=result.prompt_tokens, completion_tokens=result.completion_tokens)
        if failed:
            where = self.sources[result.row]
            message = str(result.error_message).removeprefix(f"{where}: ")
            self.last_failure = f"{where}: {result.error_type}: {message}"
            if len(self.failures) < FAILURES_KEPT:
                self.failures.append(self.last_failure)
        self._show()
        if failed:
            self.max_errors.check(failed=self.run.failed, done=self.run.done, last=self.last_failure)

    def _resumed(self, result: Result) -> None:
        self.results[result.row] = result
        self.run.count_resumed(
            failed=result.error_type is not None,
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
        )
        self._show()

    def _show(self) -> None:
        self.progress.rows(self.run.done, self.run.failed, self.total)
        self.progress.tokens(self.run.prompt_tokens, self.run.completion_tokens)

    def _write(self, rows: Sequence[Row]) -> None:
        self.progress.phase("writing")
        self.unwritten = ()
        with self.run.timed("write"):
            self.job.write(rows, self.results, self.keys)
        self.results, self.keys, self.sources = {}, {}, {}

    def keep(self) -> None:
        """The job ends before its end: what is finished is kept, and the figures so far."""
        if isinstance(self.job, StdoutJob):  # which keeps nothing, so that it goes out now
            self._write([row for row in self.unwritten if row.number in self.results])
        self.job.flush()
        stats = self._figures()
        self.job.save_stats(stats)
        write_stats(self.config.stats, stats)

    def finish(self, output: str) -> JobReport:
        """The output takes its name, the figures are written."""
        with self.run.timed("write"):
            self.job.flush()
        stats = self._figures()
        self.job.finish(stats)
        write_stats(self.config.stats, stats)
        code = 3 if self.run.failed else 0
        return JobReport(stats, output, code, False, self.prompts.chat, tuple(self.failures))

    def _figures(self) -> dict[str, Any]:
        self.run.seconds["generate"] = max(0.0, self.last_token_at - self.ready_at)
        from batchgen.engine.attention.cascade import Cascade

        engine = self.engine
        setting = Setting(
            model=self.config.model.model,
            dtype=dtype_name(self.config.model, self.text.hf_config),
            device=str(engine.runner.model.device) if engine else "",
            attention=Cascade.__name__.lower() if engine else "",
        )
        return figures(self.run, engine.stats if engine else EngineStats(), setting, earlier=self.job.previous)


def request_of(draft: Draft, key: bytes) -> Request:
    return Request(
        row=draft.row,
        tokens=draft.tokens,
        params=draft.params,
        max_tokens=draft.max_tokens,
        key=key,
        truncated=draft.truncated,
        texts=draft.texts,
        priority=draft.priority,
    )


def _already_finished(stats: dict[str, Any], output: str, config: JobConfig, *, chat: bool) -> JobReport:
    write_stats(config.stats, stats)
    code = 3 if stats["job"]["rows_failed"] else 0
    return JobReport(stats, output, code, True, chat)
