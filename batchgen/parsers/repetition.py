"""Finds completions that repeat the same tokens again and again, which a model rarely stops doing."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 256
"""Tokens of the longest pattern that is looked for."""
SHORTEST = 32
"""Minimum number of tokens of all repetitions together, so a short pattern has to come more often."""
_COMPARED_FIRST = 8  # the last tokens, which tell most patterns apart; there are always more to compare


def repeats(tokens: Sequence[int], times: int) -> bool:
    """Whether a completion ends with one pattern `times` times (two or more) in a row. Takes a constant time for most texts."""
    last = tokens[-_COMPARED_FIRST:]
    for pattern, token in enumerate(tokens[-2 : -2 - LONGEST : -1], 1):
        if token == last[-1] and tokens[-_COMPARED_FIRST - pattern : -pattern] == last:
            equal = max(pattern * (times - 1), SHORTEST - pattern)  # so many tokens equal those one pattern before
            if len(tokens) >= equal + pattern and tokens[-equal:] == tokens[-equal - pattern : -pattern]:
                return True
    return False
