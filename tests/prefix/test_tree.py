from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prefix import plan_prefixes, resident_lengths
from batchgen.prefix.order import depth_first_order, neighbour_lengths

prompt_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=24)


def arrays(lists):
    return [np.array(ids, dtype=np.int32) for ids in lists]


def trie_of(lists):
    """Number of prompts that go through each edge of the token trie, an edge named by the path that ends with it."""
    return Counter(tuple(ids[:n]) for ids in lists for n in range(1, len(ids) + 1))


def test_without_sharing_there_are_no_nodes_but_the_least_is_still_known():
    prompts = arrays([[1, 2, 3], [1, 2], [1, 2, 3]])
    plan = plan_prefixes(prompts, 1, share=False)
    assert (plan.nodes, plan.groups, plan.leaf_parent.tolist()) == ((), 0, [-1, -1, -1])
    assert plan.order.tolist() == [1, 0, 2]
    assert (plan.prompt_tokens, plan.prefill_tokens_min) == (8, 3)


@given(prompt_lists)
def test_the_least_prefill_is_the_size_of_the_token_trie(lists):
    plan = plan_prefixes(arrays(lists), 2)
    own = sum(
        len(lists[index]) - (plan.nodes[parent].end if parent >= 0 else 0)
        for index, parent in zip(plan.order, plan.leaf_parent, strict=True)
    )
    assert plan.prefill_tokens_min == len(trie_of(lists))
    assert plan.prefill_tokens_min == sum(n.end - n.start for n in plan.nodes) + own
    assert plan.prompt_tokens == sum(map(len, lists))
    assert plan_prefixes(arrays(lists), 2, share=False).prefill_tokens_min == plan.prefill_tokens_min


@given(prompt_lists)
def test_every_shared_edge_of_the_trie_is_in_exactly_one_node_with_all_that_share_it(lists):
    plan = plan_prefixes(arrays(lists), 2)
    covered = Counter()
    for node in plan.nodes:
        below = [lists[i] for i in plan.order[node.first : node.last]]
        assert len({tuple(ids[: node.end]) for ids in below}) == 1
        for n in range(node.start + 1, node.end + 1):
            covered[tuple(below[0][:n])] += len(below)
    assert covered == {edge: count for edge, count in trie_of(lists).items() if count >= 2}


@given(prompt_lists)
def test_nodes_are_maximal_runs(lists):
    plan = plan_prefixes(arrays(lists), 2)
    trie = trie_of(lists)
    ends = {tuple(ids) for ids in lists}
    for node in plan.nodes:
        path = tuple(lists[plan.order[node.first]][: node.end])
        inside = [path[:n] for n in range(node.start + 1, node.end)]
        assert not ends.intersection(inside)
        assert {trie[edge] for edge in inside} <= {node.last - node.first}
        # At its end prompts part or one ends: no single child edge carries all of them on.
        assert all(trie[(*path, token)] < node.last - node.first for token in range(3))


@given(prompt_lists)
def test_nodes_are_in_depth_first_order_and_fit_their_parents(lists):
    plan = plan_prefixes(arrays(lists), 2)
    assert [n.index for n in plan.nodes] == list(range(len(plan.nodes)))
    places = [(n.first, n.depth) for n in plan.nodes]
    assert places == sorted(set(places))
    for node in plan.nodes:
        assert node.end > node.start
        assert node.last - node.first >= 2
        if node.parent < 0:
            assert (node.start, node.depth) == (0, 0)
            continue
        parent = plan.nodes[node.parent]
        assert parent.index < node.index
        assert (node.start, node.depth) == (parent.end, parent.depth + 1)
        assert parent.first <= node.first < node.last <= parent.last


@given(prompt_lists)
def test_the_leaf_parent_is_the_deepest_node_above_a_request(lists):
    plan = plan_prefixes(arrays(lists), 2)
    for position in range(len(lists)):
        above = [n for n in plan.nodes if n.first <= position < n.last]
        assert plan.leaf_parent[position] == max(above, key=lambda n: n.depth).index if above else -1


# -- the order of prompts


any_lists = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(any_lists, max_size=20), st.integers(1, 5), st.sampled_from([1, 30, 1000]))
def test_order_is_the_stable_sort_of_the_prompts_whatever_the_slice_of_the_keys(lists, min_width, key_tokens):
    order = depth_first_order(arrays(lists), max_key_tokens=key_tokens, min_key_width=min_width)
    assert order.tolist() == sorted(range(len(lists)), key=lists.__getitem__)


@given(st.lists(any_lists, max_size=20))
def test_neighbour_lengths_are_the_common_prefixes_of_neighbours(lists):
    prompts = arrays(lists)
    order = depth_first_order(prompts)
    ordered = sorted(lists)
    expected = [0]
    for a, b in pairwise(ordered):
        expected.append(max(n for n in range(len(a) + 1) if a[:n] == b[:n]))
    expected += [0] if lists else []
    assert neighbour_lengths(prompts, order).tolist() == expected


# -- what is resident


def common(a, b):
    return max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])


def residents(lists, paths):
    prompts = arrays(lists)
    return resident_lengths(plan_prefixes(prompts, 16), prompts, arrays(paths))


@given(prompt_lists, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), max_size=6))
def test_residents_are_the_longest_matches_over_all_requests(lists, paths):
    ordered = sorted(lists)
    expected = []
    for i, path in enumerate(paths):
        lengths = [common(path, ids) for ids in ordered]
        if max(lengths, default=0) > 0:
            expected.append((i, lengths.index(max(lengths)), max(lengths)))
    assert residents(lists, paths) == expected


def test_comparisons_grow_with_the_logarithm_of_the_requests():
    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            Counted.reads += 1
            return super().__getitem__(index)

    prompts = Counted(arrays([[i, i] for i in range(1024)]))
    plan = plan_prefixes(prompts, 16)
    Counted.reads = 0
    assert resident_lengths(plan, prompts, arrays([[700, 0]])) == [(0, 700, 1)]
    assert Counted.reads <= 2 * 11 + 2
