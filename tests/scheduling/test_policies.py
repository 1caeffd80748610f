"""What the policies and the budgets do, step by step."""

from batchgen.scheduling.sequence import State
from batchgen.scheduling.waiting import POLICIES
from support import simulation as sim


def rows(step):
    return [w.span.request.row for w in step.spans if hasattr(w.span, "request")]


def test_fifo_starts_rows_in_input_order_and_prefix_in_depth_first_order():
    prompts = [[9], [1, 1, 1], [5], [1, 1, 2]]
    order = {}
    for policy in ("prefix", "fifo"):
        s = sim.Simulation(batch_size=1, policy=policy)
        s.load(prompts, [1] * 4)
        s.finish()
        order[policy] = [row for row, _ in s.done]
        assert s.prefilled == 1 + 2 + 1 + 1 + 1
    # Depth-first, the step that computes the node of rows 1 and 3 has room for row 2.
    assert order == {"prefix": [2, 1, 3, 0], "fifo": [0, 1, 2, 3]}


def test_fifo_keeps_a_margin_of_free_blocks():
    free = {}
    for policy in ("prefix", "fifo"):
        s = sim.Simulation(blocks=20, block_size=2, policy=policy)
        s.load([[n] * 3 for n in range(12)], [2] * 12)  # each needs two blocks and never more
        s.step()
        free[policy] = s.block_manager.pool.num_free
    assert POLICIES["fifo"].margin == 0.2
    assert free["fifo"] >= 0.2 * 20 > free["prefix"]


def test_only_prefill_first_runs_prompts_before_decoding():
    seen = {}
    for policy in ("prefix", "fifo", "prefill-first"):
        s = sim.Simulation(tokens=3, prefill=3, policy=policy)
        s.load([[1], [2] * 6], [9, 1])
        s.step()  # row 0 whole, and two tokens of row 1
        seen[policy] = [rows(s.step()) for _ in range(2)]
        s.finish()
    assert seen == {"prefix": [[0, 1], [0, 1]], "fifo": [[0, 1], [0, 1]], "prefill-first": [[1], [0, 1]]}


def test_sequences_take_turns_if_not_all_can_decode():
    s = sim.Simulation(block_size=2)
    s.load([[n, n] for n in range(3)], [6] * 3)
    s.step()
    s.scheduler.shrink(2)
    decoded = []
    while s.scheduler.unfinished:
        step = s.step()
        decoded.append([w.span.request.row for w in step.spans if w.start >= 2])
    counts = [sum(row in step for step in decoded[:9]) for row in range(3)]
    assert max(counts) - min(counts) <= 1
    assert s.rows == [0, 1, 2]


def test_lower_priorities_start_first_and_a_shared_prefix_still_runs_once():
    s = sim.Simulation(batch_size=1)
    s.load([[1, 1, 5], [1, 1, 6], [2], [1, 1, 7]], [2] * 4, priorities=[1, 0, -1, 1])
    s.finish()
    assert [row for row, _ in s.done] == [2, 1, 0, 3]
    assert s.prefilled == 2 + 3 + 1


def test_the_least_urgent_sequence_is_preempted_first():
    s = sim.Simulation(blocks=5, block_size=2)
    s.load([[1, 1], [2, 2]], [5, 5], priorities=[1, 0])
    preempted = []
    while s.scheduler.unfinished:
        preempted += [seq.request.row for seq in s.step().freed.sequences if seq.state is State.PREEMPTED]
    assert preempted == [0]
