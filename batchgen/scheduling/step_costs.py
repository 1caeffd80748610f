"""What a step costs: seconds from its size, learned from the steps that have run. numpy only.

Steps are kept by kind, the newest few of each, so that many steps of one kind do not outweigh the others, and one slow step is one of
many. Those of earlier runs count as if they had run at the pace of this one: a machine is not always equally busy. The model is fitted to them when it is asked, no more often than the number of measured ones grows by half: a constant, a curve over the number
of tokens that is linear between powers of two and nowhere falls, and parts that are linear in rows of logits, keys, pairs and tokens of images.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchgen.process.user_cache import replaced
from batchgen.scheduling.batch import Limits, StepSize

Matrix = NDArray[np.float64]
Step = tuple[StepSize, float]
Kinds = dict[tuple[int, ...], deque[Step]]

OCTAVES = 16
"""The curve over tokens has knots at 0, 1, 2, 4, … up to 2^OCTAVES, and goes on straight."""
KEPT = 8
"""Steps that are kept of each kind."""
MIN_STEPS = 2
"""Steps without which nothing is known."""
PACE_STEPS = 8
"""Steps after which half of what they tell of the machine's pace is believed."""
MEASURED = 1 << 16
"""Measured steps that wait for the next estimate; older ones are forgotten."""
ROUNDS = 5
"""Rounds of a fit. Each weighs the steps by the estimates and the errors of the round before."""
OUTLIER = 3.0
"""An error of more than so many times the typical one counts less."""
STIFFNESS = 0.3
"""Weight, in steps, of the wish that a token costs the same in neighbouring parts of the curve. It decides where nothing was measured, and
outweighs the noise of one or two steps, whose slope would else go on far beyond them."""
RIDGE = 1e-6
"""Keeps small what no step decides, such as the parts of tokens and of rows where both are always equal."""
_KNOTS = np.array([0, *(1 << i for i in range(OCTAVES + 1))], dtype=np.float64)


class StepCosts:
    """Estimates of the seconds of steps. `seconds` takes a microsecond or two; a fit takes some milliseconds."""

    def __init__(self, file: Path | None = None) -> None:
        """Begins with the steps that `save` has written to `file`. A file that cannot be read counts as none."""
        self.file = file
        self.measured: deque[Step] = deque(maxlen=MEASURED)
        """Steps that have run, with their seconds: the engine appends them, and the next estimate takes them in."""
        self._new = self._saved = 0
        """Number of measured steps that were taken in, now and when they were saved last."""
        self._kinds: Kinds = {}
        """Steps of this run."""
        self._earlier = _by_kind(_stored(file))
        self._costs_before: Matrix | None = None
        """The fit to the steps of earlier runs, once it was needed."""
        self._fit_at = 0
        """Number of measured steps at which the next fit is due."""
        self._curve: list[float] = []
        """Seconds at the knots; empty before the first fit."""
        self._slopes: list[float] = []
        self._any_row = self._row = self._key = self._pair = self._image_token = 0.0

    @property
    def known(self) -> bool:
        """Whether enough steps were measured or loaded for an estimate."""
        self._take_in()
        return self._enough

    def seconds(self, size: StepSize) -> float:
        """Returns the estimated seconds of a step; 0.0 if nothing is `known`."""
        if self.measured:
            self._take_in()
        if self._new >= self._fit_at and self._enough:
            self._fit()
        if not self._curve:
            return 0.0
        knot = min(size.tokens.bit_length(), OCTAVES + 1)
        seconds = self._curve[knot] + self._slopes[knot] * (size.tokens - (1 << knot >> 1))
        if size.logit_rows:
            seconds += self._any_row + self._row * size.logit_rows
        return seconds + self._key * size.keys + self._pair * size.pairs + self._image_token * size.image_tokens

    def rates(self, limits: Limits) -> tuple[float, float]:
        """Returns the seconds of a prompt token and of a completion token in full steps, without those for keys: rates to compare work by."""
        tokens, batch = limits.max_batch_tokens, limits.batch_size
        prefill = self.seconds(StepSize(2 * tokens, 0, 0, 0)) - self.seconds(StepSize(tokens, 0, 0, 0))
        return prefill / tokens, self.seconds(StepSize(batch, batch, 0, 0)) / batch

    def save(self) -> None:
        """Writes the steps to the file, if their number has grown by a quarter since the last time. Steps of the same kinds that others have
        written meanwhile give way. Does nothing where the file cannot be written.
        """
        self._take_in()
        if self.file is None or self._new <= self._saved * 5 // 4:
            return
        self._saved = self._new
        kinds = _by_kind(_stored(self.file)) | _by_kind(self._steps())
        steps = [[*size, round(seconds, 7)] for kind in kinds.values() for size, seconds in kind]
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replaced(self.file) as new:
                new.write_text(json.dumps(steps, separators=(",", ":")), encoding="utf-8")

    @property
    def _enough(self) -> bool:
        return sum(map(len, (*self._earlier.values(), *self._kinds.values()))) >= MIN_STEPS

    def _take_in(self) -> None:
        while self.measured:
            size, seconds = self.measured.popleft()
            if seconds > 0:
                _add(self._kinds, size, seconds)
                self._new += 1

    def _steps(self) -> Iterator[Step]:
        pace = self._pace()
        for kind in self._earlier | self._kinds:
            earlier = [(size, seconds * pace) for size, seconds in self._earlier.get(kind, ())]
            yield from [*earlier, *self._kinds.get(kind, ())][-KEPT:]

    def _pace(self) -> float:
        """Returns how many times as long as in earlier runs a step takes in this one, by the kinds of steps that ran in both."""
        steps = [step for kind in self._earlier.keys() & self._kinds.keys() for step in self._kinds[kind]]
        if not steps:
            return 1.0
        if self._costs_before is None:
            self._costs_before = _fitted([step for kind in self._earlier.values() for step in kind])
        sizes, seconds = zip(*steps, strict=True)
        pace = float(np.median(np.array(seconds) / np.maximum(_parts(sizes) @ self._costs_before, 1e-9)))
        return float(pace ** (self._new / (self._new + PACE_STEPS)))

    def _fit(self) -> None:
        self._fit_at = self._new * 3 // 2 + MIN_STEPS
        found = _fitted(list(self._steps()))
        curve = np.concatenate([[0.0], np.cumsum(found[1 : len(_KNOTS)] * np.diff(_KNOTS))]) + found[0]
        self._curve, self._slopes = curve.tolist(), [*found[1 : len(_KNOTS)].tolist(), float(found[len(_KNOTS) - 1])]
        self._any_row, self._row, self._key, self._pair, self._image_token = found[len(_KNOTS) :].tolist()


