"""What runs in the next step: which running sequences, which prompts, what is started, who gives pages up.

Each node is prefilled once, and its children wait for it; a finished sequence's place is taken in the next step. Nothing
a step does is linear in the number of waiting leaves: what can start next lies in a queue of cursors, one for each
resident node that still has children to start. The policy says in which order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import replace

from batchgen.engine.memory import Memory
from batchgen.engine.policy import POLICIES, Policy
from batchgen.engine.spans import Branch, Sequence, Span, State, Stops
from batchgen.engine.steps import Budget, Limits, Step
from batchgen.engine.window import Cursor, Queue, Window
from batchgen.prefix import PrefixPlan
from batchgen.request import Leaf, Request


class Scheduler:
    """Turns windows of leaves into steps. The only one that changes a sequence's state."""

    def __init__(
        self,
        memory: Memory,
        limits: Limits,
        stops: Callable[[Request], Stops],
        policy: Policy = POLICIES["prefix"],
    ) -> None:
        self.memory = memory
        self.limits = limits
        self.policy = policy
        self.running: dict[Sequence, None] = {}  # in the order of admission: the newest is preempted first
        self.prefilling: dict[Span, None] = {}
        self.unfinished = 0  # leaves that are not done
        self.steps = 0
        self.preemptions = 0
        self.held_tokens = 0  # what the running sequences would hold, each with a prefix of its own
        self.peak_held_tokens = 0
        self._stops = stops
        self._slots = list(range(limits.batch_size))
        self._queue = Queue()
        self._numbers = 0  # leaves of all windows so far

    # -- windows come and go

    def load(self, leaves: List[Leaf], plan: PrefixPlan, unfit: Iterable[int] = ()) -> Window:
        """Takes a window in, beside those that are not done: `leaves` in depth-first order, and positions that fail without running.

        What nodes of other windows hold is taken over where the tokens match.
        """
        w = Window.of(leaves, plan, self.policy, self._numbers)
        self._numbers += len(leaves)
        self.unfinished += len(leaves)
        self.memory.match(w)
        for i in unfit:
            self._leave(w, i)
        if w.left:
            self._queue.push(w.cursors[-1])
        return w

    def abandon(self) -> None:
        """Drops what runs and waits: the job is being interrupted."""
        for seq in list(self.running):
            self._stop_running(seq, State.CANCELLED)
        for branch in list(self.memory.live):
            if branch.complete:
                self.memory.retire(branch)
            else:
                self.memory.evict(branch)
        self.prefilling.clear()
        self._queue.clear()
        self.unfinished = 0

    def cancel(self, w: Window, i: int) -> Sequence | None:
        """Ends leaf i, wherever it stands. Returns its sequence if it had begun; a leaf that is done stays so."""
        seq = w.running.get(i)
        if seq is not None:
            self._finish(seq, State.CANCELLED)
            return seq
        seq = w.returning.pop(i, None)
        if seq is not None:
            seq.become(State.CANCELLED)
        if i not in w.ended:
            self._leave(w, i)
        return seq

    def shrink(self, max_batch_tokens: int) -> None:
        """Steps have at most so many tokens from now on."""
        least = max(1, min(max_batch_tokens, self.limits.max_batch_tokens))
        self.limits = replace(
            self.limits, max_batch_tokens=least, max_prefill_tokens=min(least, self.limits.max_prefill_tokens)
        )

    # -- a step

    def schedule(self, admit: bool = True) -> Step:
        """The next step. Empty only when nothing is left (or, without `admit`, nothing runs)."""
        self.steps += 1
        budget = Budget(self.limits)
        preempted = self._grow_running()
        decoding = [s for s in self.running if s.state is State.DECODING]
        if self.policy.decode_first:
            self._decode(decoding, budget)
        for span in self.prefilling:
            if admit or isinstance(span, Sequence):  # else nothing that runs needs it
                budget.slice(span)
        started: list[Sequence] = []
        scored: list[Sequence] = []
        if admit and not preempted:
            self._admit(budget, started, scored)
            # Nothing runs, so what holds the pages is nodes: those beside the next item's path go, then those above
            # its parent too. With these alone it fits, or it was refused (`unfit`) from the start.
            for path in (True, False):
                if budget.works or started or scored or decoding or not self.unfinished:
                    break
                self._clear(path)
                self._admit(budget, started, scored)
            idle = not (budget.works or started or scored or decoding)
            assert not (idle and self.unfinished), "nothing runs and nothing can start"
        if not self.policy.decode_first:
            self._decode(decoding, budget)
        works = sorted(budget.works, key=lambda w: w.span.place)
        ready = tuple(s for s in started if s.state is State.DECODING)
        held = self.held_tokens + sum(seq.end for seq in scored)
        self.peak_held_tokens = max(self.peak_held_tokens, held)
        return Step(tuple(works), self.memory.take_moves(), preempted, tuple(started), ready, tuple(scored))

    def ran(self, step: Step) -> list[Sequence]:
        """The step's forward is done: its tokens have KV. Returns the texts that are scored to their end, finished."""
        scored: list[Sequence] = []
        for work in step.works:
            span = work.span
            span.computed = work.stop
            if work.stop < span.end:
                continue
            if isinstance(span, Branch):
                del self.prefilling[span]
                self._branch_complete(span)
            elif isinstance(span, Sequence) and span.state is State.PREFILLING:
                del self.prefilling[span]
                if span.scoring:
                    span.gather()
                    scored.append(span)
                    self._finish(span, State.FINISHED)
                else:
                    span.become(State.DECODING)
        if self.memory.sliding is not None:
            for work in step.works:
                if work.span.table:
                    self.memory.drop_behind(work.span)
        return scored

    def drew(self, seq: Sequence, token: int) -> str | None:
        """A token was drawn for `seq`; ends it where it has ended. Returns the finish reason, or None."""
        seq.generated.append(token)
        self.held_tokens += 1
        assert seq.stops is not None
        reason = seq.stops.append(token)
        if reason is not None:
            self._finish(seq, State.FINISHED)
        return reason

    def finish(self, seq: Sequence) -> None:
        """Ends a running sequence whose completion is whole for another reason than its last token."""
        self._finish(seq, State.FINISHED)

    def fail(self, seq: Sequence) -> None:
        """Ends a running sequence that cannot go on."""
        self._finish(seq, State.FAILED)

    # -- running

    def _decode(self, decoding: list[Sequence], budget: Budget) -> None:
        """The next token of every decoding sequence; where not all fit, of those that have waited longest."""
        if self.limits.max_kv_read is not None or budget.tokens < len(decoding):
            decoding = sorted(decoding, key=lambda s: s.turn)
        for seq in decoding:
            if not budget.decode(seq):
                break
            seq.turn = self.steps

    def _grow_running(self) -> tuple[Sequence, ...]:
        """A page for every sequence whose next token begins one; the newest give theirs up where none is free."""
        preempted: list[Sequence] = []
        for seq in list(self.running):
            while seq in self.running and seq.state is State.DECODING and not self.memory.grow(seq):
                newest = self._newest()
                if newest is seq and len(self.running) == 1:
                    self.memory.evict_all()
                    for span in [s for s in self.prefilling if isinstance(s, Branch)]:
                        self._drop_branch(span)
                    if self.memory.grow(seq):
                        break
                self._preempt(newest)
                preempted.append(newest)
        return tuple(preempted)

    def _newest(self) -> Sequence:
        """Who is preempted: of the least urgent sequences the newest."""
        return max(reversed(self.running), key=lambda s: s.request.priority)

    def _preempt(self, seq: Sequence) -> None:
        self.preemptions += 1
        self._stop_running(seq, State.PREEMPTED)
        w = seq.window
        w.returning[seq.index] = seq
        self._queue.push(Cursor(w, seq.parent.node.index if seq.parent else -1, [seq.item]))

    def _stop_running(self, seq: Sequence, state: State) -> None:
        self.prefilling.pop(seq, None)
        del self.running[seq]
        del seq.window.running[seq.index]
        heapq.heappush(self._slots, seq.slot)
        self.held_tokens -= seq.end
        self.memory.close(seq)
        seq.become(state)

    def _finish(self, seq: Sequence, state: State) -> None:
        self._stop_running(seq, state)
        self._leave(seq.window, seq.index)

    def _leave(self, w: Window, i: int) -> None:
        """Leaf i is done: nodes that nothing descends from any more become idle."""
        w.ended.add(i)
        w.left -= 1
        self.unfinished -= 1
        n = int(w.plan.leaf_parent[i])
        while n >= 0:
            w.unfinished[n] -= 1
            branch = w.branches[n]
            if w.unfinished[n] == 0 and branch is not None:
                if branch.complete:
                    self.memory.retire(branch)
                elif not branch.evicted:  # its leaves were cancelled
                    del self.prefilling[branch]
                    self.memory.evict(branch)
                w.branches[n] = None
            n = w.plan.nodes[n].parent
        if w.left == 0:
            w.forget()

    # -- admission

    def _admit(self, budget: Budget, started: list[Sequence], scored: list[Sequence]) -> None:
        queue = self._queue
        while queue:
            cursor = queue.top
            w, item = cursor.window, cursor.item
            if w.is_done(item):
                queue.advance()
                continue
            parent = w.branches[cursor.node] if cursor.node >= 0 else None
            if cursor.node >= 0 and (parent is None or not parent.complete):
                queue.wait()
                continue
            if item < 0 and w.is_scored(~item, parent):
                queue.advance()
                scored.append(self._score(w, ~item, parent))
                continue
            if budget.prefill <= 0 and not (item < 0 and w.draws_without_a_forward(~item, parent)):
                return  # it would only hold pages
            span = self._start_node(w, item) if item >= 0 else self._start_leaf(w, ~item, parent)
            if span is None:
                return
            queue.advance()
            if isinstance(span, Sequence):
                started.append(span)
            elif span.complete:
                self._branch_complete(span)
                continue
            if span.computed < span.end:
                self.prefilling[span] = None
                budget.slice(span)

    def _score(self, w: Window, i: int, parent: Branch | None) -> Sequence:
        seq = self._sequence(w, i)
        assert parent is not None
        seq.parent, seq.path, seq.start, seq.computed = parent, (*parent.path, parent), parent.end, parent.end
        seq.gather()
        seq.become(State.FINISHED)
        self._leave(w, i)
        return seq

    def _clear(self, path: bool) -> None:
        """Gives up all nodes but the parent of what comes next and, with `path`, those above it."""
        top = self._queue.top
        parent = top.window.branches[top.node] if top.node >= 0 else None
        self.memory.evict_all({parent, *(parent.path if parent and path else ())})

    def _start_node(self, w: Window, n: int) -> Branch | None:
        node = w.plan.nodes[n]
        reserve = 0
        if self.running or self.prefilling:  # a node ahead of its turn must not take the room of those before it
            ahead = self.memory.pages_for(w.leaves[node.first].most_tokens) - self.memory.pages_for(node.end)
            reserve = max(2 * ahead, self._margin)
        branch = self.memory.open_branch(w, n, reserve)
        if branch is not None:
            w.branches[n] = branch
            w.restarting.pop(n, None)
        return branch

    def _start_leaf(self, w: Window, i: int, parent: Branch | None) -> Sequence | None:
        if not self._slots:
            return None
        seq = w.returning.get(i) or self._sequence(w, i)
        alone = not self.running and not self.prefilling
        if not self.memory.open_sequence(seq, parent, None if alone else self._margin):
            return None
        w.returning.pop(i, None)
        seq.slot = heapq.heappop(self._slots)
        self.running[seq] = None
        w.running[i] = seq
        self.held_tokens += seq.end
        # A prompt that ends at a node has nothing to run: it draws from the logits computed there.
        seq.become(State.PREFILLING if seq.computed < seq.end else State.DECODING)
        return seq

    def _sequence(self, w: Window, i: int) -> Sequence:
        leaf = w.leaves[i]
        return Sequence(
            window=w, place=w.place(~i), parent=None, start=0, table=[], computed=0, claims_tail=False, leaf=leaf,
            index=i, stops=None if leaf.request.texts else self._stops(leaf.request),
        )  # fmt: skip

    @property
    def _margin(self) -> int:
        return int(self.policy.margin * self.memory.pool.num_pages)

    def _branch_complete(self, branch: Branch) -> None:
        w, n = branch.window, branch.node.index
        self._queue.complete(w, n)
        if w.unfinished[n] == 0:
            self.memory.retire(branch)
            w.branches[n] = None

    def _drop_branch(self, branch: Branch) -> None:
        """Gives up a node that is still being computed; its children wait for it to start again."""
        self.prefilling.pop(branch, None)
        self.memory.evict(branch)
        w, n = branch.window, branch.node.index
        w.branches[n] = None
        self._queue.lost(w, n)
