"""Drafters for tests: every draft is verified, right or wrong, whatever it costs."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchgen.drafting.guesses import Draft
from batchgen.scheduling.batch import StepSize
from batchgen.scheduling.sequence import GenerationSequence, State


class ForcedDrafter:
    """Drafts up to `longest` tokens for every decoding sequence in every step, each of them right with a probability of about `right`.

    `expected` returns what a sequence will sample next, as far as that is known. A wrong draft is any token of the vocabulary, end tokens included.
    """

    def __init__(
        self,
        expected: Callable[[GenerationSequence], Sequence[int]],
        vocabulary: Sequence[int],
        right: float,
        longest: int = 6,
        seed: int = 0,
    ) -> None:
        self._expected, self._vocabulary, self._right, self._longest = expected, vocabulary, right, longest
        self._random = random.Random(seed)
        self.drafted = self.accepted = 0

    def propose(self, decoding: Sequence[GenerationSequence], alone: bool) -> dict[GenerationSequence, list[int]]:
        found = {}
        for seq in decoding:
            assert seq.state is State.DECODING
            tokens = self._expected(seq)[: self._random.randint(0, self._longest)]
            found[seq] = [
                token if self._random.random() < self._right else self._random.choice(self._vocabulary)
                for token in tokens
            ]
        return found

    def verified(self, seq: GenerationSequence, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted
        self.drafted += drafted
        self.accepted += accepted

    def finished(self, seq: GenerationSequence) -> None:
        pass


class EveryDraft:
    """A `Payoff` that admits all drafts."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def rests(self, rows: int, alone: bool) -> bool:
        return False

    def is_possible(self, load: StepSize) -> bool:
        return True

    def seconds(self, load: StepSize) -> float:
        return math.inf  # so much time that every output is learned from

    def admitted(
        self, load: StepSize, searched: float, drafts: dict[GenerationSequence, Draft]
    ) -> dict[GenerationSequence, Draft]:
        return drafts

    def ran(self, size: StepSize, seconds: float, accepted: int) -> None:
        pass


def known(results: Mapping[int, Any]) -> Callable[[GenerationSequence], Sequence[int]]:
    """Returns what the sequences of rows with these results will sample, as `ForcedDrafter` wants it."""

    def expected(seq: GenerationSequence) -> Sequence[int]:
        result = results[seq.request.row]
        whole = (result.completions or [result])[seq.leaf.choice].token_ids
        return list(whole[seq.num_sampled :])

    return expected
