"""The outline of a prefix tree is the top of the tree that a plan of all prompts has, and sums of the rest."""

import hashlib
from collections import Counter

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from batchgen.prefix import GroupSurvey, Outline, plan_prefixes
from batchgen.prefix.outline import prefix_hash

# Nodes: [0, 2) of 6 saves 10; [2, 3) of 2 saves 1; [2, 6) of 3 saves 8; [6, 9) of 2 saves 3; [0, 5) of 2 saves 5.
NESTED = [
    [1, 1, 0, 1], [1, 1, 0, 2], [1, 1, 4, 4, 4, 4, 1, 1, 1, 0], [1, 1, 4, 4, 4, 4, 1, 1, 1, 1],
    [1, 1, 4, 4, 4, 4, 2], [1, 1, 7], [5, 5, 5, 5, 5], [5, 5, 5, 5, 5],
]  # fmt: skip
token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=30)


def outline_of(lists, nodes=99):
    outline = Outline(nodes, 99)
    for ids in sorted(lists):
        outline.add(np.array(ids, dtype=np.int32))
    return outline.tree()


def told(tree):
    return [
        (parent, n.rows, n.ending_rows, n.tokens, n.saved_tokens, n.nodes_below, n.saved_below, text.tolist())
        for parent, n, text in tree.nodes
    ]


def test_every_node_is_listed_with_what_is_below_it():
    tree = outline_of(NESTED)
    assert (tree.rows, tree.prompt_tokens, tree.saved_tokens, tree.node_count, tree.lone_rows) == (8, 48, 27, 5, 0)
    assert told(tree) == [
        (-1, 6, 1, 2, 10, 3, 12, [1, 1]),
        (0, 2, 2, 1, 1, 0, 0, [0]),
        (0, 3, 1, 4, 8, 1, 3, [4, 4, 4, 4]),
        (2, 2, 2, 3, 3, 0, 0, [1, 1, 1]),
        (-1, 2, 2, 5, 5, 0, 0, [5] * 5),
    ]


@given(token_lists, st.integers(1, 6))
def test_the_outline_is_the_top_of_the_planned_tree(lists, max_nodes):
    prompts = [np.array(ids, dtype=np.int32) for ids in lists]
    plan = plan_prefixes(prompts, 4)
    tree = outline_of(lists, max_nodes)
    assert tree.node_count == len(plan.nodes)
    assert tree.prompt_tokens - tree.saved_tokens == plan.prefill_tokens_min
    assert tree.lone_rows == int((plan.leaf_parent == -1).sum())
    rows = sorted((node.last - node.first for node in plan.nodes), reverse=True)
    assert sorted((n.interval.rows for n in tree.nodes), reverse=True) == rows[:max_nodes]
    for at, n, _ in tree.nodes:  # whatever is above a listed node is listed, and its sums hold
        path = n.tokens
        while at >= 0:
            above = tree.nodes[at]
            assert above.interval.rows > n.rows
            path, at = path + above.interval.tokens, above.parent
        below = [m for m in plan.nodes if m.end == path and m.last - m.first == n.rows]
        assert any(
            sum(1 for m in plan.nodes if p.first <= m.first and m.last <= p.last and m.start >= p.end) == n.nodes_below
            for p in below
        )


# -- groups


@example([[0], [0], [1, 1], [1, 1]], 1, 4)  # the largest group comes last
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=20), st.integers(1, 4), st.integers(1, 4))
def test_groups_are_the_rows_with_the_same_longest_shared_prefix_of_whole_chunks(lists, chunk_size, most):
    prompts = [np.array(ids, dtype=np.int32) for ids in sorted(lists)]
    prefixes = [[tuple(ids[:n]) for n in range(chunk_size, len(ids) + 1, chunk_size)] for ids in sorted(lists)]
    holders = Counter(prefix for chain in prefixes for prefix in chain)
    deepest = [max((p for p in chain if holders[p] >= 2), key=len, default=None) for chain in prefixes]
    expected = Counter(prefix for prefix in deepest if prefix is not None)
    plan, survey, few = plan_prefixes(prompts, chunk_size), GroupSurvey(chunk_size, 99), GroupSurvey(chunk_size, most)
    for tokens in prompts:
        survey.add(tokens)
        few.add(tokens)
    groups = survey.end()
    assert {(g.hash, g.prefix_tokens, g.rows) for g in groups} == {
        (prefix_hash(np.array(prefix, dtype=np.int32), chunk_size).hex(), len(prefix), rows)
        for prefix, rows in expected.items()
    }
    counts = (len(expected), expected.total())
    assert (survey.groups, survey.grouped) == counts
    assert (plan.groups, plan.grouped_requests) == counts
    saved = [group.rows * group.prefix_tokens for group in groups]
    assert saved == sorted(saved, reverse=True)
    assert [group.rows * group.prefix_tokens for group in few.end()] == saved[:most]


def test_a_hash_is_blake2b_of_the_hash_before_and_the_little_endian_chunk():
    first = hashlib.blake2b(b"\x01\0\0\0\x02\0\0\0", digest_size=16).digest()
    second = hashlib.blake2b(first + b"\x03\0\0\0\x2c\x01\0\0", digest_size=16).digest()
    assert prefix_hash(np.array([1, 2, 3, 300], dtype=np.int32), 2) == second
