"""What a plan shares with prefixes kept from an earlier window, exact to the token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from batchgen.prefix.order import common_length, token_key
from batchgen.prefix.tree import PrefixPlan
from batchgen.request import TokenArray


class Resident(NamedTuple):
    """A path of which a plan's requests can use the first `length` tokens."""

    path: int
    """Index among the paths as given."""
    position: int
    """The first request, in depth-first order, that begins with these tokens. Others that do follow it directly."""
    length: int
    """At least 1. No request of the plan begins with more of the path."""


def node_paths(plan: PrefixPlan, prompts: Sequence[TokenArray]) -> list[TokenArray]:
    """The tokens from the start to the end of each node without child nodes, in depth-first order.

    All nodes lie on these paths. They are views of the prompts: copy what must not keep a prompt in memory.
    """
    parents = {node.parent for node in plan.nodes}
    return [prompts[plan.order[node.first]][: node.end] for node in plan.nodes if node.index not in parents]


def resident_lengths(plan: PrefixPlan, prompts: Sequence[TokenArray], paths: Sequence[TokenArray]) -> list[Resident]:
    """How much of each path the plan's requests have too, in the paths' order; those that share nothing are left out.

    `prompts` are the plan's. A path's longest match is a neighbour of its place among the sorted prompts, and the
    requests that have the same match are a run that begins at the place of the matching tokens: two bisections, each
    O(log n) comparisons. Every request that begins with the match is below the same node, or is alone with it.
    """

    def place(tokens: TokenArray, upto: int) -> int:
        """Number of the first `upto` requests that come before `tokens`."""

        def key(position: int) -> bytes:
            # What comes after as many tokens cannot put a request before them.
            return token_key(prompts[plan.order[position]][: len(tokens)])

        return bisect_left(range(upto), token_key(tokens), key=key)

    count = len(plan.order)
    found: list[Resident] = []
    for index, path in enumerate(paths):
        at = place(path, count)
        length = max(
            (common_length(path, prompts[plan.order[i]]) for i in (at - 1, at) if 0 <= i < count),
            default=0,
        )
        if length:
            found.append(Resident(index, place(path[:length], at), length))
    return found
