"""The loop: schedule, launch, land, retire. Leaves of requests and their plan in, results out as the rows finish.

On CUDA the loop is one step ahead: the next step is scheduled, packed and launched while the device runs the present one, and only then are
the present one's tokens looked at. A sequence that has ended by then has run once too often; that token is dropped, and nothing else is.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from batchgen.attention.kv_cache import KVCache
from batchgen.config import EngineConfig
from batchgen.engine.results import OnResult, OnToken, ResultAssembler
from batchgen.errors import RowError
from batchgen.kernels.transfer import Readback, put
from batchgen.model.adapter import LoadedModel, with_blocks
from batchgen.model.memory_budget import Sizes, block_size_of, size_engine
from batchgen.model.runner import Runner
from batchgen.prefix import PrefixPlan
from batchgen.prompts import LoadedTokenizer
from batchgen.request import Leaf, Request
from batchgen.result import Result
from batchgen.sampling.constraints import Constraints
from batchgen.sampling.logprobs import SampledTokens, SamplerOutput
from batchgen.sampling.sampler import Sampler
from batchgen.sampling.scoring import StepScores, score_step
from batchgen.sampling.stopping import Detokenizer, Stopper
from batchgen.scheduling.batch import ScheduledBatch, count_step
from batchgen.scheduling.block_manager import BlockManager
from batchgen.scheduling.block_pool import BlockPool
from batchgen.scheduling.scheduler import Scheduler
from batchgen.scheduling.sequence import GenerationSequence, PrefixNodeSpan, Stops
from batchgen.scheduling.waiting import POLICIES
from batchgen.state.cache import StateCache
from batchgen.stats import EngineStats

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


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step that is launched. What it says of sequences that have ended meanwhile counts for nothing."""

    drawing: list[GenerationSequence]
    """The sequences that a token is drawn for, in the order of `drawn`."""
    drawn: SamplerOutput | None
    scored: list[GenerationSequence]
    """The texts that it scores to their end."""
    scores: StepScores | None
    readback: Readback

    def land(self) -> SampledTokens:
        """Waits for the step: its scores are filled in, what it has drawn is returned."""
        numbers = self.readback.lists()
        if self.scores is not None:
            self.scores.fill(numbers[0], numbers[1])
            del numbers[:2]
        return SampledTokens([], []) if self.drawn is None else self.drawn.read(numbers)


