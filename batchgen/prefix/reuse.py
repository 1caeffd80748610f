"""What a plan shares with prefixes that are still in memory from an earlier window, exact to the token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from batchgen.prefix.order import common_length, token_key
from batchgen.prefix.tree import PrefixPlan
from batchgen.request import TokenArray


class Resident(NamedTuple):
    """A resident path whose first `length` tokens requests of the plan can use."""

    path: int
    """Index among the paths as given."""
    position: int
    """The first request, in depth-first order, that begins with these tokens. Other such requests follow it directly."""
    length: int
    """At least 1. No request of the plan begins with more of the path."""


def resident_lengths(plan: PrefixPlan, prompts: Sequence[TokenArray], paths: Sequence[TokenArray]) -> list[Resident]:
    """How much of each path the plan's requests begin with, in the order of the paths. Paths that share nothing are left out.

    `prompts` are the plan's. A path's longest match is one of the two neighbours of its place among the sorted prompts. The requests
    with the same match are a run that begins at the place of the matching tokens. Both places are found by bisection, in O(log n)
    comparisons. Every request that begins with the match is below the same node, or is the only one.
    """

    def place(tokens: TokenArray, stop: int) -> int:
        """How many of the first `stop` requests come before `tokens`."""

        def key(position: int) -> bytes:
            # Later tokens of a request cannot put it before `tokens`.
            return token_key(prompts[plan.order[position]][: len(tokens)])

        return bisect_left(range(stop), token_key(tokens), key=key)

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
