"""The outline of a prefix tree is the top of the tree that a plan of all prompts has, and sums of the rest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prefix import Outline, Survey, plan_prefixes
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


def survey_of(lists, *, chunk_size=1, nodes=99, groups=99):
    survey = Survey(chunk_size, nodes, groups)
    for ids in sorted(lists):
        survey.add(np.array(ids, dtype=np.int32))
    survey.end()
    return survey


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=40), st.integers(1, 3), st.integers(1, 4))
def test_counts_nodes_and_groups_are_those_of_the_plan(lists, chunk_size, most):
    prompts = [np.array(ids, dtype=np.int32) for ids in lists]
    plan = plan_prefixes(prompts, chunk_size)
    survey = survey_of(lists, chunk_size=chunk_size)
    assert (survey.nodes, survey.groups) == (len(plan.nodes), len(plan.groups))
    assert survey.grouped == sum(g.rows for g in plan.groups)
    assert [(len(n.tokens), n.rows) for n in survey.largest_nodes()] == [
        (n.end - n.start, n.last - n.first) for n in plan.nodes
    ]
    saved = plan.prompt_tokens - plan.prefill_tokens_min
    assert sum(n.saved_tokens for n in survey.largest_nodes()) == saved
    assert {(g.hash, g.prefix_tokens, g.rows) for g in survey.largest_groups()} == {
        (g.hash.hex(), g.prefix_tokens, g.rows) for g in plan.groups
    }
    few = survey_of(lists, chunk_size=chunk_size, nodes=most, groups=most)
    every = sorted((n.saved_tokens for n in survey.largest_nodes()), reverse=True)
    assert sorted((n.saved_tokens for n in few.largest_nodes()), reverse=True) == every[:most]
