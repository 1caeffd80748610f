import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from batchgen.prefix import PrefixNode, plan_prefixes
from batchgen.scheduling.block_manager import BlockManager
from batchgen.scheduling.block_pool import BlockPool
from batchgen.scheduling.sequence import AFTER_NODES, GenerationSequence, WantedLogits
from batchgen.scheduling.waiting import POLICIES, Window
from support import simulation as sim


@pytest.fixture
def memory():
    manager = BlockManager(BlockPool(20), block_size=4)
    manager.windows[-1] = SimpleNamespace(depth_first=True)
    manager.peak_unshared_blocks = 20  # earlier rows have needed so many, so idle nodes may stay
    return manager


def node(start, end, index=0, parent=-1):
    return PrefixNode(index, parent, start, end, 0, 2, 0)


def window(start, end, parent=None):
    """A window with one node, whose parent belongs to another window."""
    leaf = SimpleNamespace(tokens=np.arange(100, dtype=np.int32), request=SimpleNamespace(images=()))
    return SimpleNamespace(
        number=-1, plan=SimpleNamespace(nodes=[node(start, end, 0, -1 if parent is None else 1)]), leaves=[leaf],
        wanted=[WantedLogits()], node_span=lambda n: parent, place=lambda item: (0, 0),
    )  # fmt: skip


def computed_node(memory, start, end, parent=None):
    """A node whose tokens have been computed."""
    node_span = memory.open_node(window(start, end, parent), 0, 0)
    node_span.computed = node_span.end
    return node_span


def sequence(prompt, length, at=0):
    (leaf,) = sim.make_leaves([range(prompt)], [length])
    return GenerationSequence(
        window=-1, place=(at, AFTER_NODES), parent=None, start=0, table=[], computed=0, leaf=leaf, index=at,
        stops=sim.Length(length),
    )  # fmt: skip


def check(memory, *spans):
    memory.pool.check(span.table for span in [*spans, *memory.cached])


def test_a_node_takes_a_run_of_blocks_and_a_sequence_takes_blocks_from_the_other_end(memory):
    node_span = computed_node(memory, 0, 10)
    seq = sequence(9, 1)
    assert memory.open_sequence(seq, None, reserve=None)
    assert (node_span.table, seq.table) == ([0, 1, 2], [19, 18, 17])
    assert (seq.start, seq.computed) == (0, 0)


def test_the_first_sequence_writes_into_its_nodes_last_block_and_the_others_copy_it(memory):
    node_span = computed_node(memory, 0, 10)
    first, second, third = (sequence(13, 1, i) for i in range(3))
    for seq in (first, second, third):
        assert memory.open_sequence(seq, node_span, reserve=0)
        assert (seq.start, seq.computed) == (10, 10)
    assert [s.table for s in (first, second, third)] == [[0, 1, 2, 19], [0, 1, 18, 17], [0, 1, 16, 15]]
    assert memory.has_tail_writer(node_span)
    assert memory.take_copies() == ((2, 18), (2, 16))
    assert memory.take_copies() == ()
    check(memory, node_span, first, second, third)


def test_a_node_that_ends_at_the_end_of_a_block_has_no_tail_to_copy(memory):
    node_span = computed_node(memory, 0, 8)
    first, second = (sequence(9, 1, i) for i in range(2))
    memory.open_sequence(first, node_span, reserve=0)
    memory.open_sequence(second, node_span, reserve=0)
    assert (first.table, second.table, memory.take_copies()) == ([0, 1, 19], [0, 1, 18], ())
    assert not memory.has_tail_writer(node_span)


@pytest.mark.parametrize(("between", "table", "copies"), [(0, [0, 1, 2, 3], ()), (4, [0, 3, 4, 5], ((1, 3),))])
def test_a_node_with_blocks_of_its_own_has_them_in_one_run_with_its_parents_tail(memory, between, table, copies):
    """The parent reads its last tokens from the copy in the node's block and keeps no block for them alone."""
    parent = computed_node(memory, 0, 6)
    after = computed_node(memory, 0, between)
    child = computed_node(memory, 6, 13, parent)
    assert (parent.table, child.table) == (table[:2], table)
    assert (memory.take_copies(), memory.has_tail_writer(parent)) == (copies, True)
    check(memory, parent, after, child)


