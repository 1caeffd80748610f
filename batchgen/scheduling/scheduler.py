"""Decides what runs in the next step: which running sequences, which prompts, what starts, and which sequence is preempted.

Each node is prefilled once, and its children wait for it. The place of a finished sequence is taken in the next step. Nothing that
a step does is linear in the number of waiting leaves: what can start next is in a queue of cursors, one for each resident node
that still has children to start. The policy says in which order.

A step may be scheduled before the tokens of the step before it are known. `advance` does what is certain as soon as a step is
launched; `apply` does what its tokens mean. A sequence that turns out to have ended has run once too often, and that token is dropped.

A step may verify drafts: a decoding sequence runs guesses of its next tokens behind its newest token, and a token is sampled after each.
The sampler keeps the samples up to the first that is not the draft, so the sequence advances by one token and by one more for each draft
that was right. What a wrong draft has written to the blocks lies after the sequence's last token, where the next step writes.
`StepLoop` is the one loop that calls these three methods, for the engine and for everything else that runs steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from batchgen.errors import RowError
from batchgen.prefix import PrefixPlan
from batchgen.request import Leaf, Request
from batchgen.scheduling.batch import (
    Budget,
    Freed,
    Limits,
    ScheduledBatch,
    ScheduledSpan,
    SequenceUpdate,
    StepOutput,
    StepSize,
    count_batch,
)
from batchgen.scheduling.block_manager import BlockManager
from batchgen.scheduling.sequence import GenerationSequence, PrefixNodeSpan, Span, State, Stops
from batchgen.scheduling.waiting import POLICIES, Cursor, Policy, Queue, Window
from batchgen.stats import SchedulerCounts, counted

Step = TypeVar("Step")
"""A batch that was launched, as its executor knows it."""


class Drafter(Protocol):
    """Guesses what decoding sequences will sample. It changes the number of steps, never a result."""

    def propose(
        self, decoding: Sequence[GenerationSequence], alone: bool
    ) -> Mapping[GenerationSequence, Sequence[int]]:
        """Returns draft tokens for sequences that decode in a step. The scheduler may take fewer of them. `alone`: the step runs nothing else."""
        ...

    def verified(self, seq: GenerationSequence, drafted: int, accepted: int) -> None:
        """Takes note that `drafted` draft tokens were verified, and that the first `accepted` of them were right."""
        ...

    def finished(self, seq: GenerationSequence) -> None:
        """Takes note of a completion that has ended."""
        ...


class RunningSet:
    """At most `batch_size` running sequences, each with its own index in the sampler, and the spans whose prompts are being run."""

    def __init__(self, block_manager: BlockManager, batch_size: int) -> None:
        self.block_manager = block_manager
        self.queue = Queue()
        """What may start next."""
        self.running: dict[GenerationSequence, None] = {}  # in the order of admission: the newest is preempted first
        self.prefilling: dict[Span, None] = {}  # nodes and sequences whose prompts are not yet run to their end
        self.unfinished = 0  # leaves that have something to run
        self._batch_size = batch_size
        self._free_sampler_indices = list(range(batch_size))
        self._freed_sampler_indices: list[int] = []
        self._ended: list[GenerationSequence] = []

    @property
    def num_startable(self) -> int:
        """Number of sequences that may still start."""
        return len(self._free_sampler_indices)

    @property
    def computes_a_node(self) -> bool:
        """Whether a node is being computed."""
        return any(isinstance(span, PrefixNodeSpan) for span in self.prefilling)

    def has_place(self, w: Window, n: int, parent: PrefixNodeSpan | None) -> bool:
        """Whether node n may start. A childless node takes the place of a sequence, so that sharing takes no more blocks. In depth-first
        order the leaves before it have their places already, whether they run or wait for other nodes: it must not keep them waiting.
        """
        childless = self.block_manager.childless
        before = w.unfinished_before(n) + max(0, len(self.running) - len(w.sequences))
        return (
            not w.depth_first
            or max(before, len(self.running) + len(childless) - (parent in childless)) < self._batch_size
        )

    def window_of(self, span: Span) -> Window:
        return self.block_manager.windows[span.window]

    def start(self, seq: GenerationSequence) -> None:
        """Starts a sequence that has its blocks."""
        seq.sampler_index = heapq.heappop(self._free_sampler_indices)
        self.running[seq] = None
        # A prompt that ends at a node has nothing to run: its first token is sampled from logits that the node keeps.
        seq.become(State.PREFILLING if seq.computed < seq.end else State.DECODING)
        self.window_of(seq).sequences[seq.index] = seq

    def preempt(self, seq: GenerationSequence) -> None:
        """Preempts a running sequence: frees its blocks, and lets its leaf wait again, in its start order."""
        assert not seq.num_pending_tokens, "a sequence with pending tokens cannot be preempted"
        self._stop(seq, State.PREEMPTED)
        self._ended.append(seq)
        self.queue.push(Cursor(self.window_of(seq), seq.parent.node.index if seq.parent else -1, [seq.item]))

    def start_finishing(self, seq: GenerationSequence) -> None:
        """Marks a sequence whose work is all launched: its leaf has nothing more to run. `end` follows when its last numbers are on the host.

        Other sequences may get its blocks at once, because the device runs steps in the order of the launches.
        """
        if seq in self.running:
            self._stop(seq, State.FINISHING)
        else:
            seq.become(State.FINISHING)
        w = self.window_of(seq)
        w.sequences[seq.index] = seq
        self.end_leaf(w, seq.index)

    def end(self, seq: GenerationSequence, state: State) -> None:
        """Ends a sequence that runs or is finishing."""
        self._ended.append(seq)
        w = self.window_of(seq)
        w.sequences.pop(seq.index, None)
        if seq.state is State.FINISHING:
            seq.become(state)
            self._close_if_done(w)
        else:
            self._stop(seq, state)
            self.end_leaf(w, seq.index)

    def cancel(self, w: Window, i: int) -> GenerationSequence | None:
        """Ends leaf i in any state. Returns its sequence if it had begun and was not done."""
        seq = w.sequences.get(i)
        if seq is not None and seq.state is not State.PREEMPTED:
            self.end(seq, State.CANCELLED)
            return seq
        if seq is not None:
            seq.become(State.CANCELLED)
            w.sequences.pop(i, None)
        if not w.has_ended(i):
            self.end_leaf(w, i)
        return seq

    def take_freed(self) -> Freed:
        """Returns what was freed since the last call."""
        freed = Freed(tuple(self._ended), tuple(self._freed_sampler_indices), self.block_manager.take_freed_nodes())
        self._ended.clear()
        self._freed_sampler_indices.clear()
        return freed

    def abandon(self) -> None:
        """Drops everything that runs or waits."""
        for seq in list(self.running):
            self._stop(seq, State.CANCELLED)
        for node_span in list(self.block_manager.live):
            if node_span.complete:
                self.block_manager.retire(node_span)
            else:
                self.block_manager.evict(node_span)
        for w in list(self.block_manager.windows.values()):
            self.block_manager.remove_window(w)
        self.prefilling.clear()
        self.queue.clear()
        self.unfinished = 0

    def end_leaf(self, w: Window, i: int) -> None:
        """Ends leaf i, which has nothing more to run. Retires the nodes that no leaf needs any more."""
        self.unfinished -= 1
        for node_span in w.end_leaf(i):
            if node_span.complete:
                self.block_manager.retire(node_span)
            elif not node_span.evicted:  # its leaves were cancelled
                del self.prefilling[node_span]
                self.block_manager.evict(node_span)
        self._close_if_done(w)

    def complete(self, node_span: PrefixNodeSpan) -> None:
        """Lets the children of a node start when the node has been computed."""
        self.queue.complete(self.window_of(node_span), node_span.node.index)

    def drop_node(self, node_span: PrefixNodeSpan) -> None:
        """Gives up a node that is still being computed; its children wait for it to start again."""
        self.prefilling.pop(node_span, None)
        self.block_manager.evict(node_span)
        w, n = self.window_of(node_span), node_span.node.index
        w.close_node(n)
        self.queue.restart_lost(w, n)

    def _close_if_done(self, w: Window) -> None:
        if w.done:
            self.block_manager.remove_window(w)

    def _stop(self, seq: GenerationSequence, state: State) -> None:
        self.prefilling.pop(seq, None)
        del self.running[seq]
        heapq.heappush(self._free_sampler_indices, seq.sampler_index)
        if not seq.scoring:
            self._freed_sampler_indices.append(seq.sampler_index)
        seq.sampler_index = -1
        self.block_manager.close(seq)
        seq.become(state)


class Admission:
    """Starts what waits, in start order. `stops` makes the object that ends a request's completions."""

    def __init__(self, running: RunningSet, policy: Policy, stops: Callable[[Request], Stops]) -> None:
        self._running = running
        self._block_manager = running.block_manager
        self._policy = policy
        self._stops = stops

    def admit(self, budget: Budget, started: list[GenerationSequence], scored: list[GenerationSequence]) -> None:
        """Fills the rest of a step. Adds to `started` the sequences that begin in it, and to `scored` the texts that nodes have scored completely."""
        queue = self._running.queue
        while queue.heap:
            cursor = queue.top
            w, item = cursor.window, cursor.item
            if w.is_done(item):
                queue.advance()
                continue
            parent = w.node_span(cursor.node)
            if cursor.node >= 0:
                if parent is None or not parent.complete:
                    queue.wait()
                    continue
                if not self._block_manager.has_state(parent):
                    # It was released: the node runs again for what still begins there.
                    self._block_manager.evict(parent)
                    queue.wait()
                    continue
            if item < 0 and w.is_scored(~item, parent):
                queue.advance()
                scored.append(self._score(w, ~item, parent))
                continue
            if budget.prefill <= 0 and not (item < 0 and w.samples_without_a_forward(~item, parent)):
                return  # a started item would only hold blocks
            span = self._start_node(w, item) if item >= 0 else self._start_leaf(w, ~item, parent)
            if span is None:
                return
            queue.advance()
            if isinstance(span, GenerationSequence):
                started.append(span)
            elif span.complete:
                self._running.complete(span)
                continue
            if span.computed < span.end:
                self._running.prefilling[span] = None
                budget.slice(span)

    def bring_back(self, w: Window, i: int, tokens: Iterable[int]) -> None:
        """Lets leaf i continue after these tokens of an earlier run, like a preempted sequence."""
        seq = self._sequence(w, i)
        assert seq.stops is not None
        for token in tokens:
            if seq.stops.append(token) is not None:
                return  # the completion had ended, but was not kept: it starts from its prompt
            seq.generated.append(token)
        seq.state = State.PREEMPTED
        w.sequences[seq.index] = seq

    def evict_idle(self, *, keep_path: bool) -> None:
        """Evicts all nodes except the parent of the next item and, with `keep_path`, the nodes above that parent."""
        top = self._running.queue.top
        parent = top.window.node_span(top.node)
        self._block_manager.evict_all({parent, *(parent.path if parent and keep_path else ())})

    def _score(self, w: Window, i: int, parent: PrefixNodeSpan | None) -> GenerationSequence:
        seq = self._sequence(w, i)
        assert parent is not None
        self._block_manager.attach(seq, parent)
        seq.gather()
        self._running.start_finishing(seq)
        return seq

    def _start_node(self, w: Window, n: int) -> PrefixNodeSpan | None:
        node = w.plan.nodes[n]
        blocks = self._block_manager
        if not self._running.has_place(w, n, w.node_span(node.parent)):
            return None
        reserve = 0
        if self._running.running or self._running.prefilling:
            # A node that starts early must not take the memory of work that started before it.
            ahead = blocks.blocks_for(w.leaves[node.first].max_kv_tokens) - blocks.blocks_for(node.end)
            reserve = max(2 * ahead, self._margin)
            # While other nodes are computed it needs free state slots: what follows each node takes as many as the tree is deep.
            if not blocks.has_state_slots(1 + self._running.num_startable + w.depth) and self._running.computes_a_node:
                return None
        node_span = blocks.open_node(w, n, reserve)
        if node_span is not None:
            w.open_node(node_span)
        return node_span

    def _start_leaf(self, w: Window, i: int, parent: PrefixNodeSpan | None) -> GenerationSequence | None:
        if not self._running.num_startable:
            return None
        seq = w.sequences.get(i) or self._sequence(w, i)
        alone = not self._running.running and not self._running.prefilling
        if not self._block_manager.open_sequence(seq, parent, None if alone else self._margin):
            return None
        self._running.start(seq)
        return seq

    def _sequence(self, w: Window, i: int) -> GenerationSequence:
        leaf = w.leaves[i]
        return GenerationSequence(
            window=w.number, place=w.place(~i), parent=None, start=0, table=[], computed=0, leaf=leaf, index=i,
            stops=None if leaf.request.texts else self._stops(leaf.request),
        )  # fmt: skip

    @property
    def _margin(self) -> int:
        return int(self._policy.margin * self._block_manager.pool.num_blocks)


