import numpy as np

from batchgen.attention.plan import PADDING, SharedPart, plan_attention
from batchgen.prefix import PrefixNode
from batchgen.scheduling.batch import ScheduledSpan
from batchgen.scheduling.sequence import AFTER_NODES, GenerationSequence, PrefixNodeSpan, WantedLogits
from support import simulation as sim


def node_span(table, start, end, parent=None):
    node = PrefixNode(0, -1, start, end, 0, 9, 0)
    path = (*parent.path, parent) if parent else ()
    return PrefixNodeSpan(
        window=0, place=(0, len(path)), parent=parent, start=start, table=table, computed=end, path=path,
        node=node, wanted=WantedLogits(), prompt=np.arange(end, dtype=np.int32),
    )  # fmt: skip


def sequence(sim, table, parent, at=0, prompt=50):
    (leaf,) = sim.make_leaves([range(prompt)], [9])
    start = parent.end if parent else 0
    return GenerationSequence(
        window=0, index=at, place=(at, AFTER_NODES), parent=parent, start=start, table=table, computed=start,
        path=(*parent.path, parent) if parent else (), leaf=leaf, stops=sim.Length(9),
    )  # fmt: skip


def decode(sim, table, parent, position, at=0):
    return ScheduledSpan(sequence(sim, table, parent, at), position, position + 1, position)


def test_a_node_is_one_shared_part_of_all_below_it():
    root = node_span([0, 1, 2], 0, 12)
    spans = [decode(sim, [0, 1, 2, 9 - i], root, 12 + i, i) for i in range(3)]
    plan = plan_attention(spans, 4, shared_reads=9)
    assert plan.shared == (SharedPart(block=0, num_blocks=3, q_start=0, q_end=3, position=0),)
    assert plan.paged.queries.tolist() == [0, 1, 2]
    assert plan.paged.blocks.tolist() == [9, 8, 7]
    assert plan.paged.lengths.tolist() == [1, 2, 3]
    assert plan.paged.positions.tolist() == [12, 12, 12]
    assert plan.causal == ()


def test_too_small_a_run_is_read_through_the_block_tables():
    root = node_span([0, 1, 2], 0, 12)
    spans = [decode(sim, [0, 1, 2, 9 - i], root, 12 + i, i) for i in range(3)]
    plan = plan_attention(spans, 4, shared_reads=10)
    assert plan.shared == ()
    assert plan.paged.blocks.tolist() == [0, 1, 2, 9, 0, 1, 2, 8, 0, 1, 2, 7]
    assert plan.paged.owners.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert plan.paged.lengths.tolist() == [4, 4, 4, 1, 4, 4, 4, 2, 4, 4, 4, 3]


def test_the_tail_of_a_node_belongs_to_its_children():
    """Each child has its own copy of the block in which a node ends: only whole blocks are shared."""
    root = node_span([0, 1, 2], 0, 10)
    spans = [decode(sim, [0, 1, 9 - i], root, 11, i) for i in range(2)]
    plan = plan_attention(spans, 4, shared_reads=1)
    assert plan.shared == (SharedPart(0, 2, 0, 2, 0),)
    assert plan.paged.blocks.tolist() == [9, 8]
    assert plan.paged.positions.tolist() == [8, 8]


def test_nested_nodes_are_parts_of_the_queries_below_each():
    root = node_span([0, 1], 0, 8)
    left, right = node_span([0, 1, 2, 3], 8, 16, root), node_span([0, 1, 4], 8, 12, root)
    spans = [
        decode(sim, [0, 1, 2, 3, 20], left, 16, 0),
        decode(sim, [0, 1, 2, 3, 21], left, 16, 1),
        decode(sim, [0, 1, 4, 22], right, 12, 2),
        decode(sim, [0, 1, 4, 23], right, 12, 3),
        decode(sim, [24], None, 2, 4),
    ]
    plan = plan_attention(spans, 4, shared_reads=1)
    assert sorted(plan.shared, key=lambda p: (p.q_start, p.position)) == [
        SharedPart(0, 2, 0, 4, 0),
        SharedPart(2, 2, 0, 2, 8),
        SharedPart(4, 1, 2, 4, 8),
    ]
    assert plan.paged.blocks.tolist() == [20, 21, 22, 23, 24]


def test_blocks_that_do_not_follow_one_another_are_parts_of_their_own():
    root = node_span([5, 6, 2, 3, 9], 0, 20)
    spans = [decode(sim, [5, 6, 2, 3, 9, 11 + i], root, 20, i) for i in range(2)]
    plan = plan_attention(spans, 4, shared_reads=1)
    assert plan.shared == (SharedPart(5, 2, 0, 2, 0), SharedPart(2, 2, 0, 2, 8), SharedPart(9, 1, 0, 2, 16))


def test_a_node_read_by_one_work_is_no_shared_part():
    root = node_span([0, 1], 0, 8)
    plan = plan_attention([ScheduledSpan(sequence(sim, [0, 1, 9], root), 8, 11, 10)], 4, shared_reads=1)
    assert plan.shared == ()
    (causal,) = plan.causal
    assert causal.kv_indices.tolist() == [[*range(8), 36, 37, 38, 39]]
    assert causal.k_positions.tolist() == [list(range(12))]
    assert causal.queries.tolist() == [[0, 1, 2]]
    assert causal.q_positions.tolist() == [[8, 9, 10]]


def test_what_a_long_slice_has_behind_it_is_a_shared_part():
    spans = [ScheduledSpan(sequence(sim, list(range(10, 15)), None), 4, 17, 16)]
    plan = plan_attention(spans, 4, shared_reads=8, causal_chunk=4)
    # chunks of 4, 4, 4 and 1 queries behind 1, 2, 3 and 4 blocks
    assert plan.shared == (SharedPart(10, 2, 4, 8, 0), SharedPart(10, 3, 8, 12, 0))
    assert plan.paged.queries.tolist() == [12]
    assert plan.paged.blocks.tolist() == [10, 11, 12, 13, 14]
    keys = [row[: np.searchsorted(row, PADDING)].tolist() for part in plan.causal for row in part.k_positions]
    assert sorted(keys) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_causal_batch_is_bounded_in_its_scores():
    spans = [ScheduledSpan(sequence(sim, [i], None, i), 0, 4, 3) for i in range(10)]
    plan = plan_attention(spans, 4, causal_scores=64)
    assert [part.queries.shape for part in plan.causal] == [(4, 4), (4, 4), (2, 4)]


def test_padding_is_never_attended_to():
    spans = [
        ScheduledSpan(sequence(sim, [0, 1], None, 0), 0, 8, 7),
        ScheduledSpan(sequence(sim, [2, 3], None, 1), 0, 5, 4),
    ]
    (causal,) = plan_attention(spans, 4).causal
    assert causal.queries.tolist() == [list(range(8)), [8, 9, 10, 11, 12, 13, 13, 13]]
    assert causal.q_positions[1].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
