"""How likely a draft token is right, learned from the drafts that were verified. Integers only."""

from __future__ import annotations

from typing import NamedTuple

DEPTHS = 4
"""Draft tokens from this place of a draft on have the same chance."""
PRIOR = 4.0
"""Weight of the first guess, in verified drafts."""
MEMORY = 300.0
"""Verified drafts of a kind that are remembered: older ones count less and less."""
FORGET = 0.98
"""What is known fades with every round of drafts, so that a kind that has failed is tried again after some time."""


class DraftKind(NamedTuple):
    """A kind of draft token. Tokens of one kind are taken to be right equally often, if those before them are."""

    source: str
    """One of `stats.DRAFT_SOURCES`."""
    context: int
    """Number of tokens that the context had by which it was found; 0 for a grammar."""
    depth: int
    """Number of draft tokens before it, up to `DEPTHS`."""
    greedy: bool
    """Whether the row takes its likeliest tokens."""


class Chances:
    """The chance of each kind of draft token."""

    def __init__(self) -> None:
        self._seen: dict[DraftKind, list[float]] = {}  # right ones, verified ones

    def of(self, kind: DraftKind) -> float:
        """Returns the chance that a token of this kind is right."""
        right, verified = self._seen.get(kind, (0.0, 0.0))
        return (right + PRIOR * _guess(kind)) / (verified + PRIOR)

    def note(self, kind: DraftKind, right: bool) -> None:
        """Takes note that a token was verified."""
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        if seen[1] >= MEMORY:
            seen[0] *= 0.5
            seen[1] *= 0.5
        seen[0] += right
        seen[1] += 1

    def fade(self) -> None:
        """Brings what is known closer to the first guess."""
        for seen in self._seen.values():
            seen[0] *= FORGET
            seen[1] *= FORGET


def _guess(kind: DraftKind) -> float:
    if kind.source == "grammar":
        return 0.97
    return (0.5 if kind.context < 4 else 0.65 if kind.context < 8 else 0.8) + 0.03 * kind.depth
