"""Drafters for tests: every draft is verified, right or wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from batchgen.scheduling.batch import ScheduledSpan
from batchgen.scheduling.sequence import GenerationSequence, State


class ForcedDrafter:
    """Drafts up to `longest` tokens for every decoding sequence in every step, each of them right with a probability of about `right`.

    `known` are the completions that are expected, by row and choice. A wrong draft is any token of the vocabulary, end tokens included.
    """

    def __init__(
        self, known: Mapping[tuple[int, int], Sequence[int]], vocab_size: int, right: float, longest: int = 6, seed: int = 0
    ) -> None:  # fmt: skip
        self._known, self._vocab_size, self._right, self._longest = known, vocab_size, right, longest
        self._random = random.Random(seed)
        self.accepted = self.drafted = self.ended = 0

    def propose(self, step: Sequence[ScheduledSpan]) -> dict[GenerationSequence, list[int]]:
        found = {}
        for scheduled in step:
            seq = scheduled.span
            if isinstance(seq, GenerationSequence) and seq.state is State.DECODING:
                known = self._known[seq.request.row, seq.leaf.choice][seq.num_sampled :]
                found[seq] = [self._draft(token) for token in known[: self._random.randint(0, self._longest)]]
        return found

    def _draft(self, token: int) -> int:
        return token if self._random.random() < self._right else self._random.randrange(self._vocab_size)

    def verified(self, scheduled: ScheduledSpan, accepted: int) -> None:
        self.drafted += len(scheduled.drafts)
        self.accepted += accepted
        assert 0 <= accepted <= len(scheduled.drafts)

    def finished(self, seq: GenerationSequence) -> None:
        self.ended += 1


def known_of(results: Mapping[int, object]) -> dict[tuple[int, int], Sequence[int]]:
    """Returns the tokens of results by row, as `ForcedDrafter` wants them."""
    return {
        (row, choice): completion.token_ids
        for row, result in results.items()
        for choice, completion in enumerate(result.completions or [result])
    }
