"""Decides which of several devices runs what: cuts a window into pieces, deals them out in shares, and lets a device that is done take over pieces of another. Integers and lists only.

Each device has a run of pieces that follow one another in depth-first order, so that a prefix is run on one device, but for those at the
ends of shares. It takes from the front; what others take over comes from the back, the furthest from what its prefixes are resident for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from batchgen.prefix import PrefixPlan
from batchgen.request import DECODE_COST, Leaf, Request

PIECES = 8
"""Pieces of a device's fair share: a group that costs more than one is cut."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Requests that go to one device together: whole prefix groups, or neighbours in one that is too large for that."""

    requests: tuple[Request, ...]
    """In depth-first order."""
    leaves: int
    cost: float
    """In tokens of a prompt, where the piece before it was run on the same device."""
    shared: int
    """Tokens of a prefix that the piece before it has too: elsewhere they are run once more."""


def cut(leaves: Sequence[Leaf], plan: PrefixPlan, devices: int) -> list[Piece]:
    """Cuts a window into pieces of at most 1 / (devices * PIECES) of its cost, in depth-first order. `leaves` are those of the plan.

    A node that costs more is opened: its children are pieces of their own. What cannot be cut (a request, with all its leaves) may
    cost more, and so may the first piece in a node that was opened: it has the node's tokens.
    """
    ordered = [leaves[i] for i in plan.order.tolist()]
    parents: list[int] = plan.leaf_parent.tolist()
    nodes = plan.nodes
    costs = [0.0] * len(ordered)  # a request's, at its first leaf
    owners: dict[Request, int] = {}
    for i, leaf in enumerate(ordered):
        shared = nodes[parents[i]].end if parents[i] >= 0 else 0
        costs[owners.setdefault(leaf.request, i)] += len(leaf.tokens) - shared + _to_generate(leaf)
    sums = [0.0, *accumulate(costs)]
    inside = [float(node.end - node.start) for node in nodes]
    for node in reversed(nodes):  # children before their parents
        if node.parent >= 0:
            inside[node.parent] += inside[node.index]
    whole = [tokens + sums[node.last] - sums[node.first] for tokens, node in zip(inside, nodes, strict=True)]
    roots = sum(tokens for tokens, node in zip(inside, nodes, strict=True) if node.parent < 0)
    most = (sums[-1] + roots) / (devices * PIECES)
    opened: list[bool] = []
    uncut: dict[int, int] = {}  # by its first leaf: a node that is not opened, under one that is or under none
    for node in nodes:
        inner = node.parent < 0 or opened[node.parent]
        opened.append(inner and whole[node.index] > most)
        if inner and not opened[-1]:
            uncut[node.first] = node.index

    def piece(first: int, last: int, parent: int, cost: float) -> Piece:
        outer = parent
        while outer >= 0 and nodes[outer].first == first:
            outer = nodes[outer].parent
        shared = nodes[outer].end if outer >= 0 else 0
        own = [leaf.request for i, leaf in enumerate(ordered[first:last], first) if owners[leaf.request] == i]
        begun = nodes[parent].end - shared if parent >= 0 else 0
        return Piece(tuple(own), sum(r.leaves for r in own), cost + begun, shared)

    pieces: list[Piece] = []
    first, parent, cost = 0, -1, 0.0
    at = 0
    while at < len(ordered):
        n = uncut.get(at)
        end, above, more = (at + 1, parents[at], costs[at]) if n is None else (nodes[n].last, nodes[n].parent, whole[n])
        if first < at and (above != parent or cost + more > most):
            pieces.append(piece(first, at, parent, cost))
            first, cost = at, 0.0
        parent, cost, at = above, cost + more, end
    if ordered:
        pieces.append(piece(first, at, parent, cost))
    return [p for p in pieces if p.requests]


def deal(pieces: Sequence[Piece], devices: int) -> list[list[Piece]]:
    """Returns the pieces of each device: consecutive ones, of about equal cost. Costs may differ a little more where that keeps a group whole."""
    ends = [0.0, *accumulate(p.cost for p in pieces)]
    bounds = [0]
    for device in range(1, devices):
        aim = ends[-1] * device / devices

        def off(bound: int, aim: float = aim) -> float:
            return abs(ends[bound] - aim) + (pieces[bound].shared if 0 < bound < len(pieces) else 0)

        bounds.append(min(range(bounds[-1], len(ends)), key=off))
    bounds.append(len(pieces))
    return [list(pieces[bounds[i] : bounds[i + 1]]) for i in range(devices)]


