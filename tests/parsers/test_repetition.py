"""A completion that repeats itself is seen at the token at which its pattern stands there often enough, and never before."""

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.parsers.repetition import LONGEST, SHORTEST, Repetition, repeats


def ended_at(tokens: list[int], times: int) -> int | None:
    """The number of tokens at which the completion is ended."""
    follower = Repetition(times)
    return next((i for i, token in enumerate(tokens, 1) if follower.append(token)), None)


@pytest.mark.parametrize(
    ("pattern", "times", "needed"),
    [(100, 2, 200), (LONGEST, 3, 3 * LONGEST), (20, 3, 60), (1, 2, SHORTEST), (5, 4, SHORTEST)],
)
def test_it_is_seen_at_the_last_token_of_the_last_time(pattern, times, needed):
    before = list(range(1000, 1100))
    loop = list(islice(cycle(range(pattern)), 5 * LONGEST))
    assert ended_at(before + loop, times) == len(before) + needed
    assert repeats(before + loop[:needed], times)
    assert not repeats(before + loop[: needed - 1], times)


def test_a_pattern_that_is_longer_or_changes_is_none():
    assert ended_at(list(range(LONGEST + 1)) * 5, 2) is None
    changing = [token for i in range(30) for token in (*range(20), 100 + i)]
    assert ended_at(changing, 3) is None
    assert not repeats(changing, 3)


@given(st.lists(st.integers(0, 2), max_size=120), st.integers(2, 5))
def test_both_say_the_same_of_any_tokens(tokens, times):
    follower = Repetition(times)
    for i, token in enumerate(tokens, 1):
        assert follower.append(token) == repeats(tokens[:i], times)
