"""The engine: leaves of requests and their prefix plan in, results out as the rows finish. Token ids only.

A step: the scheduler makes a batch, the executor launches it, the scheduler advances its sequences, and applies the sampled tokens
once they are on the host. On CUDA the loop is one step ahead: the next step is scheduled and launched while the device runs the present
one, and only then are the present one's tokens looked at. A sequence that has ended by then has run once too often; that token is dropped.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

from batchgen.attention.kv_cache import CPU, KVCache
from batchgen.config import EngineConfig
from batchgen.engine.executor import NO_NUMBERS, GrammarStopper, KernelsFailed, StepExecutor
from batchgen.engine.results import OnResult, OnToken, ResultAssembler
from batchgen.errors import DevicesLost
from batchgen.model.adapter import LoadedModel, with_blocks
from batchgen.model.memory_budget import Sizes, block_size_of, size_engine
from batchgen.model.runner import Runner
from batchgen.parsers.thinking import ThinkingFormat
from batchgen.parsers.tool_calls import ToolFormat
from batchgen.prefix import PrefixPlan, plan_prefixes
from batchgen.request import Leaf, Request, leaves_of
from batchgen.result import Completion, Result
from batchgen.sampling.constraints import Constraints
from batchgen.sampling.sampler import Sampler
from batchgen.sampling.stopping import Detokenizer, Stopper
from batchgen.scheduling.batch import ScheduledBatch, SequenceUpdate, StepOutput, TokenCounts
from batchgen.scheduling.block_manager import BlockManager
from batchgen.scheduling.block_pool import BlockPool
from batchgen.scheduling.scheduler import Scheduler
from batchgen.scheduling.sequence import Stops
from batchgen.scheduling.waiting import POLICIES
from batchgen.state.cache import StateCache
from batchgen.stats import EngineStats

Step = TypeVar("Step")

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc


def keep_freed_memory() -> bool:
    """Tells glibc to reuse large blocks, not to unmap them; process-wide. False where the C library is another."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False  # musl, say
    # 32 MiB is the largest threshold that glibc takes; larger blocks are mapped each for itself.
    wanted = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20))
    return all([mallopt(option, value) == 1 for option, value in wanted])


class Executor(Protocol[Step]):
    """What carries batches out: `StepExecutor`, or a test's own."""

    @property
    def needs_tokens(self) -> bool: ...
    def launch(self, batch: ScheduledBatch) -> Step: ...
    def sample(self, step: Step) -> None: ...
    def wait(self, step: Step) -> StepOutput: ...


