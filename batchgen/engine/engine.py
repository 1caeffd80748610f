"""The loop: schedule, run, draw, retire. Requests and their plan in, results out as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from batchgen.config import EngineConfig
from batchgen.engine.host_memory import keep_freed_memory
from batchgen.engine.kv_cache import KVCache
from batchgen.engine.loading import LoadedModel
from batchgen.engine.memory import Memory
from batchgen.engine.pages import PagePool
from batchgen.engine.runner import Runner
from batchgen.engine.sampler import Sampler
from batchgen.engine.scheduler import Scheduler, Step
from batchgen.engine.sizing import Sizes, size_engine
from batchgen.engine.spans import Branch, State, Stops
from batchgen.engine.spans import Sequence as Running
from batchgen.engine.stopping import Detokenizer, Stopper
from batchgen.errors import OutOfMemory, RowError
from batchgen.prefix import PrefixPlan
from batchgen.prompts import LoadedTokenizer
from batchgen.request import Request, Result
from batchgen.stats import EngineStats


class Engine:
    """A model with its page pool. Windows of requests are generated one after the other; nodes stay resident between them."""

    def __init__(self, model: LoadedModel, text: LoadedTokenizer, config: EngineConfig) -> None:
        self.text = text
        self.config = config
        self.stats = EngineStats()
        if model.device.type == "cpu":
            keep_freed_memory()
        self.sizes: Sizes = size_engine(model, config, text.context_length)
        pool = PagePool(self.sizes.num_pages)
        cache = KVCache(model.layers, pool.num_pages, self.sizes.page_size, model.dtype, model.device)
        self.memory = Memory(pool, self.sizes.page_size)
        self.scheduler = Scheduler(self.memory, self.sizes.limits, self._stopper)
        self.runner = Runner(model, cache)
        self.sampler = Sampler(model.vocab_size, model.device)
        self._eos = frozenset(text.eos_token_ids)
        self._detokenizer = Detokenizer(text.tokenizer)

    def generate(
        self,
        requests: Sequence[Request],
        plan: PrefixPlan,
        *,
        on_result: Callable[[Result], None],
        stop: Callable[[], str | None] | None = None,
    ) -> None:
        """Generates every request's completion; `on_result` is called in the loop as each finishes.

        `plan` is `plan_prefixes` of the requests' tokens. `stop()` is asked before every step: "drain" admits nothing
        new and returns when the running rows are done, "now" returns at once; None goes on.
        Raises `OutOfMemory` when the device has no room for a step.
        """
        ordered = [requests[i] for i in plan.order]
        unfit = [i for i, request in enumerate(ordered) if self._pages(request) > self.sizes.num_pages]
        self.scheduler.load(ordered, plan, unfit)
        try:
            for i in unfit:
                on_result(Result.failed(ordered[i].row, self._does_not_fit(ordered[i]), len(ordered[i].tokens)))
            while self.scheduler.unfinished:
                wish = stop() if stop else None
                if wish == "now" or (wish == "drain" and not self.scheduler.running):
                    break
                self.step(on_result, admit=wish is None)
        except torch.OutOfMemoryError as e:
            raise OutOfMemory(
                f"{self.runner.model.device} ran out of memory", "lower --max-batch-tokens, --batch-size or --kv-memory"
            ) from e
        finally:
            self._abandon()
            self._count()

    def step(self, on_result: Callable[[Result], None], admit: bool = True) -> None:
        """One forward pass and what follows from it."""
        step = self.scheduler.schedule(admit)
        self._seat(step)
        began = time.perf_counter()
        logits = self.runner.run(step)
        rows, sequences = self._rows(step, logits)
        sampled = self.sampler.sample(rows, [s.slot for s in sequences], [len(s.generated) for s in sequences])
        self.stats.forward_seconds += time.perf_counter() - began
        self._count_step(step, len(sequences))
        self.scheduler.ran(step)
        for seq, token, valid in zip(sequences, sampled.tokens, sampled.valid, strict=True):
            self._draw(seq, token, valid, on_result)
        if self.config.debug:
            self.check()

    def check(self) -> None:
        """Raises `AssertionError` unless pages, tables and running sequences add up."""
        spans = [*self.scheduler.running, *self.scheduler.resident(), *self.memory.idle]
        self.memory.pool.check(span.table for span in spans)
        for span in spans:
            assert len(span.table) * self.sizes.page_size >= span.computed, "KV outside of the block table"

    # -- the parts of a step

    def _seat(self, step: Step) -> None:
        """Gives the sequences that start their place in the sampler, after those that were preempted left theirs."""
        for seq in step.preempted:
            self.sampler.remove(seq.slot)
        for seq in step.started:
            request = seq.request
            self.sampler.add(seq.slot, request.params, request.key, request.tokens, seq.generated)

    def _rows(self, step: Step, logits: torch.Tensor | None) -> tuple[torch.Tensor, list[Running]]:
        """The logits to draw from, a row for each of the sequences; a node's are kept for the prompts that end there."""
        sequences: list[Running] = []
        rows: list[int] = []
        at = 0
        for work in step.works:
            if not work.sample:
                continue
            if isinstance(work.span, Running):
                sequences.append(work.span)
                rows.append(at)
            elif isinstance(work.span, Branch):
                assert logits is not None
                work.span.logits = logits[at].clone()
            at += 1
        parts: list[torch.Tensor] = []
        if logits is not None and rows:
            parts.append(logits if len(rows) == len(logits) else logits[rows])
        if step.ready:
            parts.append(torch.stack([s.path[-1].logits for s in step.ready]))
            sequences += step.ready
        if not parts:
            return torch.empty((0, self.runner.model.vocab_size), device=self.runner.model.device), sequences
        return parts[0] if len(parts) == 1 else torch.cat(parts), sequences

    def _draw(self, seq: Running, token: int, valid: bool, on_result: Callable[[Result], None]) -> None:
        if valid:
            reason = self.scheduler.drew(seq, token)
            self.stats.completion_tokens += 1
            if reason is None:
                return
            self.sampler.remove(seq.slot)
            on_result(
                Result(
                    row=seq.request.row,
                    text=seq.stops.text,
                    finish_reason=reason,
                    prompt_tokens=len(seq.request.tokens),
                    completion_tokens=len(seq.generated),
                    token_ids=tuple(seq.generated),
                    truncated=seq.request.truncated,
                )
            )
        else:
            self.scheduler.fail(seq)
            self.sampler.remove(seq.slot)
            error = RowError("numerical_error", f"the model's logits after {len(seq.generated)} tokens are not numbers")
            on_result(Result.failed(seq.request.row, error, len(seq.request.tokens)))

    def _abandon(self) -> None:
        for seq in list(self.scheduler.running):
            self.sampler.remove(seq.slot)
        self.scheduler.abandon()

    def _stopper(self, request: Request) -> Stops:
        return Stopper(request.params, request.max_tokens, self._eos, self._detokenizer, request.tokens)

    # -- figures

    def _pages(self, request: Request) -> int:
        return self.memory.pages_for(request.most_tokens)

    def _does_not_fit(self, request: Request) -> RowError:
        page = self.sizes.bytes_per_token * self.sizes.page_size
        return RowError(
            "does_not_fit",
            f"prompt ({len(request.tokens)} tokens) and completion (up to {request.max_tokens}) need "
            f"{_size(self._pages(request) * page)} of KV memory, there are {_size(self.sizes.num_pages * page)}; "
            "give more with --kv-memory or lower max_tokens",
        )

    def _count_step(self, step: Step, drawn: int) -> None:
        self.stats.steps += 1
        self.stats.decode_sequences += drawn
        for work in step.works:
            span = work.span
            if isinstance(span, Running) and span.state is State.DECODING:
                continue
            prompt = len(span.request.tokens) if isinstance(span, Running) else work.stop
            self.stats.prefill_tokens += max(0, min(work.stop, prompt) - work.start)
            # The last token that it had drawn is run for the first time, as in any decode step.
            again = min(work.stop, span.end - 1) - max(work.start, prompt)
            self.stats.recomputed_tokens += max(0, again)

    def _count(self) -> None:
        token = self.sizes.bytes_per_token
        self.stats.attention_parts = self.runner.attention_parts
        self.stats.preemptions = self.scheduler.preemptions
        self.stats.kv_bytes_peak = self.memory.pool.peak_used * self.sizes.page_size * token
        self.stats.kv_bytes_unshared = self.scheduler.peak_held_tokens * token


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