def _by_kind(steps: Iterable[Step]) -> Kinds:
    kinds: Kinds = {}
    for size, seconds in steps:
        _add(kinds, size, seconds)
    return kinds


def _add(kinds: Kinds, size: StepSize, seconds: float) -> None:
    """Adds a step to those of its kind, of which the newest stay."""
    kind = tuple(map(int.bit_length, size))
    steps = kinds.get(kind)
    if steps is None:
        steps = kinds[kind] = deque(maxlen=KEPT)
    steps.append((size, seconds))


def _fitted(steps: Sequence[Step]) -> Matrix:
    """Returns the costs of the parts of a step (`_parts`): least squares of relative errors, in which outliers count less and no part is negative."""
    sizes, seconds = zip(*steps, strict=True)
    measured = np.array(seconds)
    parts = _parts(sizes)
    estimates = measured + np.median(measured)  # at first, the small steps do not count more by far
    trust = np.ones(len(measured))
    found = np.zeros(parts.shape[1])
    for _ in range(ROUNDS):
        weights = np.sqrt(trust) / estimates
        found = _nonnegative(parts * weights[:, None], measured * weights, _stiffness(estimates, parts))
        estimates = np.maximum(parts @ found, 1e-9)
        errors = np.abs(measured / estimates - 1)
        limit = OUTLIER * max(float(np.median(errors)), 0.01)
        trust = np.minimum(1.0, limit / np.maximum(errors, 1e-9))
    return found


def _stored(file: Path | None) -> list[Step]:
    """Returns the steps in a file; none if one of them cannot be a step."""
    try:
        stored = [(StepSize(*size), float(seconds)) for *size, seconds in json.loads(file.read_bytes())] if file else []
    except (OSError, ValueError, TypeError):
        return []
    good = all(0 < s < math.inf and all(type(n) is int and 0 <= n < 1 << 60 for n in size) for size, s in stored)
    return stored if good else []


def _parts(sizes: Iterable[StepSize]) -> Matrix:
    """Returns, for each step, what the costs are multiplied with: 1, its tokens in each part of the curve, whether it has rows, rows, keys, pairs, tokens of images."""
    tokens, rows, keys, pairs, image_tokens = np.array(list(sizes), dtype=np.float64).T
    inside = [
        np.clip(tokens - low, 0, high - low) for low, high in zip(_KNOTS[:-1], [*_KNOTS[1:-1], np.inf], strict=True)
    ]
    return np.column_stack([np.ones(len(tokens)), *inside, rows > 0, rows, keys, pairs, image_tokens])


def _stiffness(estimates: Matrix, parts: Matrix) -> Matrix:
    """Returns equations that say that neighbouring parts of the curve have the same slope. The first part is the fixed cost of a forward."""
    count = len(_KNOTS) - 1
    tokens = parts[:, 1 : 1 + count].sum(axis=1)
    equations = np.zeros((count - 2, parts.shape[1]))
    for i in range(2, count):
        near = np.argmin(np.abs(np.log2(tokens + 1) - np.log2(_KNOTS[i])))
        scale = math.sqrt(STIFFNESS) * _KNOTS[i] / estimates[near]
        equations[i - 2, i], equations[i - 2, i + 1] = scale, -scale
    return equations


def _nonnegative(parts: Matrix, wanted: Matrix, stiffness: Matrix) -> Matrix:
    """Returns non-negative costs that nearly minimise the squared errors. What no step decides is small."""
    scales = np.sqrt((parts**2).sum(axis=0) + (stiffness**2).sum(axis=0)) + 1e-30
    scaled, stiff = parts / scales, stiffness / scales
    normal = scaled.T @ scaled + stiff.T @ stiff + RIDGE * np.eye(len(scales))
    right = scaled.T @ wanted
    free = np.ones(len(right), dtype=np.bool_)
    found: Matrix = np.zeros(len(right))
    while free.any():
        found[:] = 0.0
        found[free] = np.linalg.solve(normal[np.ix_(free, free)], right[free])
        worst = int(np.argmin(found))
        if found[worst] >= 0:
            break
        free[worst] = False
    found /= scales
    return found