def test_nothing_is_taken_when_memory_is_short(memory):
    node_span = computed_node(memory, 0, 60)
    seq = sequence(90, 1)
    assert not memory.open_sequence(seq, node_span, reserve=None)
    assert memory.open_node(window(60, 90, node_span), 0, 0) is None
    assert (seq.table, memory.pool.num_used, memory.has_tail_writer(node_span)) == ([], 15, False)
    assert memory.take_copies() == ()


def test_the_least_recently_used_idle_node_is_evicted_first(memory):
    old, new = computed_node(memory, 0, 32), computed_node(memory, 0, 32)
    memory.retire(old)
    memory.retire(new)
    seq = sequence(24, 1)
    assert memory.open_sequence(seq, None, reserve=None)
    assert (old.evicted, new.evicted, list(memory.cached)) == (True, False, [new])
    check(memory, seq)


def test_half_of_the_blocks_that_running_sequences_may_still_need_stays_free():
    memory = BlockManager(BlockPool(15), block_size=4)
    first, second, third = (sequence(4, 37, i) for i in range(3))  # 1 block now, 10 in the end
    assert memory.open_sequence(first, None, reserve=None)
    assert memory.open_sequence(second, None, reserve=0)  # 13 free, 9 must stay free
    assert not memory.open_sequence(third, None, reserve=0)  # 12 would be free, 13 must stay free
    assert memory.pool.num_used == 2


@pytest.mark.parametrize(
    ("peak", "reserve", "room"), [(3, 0, 0), (4, 0, 4), (5, 0, 6), (20, 0, 6), (20, 16, 4), (20, 17, 0)]
)
def test_drafts_get_blocks_that_would_stay_free_and_evict_no_node(memory, peak, reserve, room):
    kept, seq = cached_node(memory, 8), sequence(4, 30)  # 3 of 20 blocks
    assert memory.open_sequence(seq, None, reserve=None)
    memory.peak_unshared_blocks = peak
    assert memory.room_for_drafts(seq, 6, reserve) == room
    assert len(seq.table) == memory.blocks_for(4 + room)
    assert not kept.evicted
    check(memory, seq)
    memory.evict_all()
    memory.peak_unshared_blocks = 0
    assert memory.room_for_drafts(seq, 6, 0) == 6  # without sharing they would take these blocks too


# -- across windows


def load_window(memory, prompts):
    leaves = sim.make_leaves(prompts, [1] * len(prompts))
    plan = plan_prefixes([leaf.tokens for leaf in leaves], 16)
    later = Window([leaves[i] for i in plan.order], plan, POLICIES["prefix"], len(memory.windows))
    memory.add_window(later)
    return later


def cached_node(memory, end):
    node_span = computed_node(memory, 0, end)
    memory.retire(node_span)
    return node_span


@pytest.mark.parametrize(
    ("cached", "shared", "begins", "computed", "table", "copies"),
    [
        ([11], 9, [], 9, [0, 1, 3], ((2, 3),)),  # full blocks are shared, the block that is used in part is copied
        ([6], 9, [], 6, [0, 2, 3], ((1, 2),)),  # a longer node continues from the end of the cached one
        ([4, 16, 8], 16, [], 16, [1, 2, 3, 4], ()),  # the longest match
        ([8], 7, [90], 0, [2, 3], ()),  # other tokens
    ],
)
def test_a_later_window_reuses_a_node_exact_to_the_token(memory, cached, shared, begins, computed, table, copies):
    for end in cached:
        cached_node(memory, end)
    prompt = [*begins, *range(len(begins), len(begins) + shared)]
    node_span = memory.open_node(load_window(memory, [[*prompt, 50], [*prompt, 60]]), 0, 0)
    assert (node_span.end, node_span.computed, node_span.table) == (len(prompt), computed, table)
    assert memory.take_copies() == copies
    check(memory, node_span)


def test_the_last_token_of_a_cached_node_is_run_again_if_a_prompt_ends_there(memory):
    cached_node(memory, 8)
    node_span = memory.open_node(load_window(memory, [range(8), range(8)]), 0, 0)
    assert (node_span.computed, node_span.end) == (7, 8)


def test_a_node_is_not_evicted_to_make_room_for_the_node_that_reuses_it():
    memory = BlockManager(BlockPool(5), block_size=4)
    memory.peak_unshared_blocks = 5
    kept, other = cached_node(memory, 11), cached_node(memory, 8)
    later = load_window(memory, [[*range(10), 50], [*range(10), 60]])
    memory.cached[other] = memory.cached.pop(other)  # the node to reuse is now the first to be evicted
    node_span = memory.open_node(later, 0, 0)
    assert (node_span.computed, kept.evicted, other.evicted) == (10, False, True)
    check(memory, node_span)


