"""Decides which of several devices runs which requests. Cuts a window into pieces and deals them out in shares; a device that has finished
its share takes over pieces of another's. Integers and lists only.

Each share is contiguous in depth-first order, so that only prefixes at the ends of shares run on two devices. A device takes pieces from the
front of its share. Others take pieces from its back, which is furthest from the prefixes that the device has in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from batchgen.prefix import PrefixPlan
from batchgen.prefix.tree import PrefixNode
from batchgen.request import DECODE_COST, Leaf, Request

PIECES = 8
"""Pieces in a fair share. A group that costs more than one piece is cut."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Requests that go to one device together: whole prefix groups, or neighbours within a group that was too large."""

    requests: tuple[Request, ...]
    """In depth-first order."""
    leaves: int
    cost: float
    """In prompt tokens, if the same device runs the piece before it."""
    shared: int
    """Tokens of the prefix that it shares with the piece before it. On another device they run again."""


def cut(leaves: Sequence[Leaf], plan: PrefixPlan, devices: int) -> list[Piece]:
    """Cuts a window into pieces of at most 1 / (devices * PIECES) of its cost, in depth-first order. `leaves` are those of the plan.

    A node that costs more is opened, so that its children become pieces. A piece may cost more if it is a single request, or the first
    piece of an opened node, which has the node's own tokens.
    """
    ordered = [leaves[i] for i in plan.order.tolist()]
    parents: list[int] = plan.leaf_parent.tolist()
    nodes: dict[int, list[PrefixNode]] = {}  # by their first leaf, each before those below it
    for node in plan.nodes:
        nodes.setdefault(node.first, []).append(node)
    shared: list[int] = []  # tokens that each leaf shares with the one before it
    costs = [0.0] * len(ordered)  # a request's cost is at its first leaf
    owners: dict[Request, int] = {}
    for i, leaf in enumerate(ordered):
        outer = nodes[i][0].parent if i in nodes else parents[i]
        shared.append(plan.nodes[outer].end if outer >= 0 else 0)
        to_generate = 0 if leaf.request.texts else DECODE_COST * leaf.request.max_tokens
        costs[owners.setdefault(leaf.request, i)] += len(leaf.tokens) - shared[i] + to_generate
    sums = [0.0, *accumulate(costs)]
    limit = sums[-1] / (devices * PIECES)

    def below(parent: int, first: int, last: int) -> float:
        """The cost of leaves without the tokens of the opened nodes that begin with them."""
        begun = plan.nodes[parent].end - shared[first] if parent >= 0 else 0
        return sums[last] - sums[first] - begun

    bounds, above, at = [0], -1, 0
    while at < len(ordered):
        whole = next((node for node in nodes.get(at, ()) if below(node.parent, at, node.last) <= limit), None)
        end, parent = (at + 1, parents[at]) if whole is None else (whole.last, whole.parent)
        if bounds[-1] < at and (parent != above or below(parent, bounds[-1], end) > limit):
            bounds.append(at)
        above, at = parent, end
    pieces = []
    for first, last in pairwise([*bounds, len(ordered)]):
        own = [leaf.request for i, leaf in enumerate(ordered[first:last], first) if owners[leaf.request] == i]
        if own:
            pieces.append(_piece(own, sums[last] - sums[first], shared[first]))
    return pieces


def deal(pieces: Sequence[Piece], devices: int) -> list[list[Piece]]:
    """Returns the pieces of each device: consecutive ones, of about equal cost. Costs may differ a little more if that keeps a group whole."""
    ends = [0.0, *accumulate(p.cost for p in pieces)]
    bounds = [0]
    for device in range(1, devices):
        aim = ends[-1] * device / devices

        def off(bound: int, aim: float = aim) -> float:
            return abs(ends[bound] - aim) + (pieces[bound].shared if bound < len(pieces) else 0)

        bounds.append(min(range(bounds[-1], len(ends)), key=off))
    bounds.append(len(pieces))
    return [list(pieces[bounds[i] : bounds[i + 1]]) for i in range(devices)]


def consecutive_pieces(requests: Iterable[Request], pieces: int) -> list[Piece]:
    """Returns the requests as about `pieces` pieces of equal cost, in this order, whatever they share."""
    requests = list(requests)
    costs = [float(r.cost) for r in requests]
    limit = sum(costs) / max(1, pieces)
    found: list[Piece] = []
    first, cost = 0, 0.0
    for i, more in enumerate(costs):
        if first < i and cost + more > limit:
            found.append(_piece(requests[first:i], cost))
            first, cost = i, 0.0
        cost += more
    return [*found, _piece(requests[first:], cost)] if requests else found


class WaitingPieces:
    """The pieces that wait for devices, which have numbers."""

    def __init__(self) -> None:
        self._shares: dict[int, deque[Piece]] = {}
        """Of each device, by its number."""
        self._common: deque[Piece] = deque()
        """Pieces for any device, in this order."""
        self._backwards = False
        self.waiting = 0
        """Number of leaves that wait."""

    def add(self, leaves: Sequence[Leaf], plan: PrefixPlan, *, arrival: bool = False) -> None:
        """Adds a window. `arrival`: rows start in the order in which they came, not in prefix order."""
        if not self._shares or arrival or len({leaf.request.priority for leaf in leaves}) > 1:
            places = range(len(leaves)) if arrival else plan.order.tolist()
            rows = dict.fromkeys(leaves[i].request for i in places)
            count = max(1, len(self._shares)) * PIECES
            self._give(self._common, consecutive_pieces(sorted(rows, key=lambda r: r.priority), count))
            return
        shares = deal(cut(leaves, plan, len(self._shares)), len(self._shares))
        # The last group of a window is often the first of the next, so the same device gets it.
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


def _piece(requests: Sequence[Request], cost: float, shared: int = 0) -> Piece:
    return Piece(tuple(requests), sum(r.leaves for r in requests), cost, shared)


def _total_cost(share: Iterable[Piece]) -> float:
    return sum(p.cost for p in share)
