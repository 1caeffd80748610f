"""The engine: takes leaves of requests and their prefix plan, and returns results as the rows finish. Knows token ids, not rows.

In a step the scheduler makes a batch, the executor launches it, the scheduler advances its sequences, and applies the sampled tokens
once they are on the host. On CUDA the loop is one step ahead: it schedules and launches the next step while the device runs the
present one, and reads the present one's tokens afterwards. A sequence that turns out to have ended has run once too often, and that token is
dropped.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from batchgen.attention.kv_cache import CPU, KVCache
from batchgen.config import EngineConfig
from batchgen.drafting.payoff import Payoff
from batchgen.drafting.speculator import Speculator
from batchgen.engine.executor import GrammarStopper, KernelsFailed, StepExecutor
from batchgen.engine.results import ResultAssembler
from batchgen.errors import BatchgenError, DevicesLost, in_one_line, is_out_of_memory
from batchgen.model.inventory import digests, parts, tensor_digest
from batchgen.model.loaded_model import LoadedModel, with_blocks
from batchgen.model.memory_budget import Sizes, size_engine
from batchgen.model.runner import Runner, StatesLost
from batchgen.model.vision import Vision
from batchgen.parsers.heads import OutputHead
from batchgen.parsers.thinking import ThinkingFormat
from batchgen.parsers.tool_calls import ToolFormat
from batchgen.prefix import PrefixPlan, plan_requests
from batchgen.request import Leaf, Request
from batchgen.result import Completion, OnResult, OnToken, Result
from batchgen.sampling.constraints import Constraints
from batchgen.sampling.sampler import Sampler
from batchgen.sampling.stopping import Detokenizer, Stopper
from batchgen.scheduling.batch import Limits, SequenceUpdate
from batchgen.scheduling.block_manager import BlockManager
from batchgen.scheduling.block_pool import BlockPool
from batchgen.scheduling.scheduler import Scheduler, StepLoop
from batchgen.scheduling.sequence import Stops
from batchgen.scheduling.step_costs import StepCosts
from batchgen.scheduling.waiting import POLICIES
from batchgen.state.cache import StateCache
from batchgen.stats import EngineStats

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc


def keep_freed_memory() -> None:
    """Makes glibc reuse large freed blocks of memory for the whole process instead of unmapping them. Does nothing with another C library."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # musl, for example
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        # 32 MiB is the largest threshold that glibc accepts; each larger block has a mapping of its own.
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20)):
            mallopt(option, value)


