"""The loop: schedule, launch, land, retire. Leaves of requests and their plan in, results out as the rows finish.

On CUDA the loop is one step ahead: the next step is scheduled, packed and launched while the device runs the present one, and only then are
the present one's tokens looked at. A sequence that has ended by then has run once too often; that token is dropped, and nothing else is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from batchgen.config import EngineConfig
from batchgen.engine.constraints import Constraints
from batchgen.engine.flight import Flight, Launcher
from batchgen.engine.host_memory import keep_freed_memory
from batchgen.engine.kv_cache import KVCache
from batchgen.engine.memory import Memory
from batchgen.engine.pages import PagePool
from batchgen.engine.policy import POLICIES
from batchgen.engine.prepared import LoadedModel, with_pages
from batchgen.engine.rows import OnResult, OnToken, Rows
from batchgen.engine.runner import Runner
from batchgen.engine.sampler import Sampler
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sizing import Sizes, page_size_of, size_engine
from batchgen.engine.spans import Sequence as Running
from batchgen.engine.spans import Stops
from batchgen.engine.steps import Step
from batchgen.engine.stopping import Detokenizer, Stopper
from batchgen.errors import RowError
from batchgen.prefix import PrefixPlan
from batchgen.prompts import LoadedTokenizer
from batchgen.request import Leaf, Request
from batchgen.result import Result
from batchgen.state.cache import StateCache
from batchgen.stats import EngineStats


class Engine:
    """A model with its page pool. Windows of requests run one after the other or together; nodes stay resident between them."""

    def __init__(self, model: LoadedModel, text: LoadedTokenizer, config: EngineConfig) -> None:
        self.text = text
        self.config = config
        self.stats = EngineStats()
        self.notes: list[str] = list(model.notes)
        """What the user should hear; grows."""
        if model.device.type == "cpu":
            keep_freed_memory()
        model = with_pages(model, page_size_of(config.chunk_size))
        self.sizes: Sizes = size_engine(model, config, text.context_length)
        pool = PagePool(self.sizes.num_pages)
        cache = KVCache(model.layers, pool.num_pages, self.sizes.page_size, model.dtype)
        slots = PagePool(self.sizes.num_slots) if model.states else None
        states = StateCache(model.states, self.sizes.num_slots, model.dtype) if model.states else None
        self.memory = Memory(pool, self.sizes.page_size, model.sliding_window, self.sizes.host_pages, slots)
        self.scheduler = Scheduler(self.memory, self.sizes.limits, self._stopper, POLICIES[config.policy])
        self.runner = Runner(model, cache, self.sizes.limits, self.notes, states)
        self.sampler = Sampler(model.vocab_size, model.device, self.sizes.limits.batch_size)
        self.constraints = Constraints(text.tokenizer, model.vocab_size, text.eos_token_ids)
        self._launcher = Launcher(self.scheduler, self.runner, self.sampler, self.constraints, self.stats)
        self._flights: deque[Flight] = deque()
        # On the CPU a step is done when it is launched: a step ahead would gain nothing, and run every sequence once too often.
        self.ahead = model.device.type == "cuda" and not model.spread
        """Whether a step is launched before the tokens of the one before it are known."""
        self._eos = frozenset(text.eos_token_ids)
        self._detokenizer = Detokenizer(text.tokenizer)
        self.rows = Rows(self.scheduler, self._unseat, self._detokenizer.piece, config.row_timeout)
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
            leaf.request: leaf for leaf in ordered if self.sizes.pages_for(leaf) > self.sizes.num_pages
        }
        window = self.scheduler.load(ordered, plan, [i for i, leaf in enumerate(ordered) if leaf.request in unfit])
        self.rows.add(window, on_result, on_token)
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
        if self.rows.overdue:
            self._settle()  # what was drawn in a row's time is its own
        self.rows.end_due()
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
        return len(self.rows) + len(self._unfit)

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
        self.rows.cancel(request)

    def close(self) -> None:
        """Nothing to give back: the memory goes with the object. (`devices.Workers` has processes.)"""

    def check(self) -> None:
        """Raises `AssertionError` unless pages, state slots, tables and running sequences add up."""
        spans = [*self.scheduler.running, *self.memory.live, *self.memory.idle]
        self.memory.pool.check(span.table[span.dropped :] for span in spans)
        if self.memory.slots is not None:
            self.memory.slots.check(self.memory.slots_of(span) for span in spans)
        for span in spans:
            assert len(span.table) * self.sizes.page_size >= span.computed, "KV outside of the block table"

    # -- the parts of a step

    def _seat(self, step: Step) -> None:
        """Gives the sequences that start their place in the sampler, after those that were preempted left theirs."""
        for seq in step.preempted:
            self._unseat(seq)
        for seq in step.started:
            request = seq.request
            self.rows.begun(request)
            if not request.texts:
                self.sampler.add(seq.slot, request.params, request.key, request.tokens, seq.generated, seq.leaf.choice)
                if request.params.constrained:
                    self.constraints.add(seq, request.params, seq.generated)

    def _unseat(self, seq: Running) -> None:
        if seq.slot >= 0 and not seq.scoring:  # else it has left the sampler already
            self.sampler.remove(seq.slot)
        seq.slot = -1
        self.constraints.remove(seq)

    def _settle(self) -> None:
        """All that is in flight is dealt with, before anything else is launched."""
        while self._flights:
            self.rows.end_cancelled()
            self._land()

    def _land(self) -> None:
        """What follows from the first step in flight. Of its sequences some may have ended since it was launched: what it says of them is dropped."""
        flight = self._flights[0]
        sampled = self._launcher.land(flight)
        for seq in flight.scored:
            if seq.running:
                self.scheduler.finish(seq)
                self.rows.scored(seq)
        logprobs = sampled.logprobs or [None] * len(flight.drawing)
        for seq, token, valid, numbers in zip(flight.drawing, sampled.tokens, sampled.valid, logprobs, strict=True):
            if seq.running:
                self._drew(seq, token, valid, numbers)
        self._flights.popleft()

    def _drew(self, seq: Running, token: int, valid: bool, logprobs: object) -> None:
        """A token was drawn for a sequence."""
        self.stats.decode_sequences += 1
        if not valid:
            what = f"the model's logits after {len(seq.generated)} tokens are not numbers"
            self.rows.fail(seq, RowError("numerical_error", what))
            return
        if logprobs is not None:
            seq.logprobs.append(logprobs)
        whole = False
        if seq.request.params.constrained:
            try:
                whole = self.constraints.accept(seq, token)
            except RowError as e:
                self.rows.fail(seq, e)
                return
        reason = self.scheduler.drew(seq, token)
        self.stats.completion_tokens += 1
        if whole:  # the text is one of the grammar's, and nothing may follow
            if reason is None:
                self.scheduler.finish(seq)
            reason = "stop"
        if reason is not None or self.rows.watched:
            self.rows.drew(seq, token, reason)

    def _abandon(self) -> None:
        self.scheduler.abandon()
        self.sampler.clear()
        self.constraints.clear()
        self._flights.clear()
        self.rows.clear()
        self._unfit.clear()
        self._count()

    def _stopper(self, request: Request) -> Stops:
        return Stopper(request.params, request.max_tokens, self._eos, self._detokenizer, request.tokens)

    # -- memory and figures

    def _shrink(self) -> None:
        """After out-of-memory the steps stay as small as the ones that went through."""
        most = self.runner.most_tokens
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
        self.stats.kv_bytes_peak = self.memory.pool.peak_used * self.sizes.page_size * token
        if self.memory.slots is not None:
            self.stats.state_bytes_peak = self.memory.slots.peak_used * self.sizes.bytes_per_slot
        self.stats.kv_bytes_unshared = self.scheduler.peak_held_tokens * token
