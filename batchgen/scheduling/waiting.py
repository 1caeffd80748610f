"""What may start next: the leaves of a window, the nodes above them, and the policy that orders them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from batchgen.prefix import PrefixPlan
from batchgen.request import Leaf
from batchgen.scheduling.sequence import (
    AFTER_NODES,
    NEVER,
    GenerationSequence,
    Place,
    PrefixNodeSpan,
    State,
    WantedLogits,
)

StartOrder = tuple[float, int]
"""Sort key of a leaf: its priority, then its number. Lower keys start first."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The order in which leaves start, and the order of work inside a step."""

    arrival: bool
    """Whether leaves start in the order of the input; otherwise in depth-first order of the prefix tree."""
    decode_first: bool
    """Whether running sequences take their tokens of a step before prompts do; otherwise after them."""
    margin: float
    """Share of the blocks that must stay free when something starts while others run."""

    def start_orders(self, leaves: Sequence[Leaf], plan: PrefixPlan, base: int) -> list[StartOrder]:
        """Returns the sort keys of a window's leaves, given in depth-first order. Numbers count from `base` through all windows."""
        numbers = plan.order.tolist() if self.arrival else range(len(leaves))
        return [(leaf.request.priority, base + n) for leaf, n in zip(leaves, numbers, strict=True)]


POLICIES = {
    "prefix": Policy(arrival=False, decode_first=True, margin=0.0),
    "prefill-first": Policy(arrival=False, decode_first=False, margin=0.0),
    # transformers' continuous batching keeps the same margin. In the order of arrival little is shared, so running
    # sequences need new blocks sooner.
    "fifo": Policy(arrival=True, decode_first=True, margin=0.2),
}


@dataclass(slots=True, eq=False)
class Cursor:
    """Items still to be started under a node (-1: the root), sorted by their start order: n for node n, ~i for leaf i."""

    window: Window
    node: int
    items: list[int]
    since: StartOrder = (-math.inf, -1)
    """A node that is started again has the start order of the first leaf that waits for it, so it does not overtake others."""
    next: int = 0
    queued: bool = False

    @property
    def item(self) -> int:
        return self.items[self.next]

    @property
    def start_order(self) -> StartOrder:
        return max(self.window.start_order(self.items[self.next]), self.since)

    @property
    def depth(self) -> int:
        item = self.items[self.next]
        return AFTER_NODES if item < 0 else self.window.plan.nodes[item].depth


