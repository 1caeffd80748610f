from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prefix import Group, chunk_hashes, plan_prefixes


def arrays(lists):
    return [np.array(ids, dtype=np.int32) for ids in lists]


def prefix_hash(ids, chunk_size):
    return chunk_hashes(np.array(ids, dtype=np.int32), chunk_size)[-1]


def test_rows_of_an_outer_group_may_lie_around_an_inner_one():
    plan = plan_prefixes(arrays([[1, 0], [1, 5, 5], [1, 5, 5, 5], [1, 9]]), 1)
    assert plan.groups == (Group(prefix_hash([1], 1), 1, 2, 0, 4), Group(prefix_hash([1, 5, 5], 1), 3, 2, 1, 3))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=20), st.integers(1, 4))
def test_groups_are_those_of_the_prompts_chunk_hashes(lists, chunk_size):
    prompts = arrays(lists)
    plan = plan_prefixes(prompts, chunk_size)
    hashes = [chunk_hashes(prompts[i], chunk_size) for i in plan.order]
    holders = defaultdict(list)
    for position, chain in enumerate(hashes):
        for h in chain:
            holders[h].append(position)
    members = defaultdict(list)
    for position, chain in enumerate(hashes):
        shared = [h for h in chain if len(holders[h]) >= 2]
        if shared:
            members[shared[-1]].append(position)
    expected = []
    for h, rows in members.items():
        first, last = holders[h][0], holders[h][-1] + 1
        assert holders[h] == list(range(first, last))
        expected.append(Group(h, (hashes[rows[0]].index(h) + 1) * chunk_size, len(rows), first, last))
    assert plan.groups == tuple(sorted(expected, key=lambda g: (g.first, g.prefix_tokens)))
