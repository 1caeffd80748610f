"""What is under way: the sequences that run, the spans that are computed, and how leaves come to their end. Integers only."""

from __future__ import annotations

import heapq

from batchgen.engine.memory import Memory
from batchgen.engine.spans import Branch, Sequence, Span, State
from batchgen.engine.window import Cursor, Queue, Window


class Underway:
    """At most `batch_size` running sequences, each in a slot of its own, and what else holds pages. The scheduler's book."""

    def __init__(self, memory: Memory, batch_size: int) -> None:
        self.memory = memory
        self.queue = Queue()
        """What may start next."""
        self.running: dict[Sequence, None] = {}  # in the order of admission: the newest is preempted first
        self.prefilling: dict[Span, None] = {}
        self.unfinished = 0  # leaves that still have something to run
        self.held_tokens = 0  # what the running sequences would hold, each with a prefix of its own
        self._slots = list(range(batch_size))

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self._slots

    def start(self, seq: Sequence) -> None:
        """A sequence that has its pages takes a slot."""
        seq.slot = heapq.heappop(self._slots)
        self.running[seq] = None
        seq.window.running[seq.index] = seq
        self.held_tokens += seq.end
        # A prompt that ends at a node has nothing to run: it draws from the logits computed there.
        seq.become(State.PREFILLING if seq.computed < seq.end else State.DECODING)

    def preempt(self, seq: Sequence) -> None:
        """A running sequence gives its pages up; its leaf waits again, in its turn."""
        assert not seq.unseen, "what it has drawn must be known, or it could not go on"
        self._stop(seq, State.PREEMPTED)
        w = seq.window
        w.returning[seq.index] = seq
        self.queue.push(Cursor(w, seq.parent.node.index if seq.parent else -1, [seq.item]))

    def leave(self, seq: Sequence) -> None:
        """All of a sequence's work is launched: its leaf has nothing more to run, and `end` follows when its last numbers are here.

        What it held may go to others at once: they run after it, in the order in which the device is given its work.
        """
        if seq in self.running:
            self._stop(seq, State.LEAVING)
        else:
            seq.become(State.LEAVING)
        self.drop_leaf(seq.window, seq.index)
        seq.window.leaving[seq.index] = seq

    def end(self, seq: Sequence, state: State) -> None:
        """A sequence that runs or is leaving comes to its end."""
        if seq.state is State.LEAVING:
            del seq.window.leaving[seq.index]
            seq.become(state)
        else:
            self._stop(seq, state)
            self.drop_leaf(seq.window, seq.index)

    def cancel(self, w: Window, i: int) -> Sequence | None:
        """Ends leaf i, wherever it stands. Returns its sequence if it had begun; a leaf that is done stays so."""
        seq = w.running.get(i) or w.leaving.get(i)
        if seq is not None:
            self.end(seq, State.CANCELLED)
            return seq
        seq = w.returning.pop(i, None)
        if seq is not None:
            seq.become(State.CANCELLED)
        if i not in w.ended:
            self.drop_leaf(w, i)
        return seq

    def abandon(self) -> None:
        """Drops what runs and waits."""
        for seq in list(self.running):
            self._stop(seq, State.CANCELLED)
        for branch in list(self.memory.live):
            if branch.complete:
                self.memory.retire(branch)
            else:
                self.memory.evict(branch)
        self.prefilling.clear()
        self.queue.clear()
        self.unfinished = 0

    def drop_leaf(self, w: Window, i: int) -> None:
        """Leaf i has nothing more to run: nodes that nothing descends from any more become idle."""
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

    def complete(self, branch: Branch) -> None:
        """A node is computed: what waits for it may start."""
        w, n = branch.window, branch.node.index
        self.queue.complete(w, n)
        if w.unfinished[n] == 0:
            self.memory.retire(branch)
            w.branches[n] = None

    def drop_branch(self, branch: Branch) -> None:
        """Gives up a node that is still being computed; its children wait for it to start again."""
        self.prefilling.pop(branch, None)
        self.memory.evict(branch)
        w, n = branch.window, branch.node.index
        w.branches[n] = None
        self.queue.lost(w, n)

    def _stop(self, seq: Sequence, state: State) -> None:
        self.prefilling.pop(seq, None)
        del self.running[seq]
        del seq.window.running[seq.index]
        heapq.heappush(self._slots, seq.slot)
        self.held_tokens -= seq.end
        self.memory.close(seq)
        seq.become(state)
