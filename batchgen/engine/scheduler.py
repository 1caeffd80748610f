"""What runs in the next step. Depth-first through the prefix tree, decode first, prefill with what the budget leaves.

Each node is prefilled once, and its children wait for it; a finished sequence's place is taken in the next step. Nothing
a step does is linear in the number of waiting requests: what can start next lies in a heap of cursors, one for each
resident node that still has children to start.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batchgen.engine.memory import Memory
from batchgen.engine.spans import Branch, Sequence, Span, State, Stops
from batchgen.engine.window import Cursor, Window
from batchgen.prefix import PrefixPlan, plan_prefixes
from batchgen.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of a step."""

    batch_size: int
    """Most sequences running at once."""
    max_batch_tokens: int
    """Most tokens in one forward."""
    max_prefill_tokens: int
    """Of those, most that are not one sequence's next token."""


@dataclass(frozen=True, slots=True)
class Work:
    """A span's share of a step: its tokens at positions [start, stop)."""

    span: Span
    start: int
    stop: int
    sample: bool
    """Whether the logits after the last of them are wanted."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, packed in depth-first order, and what goes with it."""

    works: tuple[Work, ...]
    copies: tuple[tuple[int, int], ...]
    """Pages (from, to) to copy before the forward: tails of nodes into the first page of their children."""
    preempted: tuple[Sequence, ...]
    started: tuple[Sequence, ...]
    """Sequences that begin, or come back, in this step."""
    ready: tuple[Sequence, ...]
    """Of those, the ones whose prompt ends at a node: they draw from the node's logits, without a forward."""

    @property
    def num_tokens(self) -> int:
        return sum(w.stop - w.start for w in self.works)


