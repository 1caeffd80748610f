from itertools import pairwise
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prefix import order as order_module
from batchgen.prefix.order import depth_first_order, neighbour_lengths, token_key

token_lists = st.lists(st.integers(0, 2), max_size=12)


def arrays(lists):
    return [np.array(ids, dtype=np.int32) for ids in lists]


def test_keys_compare_as_tokens_do():
    small, large, longer = arrays([[255], [256], [255, 0]])
    assert token_key(small) < token_key(longer) < token_key(large)


@given(st.lists(token_lists, max_size=20), st.integers(1, 5), st.sampled_from([1, 30, 1000]))
def test_order_is_the_stable_sort_of_the_prompts_whatever_the_slice_of_the_keys(lists, min_width, key_tokens):
    order = depth_first_order(arrays(lists), max_key_tokens=key_tokens, min_key_width=min_width)
    assert order.tolist() == sorted(range(len(lists)), key=lists.__getitem__)


def test_keys_cover_a_slice_of_the_prompts_at_a_time():
    rng = np.random.default_rng(0)
    lists = (rng.integers(0, 2, (200, 3)) * np.ones((200, 1), dtype=int)).tolist()
    prompts = arrays([[7] * 500 + [head] * 300 + tail for head, *tail in lists])
    widths = []

    def key(tokens):
        widths.append(len(tokens))
        return token_key(tokens)

    with patch.object(order_module, "token_key", key):
        order = depth_first_order(prompts, max_key_tokens=20_000).tolist()
    assert order == sorted(range(200), key=lists.__getitem__)
    assert widths[:200] == [100] * 200  # 20,000 / 200, after the 500 tokens that all share
    assert set(widths[200:]) == {2}  # the two heads' rests are skipped as well


@given(st.lists(token_lists, max_size=20))
def test_neighbour_lengths_are_the_common_prefixes_of_neighbours(lists):
    prompts = arrays(lists)
    order = depth_first_order(prompts)
    ordered = sorted(lists)
    expected = [0]
    for a, b in pairwise(ordered):
        expected.append(max(n for n in range(len(a) + 1) if a[:n] == b[:n]))
    expected += [0] if lists else []
    assert neighbour_lengths(prompts, order).tolist() == expected