class ModelTokenizer(Protocol):
    """What the engine needs to know of a model's tokenizer, to make the text of stop strings, grammars and results."""

    @property
    def hf_tokenizer(self) -> Any: ...
    @property
    def context_length(self) -> int: ...
    @property
    def short_context(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def thinking(self) -> ThinkingFormat | None: ...
    @property
    def tool_format(self) -> ToolFormat | None: ...
    @property
    def head(self) -> OutputHead | None: ...


def sized(model: LoadedModel, config: EngineConfig, context_length: int) -> tuple[LoadedModel, Sizes]:
    """The model and the sizes of its engine. On a GPU the largest step is run for them: kernels that fail there are switched off."""
    try:
        return model, size_engine(model, config, context_length)
    except Exception as e:
        kernels = model.device.type == "cuda" and model.attention != "torch" and model.verdict.uses("triton")
        if not kernels or isinstance(e, BatchgenError) or is_out_of_memory(e):
            raise
        why = f"the largest step ended with {type(e).__name__}: {in_one_line(e, 300)}"
        model = replace(model, verdict=model.verdict.without("triton", why))
    return model, size_engine(model, config, context_length)


class _Loadable(NamedTuple):
    """Leaves that are loaded together, with their plan."""

    leaves: Sequence[Leaf]
    plan: PrefixPlan
    long: bool
    """The kind of requests that run. Those of the other kind run with another window."""


def _with_requests(leaves: Sequence[Leaf], change: Callable[[Request], Request]) -> Sequence[Leaf]:
    """Returns the leaves with their requests changed."""
    changed = {request: change(request) for request in dict.fromkeys(leaf.request for leaf in leaves)}
    if all(new is request for request, new in changed.items()):
        return leaves
    return [replace(leaf, request=changed[leaf.request]) for leaf in leaves]


class Engine:
    """A model with its block pool. Runs windows of requests, one after the other or together; prefix nodes stay resident between them."""

    def __init__(
        self, model: LoadedModel, tokenizer: ModelTokenizer, config: EngineConfig, costs_file: Path | None = None
    ) -> None:
        """`costs_file`: where the costs of steps are kept for later runs."""
        self.tokenizer = tokenizer
        self.config = config
        self.costs = StepCosts(costs_file)
        self.stats = EngineStats(weight_bytes=model.weight_bytes, quantization=model.quantization, parts=parts(model))
        if model.device.type == "cpu":
            keep_freed_memory()
        model, self.sizes = sized(with_blocks(model, config.block_size), config, tokenizer.context_length)
        self.notes: list[str] = [*model.notes, *model.verdict.notes()]
        """Messages for the user; the list grows."""
        cache = KVCache(model.layers, self.sizes.num_blocks, self.sizes.block_size, model.dtype)
        states = StateCache(model.states, self.sizes.num_state_slots, model.dtype) if model.states else None
        self.runner = Runner(model, cache, self.sizes.limits, self.notes, states)
        self._vision = model.vision
        if self._vision is not None:
            self._vision.limit(self.sizes.num_blocks * self.sizes.block_size * self.sizes.bytes_per_token)
        self._num_failed_images = 0
        """Number of the images that cannot be shown and whose rows have ended."""
        verdict = model.verdict
        sampled_on = model.device if verdict.uses("sampler") else CPU
        own_kernels = model.kernels is not None and sampled_on == CPU
        self.sampler = Sampler(model.vocab_size, sampled_on, self.sizes.limits.batch_size, own_kernels=own_kernels)
        self.constraints = Constraints(
            tokenizer.hf_tokenizer, model.vocab_size, tokenizer.eos_token_ids, tokenizer.thinking
        )
        head = tokenizer.head
        self.executor = StepExecutor(self.runner, self.sampler, self.constraints, head)
        # On the CPU a step is done when `launch` returns. A step ahead would gain nothing and run every sequence once too often.
        ahead = model.device.type == "cuda" and not model.spread and verdict.uses("step-ahead")
        self.speculator = None if ahead or head is not None else self._speculator()
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._detokenizer = Detokenizer(tokenizer.hf_tokenizer, tokenizer.thinking, tokenizer.tool_format)
        self._make_scheduler(replace(self.sizes.limits, every_output=head is not None and head.pooling == "mean"))
        self.loop = StepLoop(self.scheduler, self.executor, int(ahead))
        self._unfit: deque[tuple[OnResult, Result]] = deque()
        self._said_shortened = False
        self._short_context = tokenizer.short_context
        self._later: list[_Loadable] = []
        """What cannot run together with what runs now, because LongRoPE has other factors for it."""
        if model.long_rope is not None:
            model.long_rope.use(long=False)

    def _make_scheduler(self, limits: Limits) -> None:
        """Makes what knows of rows and of the blocks that hold their KV. There are none."""
        model, sizes = self.runner.model, self.sizes
        pool, state_slots = BlockPool(sizes.num_blocks), BlockPool(sizes.num_state_slots) if model.states else None
        self.block_manager = BlockManager(
            pool, sizes.block_size, model.sliding_window, state_slots, sums=limits.every_output
        )
        self.scheduler = Scheduler(self.block_manager, limits, self._stopper, POLICIES[self.config.policy])
        self.scheduler.counts, self.scheduler.drafter = self.stats, self.speculator
        self.results = ResultAssembler(
            self.scheduler, self._detokenizer.piece, self.config.row_timeout, self.tokenizer.head
        )

    def add(
        self, leaves: Sequence[Leaf], plan: PrefixPlan, on_result: OnResult, on_token: OnToken | None = None
    ) -> None:
        """Adds requests, before a run or between two of its steps.

        `leaves` and `plan` are those of `plan_requests`, for requests of which all are `long` or none, and no two that are not done have the same
        `row`. `run` calls `on_result` as each row finishes, and `on_token(row, number of the completion, token)` for each token that
        reaches the host.
        """
        long = bool(leaves) and leaves[0].request.long
        leaves = _with_requests(leaves, self._fitted)
        unfit = {
            leaf.request.row: (leaf.request, self.sizes.does_not_fit(leaf))
            for leaf in leaves
            if self.sizes.blocks_for(leaf) > self.sizes.num_blocks
        }
        for request, error in unfit.values():
            self._unfit.append((on_result, Result.from_error(request.row, error, len(request.tokens))))
        if self._short_context:
            leaves = _with_requests(
                leaves, lambda request: request if request.row in unfit else self._until_long(request)
            )
        rows = dict.fromkeys(leaf.request for leaf in leaves if not leaf.ended and leaf.request.row not in unfit)
        for request in rows:
            self.results.add(request, on_result, on_token)
        self._later.append(_Loadable(leaves, plan, long))
        onward = [request for request in rows if request.long != long]
        if onward:
            self._later.append(self._planned(onward))
        self._load()

    def _fitted(self, request: Request) -> Request:
        """Returns the request with as many tokens as fit the pool, if the user has not said how many."""
        fitted = self.sizes.fitted(request)
        if fitted is not request and not self._said_shortened:
            self._said_shortened = True
            room = self.sizes.num_blocks * self.sizes.block_size
            self.notes.append(
                f"the KV memory holds {room:,} tokens of a row, so --max-tokens auto is less for some rows: their prompts and completions "
                f"have {room:,} tokens at most (--kv-memory gives more)"
            )
        return fitted

    def _until_long(self, request: Request) -> Request:
        """Returns the request as it runs at first: to the token from which on LongRoPE has its long factors for it. Then all of it runs again."""
        limit = self._short_context + 1 - len(request.tokens)
        if request.long or request.texts or request.max_tokens <= limit:
            return request
        begun = request.begun.values()
        if len(begun) == request.leaves and all(c.finish_reason or len(c.token_ids) >= limit for c in begun):
            return replace(request, long=True)
        self.results.beyond[request.row] = request
        return replace(request, max_tokens=limit)

    def _planned(self, requests: Sequence[Request]) -> _Loadable:
        planned = plan_requests(requests, self.config.chunk_size, share=self.config.share)
        return _Loadable(*planned, requests[0].long)

    def _load(self) -> None:
        """Loads the windows that may run: those for the factors of LongRoPE that are in use, or the others if nothing runs."""
        rope = self.runner.model.long_rope
        if not self.scheduler.unfinished and not self.loop.in_flight:
            halted = self.results.take_halted()
            if halted:
                self._later.append(self._planned(halted))
            if rope is not None and self._later and all(window.long != rope.long for window in self._later):
                rope.use(long=not rope.long)
                self.block_manager.discard()
        later, self._later = self._later, []
        for window in later:
            if rope is None or window.long == rope.long:
                self._load_window(window)
            else:
                self._later.append(window)

    def _load_window(self, planned: _Loadable) -> None:
        ordered = [planned.leaves[i] for i in planned.plan.order]
        ended = [
            i for i, leaf in enumerate(ordered) if leaf.request.long != planned.long or not self.results.may_run(leaf)
        ]
        window = self.scheduler.load(ordered, planned.plan, ended)
        in_a_batch = min(1.0, self.scheduler.limits.batch_size / max(1, len(ordered)))
        self._use_huge_pages_for(int(in_a_batch * planned.plan.prefill_tokens_min) // self.sizes.block_size)
        self.results.start(window)
        if self._vision is not None:
            self._num_failed_images = 0
            self._vision.expect(self.block_manager.images_to_run(window))

    def run(self, stop: Callable[[], str | None] | None = None) -> None:
        """Runs steps until all requests are done.

        Calls `stop()` before every step. None continues, "drain" starts nothing new and returns when the running rows are done, and
        "now" returns at once. Rows that are not done then are dropped. "pause" returns at once, and the next call goes on with them. Raises
        `OutOfMemory` if the device has no room for a single token. After an exception, all rows are dropped, and no node is resident.
        """
        paused = ended = False
        try:
            while self.scheduler.unfinished or self.loop.in_flight or self._unfit or self._is_later:
                while self._unfit:
                    on_result, result = self._unfit.popleft()
                    on_result(result)
                wish = stop() if stop else None
                if wish == "now" or (wish == "drain" and not self.scheduler.running):
                    break
                try:
                    if wish == "pause":
                        self._settle()
                        paused = True
                        break
                    if not self.scheduler.unfinished and wish is None:
                        self._load()
                    if self.scheduler.unfinished:
                        self.step(admit=wish is None)
                    else:
                        self._settle()  # a callback may add something
                except KernelsFailed as e:
                    self._without_kernels(e)
                except StatesLost:
                    self._shrink()
                    self._start_again()
            with suppress(KernelsFailed):  # the rows of a failed step are not done; the next run runs them again
                self._settle()
                ended = True
        finally:
            if not ended:  # the exception may have come between two changes that belong together
                self._make_scheduler(self.scheduler.limits)
                self.loop.scheduler = self.scheduler
            if not ended or (not paused and (self.unfinished or self.loop.in_flight)):
                self._drop()
                self._unfit.clear()
            if not paused and self._vision is not None:
                self._forget_images(self._vision)
            self.executor.free(self.scheduler.take_freed())
            self._update_stats()
            self.costs.save()

    def step(self, admit: bool = True) -> None:
        """Runs the next step (`StepLoop.step`) and adds its updates to the results."""
        if self.results.overdue:
            self._settle()  # tokens that were sampled before a row's time was up belong to the row
        self.results.end_due()
        if self._vision is not None and len(self._vision.failed) > self._num_failed_images:
            self._num_failed_images = len(self._vision.failed)
            self.results.fail_shown(self._vision.error_of)
        began = time.perf_counter()
        for update in self.loop.step(admit):
            self._apply(update)
        if len(self.loop.landed) == 1:  # a step ahead: the device has run the step that has landed
            size, seconds = self.loop.landed[0], time.perf_counter() - began
            self.costs.measured.append((size, seconds))
            if self.speculator is not None:
                self.speculator.ran(size, seconds)
        self._shrink()
        self._use_huge_pages_for(self.block_manager.pool.num_used)
        self._update_stats()
        if self.config.debug:
            self.scheduler.check()
            self._keep_digests()

    @property
    def _is_later(self) -> bool:
        return bool(self._later) or self.results.halted_leaves > 0

    @property
    def unfinished(self) -> int:
        """Number of rows that have no result yet."""
        return len(self.results) + len(self._unfit)

    @property
    def device(self) -> str:
        """The device of the token ids and the logits."""
        return str(self.runner.model.device)

    @property
    def dtype(self) -> str:
        """The type that the model computes in, such as `bfloat16`."""
        return str(self.runner.model.dtype).removeprefix("torch.")

    @property
    def attention(self) -> str:
        """The name of the attention backend."""
        return self.runner.attention

    @property
    def prices(self) -> tuple[float, float] | None:
        """The seconds of a prompt token and of a completion token in full steps; None if nothing is known."""
        return self.costs.rates(self.scheduler.limits) if self.costs.known else None

    @property
    def waiting(self) -> int:
        """Number of leaves that are not done and do not run."""
        later = self.results.halted_leaves + sum(len(window.leaves) for window in self._later)
        return self.scheduler.unfinished - len(self.scheduler.running) + later

    def under_way(self) -> dict[int, dict[int, Completion]]:
        """Returns the unfinished completions by row and number. Given as `Request.begun`, they are continued exactly."""
        return self.results.under_way()

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step, with what it has so far as its result. Does nothing if it is done. Any thread may call this."""
        self.results.cancel(request.row)

    def close(self) -> None:
        """Does nothing: the memory is freed with the object. (`devices.Workers` has processes to end.)"""

    # -- the parts of a run

    def _settle(self) -> None:
        """Waits for all steps in flight and adds their updates to the results."""
        while self.loop.in_flight:
            self.results.end_cancelled()
            for update in self.loop.land():
                self._apply(update)

    def _forget_images(self, vision: Vision) -> None:
        """Forgets the images of a run. One that could not be shown may be there again in the next run; the KV of its nodes was made without it."""
        vision.clear()
        if vision.failed:
            self.block_manager.discard()
            vision.failed.clear()

    def _drop(self) -> None:
        """Forgets all unfinished rows."""
        self.scheduler.abandon()
        self.scheduler.take_freed()
        self.executor.clear()
        self.loop.in_flight.clear()
        self._later.clear()
        self.results.clear()
        if self._vision is not None:
            self._vision.clear()

    def _without_kernels(self, failed: KernelsFailed) -> None:
        """Switches the kernels off, for this run and the next ones, and continues in plain torch, without any KV that was computed so far.

        Raises `DevicesLost` if the device runs nothing more in this process.
        """
        verdict = self.runner.model.verdict.without("triton", str(failed))
        try:
            self.runner.drop_kernels()
        except RuntimeError as e:
            kept = f", as {verdict.file} says" if verdict.file is not None else " with --attention torch"
            raise DevicesLost(
                f"{self.device}: {failed}; the device runs nothing more in this process",
                f"run the same command again: it continues in plain torch{kept}",
            ) from e
        self.notes += verdict.notes()
        self._start_again(keep_nodes=False)

    def _start_again(self, *, keep_nodes: bool = True) -> None:
        """Starts the unfinished rows again from the tokens that the host has. Complete nodes keep their KV and states, or lose them."""
        self.results.end_cancelled()
        again = self.results.requests()
        under_way = self.under_way()
        self._drop()
        if not keep_nodes:
            self.block_manager.discard()
            self.runner.cache.clear()
        for (_, *calls), rows in groupby(again, lambda row: (row[0].long, *row[1:])):
            requests = [replace(request, begun=under_way.get(request.row, request.begun)) for request, *_ in rows]
            planned = self._planned(requests)
            self.add(planned.leaves, planned.plan, *calls)

    def _use_huge_pages_for(self, num_blocks: int) -> None:
        """Makes the pages of the KV pool huge if that many blocks are more than a few. Before the first step that costs nothing."""
        if num_blocks > self.runner.cache.max_few_blocks:
            self.runner.cache.make_pages_huge()

    def _apply(self, update: SequenceUpdate) -> None:
        """Adds an update to the results."""
        if self._vision is not None and (error := self._vision.error_of(update.sequence.request.images)):
            update = SequenceUpdate(update.sequence, error=error)
        self.results.update(update)

    def _speculator(self) -> Speculator | None:
        """Returns what makes drafts. On a GPU the tokens of a step are read one step later, so there are none."""
        model = self.runner.model
        if self.config.speculate == "off" or model.device.type != "cpu":
            return None
        payoff = Payoff(self.costs, replays=bool(model.states))
        return Speculator(lambda seq: self.constraints.forced(cast(Hashable, seq.stops)), payoff)

    def _stopper(self, request: Request) -> Stops:
        kind = partial(GrammarStopper, self.constraints) if request.params.guided else Stopper
        return kind(
            request.params, request.max_tokens, self._eos, self._detokenizer, request.text_tokens, request.tools
        )

    # -- memory and figures

    def _keep_digests(self) -> None:
        """Adds digests to the figures: of weights and tables at once, of the KV of the first complete node when there is one with whole blocks."""
        known = dict(self.stats.parts or {})
        found = known.get("digests") or digests(self.runner.model)
        size = self.sizes.block_size
        nodes = (n for n in self.block_manager.live if n.computed == n.end and n.end >= size and not n.dropped)
        if "kv" not in found and (node := next(nodes, None)) is not None:
            kv = self.runner.cache.kv_of(node.table[: node.end // size])
            found = found | {"kv": tensor_digest((str(i), pool) for i, pool in enumerate(kv))}
        self.stats.parts = known | {"digests": found}

    def _shrink(self) -> None:
        """After the device ran out of memory, limits steps to the size that succeeded."""
        tokens = self.runner.max_forward_tokens
        if tokens is not None and tokens < self.scheduler.limits.max_batch_tokens:
            self.notes.append(
                f"{self.runner.model.device} ran out of memory in a step of more than {tokens} tokens; from now on, a step "
                f"has at most {tokens} (--max-batch-tokens {tokens} avoids the attempt)"
            )
            self.scheduler.shrink(tokens)

    def _update_stats(self) -> None:
        """Copies the figures of executor, runner and block manager into `stats`, which the scheduler counts in itself."""
        if self.speculator is not None:
            self.stats.drafted, self.stats.accepted = self.speculator.drafted, self.speculator.accepted
        self.stats.forward_seconds = self.executor.seconds
        token = self.sizes.bytes_per_token
        self.stats.attention_parts = self.runner.attention_parts
        if self._vision is not None:
            self.stats.images_encoded = self._vision.encoded
        if self.runner.model.streamed is not None:
            self.stats.weight_bytes_read = self.runner.model.streamed.bytes_read
        pool = self.block_manager.pool
        self.stats.kv_bytes = pool.num_used * self.sizes.block_size * token
        self.stats.kv_bytes_peak = max(self.stats.kv_bytes_peak, pool.peak_used * self.sizes.block_size * token)
        if self.block_manager.state_slots is not None:
            states = self.block_manager.state_slots.peak_used * self.sizes.bytes_per_state_slot
            self.stats.state_bytes_peak = max(self.stats.state_bytes_peak, states)
        unshared = self.block_manager.peak_unshared_blocks * self.sizes.block_size * token
        self.stats.kv_bytes_unshared = max(self.stats.kv_bytes_unshared, unshared)
