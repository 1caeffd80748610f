"""What a survey tells of prompts that come one by one is what the plan of all of them would."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prefix import Survey, plan_prefixes
from support.prompts import NESTED


def survey_of(lists, *, chunk_size=1, nodes=99, groups=99):
    survey = Survey(chunk_size, nodes, groups)
    for ids in sorted(lists):
        survey.add(np.array(ids, dtype=np.int32))
    survey.end()
    return survey


def listed(lists, nodes):
    return [(n.level, n.tokens.tolist(), n.rows, n.saved_tokens) for n in survey_of(lists, nodes=nodes).largest_nodes()]


def test_all_nodes_are_listed_as_an_indented_tree():
    assert listed(NESTED, 9) == [
        (0, [1, 1], 6, 10),
        (1, [0], 2, 1),
        (1, [4, 4, 4, 4], 3, 8),
        (2, [1, 1, 1], 2, 3),
        (0, [5] * 5, 2, 5),
    ]


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
