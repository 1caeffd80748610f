"""Prefixes of earlier windows that need not be run again, for the figures: the ones that an engine is likeliest to still have."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from batchgen.prefix import PrefixNode, PrefixPlan, carried_tokens
from batchgen.request import TokenArray

OF_A_WINDOW = 256
"""Prefixes remembered of one window: those with the most tokens saved."""
IN_ALL = 2048
"""The oldest go first."""


class KeptPrefixes:
    """The most shared prefixes of the windows so far, the newest last. Bounded, whatever the file is."""

    def __init__(self) -> None:
        self._paths: dict[bytes, TokenArray] = {}
        self._last: TokenArray | None = None

    def carried(self, plan: PrefixPlan, prompts: Sequence[TokenArray], *, and_last: bool = False) -> int:
        """How many tokens of the window's tree are known from earlier windows; remembers this one's prefixes.

        `and_last`: also those of the last prompt of the window before. Where windows follow each other in depth-first order, that is all
        they share.
        """
        paths = list(self._paths.values())
        if and_last and self._last is not None:
            paths.append(self._last)
        carried = carried_tokens(plan, prompts, paths)
        self._last = prompts[plan.order[-1]].copy()
        for node in heapq.nlargest(OF_A_WINDOW, plan.nodes, key=_saved):
            path = prompts[plan.order[node.first]][: node.end].copy()
            key = path.tobytes()
            self._paths.pop(key, None)
            self._paths[key] = path
        while len(self._paths) > IN_ALL:
            self._paths.pop(next(iter(self._paths)))
        return carried


def _saved(node: PrefixNode) -> int:
    return (node.last - node.first - 1) * node.end
