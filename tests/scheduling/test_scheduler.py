import heapq
from types import SimpleNamespace

import pytest

from batchgen.prefix import plan_prefixes
from batchgen.scheduling import scheduler
from batchgen.scheduling import waiting as waiting_module
from batchgen.scheduling.sequence import PrefixNodeSpan, State
from support import simulation as sim

ROOT = list(range(10, 15))


def names(step):
    """The spans of a step as (name, start, stop), where n0 is node 0 and r1 is row 1."""
    return [
        (f"n{w.span.node.index}" if isinstance(w.span, PrefixNodeSpan) else f"r{w.span.request.row}", w.start, w.stop)
        for w in step.spans
    ]


def test_spans_run_in_depth_first_order_and_a_node_before_its_children():
    s = sim.Simulation()
    s.load([[1, 2, 2, 5], [1, 2, 2, 4], [1, 3, 3, 5], [1, 3, 3, 4], [0]], [1] * 5)
    assert names(s.step()) == [("r4", 0, 1), ("n0", 0, 1)]
    assert names(s.step()) == [("n1", 1, 3), ("n2", 1, 3)]
    assert names(s.step()) == [("r1", 3, 4), ("r0", 3, 4), ("r3", 3, 4), ("r2", 3, 4)]
    assert s.scheduler.unfinished == 0


def test_a_long_node_is_prefilled_in_slices_while_others_decode():
    s = sim.Simulation(tokens=4, prefill=3, batch_size=4)
    long = [9] * 8
    s.load([[1], [*long, 1], [*long, 2]], [6, 1, 1])
    assert names(s.step()) == [("r0", 0, 1), ("n0", 0, 2)]
    assert names(s.step()) == [("r0", 1, 2), ("n0", 2, 5)]
    assert names(s.step()) == [("r0", 2, 3), ("n0", 5, 8)]
    assert names(s.step()) == [("r0", 3, 4), ("r1", 8, 9), ("r2", 8, 9)]
    s.finish()
    assert s.prefilled == 11


def test_prompts_that_end_at_a_node_sample_from_its_logits_without_a_forward():
    s = sim.Simulation()
    s.load([ROOT, ROOT, [*ROOT, 7]], [2, 1, 1])
    first = s.step()
    assert (names(first), [(w.logits < w.stop) for w in first.spans]) == ([("n0", 0, 5)], [True])
    second = s.step()
    assert names(second) == [("r2", 5, 6)]
    assert [sample.sequence.request.row for sample in second.samples] == [2, 0, 1]
    assert names(s.step()) == [("r0", 5, 6)]
    assert s.prefilled == 6


def test_prompts_that_end_at_a_node_start_in_a_step_whose_prompt_tokens_are_used_up():
    s = sim.Simulation(prefill=6)
    s.load([ROOT, ROOT, [20] * 30], [2, 2, 1])
    assert names(s.step()) == [("n0", 0, 5), ("r2", 0, 1)]
    second = s.step()
    assert names(second) == [("r2", 1, 7)]
    assert [sample.sequence.request.row for sample in second.samples] == [0, 1]


@pytest.mark.parametrize(("blocks", "starts"), [(8, False), (9, True)])
def test_a_node_starts_beside_others_if_twice_what_follows_it_and_half_of_what_they_need_stay_free(blocks, starts):
    s = sim.Simulation(blocks=blocks, block_size=1)
    s.load([[1], [5, 5, 5, 5, 1], [5, 5, 5, 5, 2]], [6, 1, 1])
    assert (("n0", 0, 4) in names(s.step())) is starts
    s.finish()
    assert s.scheduler.counts.preemptions == 0


@pytest.mark.parametrize(("state_slots", "starts"), [(6, False), (7, True)])
def test_a_node_starts_beside_another_if_all_that_follows_can_have_state_slots(state_slots, starts):
    s = sim.Simulation(state_slots=state_slots, batch_size=4)
    s.load([[1, 1, 1], [1, 1, 2], [5, 5, 1], [5, 5, 2]], [1] * 4)
    assert names(s.step()) == [("n0", 0, 2), ("n1", 0, 2)][: 1 + starts]
    s.finish()


def test_a_node_takes_blocks_only_in_the_first_step_that_runs_it():
    s = sim.Simulation(tokens=4, prefill=2, batch_size=4, block_size=1)
    prompts = [[n] * 12 + [last] for n in range(1, 5) for last in (90, 91)]
    s.load(prompts, [1] * 8)
    for _ in range(3):  # node 0 takes six steps
        s.step()
    assert [b.node.index for b in s.scheduler.prefilling] == [0]
    assert s.block_manager.pool.num_used == 12


def test_the_newest_sequence_is_preempted_and_resumes_with_its_tokens():
    s = sim.Simulation(blocks=5, block_size=2)
    s.load([[1, 1], [2, 2]], [5, 5])  # 3 blocks each in the end
    preempted = []
    while s.scheduler.unfinished:
        step = s.step()
        preempted += [(q.request.row, [*q.generated]) for q in step.freed.sequences if q.state is State.PREEMPTED]
    assert preempted == [(1, [1007, 1008, 1009])]
    assert s.done == {(0, 0): [1000, 1001, 1002, 1003, 1004], (1, 0): [1007, 1008, 1009, 1010, 1000]}
    assert (s.scheduler.counts.preemptions, s.prefilled, s.recomputed) == (1, 6, 2)
    assert s.block_manager.pool.num_used == 0