class Scheduler:
    """Turns a window of requests into steps. The only one that changes a sequence's state."""

    def __init__(self, memory: Memory, limits: Limits, stops: Callable[[Request], Stops]) -> None:
        self.memory = memory
        self.limits = limits
        self.running: dict[Sequence, None] = {}  # in the order of admission: the newest is preempted first
        self.prefilling: dict[Span, None] = {}
        self.preemptions = 0
        self.held_tokens = 0  # what the running sequences would hold, each with a prefix of its own
        self.peak_held_tokens = 0
        self._stops = stops
        self._slots = list(range(limits.batch_size))
        self._window = Window.of([], plan_prefixes([], 1))

    # -- a window comes and goes

    def load(self, requests: list[Request], plan: PrefixPlan, unfit: Iterable[int] = ()) -> None:
        """Takes over a window: `requests` in depth-first order, and positions that fail without running.

        Nodes that an earlier window left resident are adopted where their tokens match.
        """
        assert not self.running and not self._window.left, "the window before is not done"
        self._window = w = Window.of(requests, plan)
        self.memory.match(requests, plan, w.ends_at)
        for i in unfit:
            w.failed.add(i)
            self._leave(i)
        if requests:
            self._window.push(w.cursors[-1])

    @property
    def unfinished(self) -> int:
        """Requests of the window that are not done."""
        return self._window.left

    def resident(self) -> list[Branch]:
        """The nodes of this window that hold pages, finished or being computed."""
        return [b for b in self._window.branches if b is not None and not b.evicted]

    def abandon(self) -> None:
        """Drops what runs and waits: the job is being interrupted."""
        for seq in list(self.running):
            self._stop_running(seq, State.CANCELLED)
        for branch in self.resident():
            if branch.complete:
                self.memory.retire(branch)
            else:
                self.memory.evict(branch)
        self.prefilling.clear()
        self._window.heap.clear()
        self._window = Window.of([], plan_prefixes([], 1))

    # -- a step

    def schedule(self, admit: bool = True) -> Step:
        """The next step. Empty only when nothing is left (or, without `admit`, nothing runs)."""
        preempted = self._grow_running()
        decoding = [s for s in self.running if s.state is State.DECODING]
        works = [Work(s, s.computed, s.end, True) for s in decoding]
        budget = min(self.limits.max_batch_tokens - len(works), self.limits.max_prefill_tokens)
        budget = self._continue_prefill(works, budget, admit)
        started: list[Sequence] = []
        if admit and not preempted:
            self._admit(works, started, budget)
            # Nothing runs, so what holds the pages is nodes: those beside the next item's path go, then those above
            # its parent too. With these alone it fits, or it was refused (`unfit`) from the start.
            for path in (True, False):
                if works or started or not self._window.left:
                    break
                self._clear(path)
                self._admit(works, started, budget)
            assert works or started or not self._window.left, "nothing runs and nothing can start"
        works.sort(key=lambda w: w.span.place)
        ready = tuple(s for s in started if s.state is State.DECODING)
        self.peak_held_tokens = max(self.peak_held_tokens, self.held_tokens)
        return Step(tuple(works), self.memory.take_copies(), preempted, tuple(started), ready)

    def ran(self, step: Step) -> None:
        """The step's forward is done: its tokens have KV."""
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
                span.become(State.DECODING)

    def drew(self, seq: Sequence, token: int) -> str | None:
        """A token was drawn for `seq`; ends it where it has ended. Returns the finish reason, or None."""
        seq.generated.append(token)
        self.held_tokens += 1
        reason = seq.stops.append(token)
        if reason is not None:
            self._finish(seq, State.FINISHED)
        return reason

    def fail(self, seq: Sequence) -> None:
        """Ends a running sequence that cannot go on."""
        self._finish(seq, State.FAILED)

    # -- running

    def _grow_running(self) -> tuple[Sequence, ...]:
        """A page for every sequence whose next token begins one; the newest give theirs up where none is free."""
        preempted: list[Sequence] = []
        for seq in list(self.running):
            while seq in self.running and seq.state is State.DECODING and not self.memory.grow(seq):
                newest = next(reversed(self.running))
                if newest is seq and len(self.running) == 1:
                    self.memory.evict_all(b for b in self._window.branches if b is not None and b.complete)
                    for span in [s for s in self.prefilling if isinstance(s, Branch)]:
                        self._drop_branch(span)
                    if self.memory.grow(seq):
                        break
                self._preempt(newest)
                preempted.append(newest)
        return tuple(preempted)

    def _preempt(self, seq: Sequence) -> None:
        self.preemptions += 1
        self._stop_running(seq, State.PREEMPTED)
        i = seq.place[0]
        self._window.returning[i] = seq
        self._window.push(Cursor(seq.parent.node.index if seq.parent else -1, [~i]))

    def _stop_running(self, seq: Sequence, state: State) -> None:
        self.prefilling.pop(seq, None)
        del self.running[seq]
        heapq.heappush(self._slots, seq.slot)
        self.held_tokens -= seq.end
        self.memory.close(seq)
        seq.become(state)

    def _finish(self, seq: Sequence, state: State) -> None:
        self._stop_running(seq, state)
        self._leave(seq.place[0])

    def _leave(self, i: int) -> None:
        """Request i is done: nodes that nothing descends from any more become idle."""
        w = self._window
        w.left -= 1
        node = int(w.plan.leaf_parent[i])
        while node >= 0:
            w.unfinished[node] -= 1
            branch = w.branches[node]
            if w.unfinished[node] == 0 and branch is not None:
                if branch.complete:
                    self.memory.retire(branch)
                w.branches[node] = None
            node = w.plan.nodes[node].parent

    # -- prefill and admission

    def _continue_prefill(self, works: list[Work], budget: int, nodes: bool) -> int:
        for span in self.prefilling:
            if isinstance(span, Branch) and not nodes:
                continue  # nothing that runs needs it
            budget -= self._slice(works, span, budget)
        return budget

    def _slice(self, works: list[Work], span: Span, budget: int) -> int:
        """Puts as much of the span into the step as the budget allows; returns the tokens taken."""
        stop = min(span.end, span.computed + budget)
        if stop <= span.computed:
            return 0
        done = stop == span.end
        sample = done and (not isinstance(span, Branch) or self._window.ends_at[span.node.index])
        works.append(Work(span, span.computed, stop, sample))
        return stop - span.computed

    def _admit(self, works: list[Work], started: list[Sequence], budget: int) -> None:
        w = self._window
        while w.heap:
            cursor = w.top
            item = cursor.items[cursor.next]
            if (item < 0 and ~item in w.failed) or (item >= 0 and (w.unfinished[item] == 0 or w.is_resident(item))):
                w.advance(cursor)
                continue
            parent = w.branches[cursor.node] if cursor.node >= 0 else None
            if cursor.node >= 0 and (parent is None or not parent.complete):
                w.pop(cursor)
                w.wait(cursor)
                continue
            if budget <= 0 and not (item < 0 and self._draws_at_node(~item, parent)):
                return  # it would only hold pages
            span = self._start_node(item, parent) if item >= 0 else self._start_request(~item, parent)
            if span is None:
                return
            w.advance(cursor)
            if isinstance(span, Sequence):
                started.append(span)
            elif span.complete:
                self._branch_complete(span)
                continue
            if span.computed < span.end:
                self.prefilling[span] = None
                budget -= self._slice(works, span, budget)

    def _draws_at_node(self, i: int, parent: Branch | None) -> bool:
        """Whether request i starts without a forward: its prompt ends at the node, and it has drawn nothing yet."""
        w = self._window
        return parent is not None and parent.end == len(w.requests[i].tokens) and i not in w.returning

    def _clear(self, path: bool) -> None:
        """Gives up all resident nodes but the parent of what comes next and, with `path`, those above it."""
        w = self._window
        parent = w.branches[w.top.node] if w.top.node >= 0 else None
        kept = {parent, *(parent.path if parent and path else ())}
        self.memory.evict_all(b for b in w.branches if b is not None and b not in kept)

    def _start_node(self, n: int, parent: Branch | None) -> Branch | None:
        w = self._window
        node = w.plan.nodes[n]
        request = w.requests[node.first]
        reserve = 0
        if self.running or self.prefilling:  # a node ahead of its turn must not take the room of those before it
            reserve = 2 * (self.memory.pages_for(request.most_tokens) - self.memory.pages_for(node.end))
        branch = self.memory.open_branch(node, request.tokens, parent, w.place(n), reserve)
        if branch is not None:
            w.branches[n] = branch
            w.restarting.pop(n, None)
        return branch

    def _start_request(self, i: int, parent: Branch | None) -> Sequence | None:
        w = self._window
        if not self._slots:
            return None
        seq = w.returning.get(i)
        if seq is None:
            seq = Sequence(
                place=w.place(~i), parent=None, start=0, table=[], computed=0, claims_tail=False,
                request=w.requests[i], stops=self._stops(w.requests[i]),
            )  # fmt: skip
        alone = not self.running and not self.prefilling
        if not self.memory.open_sequence(seq, parent, alone):
            return None
        w.returning.pop(i, None)
        seq.slot = heapq.heappop(self._slots)
        self.running[seq] = None
        self.held_tokens += seq.end
        # A prompt that ends at a node has nothing to run: it draws from the logits computed there.
        seq.become(State.PREFILLING if seq.computed < seq.end else State.DECODING)
        return seq

    def _branch_complete(self, branch: Branch) -> None:
        w = self._window
        n = branch.node.index
        waiting = [*w.waiters.pop(n, ()), w.cursors[n]]
        for cursor in waiting:
            if cursor.next < len(cursor.items):
                w.push(cursor)
        if w.unfinished[n] == 0:
            self.memory.retire(branch)
            w.branches[n] = None

    def _drop_branch(self, branch: Branch) -> None:
        """Gives up a node that is still being computed; its children wait for it to start again."""
        self.prefilling.pop(branch, None)
        self.memory.evict(branch)
        w, n = self._window, branch.node.index
        w.branches[n] = None
        waiting = [c for c in (*w.waiters.get(n, ()), w.cursors[n]) if c.next < len(c.items)]
        if waiting:
            w.restart(n, min(w.place_of(c)[0] for c in waiting))
