"""What starts next: nodes before their children, leaves when there is a slot, room in the step, and pages. Integers only."""

from __future__ import annotations

from collections.abc import Callable

from batchgen.engine.policy import Policy
from batchgen.engine.spans import Branch, Sequence, Stops
from batchgen.engine.steps import Budget
from batchgen.engine.underway import Underway
from batchgen.engine.window import Window
from batchgen.request import Request


class Admission:
    """Starts what waits, in the order of its turns; `stops` makes what ends a completion."""

    def __init__(self, under: Underway, policy: Policy, stops: Callable[[Request], Stops]) -> None:
        self._under = under
        self._memory = under.memory
        self._policy = policy
        self._stops = stops

    def admit(self, budget: Budget, started: list[Sequence], scored: list[Sequence]) -> None:
        """Fills what is left of a step; adds the sequences that begin in it, and the texts that nodes have scored to their end."""
        queue = self._under.queue
        while queue:
            cursor = queue.top
            w, item = cursor.window, cursor.item
            if w.is_done(item):
                queue.advance()
                continue
            parent = w.branches[cursor.node] if cursor.node >= 0 else None
            if parent is not None and parent.complete and not self._memory.has_state(parent):
                self._memory.evict(parent)  # its state was given up: it is run again for what still begins there
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
                self._under.complete(span)
                continue
            if span.computed < span.end:
                self._under.prefilling[span] = None
                budget.slice(span)

    def clear(self, path: bool) -> None:
        """Gives up all nodes but the parent of what comes next and, with `path`, those above it."""
        top = self._under.queue.top
        parent = top.window.branches[top.node] if top.node >= 0 else None
        self._memory.evict_all({parent, *(parent.path if parent and path else ())})

    def _score(self, w: Window, i: int, parent: Branch | None) -> Sequence:
        seq = self._sequence(w, i)
        assert parent is not None
        seq.parent, seq.path, seq.start, seq.computed = parent, (*parent.path, parent), parent.end, parent.end
        seq.gather()
        self._under.leave(seq)
        return seq

    def _start_node(self, w: Window, n: int) -> Branch | None:
        node = w.plan.nodes[n]
        reserve = 0
        if (
            self._under.running or self._under.prefilling
        ):  # a node ahead of its turn must not take the room of those before it
            ahead = self._memory.pages_for(w.leaves[node.first].most_tokens) - self._memory.pages_for(node.end)
            reserve = max(2 * ahead, self._margin)
        branch = self._memory.open_branch(w, n, reserve)
        if branch is not None:
            w.branches[n] = branch
            w.restarting.pop(n, None)
        return branch

    def _start_leaf(self, w: Window, i: int, parent: Branch | None) -> Sequence | None:
        if self._under.full:
            return None
        seq = w.returning.get(i) or self._sequence(w, i)
        alone = not self._under.running and not self._under.prefilling
        if not self._memory.open_sequence(seq, parent, None if alone else self._margin):
            return None
        w.returning.pop(i, None)
        self._under.start(seq)
        return seq

    def _sequence(self, w: Window, i: int) -> Sequence:
        leaf = w.leaves[i]
        return Sequence(
            window=w, place=w.place(~i), parent=None, start=0, table=[], computed=0, claims_tail=False, leaf=leaf,
            index=i, stops=None if leaf.request.texts else self._stops(leaf.request),
        )  # fmt: skip

    @property
    def _margin(self) -> int:
        return int(self._policy.margin * self._memory.pool.num_pages)