@pytest.mark.parametrize(
    ("prompts", "prefilled", "ends", "blocks"),
    [
        ([[*range(4), 50], [*range(4), 60]], 4 + 5 * 2, [4], 2),
        ([[*range(5), 50], [*range(5), 60]], 5 + 5 * 2, [5], 3),
        ([[*range(9), 50], [*range(9), 60], [*range(5), 50], [*range(5), 60]], 9 + 5 * 4, [5, 9], 5),
        ([range(5), range(5), [*range(5), 60]], 5 + 1 + 4 * (1 + 1), [5], 3),  # a last token runs again for its logits
    ],
)
def test_prefixes_that_all_windows_share_are_kept_once(prompts, prefilled, ends, blocks):
    """Otherwise each window of a long job would add a node to keep and to match."""
    s = sim.Simulation(block_size=2)
    for _ in range(5):
        s.load(prompts, [1] * len(prompts))
        s.finish()
    assert s.prefilled == prefilled
    assert sorted(b.end for b in s.block_manager.cached) == ends
    assert s.block_manager.pool.num_used == blocks


def test_a_longer_node_is_kept_beside_a_shorter_one_that_reuses_part_of_it(memory):
    kept = cached_node(memory, 11)
    later = load_window(memory, [[*range(9), 50], [*range(9), 60]])
    node_span = memory.open_node(later, 0, 0)
    memory.retire(node_span)
    assert list(memory.cached) == [kept, node_span]


def test_waiting_windows_all_reuse_the_node_of_an_earlier_one():
    """The first of them replaces the node that all of them match."""
    s = sim.Simulation(block_size=2)
    s.load([[*range(5), 50], [*range(5), 60]], [1, 1])
    s.finish()
    for i in range(4):
        s.load([[*range(5), 70 + i], [*range(5), 80 + i]], [1, 1])
    s.finish()
    assert s.prefilled == 5 + 5 * 2


def test_a_node_that_is_still_being_computed_is_reused_up_to_where_it_is(memory):
    cached_node(memory, 8)
    first, second = (load_window(memory, [range(8), range(8)]) for _ in range(2))
    replacing = memory.open_node(first, 0, 0)
    assert (replacing.computed, len(memory.cached)) == (7, 0)
    replacing.computed = 6
    assert memory.open_node(second, 0, 0).computed == 6


def test_the_number_of_idle_nodes_is_limited():
    """Otherwise a long file would fill the pool with nodes that nobody needs again."""
    s = sim.Simulation(block_size=2)
    s.block_manager.max_cached_nodes, s.block_manager.peak_unshared_blocks = 3, 100
    for first in range(0, 100, 10):
        s.load([[first, *range(5), 50], [first, *range(5), 60]], [1, 1])
        s.finish()
    assert len(s.block_manager.cached) == 3
    s.load([[90, *range(5), 70]], [1])
    s.finish()
    assert s.prefilled == 10 * (6 + 2) + 1


@pytest.mark.parametrize("abandoned", [False, True])
def test_cached_nodes_keep_neither_the_leaves_nor_the_window_they_came_from(abandoned):
    """A long file would otherwise keep all of its windows in memory."""
    s = sim.Simulation(block_size=2)
    prompts, nodes = [], []
    for _ in range(3):
        s.load([[*range(9), 50], [*range(9), 60]], [3, 3])
        prompts += [weakref.ref(leaf.request.tokens) for leaf in s.window.leaves]
        s.step()
        s.scheduler.abandon() if abandoned else s.finish()
        assert (s.block_manager.windows, len(s.block_manager.cached)) == ({}, 1)
        nodes.append(weakref.ref(next(iter(s.block_manager.cached)).prompt))
        del s.window, s.batch
        s.sampled.clear()
        s.scheduler.take_freed()
    gc.collect()
    assert [prompt() is None for prompt in prompts] == [True] * 6
    assert [node.prompt.tolist() for node in s.block_manager.cached] == [list(range(9))]
    s.block_manager.discard()
    s.scheduler.take_freed()
    gc.collect()
    assert [node() is None for node in nodes] == [True] * 3
