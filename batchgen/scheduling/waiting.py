"""What may start next: the leaves of a window, the nodes above them, and the policy that orders them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from batchgen.prefix import PrefixPlan
from batchgen.request import Leaf
from batchgen.scheduling.sequence import AFTER_NODES, GenerationSequence, Place, PrefixNodeSpan

StartOrder = tuple[float, int]
"""When a leaf's turn comes: priority, then number. Lower ones first."""


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of admission and the order of work inside a step."""

    name: str
    arrival: bool
    """In the order of the input; else depth-first through the prefix tree."""
    decode_first: bool
    """Running sequences have the step's tokens before prompts; else prompts before them."""
    margin: float
    """Share of the blocks that must stay free when something new starts beside what runs."""

    def start_orders(self, leaves: Sequence[Leaf], plan: PrefixPlan, base: int) -> list[StartOrder]:
        """The turns of a window's leaves, given in depth-first order; they are numbered from `base` through all windows."""
        numbers = plan.order.tolist() if self.arrival else range(len(leaves))
        return [(leaf.request.priority, base + n) for leaf, n in zip(leaves, numbers, strict=True)]


POLICIES = {
    p.name: p
    for p in (
        Policy("prefix", arrival=False, decode_first=True, margin=0.0),
        Policy("prefill-first", arrival=False, decode_first=False, margin=0.0),
        # The margin is what transformers' continuous batching keeps: in the order of arrival little is shared, so that
        # running sequences take new blocks sooner.
        Policy("fifo", arrival=True, decode_first=True, margin=0.2),
    )
}


NEVER = 1 << 60
"""The position of logits that nobody wants."""


@dataclass(slots=True, eq=False)
class Cursor:
    """Children still to be started under a node (-1: the root), in the order of their turns: node n as n, leaf i as ~i."""

    window: Window
    node: int
    items: list[int]
    since: StartOrder = (-math.inf, -1)
    """A node that is started again comes in the turn of the first leaf that waits for it, not ahead of others."""
    next: int = 0
    queued: bool = False

    @property
    def item(self) -> int:
        return self.items[self.next]

    @property
    def start_order(self) -> StartOrder:
        return max(self.window.start_order(self.item), self.since)