class Window:
    """The leaves of one plan and how far they are. Only its own methods and the queue's change it, and the scheduler its `sequences`.

    `leaves` are in depth-first order. `number` is the window's own; `base` is the number of its first leaf among those of all windows.
    """

    def __init__(
        self, leaves: Sequence[Leaf], plan: PrefixPlan, policy: Policy, number: int = 0, base: int = 0
    ) -> None:
        self.number = number
        self.leaves = leaves
        self.plan = plan
        self.depth = max((node.depth + 1 for node in plan.nodes), default=0)
        """Number of nodes on the longest path."""
        self.wanted = _wanted_logits(leaves, plan)
        """By node."""
        self.depth_first = not policy.arrival and len({leaf.request.priority for leaf in leaves}) < 2
        """Whether its leaves start in depth-first order."""
        self._base = base
        self._leaf_order = policy.start_orders(leaves, plan, base)
        self._node_order = self._first_below(plan)  # by node: the first start order below it
        self._node_spans: list[PrefixNodeSpan | None] = [None] * len(plan.nodes)
        self._unfinished = [
            node.last - node.first for node in plan.nodes
        ]  # by node: leaves below with something to run
        self._leaf_parent: list[int] = plan.leaf_parent.tolist()
        self._ended: set[int] = set()  # leaves that have nothing more to run
        self.sequences: dict[int, GenerationSequence] = {}
        """By leaf: those that have begun and are not done, so they run, were preempted, or their last numbers are in flight."""
        self._cursors = self._all_cursors(plan)  # by node, the root's last (index -1)
        self._waiters: dict[int, list[Cursor]] = {}  # by node: other cursors that wait for it
        self._restarting: dict[int, StartOrder] = {}  # nodes about to be started again

    def _first_below(self, plan: PrefixPlan) -> list[StartOrder]:
        orders: list[StartOrder] = [(math.inf, 0)] * len(plan.nodes)
        for i, n in enumerate(plan.leaf_parent.tolist()):
            if n >= 0:
                orders[n] = min(orders[n], self._leaf_order[i])
        for node in reversed(plan.nodes):  # children before their parents
            if node.parent >= 0:
                orders[node.parent] = min(orders[node.parent], orders[node.index])
        return orders

    def _all_cursors(self, plan: PrefixPlan) -> list[Cursor]:
        cursors = [Cursor(self, n, []) for n in range(len(plan.nodes))] + [Cursor(self, -1, [])]
        for i, n in enumerate(plan.leaf_parent.tolist()):
            cursors[n].items.append(~i)
        for node in reversed(plan.nodes):
            cursors[node.parent].items.append(node.index)
        for cursor in cursors:
            cursor.items.sort(key=self.start_order)
        return cursors

    @property
    def root(self) -> Cursor:
        """The cursor of the items that have no node above them."""
        return self._cursors[-1]

    @property
    def done(self) -> bool:
        """Whether all leaves have ended, and no numbers of theirs are in flight."""
        return len(self._ended) == len(self.leaves) and not self.sequences

    def start_order(self, item: int) -> StartOrder:
        return self._leaf_order[~item] if item < 0 else self._node_order[item]

    def place(self, item: int) -> Place:
        if item < 0:
            return (self._base + ~item, AFTER_NODES)
        node = self.plan.nodes[item]
        return (self._base + node.first, node.depth)

    def unfinished_before(self, n: int) -> int:
        """About how many leaves before those below node n, in depth-first order, have something to run: leaves end nearly in that order."""
        return self.plan.nodes[n].first - len(self._ended)

    # -- nodes

    def node_span(self, n: int) -> PrefixNodeSpan | None:
        """The span of node n while leaves below it have something to run; None before it starts and for the root (-1)."""
        return self._node_spans[n] if n >= 0 else None

    def is_resident(self, n: int) -> bool:
        """Whether the node has blocks: it is computed or being computed."""
        node_span = self._node_spans[n]
        return node_span is not None and not node_span.evicted

    def is_needed(self, n: int) -> bool:
        """Whether leaves below the node have something to run."""
        return self._unfinished[n] > 0

    def open_node(self, node_span: PrefixNodeSpan) -> None:
        """Registers the span of a node that has its blocks."""
        self._node_spans[node_span.node.index] = node_span
        self._restarting.pop(node_span.node.index, None)

    def close_node(self, n: int) -> None:
        """Removes the span of node n, which was evicted or is not needed any more."""
        self._node_spans[n] = None

    def begins_at(self, n: int) -> bool:
        """Whether something is still to be started, or to come back, directly under node n."""
        return (
            bool(self.waiting(n))
            or any(self.plan.leaf_parent[i] == n for i, seq in self.sequences.items() if seq.state is State.PREEMPTED)
            or any(self.plan.nodes[m].parent == n for m in self._restarting)
        )

    def waiting(self, n: int) -> list[Cursor]:
        """The cursors that have something to start under node n."""
        return [c for c in (*self._waiters.get(n, ()), self._cursors[n]) if c.next < len(c.items)]

    def wait(self, cursor: Cursor) -> None:
        """Puts the cursor aside until its node is computed."""
        if cursor is not self._cursors[cursor.node]:
            self._waiters.setdefault(cursor.node, []).append(cursor)

    def end_waiting(self, n: int) -> list[Cursor]:
        """Must be called when node n has been computed. Returns the cursors that have something to start under it."""
        waiting = self.waiting(n)
        self._waiters.pop(n, None)
        return waiting

    def restart(self, n: int, since: StartOrder) -> Cursor | None:
        """Returns a cursor that starts node n again. None if it is resident, or will start at least as soon for another leaf."""
        if self.is_resident(n) or (n in self._restarting and self._restarting[n] <= since):
            return None
        self._restarting[n] = since
        return Cursor(self, self.plan.nodes[n].parent, [n], since)

    # -- leaves

    def has_ended(self, i: int) -> bool:
        """Whether leaf i has nothing more to run."""
        return i in self._ended

    def end_leaf(self, i: int) -> list[PrefixNodeSpan]:
        """Leaf i has nothing more to run. Returns the spans of the nodes that no leaf needs any more."""
        self._ended.add(i)
        freed: list[PrefixNodeSpan] = []
        n = self._leaf_parent[i]
        while n >= 0:
            self._unfinished[n] -= 1
            node_span = self._node_spans[n]
            if not self._unfinished[n] and node_span is not None:
                freed.append(node_span)
                self.close_node(n)
            n = self.plan.nodes[n].parent
        return freed

    def is_done(self, item: int) -> bool:
        """Whether there is nothing to start there."""
        return ~item in self._ended if item < 0 else not self.is_needed(item) or self.is_resident(item)

    def is_scored(self, i: int, parent: PrefixNodeSpan | None) -> bool:
        """Whether leaf i is a text whose tokens the nodes above it have all scored."""
        leaf = self.leaves[i]
        return parent is not None and bool(leaf.request.texts) and parent.end == len(leaf.tokens)

    def samples_without_a_forward(self, i: int, parent: PrefixNodeSpan | None) -> bool:
        """Whether leaf i can sample its first token from logits that its node keeps: its prompt ends there."""
        return parent is not None and parent.end == len(self.leaves[i].tokens) and i not in self.sequences