class Scheduler(RunningSet):
    """Turns windows of leaves into steps. The only one that changes a sequence's state."""

    def __init__(
        self,
        block_manager: BlockManager,
        limits: Limits,
        stops: Callable[[Request], Stops],
        policy: Policy = POLICIES["prefix"],
    ) -> None:
        super().__init__(block_manager, limits.batch_size)
        self.limits = limits
        self.policy = policy
        self.counts = SchedulerCounts()
        self.drafter: Drafter | None = None
        """Guesses tokens of decoding sequences; None for none. Only for a loop without a step ahead."""
        self._admission = Admission(self, policy, stops)
        self._num_windows = self._num_leaves = 0  # so far

    # -- windows come and go

    def load(self, leaves: Sequence[Leaf], plan: PrefixPlan, ended: Iterable[int] = ()) -> Window:
        """Adds a window to those that are not done. `leaves` are in depth-first order; those at the places `ended` have nothing to run.

        Its nodes take over the KV of other windows' nodes where the tokens match.
        """
        w = Window(leaves, plan, self.policy, self._num_windows, self._num_leaves)
        self._num_windows += 1
        self._num_leaves += len(leaves)
        self.unfinished += len(leaves)
        self.block_manager.add_window(w)
        for i in ended:
            self.end_leaf(w, i)
        for i, leaf in enumerate(leaves):
            if leaf.choice in leaf.request.begun and not w.has_ended(i):
                self._admission.bring_back(w, i, leaf.request.begun[leaf.choice].token_ids)
        if not w.done:
            self.queue.push(w.root)
        return w

    def shrink(self, max_batch_tokens: int) -> None:
        """Limits steps to this many tokens from now on."""
        prefill = min(max_batch_tokens, self.limits.max_prefill_tokens)
        self.limits = replace(self.limits, max_batch_tokens=max_batch_tokens, max_prefill_tokens=prefill)

    # -- a step

    def schedule(self, admit: bool = True) -> ScheduledBatch | None:
        """Returns the next step. It is empty only when nothing is left (or, without `admit`, nothing runs).

        Returns None when a preemption is needed but sampled tokens are still in flight: the victim's tokens must reach the host
        first, and it may turn out to have finished.
        """
        preempted = self._grow_running()
        if preempted is None:
            return None
        budget = Budget(self.limits)
        decoding = [s for s in self.running if s.state is State.DECODING]
        if self.policy.decode_first:
            self._decode(decoding, budget)
        for span in self.prefilling:
            if admit or isinstance(span, GenerationSequence):  # else nothing that runs needs it
                budget.slice(span)
        started: list[GenerationSequence] = []
        scored: list[GenerationSequence] = []
        if admit and not preempted:
            self._admission.admit(budget, started, scored)
            # If nothing runs, nodes hold the blocks. Those beside the next item's path are evicted first, then those above its
            # parent too. With its parent alone the item fits, or the engine refused its request from the start.
            for keep_path in (True, False):
                if budget.spans or started or scored or decoding or not self.unfinished:
                    break
                self._admission.evict_idle(keep_path=keep_path)
                self._admission.admit(budget, started, scored)
            idle = not (budget.spans or started or scored or decoding)
            assert not (idle and self.unfinished), "nothing runs and nothing can start"
        if not self.policy.decode_first:
            self._decode(decoding, budget)
        if self.drafter is not None and decoding and budget.tokens:
            self._draft(self.drafter, decoding, budget)
        self.block_manager.note_unshared(scored[: self.limits.batch_size - len(self.running)])
        spans = sorted(budget.spans, key=lambda scheduled: scheduled.span.place)
        batch = ScheduledBatch.of(
            spans, self.block_manager.take_copies(), tuple(started), tuple(scored), self.take_freed()
        )
        count_batch(self.counts, batch)
        return batch

    def advance(self, batch: ScheduledBatch) -> None:
        """Does what is certain once the batch is launched and before its tokens are known."""
        for scheduled in batch.spans:
            span = scheduled.span
            if span.draft_state_slot < 0:  # else it is only known once the drafts are verified
                self.block_manager.advance(span, scheduled.stop - len(scheduled.drafts))
            if scheduled.stop < span.end:
                continue
            if isinstance(span, PrefixNodeSpan):
                del self.prefilling[span]
                self.complete(span)
            elif isinstance(span, GenerationSequence) and span.state is State.PREFILLING:
                del self.prefilling[span]
                if span.scoring:
                    span.gather()
                    self.start_finishing(span)
                else:
                    span.become(State.DECODING)
        if self.block_manager.sliding_window is not None:
            for scheduled in batch.spans:
                if scheduled.span.table:
                    self.block_manager.drop_behind(scheduled.span)
        for sample in batch.samples:
            if sample.drafts:
                continue  # it is known only if it counts
            seq = sample.sequence
            seq.num_pending_tokens += 1
            if seq.num_sampled >= seq.request.max_tokens:
                self.start_finishing(seq)

    def apply(self, output: StepOutput) -> Iterator[SequenceUpdate]:
        """Applies what a step has computed. Steps are applied in the order of their batches; tokens of sequences that have ended since are dropped.

        Yields an update for each sequence. The caller may cancel other sequences between two updates.
        """
        entries = output.batch.score_targets.entries
        if output.outputs:
            for entry, row in zip(entries, output.outputs, strict=True):
                entry.output = row
        else:
            for entry, logprob, likeliest in zip(entries, output.score_logprobs, output.score_likeliest, strict=True):
                entry.logprob, entry.likeliest = logprob, bool(likeliest)
        for seq in output.batch.scored:
            if seq.running:
                self.end(seq, State.FINISHED)
                yield SequenceUpdate(seq, reason="scored")
        sampled = zip(output.sequences, output.tokens, output.valid, output.logprobs, strict=True)
        for seq, token, valid, logprobs in sampled:
            if seq.running:
                yield self._append(seq, token, valid, logprobs)
        if self.drafter is not None:
            for scheduled in output.batch.spans:
                if scheduled.drafts:
                    self._verified(self.drafter, scheduled)

    def _verified(self, drafter: Drafter, scheduled: ScheduledSpan) -> None:
        """Tells the drafter which drafts of a span were right. A state has taken up all of a span's tokens, so it counts only if all were."""
        seq, drafted = scheduled.span, len(scheduled.drafts)
        assert isinstance(seq, GenerationSequence)
        accepted = max(0, seq.end - (scheduled.stop - drafted) - 1)
        if seq.draft_state_slot >= 0:
            self.block_manager.end_verification(seq, scheduled.stop if accepted == drafted else None)
        drafter.verified(seq, drafted, accepted)

    def _append(self, seq: GenerationSequence, token: int, valid: bool, logprobs: Any) -> SequenceUpdate:
        """Adds a sampled token to its sequence. Ends the sequence if its completion has ended or failed."""
        assert seq.stops is not None
        if seq.num_pending_tokens:
            seq.num_pending_tokens -= 1
            self.counts.decode_sequences += 1
        elif seq.draft_state_slot < 0:  # the sample after a draft that was right, whose KV is in the blocks
            self.block_manager.advance(seq, seq.computed + 1)
        try:
            if not valid:
                what = f"the model's logits after {counted(len(seq.generated), 'token')} are not numbers"
                raise RowError("numerical_error", what)
            if logprobs is not None:
                seq.logprobs.append(logprobs)
            reason = seq.stops.append(token)
        except RowError as e:
            self.end(seq, State.FAILED)
            return SequenceUpdate(seq, error=e)
        seq.generated.append(token)
        self.counts.completion_tokens += 1
        if reason is not None:
            self.end(seq, State.FINISHED)
            if self.drafter is not None:
                self.drafter.finished(seq)
        assert seq.num_pending_tokens or seq.state is not State.FINISHING, "a completion passes its length"
        return SequenceUpdate(seq, token, reason)

    def check(self) -> None:
        """Raises `AssertionError` unless blocks, state slots, tables and running sequences add up."""
        manager = self.block_manager
        spans: list[Span] = [*self.running, *manager.live, *manager.cached]
        manager.pool.check(span.table[span.dropped :] for span in spans)
        if manager.state_slots is not None:
            manager.state_slots.check(manager.state_slots_of(span) for span in spans)
        for span in spans:
            assert len(span.table) * manager.block_size >= span.computed, "KV outside of the block table"
        held = sum(len(span.table) - span.dropped for span in (*self.running, *manager.childless))
        assert manager.unshared_blocks == held, "blocks without sharing do not add up"

    # -- running

    def _decode(self, decoding: list[GenerationSequence], budget: Budget) -> None:
        """Schedules the next token of every decoding sequence. If not all fit, those that have waited longest go first."""
        if budget.tokens < len(decoding):
            decoding = sorted(decoding, key=lambda s: s.last_step)
        for seq in decoding:
            if not budget.decode(seq):
                break
            seq.last_step = self.counts.steps + 1

    def _draft(self, drafter: Drafter, decoding: Sequence[GenerationSequence], budget: Budget) -> None:
        """Adds draft tokens to decoding sequences, as far as tokens, blocks and the lengths of the completions allow."""
        proposed = drafter.propose(decoding, alone=len(budget.spans) == len(decoding))
        if not proposed:
            return
        places = {scheduled.span: number for number, scheduled in enumerate(budget.spans)}
        for seq, tokens in proposed.items():
            count = min(len(tokens), budget.tokens, seq.request.max_tokens - seq.num_sampled - 1)
            count = self.block_manager.room_for_drafts(seq, count, len(self.running))
            if count > 0:
                budget.draft(places[seq], tokens[:count])

    def _grow_running(self) -> int | None:
        """Allocates a block for every sequence whose next token begins one. If no block is free, the newest sequences are preempted.

        Returns the number of preempted sequences, or None if a preemption must wait (`schedule`).
        """
        before = self.counts.preemptions
        for seq in list(self.running):
            while seq in self.running and seq.state is State.DECODING and not self.block_manager.grow(seq):
                if any(other.num_pending_tokens for other in self.running):
                    return None
                newest = self._newest()
                if newest is seq and len(self.running) == 1:
                    self.block_manager.evict_all()
                    for span in [s for s in self.prefilling if isinstance(s, PrefixNodeSpan)]:
                        self.drop_node(span)
                    if self.block_manager.grow(seq):
                        break
                self.counts.preemptions += 1
                self.preempt(newest)
        return self.counts.preemptions - before

    def _newest(self) -> GenerationSequence:
        """The sequence to preempt: the newest of those with the lowest priority."""
        return max(reversed(self.running), key=lambda s: s.request.priority)


