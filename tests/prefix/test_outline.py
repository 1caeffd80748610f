"""The outline of a prefix tree is the top of the tree that a plan of all prompts has, and sums of the rest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prefix import GroupSurvey, Outline, plan_prefixes
from support.prompts import NESTED

token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=30)


def outline_of(lists, nodes=99, text_tokens=99):
    outline = Outline(nodes, text_tokens)
    for ids in sorted(lists):
        outline.add(np.array(ids, dtype=np.int32))
    return outline.tree()


def told(tree):
    return [
        (
            n.parent,
            n.rows,
            n.ending_rows,
            n.tokens,
            n.saved_tokens,
            n.nodes_below,
            n.saved_below,
            n.text_tokens.tolist(),
        )
        for n in tree.nodes
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
    assert sorted((n.rows for n in tree.nodes), reverse=True) == rows[:max_nodes]
    for n in tree.nodes:  # whatever is above a listed node is listed, and its sums hold
        path, at = n.tokens, n.parent
        while at >= 0:
            assert tree.nodes[at].rows > n.rows
            path, at = path + tree.nodes[at].tokens, tree.nodes[at].parent
        below = [m for m in plan.nodes if m.end == path and m.last - m.first == n.rows]
        assert any(
            sum(1 for m in plan.nodes if p.first <= m.first and m.last <= p.last and m.start >= p.end) == n.nodes_below
            for p in below
        )


# -- all nodes as text


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=40), st.integers(1, 3), st.integers(1, 4))
def test_groups_are_those_of_the_plan_and_the_largest_are_kept(lists, chunk_size, most):
    plan = plan_prefixes([np.array(ids, dtype=np.int32) for ids in lists], chunk_size)
    survey, few = GroupSurvey(chunk_size, 99), GroupSurvey(chunk_size, most)
    for ids in sorted(lists):
        survey.add(np.array(ids, dtype=np.int32))
        few.add(np.array(ids, dtype=np.int32))
    groups = survey.end()
    assert (survey.groups, survey.grouped) == (len(plan.groups), sum(g.rows for g in plan.groups))
    assert {(g.hash, g.prefix_tokens, g.rows) for g in groups} == {
        (g.hash.hex(), g.prefix_tokens, g.rows) for g in plan.groups
    }
    saved = [group.rows * group.prefix_tokens for group in groups]
    assert saved == sorted(saved, reverse=True)
    assert [group.rows * group.prefix_tokens for group in few.end()] == saved[:most]
