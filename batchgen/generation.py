"""What both ways through a job share: rows to requests, requests to results, and what is counted and shown on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchgen.ahead import Ahead
from batchgen.config import JobConfig
from batchgen.devices import AnyEngine, open_engine
from batchgen.guards import ErrorLimit
from batchgen.jobs.identity import dtype_name
from batchgen.kept import KeptPrefixes
from batchgen.prefix import PrefixPlan, plan_prefixes
from batchgen.progress import Progress
from batchgen.prompts import LoadedTokenizer, PromptBuilder
from batchgen.records import JobFolder, Row, StdoutJob
from batchgen.request import Leaf, Request, leaves_of
from batchgen.result import Result
from batchgen.sampling.grammars import GrammarCheck
from batchgen.signals import Signals
from batchgen.stats import EngineStats, RunFigures, Setting, figures

FAILURES_KEPT = 5


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A window of requests with its plan."""

    leaves: list[Leaf]
    plan: PrefixPlan
    prefill_tokens_min: int
    """Less what earlier windows have left."""
    keys: dict[int, bytes]
    """By row."""


class Generation:
    """One run of a job: makes requests of rows, generates them, keeps their results and counts."""

    def __init__(
        self,
        config: JobConfig,
        tokenizer: LoadedTokenizer,
        prompts: PromptBuilder,
        grammars: GrammarCheck,
        job: JobFolder | StdoutJob,
        run: RunFigures,
        signals: Signals,
        progress: Progress,
    ) -> None:
        self.config, self.tokenizer, self.prompts, self.grammars, self.job = config, tokenizer, prompts, grammars, job
        self.run, self.signals, self.progress = run, signals, progress
        self.total: int | None = None
        """Rows of the input, where that is known."""
        self.engine: AnyEngine | None = None
        self._loading: Ahead[AnyEngine] | None = None
        self.ready_at = self.last_token_at = 0.0
        self.failures: list[str] = []
        """The first few rows that failed: where, and why."""
        self.last_failure = ""
        self.max_errors = ErrorLimit(config.max_errors)
        self.kept = KeptPrefixes()
        self.notes_told = 0
        # Of the rows that are at hand, by number; emptied by `forget`.
        self.results: dict[int, Result] = {}
        self.keys: dict[int, bytes] = {}
        self.sources: dict[int, str] = {}

    def forget(self) -> None:
        """The rows at hand are dealt with."""
        self.results, self.keys, self.sources = {}, {}, {}

    def built(self, rows: Sequence[Row]) -> list[Request | Result]:
        """Each row as a request, or the result of one that failed. May be done ahead, in another thread."""
        return [self.grammars.of_row(b) if isinstance(b, Request) else b for b in self.prompts.build(rows)]

    def requests(self, rows: Sequence[Row], built: Sequence[Request | Result]) -> list[Request]:
        """The rows that are to be generated; the others' results are put into `results`."""
        self.sources.update((row.number, row.source) for row in rows)
        found = []
        for row in built:
            if isinstance(row, Request):
                found.append(row)
            else:
                self.done(row)
        for note in self.prompts.notes[self.notes_told :]:
            self.progress.note(note)
        self.notes_told = len(self.prompts.notes)
        occurrences = self.job.occurrences([request.key for request in found])
        requests = [request.repeated(n) for request, n in zip(found, occurrences, strict=True)]
        self.keys.update((request.row, request.key) for request in requests)
        lacking = self.lacking(requests)
        if lacking:
            self.expect_model()
        return lacking

    def lacking(self, requests: list[Request]) -> list[Request]:
        """Those that an earlier run left no result of; the others' are put into `results`."""
        stored = self.job.stored([r.key for r in requests])
        if not stored:
            return requests
        for request in requests:
            if request.key in stored:
                self._resumed(replace(stored[request.key], row=request.row))
        return [r for r in requests if r.key not in stored]

    def planned(self, requests: list[Request], *, follow_on: bool = False) -> Planned:
        """A window's plan. `follow_on`: these come, in order, right after those of the call before. May be done ahead, in another thread."""
        leaves = leaves_of(requests)
        prompts = [leaf.tokens for leaf in leaves]
        plan = plan_prefixes(prompts, self.config.engine.chunk_size, share=self.config.engine.share)
        carried = self.kept.carried(plan, prompts, and_last=follow_on)
        least = plan.prefill_tokens_min
        if any(request.texts for request in requests):  # whose tokens are in the plan, and are no prompt's
            least = plan_prefixes([r.tokens for r in requests], plan.chunk_size, share=False).prefill_tokens_min
        return Planned(leaves, plan, max(0, least - carried), {r.row: r.key for r in requests})

    def generate(
        self, window: Planned, more: Callable[[int], Planned | None] = lambda waiting: None, *, forget: bool = False
    ) -> None:
        """Generates; the results go to the job as they come, and with `forget` nowhere else.

        `more` is asked before every step, with the number of leaves that wait for their turn, whether there is another window: what runs of
        one window then runs together with the beginning of the next.
        """
        engine = self._engine()
        self.progress.phase("generating")
        on_result = self._generated_last if forget else self._generated
        self._add(engine, window, on_result)

        def stop() -> str | None:
            self._tell(engine)
            self.progress.running(max(0, engine.stats.completion_tokens - self.run.completion_tokens))
            wish = self.signals.stop()
            another = more(engine.waiting) if wish is None else None
            if another is not None:
                self._add(engine, another, on_result)
            return wish

        try:
            engine.run(stop)
        finally:
            self.last_token_at = time.perf_counter()
            self._tell(engine)

    def _add(self, engine: AnyEngine, window: Planned, on_result: Callable[[Result], None]) -> None:
        self.run.prefill_tokens_min += window.prefill_tokens_min
        self.run.groups += len(window.plan.groups)
        self.run.prefix_nodes += len(window.plan.nodes)
        self.keys.update(window.keys)
        engine.add(window.leaves, window.plan, on_result)

    def expect_model(self) -> None:
        """The model will be needed, and is loaded meanwhile."""
        if self.engine is None and self._loading is None:
            self._loading = Ahead(self._load)

    def _load(self) -> AnyEngine:
        return open_engine(self.config.model, self.tokenizer, self.config.engine)

    def _engine(self) -> AnyEngine:
        """The model is loaded when the first row needs it: a job that has nothing left to generate never does."""
        if self.engine is None:
            self.progress.phase("loading model")
            with self.signals.interruptible():
                self.expect_model()
                assert self._loading is not None
                self.engine = self._loading.result()
            self.run.seconds["load"] += self._loading.ended - self._loading.began
            self.ready_at = self._loading.ended
            self._tell(self.engine)
        return self.engine

    def close(self) -> None:
        """The job ends: a model that is still being loaded is not waited for."""
        if self._loading is not None:
            self._loading.stop()
            if self._loading.ready:
                self._loading.result().close()

    def _tell(self, engine: AnyEngine) -> None:
        """What the engine has to say, each once."""
        while engine.notes:
            self.progress.note(engine.notes.pop(0))

    def _generated(self, result: Result) -> None:
        self.job.append(self.keys[result.row], result)
        self.done(result)

    def _generated_last(self, result: Result) -> None:
        self._generated(result)
        del self.results[result.row], self.keys[result.row]

    def done(self, result: Result) -> None:
        """A row of this run is done, well or not."""
        self.results[result.row] = result
        failed = result.error_type is not None
        self.run.count(failed=failed, prompt_tokens=result.prompt_tokens, completion_tokens=result.completion_tokens)
        if failed:
            where = self.sources.get(result.row, f"row {result.row}")
            message = str(result.error_message).removeprefix(f"{where}: ")
            self.last_failure = f"{where}: {result.error_type}: {message}"
            if len(self.failures) < FAILURES_KEPT:
                self.failures.append(self.last_failure)
        self.show()
        if failed:
            self.max_errors.check(failed=self.run.failed, done=self.run.done, last=self.last_failure)

    def _resumed(self, result: Result) -> None:
        self.results[result.row] = result
        self.run.count_resumed(
            failed=result.error_type is not None,
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
        )
        self.show()

    def show(self) -> None:
        self.progress.kept(self.run.rows_resumed)
        self.progress.rows(self.run.done, self.run.failed, self.total)
        self.progress.tokens(self.run.prompt_tokens, self.run.completion_tokens)

    def figures(self) -> dict[str, Any]:
        self.run.seconds["generate"] = max(0.0, self.last_token_at - self.ready_at)
        engine = self.engine
        setting = Setting(
            model=self.config.model.model,
            dtype=engine.dtype if engine else dtype_name(self.config.model, self.tokenizer.hf_config),
            device=engine.device if engine else "",
            attention=engine.attention if engine else "",
        )
        return figures(self.run, engine.stats if engine else EngineStats(), setting, earlier=self.job.previous)