class Executor(Protocol[Step]):
    """Runs batches: the engine's `StepExecutor`, or one without an engine (`rehearsal`)."""

    @property
    def needs_tokens(self) -> bool:
        """Whether `sample` needs the tokens of the steps before on the host."""
        ...

    def launch(self, batch: ScheduledBatch) -> Step:
        """Starts the forward of a batch. Waits for nothing."""
        ...

    def sample(self, step: Step) -> None:
        """Starts the sampling of its tokens."""
        ...

    def wait(self, step: Step) -> StepOutput:
        """Returns what the step gave, once it is on the host."""
        ...


class StepLoop(Generic[Step]):
    """The loop of steps. `ahead` is the number of steps (0 or 1) that are launched before the tokens of the one before are read."""

    def __init__(self, scheduler: Scheduler, executor: Executor[Step], ahead: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.ahead = ahead
        self.in_flight: deque[Step] = deque()
        self.landed: list[StepSize] = []
        """The sizes of the steps whose tokens were read in the last call of `step`."""

    def step(self, admit: bool = True) -> Iterator[SequenceUpdate]:
        """Runs the next step. Yields the updates of the steps that are done. Without `admit` no new sequence is started.

        If memory is short, it only waits for the step in flight: that step may end sequences, and the tokens of a sequence must be on
        the host before it is preempted.
        """
        self.landed.clear()
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
        output = self.executor.wait(self.in_flight.popleft())
        self.landed.append(output.batch.size)
        yield from self.scheduler.apply(output)

    def settle(self) -> Iterator[SequenceUpdate]:
        """Waits for all steps in flight."""
        while self.in_flight:
            yield from self.land()