@dataclass(slots=True, eq=False)
class Window:
    """The leaves of one plan, and how far they are."""

    leaves: Sequence[Leaf]
    """In depth-first order."""
    plan: PrefixPlan
    base: int
    """Number of the first leaf among those of all windows."""
    leaf_order: list[StartOrder]
    node_order: list[StartOrder]
    """By node: the first of the turns below."""
    cursors: list[Cursor] = field(default_factory=list)
    """By node, the root's last (index -1)."""
    unfinished: list[int] = field(default_factory=list)
    """By node: leaves below it that are not done."""
    sampled_at: list[bool] = field(default_factory=list)
    """By node: whether a completion draws its first token from the logits at the node's end."""
    logits_from: list[int] = field(default_factory=list)
    """By node: the first position after which logits are wanted, to draw from or for texts that are scored."""
    prompt_end: list[int] = field(default_factory=list)
    """By node: positions before this belong to a prompt below; the others to texts that are scored."""
    targets: dict[int, set[int]] = field(default_factory=dict)
    """By node: the tokens that follow its last one in texts that are scored."""
    node_spans: list[PrefixNodeSpan | None] = field(default_factory=list)
    sources: dict[int, tuple[PrefixNodeSpan, int]] = field(default_factory=dict)
    """By item: a node of an earlier window, and how many positions can be taken over from it."""
    restarting: dict[int, StartOrder] = field(default_factory=dict)
    """Nodes about to be started again: the turn of the first leaf that waits for each."""
    waiters: dict[int, list[Cursor]] = field(default_factory=dict)
    returning: dict[int, GenerationSequence] = field(default_factory=dict)
    """Preempted sequences by depth-first position."""
    running: dict[int, GenerationSequence] = field(default_factory=dict)
    """Running ones."""
    finishing: dict[int, GenerationSequence] = field(default_factory=dict)
    """Those whose last numbers are to come."""
    ended: set[int] = field(default_factory=set)
    """Leaves that are done."""
    left: int = 0
    """Leaves that are not done."""
    depth: int = 0
    """Most nodes on a path."""

    @classmethod
    def of(cls, leaves: Sequence[Leaf], plan: PrefixPlan, policy: Policy, base: int) -> Window:
        """`leaves` in depth-first order."""
        count = len(plan.nodes)
        w = cls(leaves, plan, base, policy.start_orders(leaves, plan, base), [(math.inf, 0)] * count, left=len(leaves))
        w.cursors = [Cursor(w, n, []) for n in range(count)] + [Cursor(w, -1, [])]
        w.unfinished = [node.last - node.first for node in plan.nodes]
        w.node_spans = [None] * count
        w.depth = max((node.depth + 1 for node in plan.nodes), default=0)
        w.sampled_at = [False] * count
        w.prompt_end = [0] * count
        scored_from = [NEVER] * count  # the least of what texts below begin to be scored at
        for i, n in enumerate(plan.leaf_parent.tolist()):
            w.cursors[n].items.append(~i)
            if n >= 0:
                leaf, prompt, end = leaves[i], len(leaves[i].request.tokens), plan.nodes[n].end
                w.prompt_end[n] = max(w.prompt_end[n], prompt)
                w.node_order[n] = min(w.node_order[n], w.leaf_order[i])
                if leaf.request.texts:
                    scored_from[n] = min(scored_from[n], prompt - 1)
                    own = leaf.tokens[end] if end < len(leaf.tokens) else leaf.scored[-1]
                    w.targets.setdefault(n, set()).add(int(own))
                elif end == prompt:
                    w.sampled_at[n] = True
        for node in reversed(plan.nodes):  # children before their parents
            n, parent = node.index, node.parent
            w.cursors[parent].items.append(n)
            if parent >= 0:
                w.prompt_end[parent] = max(w.prompt_end[parent], w.prompt_end[n])
                w.node_order[parent] = min(w.node_order[parent], w.node_order[n])
                if scored_from[n] < NEVER:
                    scored_from[parent] = min(scored_from[parent], scored_from[n])
                    w.targets.setdefault(parent, set()).add(int(leaves[node.first].tokens[node.start]))
        for cursor in w.cursors:
            cursor.items.sort(key=w.start_order)
        for node in plan.nodes:
            drawn = node.end - 1 if w.sampled_at[node.index] else NEVER
            scored = scored_from[node.index]
            w.logits_from.append(min(drawn, max(scored, node.start) if scored < node.end else NEVER))
        return w

    def forget(self) -> None:
        """All leaves are done. Nodes that stay for later windows keep this one, which must keep neither its leaves nor, through
        `sources`, the windows before it."""
        self.leaves = []
        self.sources.clear()

    def start_order(self, item: int) -> StartOrder:
        return self.leaf_order[~item] if item < 0 else self.node_order[item]

    def place(self, item: int) -> Place:
        if item < 0:
            return (self.base + ~item, AFTER_NODES)
        node = self.plan.nodes[item]
        return (self.base + node.first, node.depth)

    def is_resident(self, n: int) -> bool:
        """Whether the node has blocks: it is computed, or being computed."""
        node_span = self.node_spans[n]
        return node_span is not None and not node_span.evicted

    def is_done(self, item: int) -> bool:
        """Whether there is nothing to start there any more."""
        return ~item in self.ended if item < 0 else self.unfinished[item] == 0 or self.is_resident(item)

    def is_scored(self, i: int, parent: PrefixNodeSpan | None) -> bool:
        """Whether leaf i is a text all of whose tokens the nodes above it have scored."""
        leaf = self.leaves[i]
        return parent is not None and bool(leaf.request.texts) and parent.end == len(leaf.tokens)

    def samples_without_a_forward(self, i: int, parent: PrefixNodeSpan | None) -> bool:
        """Whether leaf i has nothing to run to start: its prompt ends at the node, and it has drawn nothing yet."""
        return parent is not None and parent.end == len(self.leaves[i].tokens) and i not in self.returning

    def begins_at(self, n: int) -> bool:
        """Whether something is still to be started, or to come back, directly under node n."""
        return (
            bool(self.waiting(n))
            or any(self.plan.leaf_parent[i] == n for i in self.returning)
            or any(self.plan.nodes[m].parent == n for m in self.restarting)
        )

    def waiting(self, n: int) -> list[Cursor]:
        """The cursors that have something to start under node n."""
        return [c for c in (*self.waiters.get(n, ()), self.cursors[n]) if c.next < len(c.items)]


class Queue:
    """What may start next: a heap of cursors, one for each resident node that still has children to start."""

    def __init__(self) -> None:
        self._heap: list[tuple[StartOrder, int, int, Cursor]] = []
        self._tick = count()  # tells cursors of equal turn apart

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def top(self) -> Cursor:
        """The cursor whose next item comes first."""
        return self._heap[0][3]

    def push(self, cursor: Cursor) -> None:
        if not cursor.queued:
            cursor.queued = True
            depth = cursor.window.place(cursor.item)[1]
            heapq.heappush(self._heap, (cursor.start_order, depth, next(self._tick), cursor))

    def pop(self) -> Cursor:
        """Takes the top out."""
        cursor = heapq.heappop(self._heap)[3]
        cursor.queued = False
        return cursor

    def advance(self) -> None:
        """The top goes on to its next item."""
        cursor = self.pop()
        cursor.next += 1
        if cursor.next < len(cursor.items):
            self.push(cursor)

    def wait(self) -> None:
        """The node of the top is not resident: start it (again), and go on when it is complete."""
        cursor = self.pop()
        w, n = cursor.window, cursor.node
        if cursor is not w.cursors[n]:
            w.waiters.setdefault(n, []).append(cursor)
        self.restart(w, n, cursor.start_order)

    def complete(self, w: Window, n: int) -> None:
        """Node n is computed: what waits for it may start."""
        for cursor in w.waiting(n):
            self.push(cursor)
        w.waiters.pop(n, None)

    def lost(self, w: Window, n: int) -> None:
        """Node n was given up while it was computed: it starts again for what waits for it."""
        waiting = w.waiting(n)
        if waiting:
            self.restart(w, n, min(c.start_order for c in waiting))

    def restart(self, w: Window, n: int, since: StartOrder) -> None:
        """Has node n started again for a leaf with this turn, unless it is resident or on its way for an earlier one."""
        if not w.is_resident(n) and (n not in w.restarting or since < w.restarting[n]):
            w.restarting[n] = since
            self.push(Cursor(w, w.plan.nodes[n].parent, [n], since))

    def clear(self) -> None:
        self._heap.clear()
