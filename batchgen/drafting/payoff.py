"""Whether drafts pay: which of them make tokens come faster, and how long none are looked for if none do.

Draft tokens are admitted best first, as many as give the most accepted tokens per second. What a step costs is estimated (`StepCosts`) and
corrected by the clock: by how much longer steps took than estimated, and by how much more drafts added to a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import accumulate
from statistics import median

from batchgen.drafting.guesses import Draft
from batchgen.scheduling.batch import StepSize
from batchgen.scheduling.sequence import GenerationSequence
from batchgen.scheduling.step_costs import StepCosts

MAX_DRAFTS = 512
"""Maximum number of draft tokens in a step: each needs a row of logits."""
CAUTION = 0.88
"""A draft token is worth this share of what its chance promises: costs and chances are estimates."""
SHARE = 0.01
"""Searches in vain may take this share of the time of the steps, and `SAVED` of the time that drafts save."""
SAVED = 0.1
CREDIT = 0.3
"""Searches in vain may take this share of the time of a step before there is a rest, at first and at most."""
MAX_REST = 64
"""Steps at most until drafts are looked for again, if they did not pay."""
FEWER = 0.8
"""With fewer sequences than this share of those of the last search, drafts are looked for at once."""
MIN_PRICE = 0.02
"""A draft token is taken to cost at least this share of a sequence's part of a step."""
MEASURED_FIRST = 3
"""Steps without drafts that are measured before there are any."""
REMEMBERED = 5
"""The newest steps, with drafts and without, and searches whose times count."""
FADES = 0.8
"""Each step with drafts makes the accepted tokens of those before it count less by this factor."""
MISTRUST = 50.0
"""Draft tokens that should be right, without which the number of those that were says nothing."""
FORGETS = 64
"""After so many searches in vain one of them is forgotten, so that drafts which were too dear are tried again."""


