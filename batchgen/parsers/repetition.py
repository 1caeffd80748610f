"""Finds completions that repeat the same tokens again and again, which a model rarely stops doing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

LONGEST = 256
"""Tokens of the longest pattern that is looked for."""
SHORTEST = 32
"""Minimum number of tokens of all repetitions together, so a short pattern has to come more often."""
_PATTERNS = np.arange(1, LONGEST + 1)


class Repetition:
    """Follows a completion token by token, and tells when it ends with one pattern `times` times in a row."""

    def __init__(self, times: int) -> None:
        self._enough = _matches_needed(times)
        self._tokens = np.full(4 * LONGEST, -1, dtype=np.int64)
        self._size = LONGEST
        self._matches = np.zeros(LONGEST, dtype=np.int64)
        """By length of a pattern less one: how many of the last tokens equal the one that many tokens before them."""

    def append(self, token: int) -> bool:
        """Takes the next token. Returns whether the completion repeats itself now."""
        if self._size == len(self._tokens):
            self._tokens[:LONGEST] = self._tokens[-LONGEST:]
            self._size = LONGEST
        before = self._tokens[self._size - LONGEST : self._size][::-1]
        self._matches = np.where(before == token, self._matches + 1, 0)
        self._tokens[self._size] = token
        self._size += 1
        return bool((self._matches >= self._enough).any())


@cache
def _matches_needed(times: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """By length of a pattern minus one: how many tokens must equal those one pattern earlier, so that it occurs often enough."""
    needed: np.ndarray[tuple[int], np.dtype[np.int64]] = np.maximum(_PATTERNS * (times - 1), SHORTEST - _PATTERNS)
    return needed


def repeats(tokens: Sequence[int], times: int) -> bool:
    """Whether a completion ends with one pattern `times` times in a row."""
    if len(tokens) < SHORTEST:
        return False
    whole = np.asarray(tokens[-LONGEST * times :], dtype=np.int64)
    enough = _matches_needed(times)
    before = whole[-1 - LONGEST : -1][::-1]
    for pattern in (np.flatnonzero(before == whole[-1]) + 1).tolist():  # the last token comes before the pattern, too
        start = len(whole) - int(enough[pattern - 1])
        if start >= pattern and np.array_equal(whole[start:], whole[start - pattern : len(whole) - pattern]):
            return True
    return False
