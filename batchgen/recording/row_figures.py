"""Sums over the rows of an output: lengths, reasons, errors, labels, scores, and a few rows of each kind as samples."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchgen.result import Result

SAMPLES = 4
"""Rows that are kept of each reason, and of each type of error."""
MAX_LABELS = 200
"""Number of labels that are counted one by one; all others are counted together."""
BINS = 40
SAMPLE_TEXT = 320
"""Characters that are kept of a text in a sample."""
_SAMPLE_ITEMS = 8


class RowFigures:
    """Counts rows one by one."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._prompts: Counter[int] = Counter()
        self._completions: Counter[int] = Counter()
        self._samples: dict[str, list[dict[str, Any]]] = {}
        self._thumbnails: dict[str, list[list[str]]] = {}
        self._labels: dict[str, _Label] = {}
        self._other_labels = 0
        self._scores: Counter[float] = Counter()
        self._greedy = 0
        self._rewards: Counter[float] = Counter()

    def add(
        self, result: Result, row: Callable[[], Mapping[str, Any]], thumbnails: Callable[[], list[str]] = list
    ) -> None:
        """Counts a result. `row` returns its row of the output, and `thumbnails` pictures of its images as URLs, for a row that becomes a sample."""
        reason = result.reason
        self._reasons[reason] += 1
        kind = reason
        if result.error_type is not None:
            self._errors[result.error_type] += 1
            kind = f"error: {result.error_type}"
        else:
            self._prompts[result.prompt_tokens] += 1
            if result.finish_reason is not None and result.choice_probs is None:
                self._completions[result.completion_tokens] += 1
        samples = self._samples.setdefault(kind, [])
        if len(samples) < SAMPLES:
            samples.append(shortened(row()))
            self._thumbnails.setdefault(kind, []).append(thumbnails())
        if result.choice_probs is not None:
            known = {name: value for name, value in result.choice_probs.items() if math.isfinite(value)}
            self._add_label(str(result.text), known)
        if result.score is not None:
            if math.isfinite(result.score.logprob):
                self._scores[_rounded(result.score.logprob / max(1, result.score.tokens))] += 1
            self._greedy += result.score.greedy
        if result.reward is not None and math.isfinite(result.reward):
            self._rewards[_rounded(result.reward)] += 1

    def _add_label(self, chosen: str, probs: Mapping[str, float]) -> None:
        if chosen not in self._labels and len(self._labels) >= MAX_LABELS:
            self._other_labels += 1
        else:
            self._labels.setdefault(chosen, _Label()).choose(probs.get(chosen, 0.0))
        for name, probability in probs.items():
            if name in self._labels or len(self._labels) < MAX_LABELS:
                self._labels.setdefault(name, _Label()).give(probability)

    def as_dict(self) -> dict[str, Any]:
        """Returns the sums as JSON."""
        labels = sorted(self._labels.items(), key=lambda item: -item[1].rows)
        return {
            "rows": self._reasons.total(),
            "reasons": dict(self._reasons.most_common()),
            "errors": dict(self._errors.most_common()),
            "samples": self._samples,
            "thumbnails": {kind: shown for kind, shown in self._thumbnails.items() if any(shown)},
            "prompt_tokens": histogram(self._prompts),
            "completion_tokens": histogram(self._completions),
            "labels": [label.as_dict(name) for name, label in labels],
            "other_labels": self._other_labels,
            "scores": histogram(self._scores, smallest_width=0.01),
            "scores_greedy": self._greedy,
            "rewards": histogram(self._rewards, smallest_width=0.01),
        }


class _Label:
    """Counts the rows of a label, and the probabilities that it was given."""

    def __init__(self) -> None:
        self.rows = self._offered = 0
        self._probability = self._probability_chosen = 0.0

    def choose(self, probability: float) -> None:
        self.rows += 1
        self._probability_chosen += probability

    def give(self, probability: float) -> None:
        self._offered += 1
        self._probability += probability

    def as_dict(self, name: str) -> dict[str, Any]:
        return {
            "label": _short_text(name),
            "rows": self.rows,
            "mean_probability": round(self._probability / max(1, self._offered), 6),
            "mean_probability_chosen": round(self._probability_chosen / self.rows, 6) if self.rows else None,
        }


def histogram(counts: Mapping[int, int] | Mapping[float, int], smallest_width: float = 1) -> dict[str, Any] | None:
    """Returns the histogram of values with their counts: at most `BINS` bins of equal width up to the 99th percentile, then one for the rest.

    Each bin is [from, to, count]; the last one includes its end. None if there is no value.
    """
    values = sorted(counts.items())
    if not values:
        return None
    total = sum(count for _, count in values)
    low, high = values[0][0], values[-1][0]
    end = _percentile(values, total, 0.99)
    if high - end <= (end - low) / 4:  # no long tail
        end = high
    width = _nice_width((end - low) / BINS, smallest_width)
    start = math.floor(low / width + 1e-9) * width
    last = int((end - start) / width + 1e-9)
    bins = [[round(start + i * width, 6), round(start + (i + 1) * width, 6), 0] for i in range(last + 1)]
    rest = 0
    for value, count in values:
        place = int((value - start) / width + 1e-9)
        if place <= last:
            bins[place][2] += count
        else:
            rest += count
    if rest:
        bins.append([bins[-1][1], high, rest])
    return {
        "count": total,
        "min": low,
        "max": high,
        "p50": _percentile(values, total, 0.5),
        "p99": _percentile(values, total, 0.99),
        "bins": bins,
    }


def _rounded(value: float) -> float:
    """A value to two decimals and four digits, so that a histogram has a bounded number of different values however many rows there are."""
    return float(f"{round(value, 2):.4g}")


def _percentile(values: Sequence[tuple[float, int]], total: int, part: float) -> float:
    """Returns the smallest value that is not below `part` of all values."""
    seen = 0
    for value, count in values:
        seen += count
        if seen >= part * total:
            return value
    return values[-1][0]


def _nice_width(width: float, smallest: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50… times `smallest` that is at least `width`."""
    found = smallest
    while True:
        for factor in (1, 2, 5):
            if found * factor >= width - 1e-9:
                return round(found * factor, 6)
        found *= 10


def shortened(value: Any, depth: int = 0) -> Any:
    """Returns a row of the output with long texts and lists cut, so that a person can look at it."""
    if isinstance(value, str):
        return _short_text(value)
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, bool | int) or value is None:
        return value
    if depth >= 3:
        return _short_text(json.dumps(value, default=str, ensure_ascii=False))
    if isinstance(value, Mapping):
        cut = {str(name): shortened(item, depth + 1) for name, item in list(value.items())[: 4 * _SAMPLE_ITEMS]}
        return cut | ({"…": f"{len(value) - len(cut):,} more"} if len(value) > len(cut) else {})
    if isinstance(value, list | tuple):
        items = [shortened(item, depth + 1) for item in value[:_SAMPLE_ITEMS]]
        return items + ([f"… {len(value) - len(items):,} more"] if len(value) > len(items) else [])
    return (
        shortened(value.tolist(), depth) if hasattr(value, "tolist") else _short_text(str(value))
    )  # an embedding is an array


def _short_text(text: str) -> str:
    """A long text without its middle: prompts of a job differ at their ends."""
    if len(text) <= SAMPLE_TEXT:
        return text
    head, tail = SAMPLE_TEXT // 4, SAMPLE_TEXT - SAMPLE_TEXT // 4
    return f"{text[:head]} … {len(text) - head - tail:,} characters … {text[-tail:]}"