@pytest.mark.parametrize(("policy", "again"), [("prefix", 0), ("fifo", 10)])
def test_every_request_finishes_if_it_fits_alone_and_evicted_nodes_are_computed_again(policy, again):
    s = sim.Simulation(blocks=4, block_size=2, policy=policy)
    one, other = [5, 5, 5, 6, 6], [7, 7, 7, 8, 8]
    plan = s.load([[*one, 1, 1], [*other, 2, 2], [*one, 9], [*other, 8]], [2, 2, 1, 1])
    s.finish(max_steps=200)
    assert s.rows == [0, 1, 2, 3]
    assert s.prefilled == plan.prefill_tokens_min + again


def test_a_node_frees_its_blocks_if_all_its_rows_are_cancelled_during_prefill():
    s = sim.Simulation(blocks=20, block_size=1, prefill=3)
    s.load([[*range(9), 1], [*range(9), 2]], [2, 2])
    s.step()
    (node,) = s.scheduler.prefilling
    assert (node.end, node.computed, s.block_manager.pool.num_free) == (9, 3, 11)
    s.cancel(0)
    s.cancel(1)
    assert (s.scheduler.unfinished, list(s.scheduler.prefilling), s.block_manager.pool.num_free) == (0, [], 20)


def test_a_node_that_starts_again_does_not_overtake_rows_that_have_waited_longer():
    """Row 5 needs the root again while rows 3 and 4 wait for a node that leaves no room for it. Rows 3 and 4 come first."""
    s = sim.Simulation(blocks=8, block_size=3, batch_size=2, tokens=3, prefill=2)
    path = list(range(100, 119))
    prompts = [
        [*path[:1], 1, 1, 1, 1], path[:4], [*path[:8], 3, 3], [*path, 4], [*path, 5], [*path[:6], *[200] * 10],
    ]  # fmt: skip
    s.load(prompts, [2, 5, 4, 4, 4, 5])
    s.finish(max_steps=500)
    assert s.rows == [0, 1, 2, 3, 4, 5]


def test_abandoning_keeps_only_complete_nodes():
    s = sim.Simulation(block_size=1, tokens=8, batch_size=4)
    s.load([[*ROOT, 1], [*ROOT, 2], [20] * 12 + [1], [20] * 12 + [2]], [9] * 4)
    s.step()
    s.step()
    s.scheduler.abandon()
    s.check()
    assert [b.tokens(0, b.end).tolist() for b in s.block_manager.cached] == [ROOT]
    assert s.block_manager.pool.num_used == 5
    assert s.scheduler.unfinished == 0
    s.load([[*ROOT, 3]], [1])
    s.finish()


@pytest.mark.parametrize("abandoned", [False, True])
def test_cached_nodes_keep_no_logits(abandoned):
    s = sim.Simulation(batch_size=1)
    s.load([ROOT, ROOT, [*ROOT, 1]], [3, 3, 3])
    s.step()
    (node,) = s.block_manager.live
    assert list(s.node_logits) == [node]
    s.scheduler.abandon() if abandoned else s.finish()
    assert list(s.block_manager.cached) == [node]
    s.free(s.scheduler.take_freed())
    assert s.node_logits == {}


@pytest.mark.parametrize(("ended", "rows", "prefilled"), [([1], [0, 2], 4), ([0, 1, 2], [], 0)])
def test_requests_that_do_not_fit_are_never_run_nor_a_node_of_such_alone(ended, rows, prefilled):
    s = sim.Simulation()
    leaves = sim.make_leaves([[1, 1, 5], [1, 1, 6], [1, 1, 7]], [1, 1, 1])
    plan = plan_prefixes([leaf.tokens for leaf in leaves], 16)
    s.scheduler.load(leaves, plan, ended=ended)
    assert s.scheduler.unfinished == len(rows)
    s.finish()
    assert (s.rows, s.prefilled) == (rows, prefilled)


def heap_calls(monkeypatch, waiting):
    calls = []
    real = {name: getattr(heapq, name) for name in ("heappush", "heappop")}
    fake = SimpleNamespace(**{n: lambda *a, n=n: (calls.append(n), real[n](*a))[1] for n in real})
    s = sim.Simulation(batch_size=8, block_size=2)
    leaves = sim.make_leaves([[50, n] for n in range(waiting)], [2] * waiting)
    plan = plan_prefixes([leaf.tokens for leaf in leaves], 16)
    s.scheduler.load([leaves[i] for i in plan.order], plan)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "heapq", fake)
        patch.setattr(waiting_module, "heapq", fake)
        for _ in range(20):
            s.step()
    return len(calls), len(s.scheduler.queue.heap)


def test_the_cost_of_a_step_does_not_depend_on_how_many_requests_wait(monkeypatch):
    few, many = (heap_calls(monkeypatch, waiting) for waiting in (1_000, 5_000))
    assert few == many
    assert 0 < few[0] < 20 * 8 * 6