def consecutive_pieces(requests: Iterable[Request], pieces: int) -> list[Piece]:
    """Returns the requests as about `pieces` pieces of equal cost, in this order, whatever they share."""
    requests = list(requests)
    costs = [float(r.cost) for r in requests]
    most = sum(costs) / max(1, pieces)
    found: list[Piece] = []
    first, cost = 0, 0.0
    for i, more in enumerate(costs):
        if first < i and cost + more > most:
            found.append(_piece(requests[first:i], cost))
            first, cost = i, 0.0
        cost += more
    return [*found, _piece(requests[first:], cost)] if requests else found


class Shares:
    """What waits to be given to devices, by their numbers."""

    def __init__(self, devices: int = 0) -> None:
        self._shares: dict[int, deque[Piece]] = {device: deque() for device in range(devices)}
        self._common: deque[Piece] = deque()
        """For whoever asks first, in this order."""
        self._backwards = False
        self.waiting = 0
        """Leaves."""

    def add(self, leaves: Sequence[Leaf], plan: PrefixPlan, *, arrival: bool = False) -> None:
        """Takes a window in. `arrival`: rows are to be started in the order they came in, not in prefix order."""
        if not self._shares or arrival or len({leaf.request.priority for leaf in leaves}) > 1:
            places = range(len(leaves)) if arrival else plan.order.tolist()
            rows = dict.fromkeys(leaves[i].request for i in places)
            count = max(1, len(self._shares)) * PIECES
            self._give(self._common, consecutive_pieces(sorted(rows, key=lambda r: r.priority), count))
            return
        shares = deal(cut(leaves, plan, len(self._shares)), len(self._shares))
        # The group that a window ends with is often the one that the next begins with: the same device goes on with it.
        devices = reversed(self._shares) if self._backwards else iter(self._shares)
        self._backwards = not self._backwards
        for device, pieces in zip(devices, shares, strict=True):
            self._give(self._shares[device], pieces)

    def take(self, device: int, leaves: int) -> list[Piece]:
        """Returns the next pieces for a device, with at least `leaves` leaves if there are as many. Empty if the other devices had better keep the rest."""
        taken: list[Piece] = []
        own = self._shares[device] or self._common
        if own:
            while own and sum(p.leaves for p in taken) < leaves:
                taken.append(own.popleft())
        else:
            taken = self._take_over(leaves)
        self.waiting -= sum(p.leaves for p in taken)
        return taken

    def _take_over(self, leaves: int) -> list[Piece]:
        """Takes up to half of the costliest share, from its end. Leaves a piece whose shared prefix would cost more to compute again than its device needs to reach it."""
        share = max(self._shares.values(), key=_total_cost)
        left = half = _total_cost(share) / 2
        taken: deque[Piece] = deque()
        while share and sum(p.leaves for p in taken) < leaves:
            piece = share[-1]
            left -= piece.cost
            if left < (0 if taken else piece.shared - half):
                break
            taken.appendleft(share.pop())
        return list(taken)

    def join(self, device: int) -> None:
        """Adds a device. Until the next window it takes pieces that no device has, or some of another device's share."""
        self._shares[device] = deque()

    def lost(self, device: int, requests: Iterable[Request]) -> None:
        """Removes a device. The others get its share, and the requests that it had begun, after their own."""
        share = self._shares.pop(device)
        self._common += share
        self._give(self._common, consecutive_pieces(requests, max(1, len(self._shares)) * PIECES))

    def clear(self) -> None:
        self._common.clear()
        for share in self._shares.values():
            share.clear()
        self.waiting = 0

    def _give(self, share: deque[Piece], pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            share.append(piece)
            self.waiting += piece.leaves


def _to_generate(leaf: Leaf) -> int:
    return 0 if leaf.request.texts else DECODE_COST * leaf.request.max_tokens


def _piece(requests: Sequence[Request], cost: float) -> Piece:
    return Piece(tuple(requests), sum(r.leaves for r in requests), cost, 0)


def _total_cost(share: Iterable[Piece]) -> float:
    return sum(p.cost for p in share)
