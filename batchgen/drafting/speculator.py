"""Drafts for the decoding sequences of a step: what may come next (guesses.py), as far as it makes tokens come faster (payoff.py).

Where drafts cannot pay, as in a large batch on a processor that computes at its limit, nothing is searched and nothing is learned, and a step costs a comparison
or two.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from batchgen.drafting.guesses import Draft, Guesses
from batchgen.drafting.payoff import Payoff
from batchgen.scheduling.batch import StepSize, keys_and_pairs
from batchgen.scheduling.sequence import GenerationSequence

LEARNING = 0.02
"""Share of the time of the steps with drafts in which outputs are added to the index."""


class Speculator:
    """Proposes drafts for a scheduler (`scheduler.Drafter`), and learns from what becomes of them."""

    def __init__(self, forced: Callable[[GenerationSequence], Sequence[int]], payoff: Payoff) -> None:
        """`forced`: see `Guesses`."""
        self._guesses = Guesses(forced)
        self._payoff = payoff
        self._right = 0
        """Draft tokens of the step under way that were right."""
        self._made: Mapping[GenerationSequence, Draft] = {}
        self.drafted, self.accepted = Counter[str](), Counter[str]()
        """Numbers of draft tokens by their source."""

    def propose(
        self, decoding: Sequence[GenerationSequence], alone: bool
    ) -> Mapping[GenerationSequence, Sequence[int]]:
        """Returns draft tokens by sequence."""
        if self._payoff.rests(len(decoding), alone):
            return {}
        self._made = self._paying(decoding)
        return {seq: [token for token, *_ in draft] for seq, draft in self._made.items()}

    def verified(self, seq: GenerationSequence, drafted: int, accepted: int) -> None:
        """Learns from a draft whose first `accepted` tokens of `drafted` were right."""
        self._right += accepted
        for place, (_, kind, _) in enumerate(self._made[seq][:drafted]):
            right = place < accepted
            self.drafted[kind.source] += 1
            self.accepted[kind.source] += right
            if right or (place == accepted and seq.running):  # nothing follows in a completion that has ended
                self._guesses.chances.note(kind, right)

    def finished(self, seq: GenerationSequence) -> None:
        """Keeps a finished output to learn from it."""
        self._guesses.finished(seq)

    def ran(self, size: StepSize, seconds: float) -> None:
        """Learns what a step took."""
        self._payoff.ran(size, seconds, self._right)
        self._right = 0

    def _paying(self, decoding: Sequence[GenerationSequence]) -> dict[GenerationSequence, Draft]:
        keys, pairs = keys_and_pairs((seq, seq.end - 1, seq.end) for seq in decoding)
        load = StepSize(len(decoding), len(decoding), keys, pairs)
        if not self._payoff.is_possible(load):
            return {}
        began = time.perf_counter()
        self._guesses.learn(decoding, LEARNING * self._payoff.seconds(load))
        drafts = self._guesses.drafts(decoding)
        return self._payoff.admitted(load, time.perf_counter() - began, drafts)
