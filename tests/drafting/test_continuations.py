"""Continuations are found by the tokens before them, the most frequent ones first, in bounded memory."""

import numpy as np
import pytest

from batchgen.drafting.continuations import SURE, OutputIndex, OutputText, PromptText


def written(index: OutputIndex, *texts: list[int]) -> None:
    for tokens in texts:
        text = OutputText(np.array([], dtype=np.int32))
        text.tokens += tokens
        index.add(text, None)


def test_what_followed_in_another_output_is_found_by_its_last_tokens():
    index = OutputIndex()
    written(index, [1, 2, 3, 4, 5, 6])
    assert list(index.find(None, (2, 3))) == [4, 5, 6]
    assert list(index.find(None, (1, 2, 3, 4))) == [5, 6]
    assert list(index.find(None, (5, 6))) == list(index.find(None, (3, 2))) == []


def test_an_output_is_read_on_while_it_grows():
    index, text = OutputIndex(), OutputText(np.array([7, 8], dtype=np.int32))
    for token in (1, 2, 3, 1, 2):
        text.tokens.append(token)
        index.add(text, None)
    assert list(index.find(None, (7, 8))) == [1, 2, 3, 1, 2]
    assert list(index.find(None, (1, 2))) == [3, 1, 2]


@pytest.mark.parametrize("times", [1, 2, SURE + 2])
def test_the_most_frequent_continuation_stays_until_others_outweigh_it(times):
    index = OutputIndex()
    written(index, *[[1, 2, 3]] * times)
    for count in range(min(times, SURE)):
        assert list(index.find(None, (1, 2))) == [3], count
        written(index, [1, 2, 4])
    assert list(index.find(None, (1, 2))) == [4]


def test_the_entries_are_limited_and_those_used_last_stay():
    index = OutputIndex(max_entries=10)
    for start in range(0, 3000, 3):
        written(index, [start, start + 1, start + 2], [-1, -2, -3])
        assert len(index._new) + len(index._old) <= 20
    assert list(index.find(None, (-1, -2))) == [-3]
    assert list(index.find(None, (0, 1))) == []


def test_a_prompt_gives_what_follows_the_last_place_of_a_context():
    prompt = PromptText(np.array([5, 6, 1, 5, 6, 2, 9, 5, 6], dtype=np.int32))
    assert list(prompt.find((5, 6))) == [2, 9, 5, 6]  # not its end, which nothing follows
    assert list(prompt.find((6, 1, 5, 6))) == [2, 9, 5, 6]
    assert list(prompt.find((9, 9))) == []
    assert list(PromptText(np.array([], dtype=np.int32)).find((1, 2))) == []
    assert len(PromptText(np.array([1, 2, *range(50)], dtype=np.int32)).find((1, 2))) == 32


def test_only_whole_tokens_of_a_prompt_are_found():
    """The bytes of 1, 1 stand in the middle of other tokens."""
    shifted = [256, 256, 256, 7, 1, 1, 8, 256, 256, 256]
    assert list(PromptText(np.array(shifted, dtype=np.int32)).find((1, 1))) == [8, 256, 256, 256]
