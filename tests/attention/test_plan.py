import numpy as np

from batchgen.attention.plan import PADDING, SharedPart, plan_attention, split_step
from support import simulation as sim


def blocks_of(plan):
    """The blocks that each chunk of queries reads in its causal part."""
    return [row[::4].tolist() for part in plan.causal for row in part.kv_indices // 4]


def test_a_node_is_one_shared_part_of_all_below_it_unless_it_is_too_small():
    root = sim.node(0, 12)
    spans = [sim.scheduled([0, 1, 2, 9 - i], 12 + i, 13 + i, root) for i in range(3)]
    plan = plan_attention(spans, 4, shared_reads=9)
    assert plan.shared == (SharedPart(block=0, num_blocks=3, q_start=0, q_end=3, position=0),)
    (causal,) = plan.causal
    assert causal.queries.tolist() == [[0], [1], [2]]
    assert causal.q_positions.tolist() == [[12], [13], [14]]
    assert causal.kv_indices.tolist() == [[36, 37, 38, 39], [32, 33, 34, 35], [28, 29, 30, 31]]
    assert causal.k_positions.tolist() == [[12, 13, 14, 15]] * 3
    plan = plan_attention(spans, 4, shared_reads=10)
    assert plan.shared == ()
    assert blocks_of(plan) == [[0, 1, 2, 9], [0, 1, 2, 8], [0, 1, 2, 7]]


def test_the_tail_of_a_node_belongs_to_its_children():
    """Each child has its own copy of the block in which a node ends: only whole blocks are shared."""
    root = sim.node(0, 10)
    spans = [sim.scheduled([0, 1, 9 - i], 11, 12, root) for i in range(2)]
    plan = plan_attention(spans, 4, shared_reads=1)
    assert plan.shared == (SharedPart(0, 2, 0, 2, 0),)
    assert blocks_of(plan) == [[9], [8]]
    assert plan.causal[0].k_positions[:, 0].tolist() == [8, 8]


def test_nested_nodes_are_parts_of_the_queries_below_each():
    root = sim.node(0, 8)
    left, right = sim.node(8, 16), sim.node(8, 12)
    spans = [
        sim.scheduled([0, 1, 2, 3, 20], 16, 17, root, left),
        sim.scheduled([0, 1, 2, 3, 21], 16, 17, root, left),
        sim.scheduled([0, 1, 4, 22], 12, 13, root, right),
        sim.scheduled([0, 1, 4, 23], 12, 13, root, right),
        sim.scheduled([24], 2, 3),
    ]
    plan = plan_attention(spans, 4, shared_reads=1)
    assert sorted(plan.shared, key=lambda p: (p.q_start, p.position)) == [
        SharedPart(0, 2, 0, 4, 0),
        SharedPart(2, 2, 0, 2, 8),
        SharedPart(4, 1, 2, 4, 8),
    ]
    assert blocks_of(plan) == [[20], [21], [22], [23], [24]]


def test_blocks_that_do_not_follow_one_another_are_parts_of_their_own():
    root = sim.node(0, 20)
    spans = [sim.scheduled([5, 6, 2, 3, 9, 11 + i], 20, 21, root) for i in range(2)]
    plan = plan_attention(spans, 4, shared_reads=1)
    assert plan.shared == (SharedPart(5, 2, 0, 2, 0), SharedPart(2, 2, 0, 2, 8), SharedPart(9, 1, 0, 2, 16))


def test_a_node_read_by_one_work_is_no_shared_part():
    root = sim.node(0, 8)
    plan = plan_attention([sim.scheduled([0, 1, 9], 8, 11, root)], 4, shared_reads=1)
    assert plan.shared == ()
    (causal,) = plan.causal
    assert causal.kv_indices.tolist() == [[*range(8), 36, 37, 38, 39]]
    assert causal.k_positions.tolist() == [list(range(12))]
    assert causal.queries.tolist() == [[0, 1, 2]]
    assert causal.q_positions.tolist() == [[8, 9, 10]]


def test_what_a_long_slice_has_behind_it_is_a_shared_part():
    spans = [sim.scheduled(list(range(10, 15)), 4, 17)]
    plan = plan_attention(spans, 4, shared_reads=8, causal_chunk=4)
    # chunks of 4, 4, 4 and 1 queries behind 1, 2, 3 and 4 blocks
    assert plan.shared == (SharedPart(10, 2, 4, 8, 0), SharedPart(10, 3, 8, 12, 0))
    keys = [row[: np.searchsorted(row, PADDING)].tolist() for part in plan.causal for row in part.k_positions]
    assert sorted(keys) == [[0, 1, 2, 3, 4, 5, 6, 7], [*range(20)], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_causal_batch_is_bounded_in_its_scores():
    spans = [sim.scheduled([i], 0, 4) for i in range(10)]
    plan = plan_attention(spans, 4, causal_scores=64)
    assert [part.queries.shape for part in plan.causal] == [(4, 4), (4, 4), (2, 4)]


def test_padding_is_never_attended_to():
    spans = [
        sim.scheduled([0, 1], 0, 8),
        sim.scheduled([2, 3], 0, 5),
    ]
    (causal,) = plan_attention(spans, 4).causal
    assert causal.queries.tolist() == [list(range(8)), [8, 9, 10, 11, 12, 13, 13, 13]]
    assert causal.q_positions[1].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_blocks_that_a_span_has_released_are_not_read():
    root = sim.node(0, 8)
    spans = [sim.scheduled([0, 1, 10 + i, 20 + i, 30 + i], 16, 17, root) for i in range(3)]
    for i, dropped in enumerate((1, 2, 3)):
        spans[i].span.dropped = dropped
    plan = plan_attention(spans, 4, shared_reads=100)
    assert plan.shared == ()
    read = [[block for block in blocks if block] for blocks in blocks_of(plan)]
    assert read == [[1, 10, 20, 30], [11, 21, 31], [22, 32]]
    of, firsts, ends = np.array(split_step(spans, 4, 100).chunks.ranges(4)).T
    assert (firsts < ends).all()
    assert of.tolist() == [0, 0, 1, 2]
