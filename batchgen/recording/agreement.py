"""Compares results with the texts that the user expects: how many are right, which are taken for which, and how sure the model is of them.

Any number of rows is counted in bounded memory.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from batchgen.json_values import plain
from batchgen.records.jsonl import to_json
from batchgen.result import Result

MAX_PAIRS = 1_000
"""Pairs of an expected and a given text that are counted one by one; all others are counted together."""
BINS = 10
_PAIR_TEXT = 80
"""Characters that are kept of a text in a pair."""
_PUNCTUATION = " .,;:!?\"'`*“”‘’«»"
"""Characters at the ends of a text that do not change its meaning."""


class Agreement:
    """Counts the rows whose text is the one in a column. Blanks around a text do not count."""

    def __init__(self, column: str, names: Sequence[str] = ()) -> None:
        """`names` are those of the numbers in the column, if it holds the numbers of classes."""
        self._column, self._names = column, names
        self._correct = self._failed = self._missing = self._other_pairs = 0
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._bins = [[0, 0.0, 0] for _ in range(BINS)]
        """Rows, the sum of their probabilities, and how many of them are right, by the probability of the label that was given."""

    def add(self, result: Result, columns: Mapping[str, Any]) -> None:
        given = (result.text or "").strip()
        expected = self._text(columns.get(self._column), given)
        if result.failed:
            self._failed += 1
        elif not expected:
            self._missing += 1
        else:
            self._correct += given == expected
            pair = (expected[:_PAIR_TEXT], given[:_PAIR_TEXT])
            if pair in self._pairs or len(self._pairs) < MAX_PAIRS:
                self._pairs[pair] += 1
            else:
                self._other_pairs += 1
            probability = (result.choice_probs or {}).get(result.text or "")
            if probability is not None:
                found = self._bins[min(BINS - 1, int(probability * BINS))]
                for place, value in enumerate((1, probability, given == expected)):
                    found[place] += value

    def _text(self, value: Any, given: str) -> str:
        """Returns the expected text, empty for none; `given` if it is another way to write the same number, object or list. True and false are written as in `given`."""
        if value is None or value != value:  # NaN
            return ""
        if isinstance(value, bool) and given.lower() in ("true", "false"):
            return str(value).lower() if given.islower() else str(value).upper() if given.isupper() else str(value)
        if given not in self._names and _is_written(value, given):
            return given
        if isinstance(value, float | Decimal) and math.isfinite(value) and value.as_integer_ratio()[1] == 1:
            value = int(value)  # pandas has no whole numbers in a column with nulls
        value = plain(value)
        if _is_json_of(value, given):
            return given
        if isinstance(value, str):
            return value.strip()
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(self._names):
            return self._names[value].strip()
        return to_json(value).decode()

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts as JSON. `error` of the calibration is the expected calibration error (arXiv:1706.04599): the difference of mean
        probability and share of right rows in each of 10 bins of equal width, averaged over the rows. Shares are None without a row.
        """
        rows = self._pairs.total() + self._other_pairs
        return {
            "column": self._column,
            "rows": rows,
            "rows_right": self._correct,
            "accuracy": _share(self._correct, rows),
            "rows_failed": self._failed,
            "rows_without": self._missing,
            "confusion": [
                {"expected": expected, "given": given, "rows": count}
                for (expected, given), count in self._pairs.most_common()
            ],
            "confusion_other_rows": self._other_pairs,
            "calibration": self._calibration(),
        }

    def _calibration(self) -> dict[str, Any] | None:
        rows, total, correct = (sum(found[place] for found in self._bins) for place in range(3))
        if not rows:
            return None
        return {
            "rows": rows,
            "mean_probability": _share(total, rows),
            "accuracy": _share(correct, rows),
            "error": _share(sum(abs(found[1] - found[2]) for found in self._bins), rows),
            "bins": [
                {
                    "from": place / BINS,
                    "to": (place + 1) / BINS,
                    "rows": n,
                    "mean_probability": _share(total, n),
                    "accuracy": _share(right, n),
                }
                for place, (n, total, right) in enumerate(self._bins)
            ],
        }


def confusion_table(expect: Mapping[str, Any], max_labels: int) -> list[list[str]]:
    """Returns the table of `expect.confusion` line by line, names of labels first: a line for each expected label, a column for each given one.

    Empty if there are more labels.
    """
    pairs = {(pair["expected"], pair["given"]): pair["rows"] for pair in expect["confusion"]}
    labels = sorted({label for pair in pairs for label in pair})
    if len(labels) > max_labels or expect["confusion_other_rows"]:
        return []
    lines = [[one, *(f"{pairs.get((one, other), 0):,}" for other in labels)] for one in labels]
    return [["expected \\ given", *labels], *lines]


def other_spellings(expect: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Returns the wrong rows of `expect.confusion` whose expected text only differs in how it is written (`Yes`, `1.0`) from one that is given (`yes`, `1`).

    The keys are the expected and the given text, the most frequent pair first; the values are numbers of rows. A text that is expected as it is given is no
    other spelling.
    """
    pairs = expect["confusion"]
    expected, given = {pair["expected"] for pair in pairs}, {pair["given"] for pair in pairs}
    likeliest = {_as_read(pair["given"]): pair["given"] for pair in reversed(pairs)}
    counts: Counter[tuple[str, str]] = Counter()
    for pair in pairs:
        one, other = pair["expected"], pair["given"]
        if one not in given:  # such a row could not be right, whatever its answer
            other = likeliest.get(_as_read(one), one)
        elif other in expected or _as_read(one) != _as_read(other):
            continue
        if one != other:
            counts[one, other] += pair["rows"]
    return dict(counts.most_common())


def _as_read(text: str) -> str:
    """Returns what all spellings of a text have in common: without case, quotes and punctuation at its ends, and a number as a double."""
    core = text.casefold().strip(_PUNCTUATION) or text  # `!` is no other spelling of `?`
    try:
        return repr(float(core))
    except ValueError:
        return core


def _is_written(value: Any, text: str) -> bool:
    """Whether a text is one of the ways to write a number (`1`, `1.0` and `1.00`)."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return False
    try:
        return float(text) == value if isinstance(value, float) else Decimal(text) == value
    except (ValueError, InvalidOperation):
        return False


def _is_json_of(value: Any, text: str) -> bool:
    """Whether a text is the JSON of an object or a list, which may be JSON text too, whatever the blanks and the order of keys."""
    if not text.startswith(("{", "[")):
        return False
    try:
        return _is_same(json.loads(text), json.loads(value) if isinstance(value, str) else value)
    except (ValueError, RecursionError):
        return False


def _is_same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal. In Python, `True == 1`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole else None
