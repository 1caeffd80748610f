"""What runs in the next step: which running sequences, which prompts, what is started, who gives pages up.

Each node is prefilled once, and its children wait for it; a finished sequence's place is taken in the next step. Nothing
a step does is linear in the number of waiting leaves: what can start next lies in a queue of cursors, one for each
resident node that still has children to start. The policy says in which order.

A step may be scheduled before the tokens of the one before it are known: `ran` and `draws` say what is certain as soon as a step is
launched, `drew` what its tokens say. A sequence that turns out to have ended has run once too often, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import replace

from batchgen.engine.admission import Admission
from batchgen.engine.memory import Memory
from batchgen.engine.policy import POLICIES, Policy
from batchgen.engine.spans import Branch, Sequence, Span, State, Stops
from batchgen.engine.steps import Budget, Limits, Step
from batchgen.engine.underway import Underway
from batchgen.engine.window import Window
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
        self.steps = 0
        self.preemptions = 0
        self.peak_held_tokens = 0
        self._under = Underway(memory, limits.batch_size)
        self._admission = Admission(self._under, policy, stops)
        self._numbers = 0  # leaves of all windows so far

    @property
    def running(self) -> dict[Sequence, None]:
        """In the order of admission."""
        return self._under.running

    @property
    def prefilling(self) -> dict[Span, None]:
        """Nodes and sequences whose prompts are not yet run to their end."""
        return self._under.prefilling

    @property
    def unfinished(self) -> int:
        """Leaves that still have something to run."""
        return self._under.unfinished

    # -- windows come and go

    def load(self, leaves: List[Leaf], plan: PrefixPlan, unfit: Iterable[int] = ()) -> Window:
        """Takes a window in, beside those that are not done: `leaves` in depth-first order, and positions that fail without running.

        What nodes of other windows hold is taken over where the tokens match.
        """
        w = Window.of(leaves, plan, self.policy, self._numbers)
        self._numbers += len(leaves)
        self._under.unfinished += len(leaves)
        self.memory.match(w)
        for i in unfit:
            self._under.drop_leaf(w, i)
        if w.left:
            self._under.queue.push(w.cursors[-1])
        return w

    def abandon(self) -> None:
        """Drops what runs and waits: the job is being interrupted."""
        self._under.abandon()

    def cancel(self, w: Window, i: int) -> Sequence | None:
        """Ends leaf i, wherever it stands. Returns its sequence if it had begun; a leaf that is done stays so."""
        return self._under.cancel(w, i)

    def shrink(self, max_batch_tokens: int) -> None:
        """Steps have at most so many tokens from now on."""
        least = max(1, min(max_batch_tokens, self.limits.max_batch_tokens))
        self.limits = replace(
            self.limits, max_batch_tokens=least, max_prefill_tokens=min(least, self.limits.max_prefill_tokens)
        )

    # -- a step

    def schedule(self, admit: bool = True) -> Step | None:
        """The next step. Empty only when nothing is left (or, without `admit`, nothing runs).

        None while memory is short and tokens are unseen: who gives its pages up must be known whole, and may have ended.
        """
        preempted = self._grow_running()
        if preempted is None:
            return None
        self.steps += 1
        budget = Budget(self.limits)
        decoding = [s for s in self.running if s.state is State.DECODING]
        if self.policy.decode_first:
            self._decode(decoding, budget)
        for span in self.prefilling:
            if admit or isinstance(span, Sequence):  # else nothing that runs needs it
                budget.slice(span)
        started: list[Sequence] = []
        scored: list[Sequence] = []
        if admit and not preempted:
            self._admission.admit(budget, started, scored)
            # Nothing runs, so what holds the pages is nodes: those beside the next item's path go, then those above
            # its parent too. With these alone it fits, or it was refused (`unfit`) from the start.
            for path in (True, False):
                if budget.works or started or scored or decoding or not self.unfinished:
                    break
                self._admission.clear(path)
                self._admission.admit(budget, started, scored)
            idle = not (budget.works or started or scored or decoding)
            assert not (idle and self.unfinished), "nothing runs and nothing can start"
        if not self.policy.decode_first:
            self._decode(decoding, budget)
        works = sorted(budget.works, key=lambda w: w.span.place)
        ready = tuple(s for s in started if s.state is State.DECODING)
        held = self._under.held_tokens + sum(seq.end for seq in scored)
        self.peak_held_tokens = max(self.peak_held_tokens, held)
        return Step(tuple(works), self.memory.take_moves(), preempted, tuple(started), ready, tuple(scored))

    def ran(self, step: Step) -> list[Sequence]:
        """The step's forward is launched: its tokens have KV. Returns the texts that are scored to their end, which leave."""
        scored: list[Sequence] = []
        for work in step.works:
            span = work.span
            span.computed = work.stop
            self.memory.wrote_state(span)
            if work.stop < span.end:
                continue
            if isinstance(span, Branch):
                del self.prefilling[span]
                self._under.complete(span)
            elif isinstance(span, Sequence) and span.state is State.PREFILLING:
                del self.prefilling[span]
                if span.scoring:
                    span.gather()
                    scored.append(span)
                    self._under.leave(span)
                else:
                    span.become(State.DECODING)
        if self.memory.sliding is not None:
            for work in step.works:
                if work.span.table:
                    self.memory.drop_behind(work.span)
        return scored

    def draws(self, drawing: Iterable[Sequence]) -> list[Sequence]:
        """A token is being drawn for each of these. Returns those that end with it at the latest, which leave."""
        leaving: list[Sequence] = []
        for seq in drawing:
            seq.unseen += 1
            self._under.held_tokens += 1
            if seq.drawn >= seq.request.max_tokens:
                self._under.leave(seq)
                leaving.append(seq)
        return leaving

    def drew(self, seq: Sequence, token: int) -> str | None:
        """This token was drawn for `seq`; ends it where it has ended. Returns the finish reason, or None."""
        seq.generated.append(token)
        seq.unseen -= 1
        assert seq.stops is not None
        reason = seq.stops.append(token)
        if reason is not None:
            self.finish(seq)
        assert seq.unseen or seq.state is not State.LEAVING, "a completion passes its length"
        return reason

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence that is whole."""
        self._under.end(seq, State.FINISHED)

    def fail(self, seq: Sequence) -> None:
        """Ends a sequence that cannot go on."""
        self._under.end(seq, State.FAILED)

    # -- running

    def _decode(self, decoding: list[Sequence], budget: Budget) -> None:
        """The next token of every decoding sequence; where not all fit, of those that have waited longest."""
        if self.limits.max_kv_read is not None or budget.tokens < len(decoding):
            decoding = sorted(decoding, key=lambda s: s.turn)
        for seq in decoding:
            if not budget.decode(seq):
                break
            seq.turn = self.steps

    def _grow_running(self) -> tuple[Sequence, ...] | None:
        """A page for every sequence whose next token begins one; the newest give theirs up where none is free.

        None where that is to be put off (`schedule`).
        """
        preempted: list[Sequence] = []
        for seq in list(self.running):
            while seq in self.running and seq.state is State.DECODING and not self.memory.grow(seq):
                if any(other.unseen for other in self.running):
                    return None
                newest = self._newest()
                if newest is seq and len(self.running) == 1:
                    self.memory.evict_all()
                    for span in [s for s in self.prefilling if isinstance(s, Branch)]:
                        self._under.drop_branch(span)
                    if self.memory.grow(seq):
                        break
                self.preemptions += 1
                self._under.preempt(newest)
                preempted.append(newest)
        return tuple(preempted)

    def _newest(self) -> Sequence:
        """Who is preempted: of the least urgent sequences the newest."""
        return max(reversed(self.running), key=lambda s: s.request.priority)
