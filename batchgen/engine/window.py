"""The requests of one plan and how far they are: what each node still has to start, which are resident. Integers only."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

from batchgen.engine.spans import AFTER_NODES, Branch, Place, Sequence
from batchgen.prefix import PrefixPlan
from batchgen.request import Request


@dataclass(slots=True, eq=False)
class Cursor:
    """Children still to be started under a node (-1: the root), in depth-first order: node n as n, request i as ~i."""

    node: int
    items: list[int]
    since: int = 0
    """A node that is started again comes in the place of the first request that waits for it, not ahead of others."""
    next: int = 0
    queued: bool = False


@dataclass(slots=True, eq=False)
class Window:
    """The requests of one plan, and how far they are."""

    requests: list[Request]
    """In depth-first order."""
    plan: PrefixPlan
    cursors: list[Cursor]
    """By node, the root's last (index -1)."""
    unfinished: list[int]
    """By node: requests below it that are not done."""
    ends_at: list[bool]
    """By node: whether a prompt ends at its end."""
    branches: list[Branch | None]
    restarting: dict[int, int] = field(default_factory=dict)
    """Nodes about to be started again: the first request that waits for each."""
    waiters: dict[int, list[Cursor]] = field(default_factory=dict)
    returning: dict[int, Sequence] = field(default_factory=dict)
    """Preempted sequences by depth-first position."""
    failed: set[int] = field(default_factory=set)
    left: int = 0
    """Requests that are not done."""
    heap: list[tuple[Place, int, Cursor]] = field(default_factory=list)
    tick: count[int] = field(default_factory=count)
    """Tells cursors of equal place apart."""

    @classmethod
    def of(cls, requests: list[Request], plan: PrefixPlan) -> Window:
        cursors = [Cursor(n, []) for n in range(len(plan.nodes))] + [Cursor(-1, [])]
        ends_at = [False] * len(plan.nodes)
        nodes = iter(plan.nodes)
        node = next(nodes, None)
        parents = plan.leaf_parent.tolist()
        for i, request in enumerate(requests):
            while node is not None and node.first == i:
                cursors[node.parent].items.append(node.index)
                node = next(nodes, None)
            parent = parents[i]
            cursors[parent].items.append(~i)
            if parent >= 0 and plan.nodes[parent].end == len(request.tokens):
                ends_at[parent] = True
        unfinished = [n.last - n.first for n in plan.nodes]
        return cls(requests, plan, cursors, unfinished, ends_at, [None] * len(plan.nodes), left=len(requests))

    def place(self, item: int) -> Place:
        if item < 0:
            return (~item, AFTER_NODES)
        node = self.plan.nodes[item]
        return (node.first, node.depth)

    # -- the heap of cursors: what may start next

    @property
    def top(self) -> Cursor:
        """The cursor whose next item comes first."""
        return self.heap[0][2]

    def push(self, cursor: Cursor) -> None:
        if not cursor.queued:
            cursor.queued = True
            heapq.heappush(self.heap, (self.place_of(cursor), next(self.tick), cursor))

    def place_of(self, cursor: Cursor) -> Place:
        first, depth = self.place(cursor.items[cursor.next])
        return (max(first, cursor.since), depth)

    def pop(self, cursor: Cursor) -> None:
        assert self.heap[0][2] is cursor
        heapq.heappop(self.heap)
        cursor.queued = False

    def advance(self, cursor: Cursor) -> None:
        self.pop(cursor)
        cursor.next += 1
        if cursor.next < len(cursor.items):
            self.push(cursor)

    def wait(self, cursor: Cursor) -> None:
        """The cursor's node is not resident: start it (again), and go on when it is complete."""
        n = cursor.node
        if cursor is not self.cursors[n]:
            self.waiters.setdefault(n, []).append(cursor)
        self.restart(n, self.place_of(cursor)[0])

    def restart(self, n: int, since: int) -> None:
        """Has node n started again for request `since`, unless it is resident or on its way for an earlier one."""
        if not self.is_resident(n) and since < self.restarting.get(n, self.plan.nodes[n].last):
            self.restarting[n] = since
            self.push(Cursor(self.plan.nodes[n].parent, [n], since))

    def is_resident(self, n: int) -> bool:
        """Whether the node has pages: it is computed, or being computed."""
        branch = self.branches[n]
        return branch is not None and not branch.evicted
