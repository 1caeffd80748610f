"""A completion that repeats itself is seen at the token at which its pattern stands there often enough, and never before."""

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.parsers.repetition import LONGEST, SHORTEST, repeats


def ended_at(tokens: list[int], times: int) -> int | None:
    """The number of tokens at which the completion is ended."""
    return next((i for i in range(1, len(tokens) + 1) if repeats(tokens[:i], times)), None)


@pytest.mark.parametrize(
    ("pattern", "times", "needed"),
    [(100, 2, 200), (LONGEST, 3, 3 * LONGEST), (20, 3, 60), (1, 2, SHORTEST), (5, 4, SHORTEST)],
)
def test_it_is_seen_at_the_last_token_of_the_last_time(pattern, times, needed):
    before = list(range(1000, 1100))
    loop = list(islice(cycle(range(pattern)), 5 * LONGEST))
    assert ended_at(before + loop, times) == len(before) + needed


def test_a_pattern_that_is_longer_or_changes_is_none():
    assert ended_at(list(range(LONGEST + 1)) * 5, 2) is None
    changing = [token for i in range(30) for token in (*range(20), 100 + i)]
    assert ended_at(changing, 3) is None


@given(st.lists(st.integers(0, 2), max_size=120), st.integers(2, 5))
def test_it_is_the_last_tokens_that_are_one_pattern_again_and_again(tokens, times):
    ends = (tokens[-max(pattern * times, SHORTEST) :] for pattern in range(1, LONGEST + 1))
    patterns = enumerate(ends, 1)
    assert repeats(tokens, times) == any(
        len(end) >= max(pattern * times, SHORTEST) and end[pattern:] == end[:-pattern] for pattern, end in patterns
    )
