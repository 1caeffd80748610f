"""How long a job takes: before it runs, by its steps without a model and what they cost; while it runs, by its own steps. Knows token ids, not rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from batchgen.prefix import PrefixPlan
from batchgen.request import DECODE_COST, Leaf, Request
from batchgen.scheduling.rehearsal import FixedLength, Rehearsal
from batchgen.scheduling.step_costs import StepCosts

MAX_STEPS = 1000
"""Steps that are run. The time of the others is estimated from these, by the tokens that they have."""
COST_ERROR = 0.15
"""What the costs of steps add to the range of an estimate, as a part of it."""
TRUSTED_SECONDS = 1.0
"""A running job's own steps count as much as the costs of earlier ones once they have taken so long."""
RECENT_SECONDS, RECENT_SHARE = 2.0, 0.25
"""Of a running job's own steps those of so many seconds count most, or of such a part of its time: a long prefix takes its time before all else."""
_PRICES = 1.0, float(DECODE_COST)
"""Prices of a prompt token and of a completion token, relative to each other, where none are known."""
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long the rows that have no result yet will take, from the moment when the model is loaded."""

    seconds: float
    low: float
    high: float
    rows: int
    """Number of these rows."""
    lengths: str
    """What the lengths of completions are taken from: `rows`, those that the job has finished; `max_tokens`, which are upper limits; or
    `none`, because nothing is generated."""


class Lengths:
    """The lengths of completions to expect, from those of finished rows."""

    def __init__(self, ends: Iterable[tuple[int, bool]] = ()) -> None:
        """`ends`: of each finished completion, its number of tokens and whether `max_tokens` has cut it."""
        self._ends = sorted(ends)
        self.tokens = np.array([tokens for tokens, _ in self._ends], dtype=np.int64)
        """In ascending order."""
        self.cut = sum(cut for _, cut in self._ends)
        """How many of them `max_tokens` has cut."""

    def of(self, request: Request, number: int) -> int:
        """Returns the length of the completions of the request of this number. The lengths of finished rows take turns, in their proportions."""
        if not self._ends:
            return request.max_tokens
        # Multiples of the golden ratio lie evenly in any part of a job.
        tokens, cut = self._ends[int((number + 0.5) * _GOLDEN % 1 * len(self._ends))]
        return request.max_tokens if cut else min(tokens, request.max_tokens)

    @property
    def error(self) -> float:
        """The standard error of their mean, as a part of it."""
        count = len(self.tokens)
        return float(self.tokens.std() / self.tokens.mean() / math.sqrt(count)) if count else 0.0


class Duration:
    """Adds up the time of a job's windows."""

    def __init__(self, costs: StepCosts, rehearsal: Rehearsal, lengths: Lengths, devices: int = 1) -> None:
        """`rehearsal` ends completions by `stops`."""
        self._costs, self._rehearsal, self._lengths, self._devices = costs, rehearsal, lengths, devices
        rehearsal.stops = lambda request: FixedLength(request, self._expected[request])
        self._expected: dict[Request, int] = {}
        self._steps_left = MAX_STEPS
        self._seconds = 0.0
        self._prefill = self._decode = self._rows = 0
        """Of all windows: tokens of prompts and texts to run, tokens to generate, rows."""

    def add(self, leaves: Sequence[Leaf], plan: PrefixPlan) -> None:
        """Adds a window: the leaves of its requests, with their plan."""
        requests = dict.fromkeys(leaf.request for leaf in leaves)
        self._expected = {r: self._lengths.of(r, number) for number, r in enumerate(requests, self._rows)}
        self._rows += len(requests)
        self._prefill += plan.prefill_tokens_min
        self._decode += sum(0 if r.texts else r.leaves * length for r, length in self._expected.items())
        for size in self._rehearsal.run(leaves, plan, self._steps_left):
            self._seconds += self._costs.seconds(size)
            self._steps_left -= 1

    def estimate(self) -> Estimate:
        """Returns the time of all windows. Its range has the errors of costs and lengths; completions of unknown length may all be short."""
        counts = self._rehearsal.scheduler.counts
        prefill, decode = self._costs.rates(self._rehearsal.scheduler.limits)
        ran = prefill * (counts.prefill_tokens + counts.scored_tokens) + decode * counts.decode_sequences
        whole = prefill * self._prefill + decode * self._decode
        seconds = self._seconds * max(1.0, whole / ran if ran else 1.0) / self._devices
        generating = decode * self._decode / whole if whole else 0.0
        known = len(self._lengths.tokens) > 0 or not self._decode
        error = math.hypot(COST_ERROR, 2 * generating * self._lengths.error)
        low = seconds * (1 if known else 1 - generating) * max(0.0, 1 - error)
        basis = "none" if not self._decode else "rows" if known else "max_tokens"
        return Estimate(round(seconds, 3), round(low, 3), round(seconds * (1 + error), 3), self._rows, basis)