class Launcher:
    """Launches steps: the forward, what is scored in it, the draw, and the copy of their numbers to the host.

    What the scheduler gives away at a launch, blocks and slots of sequences that have ended or are leaving, goes to later steps. The device does
    its work in the order of the launches, so whatever a step still in flight reads or writes there, it does before them.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, sampler: Sampler, constraints: Constraints, stats: EngineStats
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._constraints = constraints
        self._stats = stats

    def launch(self, step: ScheduledBatch, catch_up: Callable[[], None] | None) -> Flight:
        """Launches a step whose sequences are seated.

        `catch_up` lands the step before, where that is still in flight. It is called between forward and draw where a row under a grammar
        runs: which token may follow depends on the one before.
        """
        with self._timed():
            drawing = _drawing(step)
            if catch_up is None:
                self._constraints.start(drawing)  # while the model runs
            logits = self._runner.run(step, self._sampler.last)
            scores = None
            if logits is not None:
                scores = score_step(step.spans, logits)
                _keep_logits(step, logits)
        count_step(self._stats, step)
        scored = [*step.scored, *self._scheduler.ran(step)]
        if catch_up is not None and self._constraints.used:
            catch_up()
        with self._timed():
            drawing, drawn = self._draw(step, logits, drawing)
            parts = [*(scores.tensors if scores else ()), *(drawn.tensors if drawn else ())]
            readback = Readback(parts, self._runner.model.device)
        for seq in self._scheduler.draws(drawing):
            self._sampler.remove(seq.slot)
            seq.slot = -1
        return Flight(drawing, drawn, scored, scores, readback)

    def land(self, flight: Flight) -> SampledTokens:
        """Waits for a step."""
        with self._timed():
            return flight.land()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._stats.forward_seconds += time.perf_counter() - began

    def _draw(
        self, step: ScheduledBatch, logits: torch.Tensor | None, drawing: list[GenerationSequence]
    ) -> tuple[list[GenerationSequence], SamplerOutput | None]:
        """Draws for those of `drawing` that have not ended since the step was scheduled, and returns who they are."""
        rows: list[int] = []
        at = 0
        for scheduled in step.spans:
            at += scheduled.stop - scheduled.logits
            if (
                scheduled.logits < scheduled.stop
                and isinstance(scheduled.span, GenerationSequence)
                and not scheduled.span.scoring
            ):
                rows.append(at - 1)
        if not all(seq.running for seq in drawing):
            rows = [row for row, seq in zip(rows, drawing, strict=False) if seq.running]
            drawing = [seq for seq in drawing if seq.running]
        if not drawing:
            return [], None
        parts: list[torch.Tensor] = []
        if logits is not None and rows:
            places = np.array(rows, dtype=np.int64)
            parts.append(logits if len(rows) == len(logits) else logits[put(places, logits.device)])
        if len(drawing) > len(rows):
            parts.append(torch.stack([seq.path[-1].logits for seq in drawing[len(rows) :]]))
        drawn = self._sampler.sample(
            parts[0] if len(parts) == 1 else torch.cat(parts),
            [seq.slot for seq in drawing],
            [seq.num_sampled for seq in drawing],
            self._constraints.mask(drawing),
        )
        return drawing, drawn


def _drawing(step: ScheduledBatch) -> list[GenerationSequence]:
    """The sequences that draw a token in this step: in the order of the works, then those that draw at a node."""
    spans = (w.span for w in step.spans if w.logits < w.stop)
    return [*(s for s in spans if isinstance(s, GenerationSequence) and not s.scoring), *step.ready]


def _keep_logits(step: ScheduledBatch, logits: torch.Tensor) -> None:
    """A node's last logits stay for the prompts that end there."""
    at = 0
    for scheduled in step.spans:
        at += scheduled.stop - scheduled.logits
        span = scheduled.span
        if isinstance(span, PrefixNodeSpan) and scheduled.stop == span.end and span.window.sampled_at[span.node.index]:
            span.logits = logits[at - 1].clone()