class Payoff:
    """Compares steps with drafts to steps without."""

    def __init__(self, costs: StepCosts, *, replays: bool = False) -> None:
        """`replays`: the tokens before a wrong draft run again in the next step, as with recurrent states."""
        self._costs = costs
        self._replays = replays
        self._rest = 0
        """Steps without drafts that are left."""
        self._credit = math.inf
        """Seconds that searches in vain may take before there is a rest."""
        self._searched = 0
        """The number of sequences when drafts were looked for last."""
        self._rows = 0
        """The number of sequences of the step under way; 0 if it runs anything else."""
        self._plain: deque[float] = deque(maxlen=REMEMBERED)
        """How many times as long as estimated steps without drafts took."""
        self._slower = 1.0
        """The median of these."""
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)
        """How many times as much as estimated drafts added to steps."""
        self._dearer = 1.0
        """The median of these, and of two that were as estimated: a busy machine has slow steps, and one or two of them decide nothing."""
        self._expected = self._right = 0.0
        """The numbers of draft tokens that should have been right, and were, in the newest steps."""
        self._promised = 0.0
        """The number of draft tokens of the step under way that should be right."""
        self._searches: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds that searches took for each sequence."""
        self._careful = False
        """Whether drafts were too dear and are tried again: a step has few then."""
        self._vain = 0
        """Searches in vain since the last one that was not, or since something was forgotten."""

    def rests(self, rows: int, alone: bool) -> bool:
        """Takes note that a step of so many decoding sequences begins. Returns whether it has no drafts. `alone`: it runs nothing else."""
        self._rows = rows if alone else 0
        if self._rest and rows > FEWER * self._searched:
            self._rest -= 1
            return True
        return alone and len(self._plain) < MEASURED_FIRST

    def ran(self, size: StepSize, seconds: float, accepted: int) -> None:
        """Learns from a step that has run. `accepted` of its draft tokens were right."""
        rows, self._rows = self._rows, 0
        if self._promised:
            # Rows that begin together are at the same place of their texts, so many drafts fail together.
            self._expected = FADES * self._expected + self._promised
            self._right = FADES * self._right + accepted
            self._promised = 0.0
        if not rows or not self._costs.known:
            return
        drafts = size.logit_rows - rows
        if not drafts:
            self._plain.append(seconds / self._seconds(size))
            self._slower = median(self._plain)
        else:
            drafted = drafts * size.pairs // size.tokens
            load = _with(size, -drafts, -drafted)
            added = (seconds - self.seconds(load)) / (self._slower * self._price(load, drafts, drafted))
            self._careful = self._careful and added > 2
            self._ratios.append(max(1.0, added))
            self._dearer = median([1.0, 1.0, *self._ratios])

    def seconds(self, load: StepSize) -> float:
        """Returns the expected seconds of a step of decoding sequences without drafts."""
        return self._slower * self._seconds(load)

    def is_possible(self, load: StepSize) -> bool:
        """Returns whether good drafts, if there were any, would make tokens come faster in a step like this. If not, rests for a long time."""
        rows, each = load.logit_rows, load.pairs // max(1, load.tokens)
        plain = self.seconds(load)
        counts = {1, 2, max(1, rows // 4), rows, 4 * rows}
        possible = self._costs.known and any(
            (rows + self._worth * n) / (plain + self._more(load, n, n * each)) > rows / plain for n in counts
        )
        if not possible:
            self._rest, self._searched = MAX_REST, rows
            self._forget()
        return possible

    def admitted(
        self, load: StepSize, searched: float, drafts: Mapping[GenerationSequence, Draft]
    ) -> dict[GenerationSequence, Draft]:
        """Returns the beginnings of the drafts that give the most accepted tokens per second in a step of decoding sequences alone.

        `searched` are the seconds that it took to find them. What else the step runs does not count: a draft saves a token of a later step,
        which is one of these. If none pays, drafts may rest.
        """
        rows, plain = load.logit_rows, self.seconds(load)
        self._searches.append(searched / rows)
        search = rows * median(self._searches)
        ranked = sorted(_ranked(drafts), key=lambda item: -item[0])
        ranked = ranked[: rows if self._careful else MAX_DRAFTS]
        worth = self._worth
        gains = [*accumulate((worth * chance for chance, *_ in ranked), initial=float(rows))]
        pairs = [0, *accumulate(seq.end for *_, seq in ranked)]
        again = [0.0, *accumulate(again if self._replays else 0.0 for _, again, _ in ranked)]
        best, count = rows / plain, 0
        for n in _counts(len(ranked)):
            rate = gains[n] / (plain + search + self._more(load, n, pairs[n], int(again[n])))
            if rate > best:
                best, count = rate, n
        self._promised = sum(chance for chance, *_ in ranked[:count])
        saved = gains[count] * (plain / rows - 1 / best)
        self._credit = min(CREDIT * plain, self._credit) + (SAVED * saved if count else -search)
        self._vain = 0 if count else self._vain + 1
        if self._vain >= FORGETS:
            self._forget()
        if self._credit < 0:
            self._rest, self._searched = min(MAX_REST, int(-self._credit / (SHARE * plain))), rows
            self._credit = 0.0
        taken: dict[GenerationSequence, int] = {}
        for *_, seq in ranked[:count]:
            taken[seq] = taken.get(seq, 0) + 1
        return {seq: drafts[seq][:n] for seq, n in taken.items()}

    def _seconds(self, size: StepSize) -> float:
        return max(1e-9, self._costs.seconds(size))

    def _more(self, load: StepSize, drafts: int, pairs: int, again: int = 0) -> float:
        """Returns the expected seconds that draft tokens add to a step, with those of `again` tokens that run again after wrong ones."""
        return self._slower * self._dearer * self._price(load, drafts, pairs, again)

    @property
    def _worth(self) -> float:
        """What a draft token is worth, as a share of its chance."""
        return CAUTION * min(1.0, (MISTRUST + self._right) / (MISTRUST + self._expected))

    def _forget(self) -> None:
        """Forgets the oldest step with drafts, and half of what was right."""
        self._vain = 0
        self._expected, self._right = self._expected / 2, self._right / 2
        if self._ratios:
            self._careful = self._careful or self._dearer > 2
            self._ratios.popleft()
            self._dearer = median([1.0, 1.0, *self._ratios])

    def _price(self, load: StepSize, drafts: int, pairs: int, again: int = 0) -> float:
        """Returns the estimated seconds that draft tokens add to a step."""
        plain = self._seconds(load)
        least = MIN_PRICE * plain * (drafts + again) / load.logit_rows
        return max(self._seconds(_with(load, drafts, pairs, again)) - plain, least)


def _ranked(drafts: Mapping[GenerationSequence, Draft]) -> Iterator[tuple[float, float, GenerationSequence]]:
    """Yields draft tokens: the chance of each, the tokens that run again if it is the first wrong one, times the chance of that, and the sequence.

    A draft's chances fall from token to token, so a stable sort by chance admits each draft from its beginning.
    """
    for seq, draft in drafts.items():
        before = 1.0
        for number, (*_, chance) in enumerate(draft, 1):
            yield chance, number * (before - chance), seq
            before = chance


def _counts(most: int) -> list[int]:
    """Numbers of draft tokens that are compared: all small ones, and larger ones in steps of about a tenth."""
    found, n = [], 1
    while n < most:
        found.append(n)
        n += max(1, n // 10)
    return [*found, most] if most else []


def _with(load: StepSize, drafts: int, pairs: int, again: int = 0) -> StepSize:
    return StepSize(load.tokens + drafts + again, load.logit_rows + drafts, load.keys + drafts, load.pairs + pairs)
