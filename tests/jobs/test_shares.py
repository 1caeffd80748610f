"""Where the sorted requests are cut into shares."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from batchgen.jobs.order.shares import PrefixCosts, Share, shard_bounds
from support.fakes import request


def cuts(costs: list[float], shared: list[int], shares: int, chunk_size: int = 1) -> list[int]:
    return shard_bounds(np.cumsum(np.array(costs)), np.array(shared, dtype=np.int32), shares, chunk_size)


def test_equal_requests_that_share_nothing_are_cut_into_equal_shares():
    assert cuts([1.0] * 12, [0] * 12, 4) == [3, 6, 9]


def test_a_cut_moves_to_the_nearest_end_of_a_group_within_its_slack():
    # 400 requests in groups of 10: the middle of the order, 205, would go through a group
    shared = [0 if i % 10 == 0 else 500 for i in range(410)]
    assert cuts([1.0] * 410, shared, 2) == [200]
    assert [place % 10 for place in cuts([1.0] * 410, shared, 3)] == [0, 0]


def test_a_few_tokens_that_neighbouring_groups_share_by_accident_do_not_move_a_cut():
    shared = [3 if i == 100 else 0 if i == 104 else 64 for i in range(200)]
    assert cuts([1.0] * 200, shared, 2, chunk_size=16) == [100]
    assert cuts([1.0] * 200, shared, 2, chunk_size=1) == [104]


def test_a_group_larger_than_a_share_is_cut():
    assert cuts([1.0] * 100, [0] + [64] * 99, 4) == [25, 50, 75]


def test_a_request_that_costs_more_than_all_others_gets_its_own_share():
    found = [0, *cuts([1.0, 1.0, 1000.0, 1.0], [0] * 4, 4), 4]
    assert found == sorted(found)


def test_more_shares_than_requests_leave_some_empty():
    found = [0, *cuts([1.0, 1.0], [0, 0], 5), 2]
    assert found == sorted(found)
    assert sum(b > a for a, b in pairwise(found)) == 2


def test_costs_count_a_shared_prefix_once_in_each_share(tmp_path):
    costs = PrefixCosts(tmp_path)
    costs.add([request(0, [1, 2, 3], max_tokens=1), request(1, [1, 2, 4], max_tokens=1)])
    costs.add([request(2, [1, 5, 6], max_tokens=1), request(3, [7, 8, 9], max_tokens=1)])
    assert costs.shares(1, 1) == [
        Share(0, 4, 25.0, 0)
    ]  # 12 tokens, of which 3 are shared, and 4 * 4 for one token each
    assert costs.shares(2, 1) == [Share(0, 2, 12.0, 0), Share(2, 4, 14.0, 1)]


def test_without_requests_all_shares_are_empty(tmp_path):
    assert PrefixCosts(tmp_path).shares(2, 16) == [Share(0, 0, 0.0, 0), Share(0, 0, 0.0, 0)]