def _wanted_logits(leaves: Sequence[Leaf], plan: PrefixPlan) -> list[WantedLogits]:
    """By node, which logits the leaves below want."""
    count = len(plan.nodes)
    sampled = [False] * count
    prompt_end = [0] * count
    scored_from = [NEVER] * count  # the first position after which a text below is scored
    targets: list[set[int]] = [set() for _ in range(count)]
    for i, n in enumerate(plan.leaf_parent.tolist()):
        if n >= 0:
            leaf, prompt, end = leaves[i], len(leaves[i].request.tokens), plan.nodes[n].end
            prompt_end[n] = max(prompt_end[n], prompt)
            if leaf.request.texts:
                scored_from[n] = min(scored_from[n], leaf.request.scored_from)
                if leaf.request.scored_from < end:
                    targets[n].add(int(leaf.tokens[end] if end < len(leaf.tokens) else leaf.scored[-1]))
            elif end == prompt:
                sampled[n] = True
    for node in reversed(plan.nodes):  # children before their parents
        n, parent = node.index, node.parent
        if parent >= 0:
            prompt_end[parent] = max(prompt_end[parent], prompt_end[n])
            if scored_from[n] < NEVER:
                scored_from[parent] = min(scored_from[parent], scored_from[n])
                if scored_from[n] < node.start:
                    targets[parent].add(int(leaves[node.first].tokens[node.start]))
    wanted: list[WantedLogits] = []
    for node in plan.nodes:
        n = node.index
        for_texts = max(scored_from[n], node.start) if scored_from[n] < node.end else NEVER
        start = min(node.end - 1 if sampled[n] else NEVER, for_texts)
        wanted.append(WantedLogits(start, prompt_end[n], sampled[n], tuple(sorted(targets[n]))))
    return wanted


class Queue:
    """What may start next: a heap of cursors, one for each resident node that still has children to start."""

    def __init__(self) -> None:
        self.heap: list[tuple[StartOrder, int, int, Cursor]] = []
        """Empty if nothing waits."""
        self._tick = count()  # orders cursors whose start order and depth are equal

    @property
    def top(self) -> Cursor:
        """The cursor whose next item comes first."""
        return self.heap[0][3]

    def push(self, cursor: Cursor) -> None:
        if not cursor.queued:
            cursor.queued = True
            heapq.heappush(self.heap, (cursor.start_order, cursor.depth, next(self._tick), cursor))

    def pop(self) -> Cursor:
        """Removes and returns the top."""
        cursor = heapq.heappop(self.heap)[3]
        cursor.queued = False
        return cursor

    def advance(self) -> None:
        """Moves the top to its next item."""
        cursor = self.pop()
        cursor.next += 1
        if cursor.next < len(cursor.items):
            self.push(cursor)

    def wait(self) -> None:
        """Puts the top aside until its node is computed, and starts the node if it is not resident."""
        cursor = self.pop()
        cursor.window.wait(cursor)
        self._restart(cursor.window, cursor.node, cursor.start_order)

    def complete(self, w: Window, n: int) -> None:
        """Lets the children of node n start when the node has been computed."""
        for cursor in w.end_waiting(n):
            self.push(cursor)

    def restart_lost(self, w: Window, n: int) -> None:
        """Node n was given up while it was computed. It starts again if something waits for it."""
        waiting = w.waiting(n)
        if waiting:
            self._restart(w, n, min(c.start_order for c in waiting))

    def clear(self) -> None:
        self.heap.clear()

    def _restart(self, w: Window, n: int, since: StartOrder) -> None:
        cursor = w.restart(n, since)
        if cursor is not None:
            self.push(cursor)