class Engine:
    """A model with its block pool. Windows of requests run one after the other or together; nodes stay resident between them."""

    def __init__(self, model: LoadedModel, tokenizer: LoadedTokenizer, config: EngineConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.stats = EngineStats()
        self.notes: list[str] = list(model.notes)
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
        self.sampler = Sampler(model.vocab_size, model.device, self.sizes.limits.batch_size)
        self.constraints = Constraints(
            tokenizer.hf_tokenizer, model.vocab_size, tokenizer.eos_token_ids, tokenizer.thinking
        )
        self._launcher = Launcher(self.scheduler, self.runner, self.sampler, self.constraints, self.stats)
        self._flights: deque[Flight] = deque()
        # On the CPU a step is done when it is launched: a step ahead would gain nothing, and run every sequence once too often.
        self.ahead = model.device.type == "cuda" and not model.spread
        """Whether a step is launched before the tokens of the one before it are known."""
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._detokenizer = Detokenizer(tokenizer.hf_tokenizer, tokenizer.thinking)
        self.results = ResultAssembler(self.scheduler, self._unseat, self._detokenizer.piece, config.row_timeout)
        self._unfit: deque[tuple[OnResult, Result]] = deque()

    def generate(
        self,
        leaves: Sequence[Leaf],
        plan: PrefixPlan,
        *,
        on_result: OnResult,
        stop: Callable[[], str | None] | None = None,
    ) -> None:
        """`add` and `run`."""
        self.add(leaves, plan, on_result)
        self.run(stop)

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
        window = self.scheduler.load(ordered, plan, [i for i, leaf in enumerate(ordered) if leaf.request in unfit])
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
            while self.scheduler.unfinished or self._flights or self._unfit:
                while self._unfit:
                    on_result, result = self._unfit.popleft()
                    on_result(result)
                wish = stop() if stop else None
                if wish == "now" or (wish == "drain" and not self.scheduler.running):
                    break
                if self.scheduler.unfinished:
                    self.step(admit=wish is None)
                else:
                    self._settle()  # a callback may add something
            self._settle()
        finally:
            if self.unfinished or self._flights:
                self._abandon()

    def step(self, admit: bool = True) -> None:
        """Launches the next step, and does what follows from the one before it; without `ahead` from this one.

        Where memory is short, only the step in flight is dealt with: it may end sequences, and who is preempted must be known whole.
        """
        if self.results.overdue:
            self._settle()  # what was drawn in a row's time is its own
        self.results.end_due()
        step = self.scheduler.schedule(admit)
        if step is None:
            self._land()
            return
        self._seat(step)
        self._flights.append(self._launcher.launch(step, self._land if self._flights else None))
        self._shrink()
        while len(self._flights) > self.ahead:
            self._land()
        self._count()
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

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step, if it is not done by then: what it has is its result. Any thread may call this."""
        self.results.cancel(request)

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

    # -- the parts of a step

    def _seat(self, step: ScheduledBatch) -> None:
        """Gives the sequences that start their place in the sampler, after those that were preempted left theirs."""
        for seq in step.preempted:
            self._unseat(seq)
        for seq in step.started:
            request = seq.request
            self.results.begun(request)
            if not request.texts:
                self.sampler.add(seq.slot, request.params, request.key, request.tokens, seq.generated, seq.leaf.choice)
                if request.params.guided:
                    self.constraints.add(seq, request.params, seq.generated, request.tokens)

    def _unseat(self, seq: GenerationSequence) -> None:
        if seq.slot >= 0 and not seq.scoring:  # else it has left the sampler already
            self.sampler.remove(seq.slot)
        seq.slot = -1
        self.constraints.remove(seq)

    def _settle(self) -> None:
        """All that is in flight is dealt with, before anything else is launched."""
        while self._flights:
            self.results.end_cancelled()
            self._land()

    def _land(self) -> None:
        """What follows from the first step in flight. Of its sequences some may have ended since it was launched: what it says of them is dropped."""
        flight = self._flights[0]
        sampled = self._launcher.land(flight)
        for seq in flight.scored:
            if seq.running:
                self.scheduler.finish(seq)
                self.results.scored(seq)
        logprobs = sampled.logprobs or [None] * len(flight.drawing)
        for seq, token, valid, numbers in zip(flight.drawing, sampled.tokens, sampled.valid, logprobs, strict=True):
            if seq.running:
                self._drew(seq, token, valid, numbers)
        self._flights.popleft()

    def _drew(self, seq: GenerationSequence, token: int, valid: bool, logprobs: object) -> None:
        """A token was drawn for a sequence."""
        self.stats.decode_sequences += 1
        if not valid:
            what = f"the model's logits after {len(seq.generated)} tokens are not numbers"
            self.results.fail(seq, RowError("numerical_error", what))
            return
        if logprobs is not None:
            seq.logprobs.append(logprobs)
        whole = False
        if seq.request.params.guided:
            try:
                whole = self.constraints.accept(seq, token)
            except RowError as e:
                self.results.fail(seq, e)
                return
        reason = self.scheduler.drew(seq, token)
        self.stats.completion_tokens += 1
        if whole:  # the text is one of the grammar's, and nothing may follow
            if reason is None:
                self.scheduler.finish(seq)
            reason = "stop"
        if reason is not None or self.results.watched:
            self.results.drew(seq, token, reason)

    def _abandon(self) -> None:
        self.scheduler.abandon()
        self.sampler.clear()
        self.constraints.clear()
        self._flights.clear()
        self.results.clear()
        self._unfit.clear()
        self._count()

    def _stopper(self, request: Request) -> Stops:
        return Stopper(request.params, request.max_tokens, self._eos, self._detokenizer, request.tokens)

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

    def _count(self) -> None:
        token = self.sizes.bytes_per_token
        self.stats.attention_parts = self.runner.attention_parts
        self.stats.preemptions = self.scheduler.preemptions
        self.stats.kv_bytes_peak = self.block_manager.pool.peak_used * self.sizes.block_size * token
        if self.block_manager.slots is not None:
            self.stats.state_bytes_peak = self.block_manager.slots.peak_used * self.sizes.bytes_per_slot
        self.stats.kv_bytes_unshared = self.scheduler.peak_held_tokens * token
