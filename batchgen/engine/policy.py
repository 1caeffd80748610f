"""Which requests start first, and what has a step's tokens first. A policy is these few values; everything else is the scheduler's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.prefix import PrefixPlan
from batchgen.request import Leaf

Turn = tuple[float, int]
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
    """Share of the pages that must stay free when something new starts beside what runs."""

    def turns(self, leaves: Sequence[Leaf], plan: PrefixPlan, base: int) -> list[Turn]:
        """The turns of a window's leaves, given in depth-first order; they are numbered from `base` through all windows."""
        numbers = plan.order.tolist() if self.arrival else range(len(leaves))
        return [(leaf.request.priority, base + n) for leaf, n in zip(leaves, numbers, strict=True)]


POLICIES = {
    p.name: p
    for p in (
        Policy("prefix", arrival=False, decode_first=True, margin=0.0),
        Policy("prefill-first", arrival=False, decode_first=False, margin=0.0),
        # The margin is what transformers' continuous batching keeps: in the order of arrival little is shared, so that
        # running sequences take new pages sooner.
        Policy("fifo", arrival=True, decode_first=True, margin=0.2),
    )
}
