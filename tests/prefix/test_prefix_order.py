from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prefix.order import depth_first_order, neighbour_lengths

token_lists = st.lists(st.integers(0, 2), max_size=12)


def arrays(lists):
    return [np.array(ids, dtype=np.int32) for ids in lists]


@given(st.lists(token_lists, max_size=20), st.integers(1, 5), st.sampled_from([1, 30, 1000]))
def test_order_is_the_stable_sort_of_the_prompts_whatever_the_slice_of_the_keys(lists, min_width, key_tokens):
    order = depth_first_order(arrays(lists), max_key_tokens=key_tokens, min_key_width=min_width)
    assert order.tolist() == sorted(range(len(lists)), key=lists.__getitem__)


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