class TimeLeft:
    """How long the rest of a running job takes: its time so far, extended to the work that is left, as `Duration` does with steps that it runs."""

    def __init__(self) -> None:
        self._prefill = self._completions = self._max_tokens = 0
        """Of all windows so far: tokens of prompts and texts to run, completions to generate, the most tokens that these may have."""
        self._ended: Counter[int] = Counter()
        """Number of finished completions by their length."""
        self._told = (0, 0, 0.0)
        """Tokens of prompts, tokens of completions and seconds that the last estimate was told."""
        self._ran = self._took = 0.0
        """What has run lately at its prices, and the seconds that it took."""

    def add(self, requests: Iterable[Request], prefill_tokens: int) -> None:
        """Adds a window, in which so many tokens of prompts and texts have to run."""
        self._prefill += prefill_tokens
        for request in requests:
            if not request.texts:
                self._completions += request.leaves
                self._max_tokens += request.leaves * request.max_tokens

    def ended(self, lengths: Iterable[int]) -> None:
        """Takes the lengths of finished completions."""
        self._ended.update(lengths)

    def completions_left(self, tokens: int, waiting: int) -> float:
        """Returns the number of tokens to expect of unfinished completions.

        `tokens` were generated so far, and `waiting` completions have not begun. A running one is expected to become as long as the finished
        ones that are longer than the running ones are now.
        """
        if not self._completions:
            return 0.0
        most = self._max_tokens / self._completions
        ended, ended_tokens = self._ended.total(), sum(length * count for length, count in self._ended.items())
        running, under_way = max(0, self._completions - ended - waiting), max(0, tokens - ended_tokens)
        now = under_way / running if running else 0.0
        longer = {length: count for length, count in self._ended.items() if length > now}
        if longer:
            whole = sum(length * count for length, count in longer.items()) / sum(longer.values())
        else:
            whole = max(now, min(most, now + tokens / ended) if ended else most)
        mean = (ended_tokens + running * whole) / (ended + running) if ended + running else most
        return running * (whole - now) + waiting * mean

    def expect(
        self, prices: tuple[float, float] | None, prefill_tokens: int, tokens: int, left: float, elapsed: float
    ) -> tuple[float, float | None]:
        """Returns which part of the work of all windows so far has run, and the seconds that the rest will take; None if nothing tells.

        `prices`: the seconds of a prompt token and of a completion token in full steps (`StepCosts.rates`), if they are known. In `elapsed` seconds,
        `prefill_tokens` of prompts and texts and `tokens` of completions have run; of these, `left` are to come.
        """
        prefill, decode = prices or _PRICES
        told, self._told = self._told, (prefill_tokens, tokens, elapsed)
        since = elapsed - told[2]
        kept = max(0.0, 1 - since / max(RECENT_SECONDS, RECENT_SHARE * elapsed))
        self._took = kept * self._took + since
        self._ran = kept * self._ran + prefill * (prefill_tokens - told[0]) + decode * (tokens - told[1])
        done = prefill * prefill_tokens + decode * tokens
        rest = prefill * max(0, self._prefill - prefill_tokens) + decode * left
        share = done / (done + rest) if done + rest else 0.0
        if prices is not None:
            return share, rest * (self._took + TRUSTED_SECONDS) / (self._ran + TRUSTED_SECONDS)
        return share, rest * self._took / self._ran if self._ran > 0 else None