class StepLoop(Generic[Step]):
    """The loop of steps. `ahead` is how many steps are launched before the tokens of the first of them are looked at: 0 or 1."""

    def __init__(self, scheduler: Scheduler, executor: Executor[Step], ahead: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.ahead = ahead
        self.in_flight: deque[Step] = deque()

    def step(self, admit: bool = True) -> Iterator[SequenceUpdate]:
        """Runs the next step; without `admit` nothing new is started. Yields what the steps that are done mean for their sequences.

        Where memory is short, only the step in flight is waited for: it may end sequences, and a victim's tokens must be known
        before it is preempted.
        """
        batch = self.scheduler.schedule(admit)
        if batch is None:
            yield from self.land()
            return
        yield from map(SequenceUpdate, batch.started)
        started = self.executor.launch(batch)  # the forward; waits for nothing
        self.scheduler.advance(batch)  # what is certain before the tokens are known
        if self.executor.needs_tokens:
            yield from self.settle()
        self.executor.sample(started)
        self.in_flight.append(started)
        while len(self.in_flight) > self.ahead:  # on a CPU this step's tokens, on CUDA those of the step before
            yield from self.land()

    def land(self) -> Iterator[SequenceUpdate]:
        """Waits for the first step in flight."""
        yield from self.scheduler.apply(self.executor.wait(self.in_flight.popleft()))

    def settle(self) -> Iterator[SequenceUpdate]:
        """Waits for all steps in flight."""
        while self.in_flight:
            yield from self.land()


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer: it makes text of token ids, for stop strings and results."""

    @property
    def hf_tokenizer(self) -> Any: ...
    @property
    def context_length(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def thinking(self) -> ThinkingFormat | None: ...
    @property
    def tool_format(self) -> ToolFormat | None: ...


class Engine:
    """A model with its block pool. Windows of requests run one after the other or together; nodes stay resident between them."""

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.stats = EngineStats()
        self.notes: list[str] = [*model.notes, *model.verdict.notes()]
        """What the user should hear; grows."""
        if model.device.type == "cpu":
            keep_freed_memory()
        model = with_blocks(model, block_size_of(config.chunk_size))
        self.sizes: Sizes = size_engine(model, config, tokenizer.context_length)
        pool = BlockPool(self.sizes.num_blocks)
        cache = KVCache(model.layers, pool.num_blocks, self.sizes.block_size, model.dtype)
        slots = BlockPool(self.sizes.num_slots) if model.states else None
        states = StateCache(model.states, self.sizes.num_slots, model.dtype) if model.states else None
        self.block_manager = BlockManager(
            pool, self.sizes.block_size, model.sliding_window, self.sizes.host_blocks, slots
        )
        self.scheduler = Scheduler(self.block_manager, self.sizes.limits, self._stopper, POLICIES[config.policy])
        self.runner = Runner(model, cache, self.sizes.limits, self.notes, states)
        verdict = model.verdict
        sampled_on = model.device if verdict.uses("sampler") else CPU
        self.sampler = Sampler(model.vocab_size, sampled_on, self.sizes.limits.batch_size)
        self.constraints = Constraints(
            tokenizer.hf_tokenizer, model.vocab_size, tokenizer.eos_token_ids, tokenizer.thinking
        )
        self.executor = StepExecutor(self.runner, self.sampler, self.constraints)
        # On the CPU a step is done when it is launched: a step ahead would gain nothing, and run every sequence once too often.
        ahead = (
            model.device.type == "cuda" and not model.spread and verdict.uses("sampler") and verdict.uses("step-ahead")
        )
        self.loop = StepLoop(self.scheduler, self.executor, int(ahead))
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._detokenizer = Detokenizer(tokenizer.hf_tokenizer, tokenizer.thinking, tokenizer.tool_format)
        self.results = ResultAssembler(self.scheduler, self._detokenizer.piece, config.row_timeout)
        self._unfit: deque[tuple[OnResult, Result]] = deque()
        self._suspects: set[int] = set()
        """Rows whose logits were not numbers while kernels ran, until plain torch has run them: theirs may be none either."""
        self._replaced: dict[Request, Request] = {}
        """Requests that were started again, and those that took their place."""

    def add(
        self, leaves: Sequence[Leaf], plan: PrefixPlan, on_result: OnResult, on_token: OnToken | None = None
    ) -> None:
        """Takes requests in, before a run or between two of its steps.

        `leaves` are `leaves_of` the requests, `plan` is `plan_prefixes` of the leaves' tokens. `on_result` is called in the
        loop as each row finishes, `on_token(row, number of the completion, token)` for each token as it is drawn.
        """
        ordered = [leaves[i] for i in plan.order]
        unfit: dict[Request, Leaf] = {
            leaf.request: leaf for leaf in ordered if self.sizes.blocks_for(leaf) > self.sizes.num_blocks
        }
        ended = [i for i, leaf in enumerate(ordered) if leaf.request in unfit or leaf.ended]
        window = self.scheduler.load(ordered, plan, ended)
        self.results.add(window, on_result, on_token)
        for request, leaf in unfit.items():
            result = Result.failed(request.row, self.sizes.does_not_fit(leaf), len(request.tokens))
            self._unfit.append((on_result, result))

    def run(self, stop: Callable[[], str | None] | None = None) -> None:
        """Steps until all requests are done.

        `stop()` is asked before every step: "drain" admits nothing new and returns when the running rows are done, "now"
        returns at once; None goes on. Raises `OutOfMemory` when the device has no room for a single token.
        """
        try:
            while self.scheduler.unfinished or self.loop.in_flight or self._unfit:
                while self._unfit:
                    on_result, result = self._unfit.popleft()
                    on_result(result)
                wish = stop() if stop else None
                if wish == "now" or (wish == "drain" and not self.scheduler.running):
                    break
                try:
                    if self.scheduler.unfinished:
                        self.step(admit=wish is None)
                    else:
                        self._settle()  # a callback may add something
                except KernelsFailed as e:
                    self._without_kernels(e)
            with suppress(KernelsFailed):  # what it ran is not done, and is run again by the next run
                self._settle()
        finally:
            if self.unfinished or self.loop.in_flight:
                self._abandon()
            self.executor.free(self.scheduler.take_freed())
            self._update_stats()

    def step(self, admit: bool = True) -> None:
        """Runs the next step (`StepLoop.step`) and adds what it means to the results."""
        if self.results.overdue:
            self._settle()  # a token that was sampled in a row's time is the row's
        self.results.end_due()
        for update in self.loop.step(admit):
            self._apply(update)
        self._shrink()
        self._update_stats()
        if self.config.debug:
            self.check()

    @property
    def unfinished(self) -> int:
        """Rows that have no result yet."""
        return len(self.results) + len(self._unfit)

    @property
    def device(self) -> str:
        """Where token ids go in and logits come out."""
        return str(self.runner.model.device)

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return str(self.runner.model.dtype).removeprefix("torch.")

    @property
    def attention(self) -> str:
        """Which kernels attend."""
        return self.runner.attention

    @property
    def waiting(self) -> int:
        """Leaves that are not done and do not run."""
        return self.scheduler.unfinished - len(self.scheduler.running)

    def under_way(self) -> dict[int, dict[int, Completion]]:
        """What there is of completions of rows that are not done, by row and number: as `Request.begun` they are continued exactly."""
        return self.results.under_way()

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step, if it is not done by then: what it has is its result. Any thread may call this."""
        self.results.cancel(self._replaced.get(request, request))

    def close(self) -> None:
        """Nothing to give back: the memory goes with the object. (`devices.Workers` has processes.)"""

    def check(self) -> None:
        """Raises `AssertionError` unless blocks, state slots, tables and running sequences add up."""
        spans = [*self.scheduler.running, *self.block_manager.live, *self.block_manager.cached]
        self.block_manager.pool.check(span.table[span.dropped :] for span in spans)
        if self.block_manager.slots is not None:
            self.block_manager.slots.check(self.block_manager.slots_of(span) for span in spans)
        for span in spans:
            assert len(span.table) * self.sizes.block_size >= span.computed, "KV outside of the block table"

    # -- the parts of a run

    def _settle(self) -> None:
        """Waits for all steps in flight, and adds what they mean to the results."""
        while self.loop.in_flight:
            self.results.end_cancelled()
            for update in self.loop.land():
                self._apply(update)

    def _abandon(self) -> None:
        self._drop()
        self._unfit.clear()
        self._replaced.clear()

    def _drop(self) -> None:
        """Forgets all rows that are not done."""
        self.scheduler.abandon()
        self.scheduler.take_freed()
        self.executor.clear()
        self.loop.in_flight.clear()
        self.results.clear()
        self._suspects.clear()

    # -- kernels that fail in the middle of a job

    def _without_kernels(self, failed: KernelsFailed) -> None:
        """Goes on in plain torch: what is not done starts again from the tokens that the host has, and no KV is kept.

        Raises `DevicesLost` where the device runs nothing more in this process.
        """
        device = self.runner.model.device
        try:
            self.runner.pause_kernels()
        except RuntimeError as e:
            verdict = self.runner.model.verdict.without("triton", str(failed))
            kept = f", as {verdict.file} says" if verdict.file is not None else " with --attention torch"
            raise DevicesLost(
                f"{device}: {failed}; the device runs nothing more in this process",
                f"run the same command again: it goes on in plain torch{kept}",
            ) from e
        if not failed.rows:
            self._blame(failed)
        again = self.results.requests()
        under_way = self.under_way()
        self._drop()
        self.block_manager.discard()
        self.runner.cache.clear()
        self._suspects = set(failed.rows)
        new = {request: replace(request, begun=under_way.get(request.row, request.begun)) for request, *_ in again}
        self._replaced = {old: new.get(last, last) for old, last in self._replaced.items()} | new
        for calls, rows in groupby(again, lambda row: row[1:]):
            leaves = leaves_of(new[request] for request, *_ in rows)
            plan = plan_prefixes([leaf.tokens for leaf in leaves], self.config.chunk_size, share=self.config.share)
            self.add(leaves, plan, *calls)

    def _apply(self, update: SequenceUpdate) -> None:
        """Adds what a step means for a sequence to the results. Raises `KernelsFailed` for scores that are not numbers, while kernels run."""
        seq, token, reason, error = update
        row = seq.request.row
        no_numbers = error is not None and error.type == "numerical_error"
        if reason == "scored":
            no_numbers = any(math.isnan(score.logprob) for score in seq.text_scores)
            if no_numbers and self.runner.attention == "triton" and self.executor.doubts_numbers:
                raise KernelsFailed(NO_NUMBERS, frozenset({row}))
        if row in self._suspects and (token is not None or reason is not None or error is not None):
            self._suspects.remove(row)
            if no_numbers:  # the model's own: it is not asked again, and the row fails
                self._suspects.clear()
                self.executor.doubts_numbers = False
                self.runner.resume_kernels()
            elif not self._suspects:
                self._blame(KernelsFailed(NO_NUMBERS))
        self.results.update(update)

    def _blame(self, failed: KernelsFailed) -> None:
        """The kernels stay off, now and at the next start."""
        verdict = self.runner.model.verdict.without("triton", str(failed))
        self.notes.append(verdict.note("triton"))

    def _stopper(self, request: Request) -> Stops:
        arguments = (request.params, request.max_tokens, self._eos, self._detokenizer, request.tokens, request.tools)
        return GrammarStopper(self.constraints, *arguments) if request.params.guided else Stopper(*arguments)

    # -- memory and figures

    def _shrink(self) -> None:
        """After out-of-memory the steps stay as small as the ones that went through."""
        most = self.runner.max_forward_tokens
        if most is not None and most < self.scheduler.limits.max_batch_tokens:
            self.notes.append(
                f"{self.runner.model.device} ran out of memory in a step of more than {most} tokens; going on with steps of "
                f"{most} (--max-batch-tokens {most} avoids the attempt)"
            )
            self.scheduler.shrink(most)

    def _update_stats(self) -> None:
        """Brings `stats` up to date; the parts count, and this is the only place that writes the figures of a step."""
        for name in TokenCounts.__slots__:
            setattr(self.stats, name, getattr(self.scheduler.counts, name))
        self.stats.forward_seconds = self.executor.seconds
        token = self.sizes.bytes_per_token
        self.stats.attention_parts = self.runner.attention_parts
        self.stats.preemptions = self.scheduler.preemptions
        self.stats.kv_bytes_peak = self.block_manager.pool.peak_used * self.sizes.block_size * token
        if self.block_manager.slots is not None:
            self.stats.state_bytes_peak = self.block_manager.slots.peak_used * self.sizes.bytes_per_slot
        self.stats.kv_bytes_unshared = self.scheduler.peak_held_tokens * token
