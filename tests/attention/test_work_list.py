"""The work list of a step: every query reads each of its keys once, and long reads are cut to the device's size."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.attention.plan import split_step
from batchgen.attention.work_list import (
    ALL,
    BLOCK_TABLE,
    FIRST_VISIBLE,
    NUM_KEYS,
    PARTIAL,
    POSITION,
    Q_COUNT,
    Q_START,
    Lane,
    work_list,
)
from support import simulation as sim
from support.params import examples, slow_but

NO_LIMIT = 1 << 62
WIDE = Lane(tokens=4, programs=1, heads=1, min_keys=1 << 20)  # nothing is split
NARROW = Lane(tokens=1, programs=1, heads=1, min_keys=1 << 20)


def listed(spans, block_size, wide=WIDE, narrow=NARROW, shared_reads=1):
    return work_list(spans, split_step(spans, block_size, shared_reads, NO_LIMIT), wide, narrow)


def columns(items):
    """(queries, blocks' place, keys, first visible, position, partial) of each item."""
    at = [Q_START, Q_COUNT, BLOCK_TABLE, NUM_KEYS, FIRST_VISIBLE, POSITION, PARTIAL]
    return [tuple("all" if x >= ALL // 2 else x for x in item) for item in items[:, at].tolist()]


def check(spans, block_size, lists, sliding_window=None):
    """Each query reads each of its keys once, and gets a result from each of its items."""
    T = sum(w.stop - w.start for w in spans)
    reads, results = [[] for _ in range(T)], [[] for _ in range(T)]
    for item in np.concatenate([lists.wide, lists.narrow]).tolist():
        n = np.arange(item[NUM_KEYS])
        kv_indices = lists.blocks[item[BLOCK_TABLE] + n // block_size] * block_size + n % block_size
        for j in range(item[Q_COUNT]):
            query, visible = item[Q_START] + j, max(0, item[FIRST_VISIBLE] + j)
            reads[query] += zip((item[POSITION] + n[:visible]).tolist(), kv_indices[:visible].tolist(), strict=True)
            results[query].append(item[PARTIAL] + j if item[PARTIAL] >= 0 else None)
    rows = []
    for t in range(T):
        merged = lists.merge_rows[lists.merge_starts[t] : lists.merge_starts[t + 1]].tolist()
        assert sorted(merged) == sorted(results[t]) if merged else results[t] == [None]
        rows += merged
    assert sorted(rows) == list(range(lists.num_partials))
    query = 0
    for w in spans:
        for position in range(w.start, w.stop):
            first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
            want = [(p, sim.kv_index(w.span, p, block_size)) for p in range(first, position + 1)]
            assert sorted(read for read in reads[query] if read[0] >= first) == want
            query += 1
    assert len(lists.merge_starts) == T + 1


@settings(max_examples=examples(15, 60))
@given(st.data())
def test_every_query_reads_each_of_its_keys_once_and_its_results_are_merged(data):
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    block_size, sliding_window = rng.choice([1, 2, 4, 16]), rng.choice([None, None, 3, 9])
    wide = Lane(rng.choice([2, 5, 32]), rng.choice([1, 3, 100]), rng.choice([1, 2]), rng.choice([1, 7, 1000]))
    narrow = Lane(rng.choice([1, 2]), rng.choice([1, 3, 100]), rng.choice([1, 2]), rng.choice([1, 7, 1000]))
    shared_reads = rng.choice([1, 6, NO_LIMIT])

    def check_step(step, plan):
        lists = listed(step.spans, block_size, wide, narrow, shared_reads)
        check(step.spans, block_size, lists, sliding_window)
        assert (lists.narrow[:, Q_COUNT] <= narrow.tokens).all()
        assert (lists.wide[:, Q_COUNT] <= wide.tokens).all()

    sim.random_steps(
        rng.randrange(2**32), check_step, longest=30, steps=6, tokens=rng.choice([9, 40, 300]), blocks=rng.choice([120, 1000]),
        block_size=block_size, batch_size=8, sliding_window=sliding_window,
    )  # fmt: skip


def test_a_node_is_read_by_tiles_of_the_queries_below_it_and_own_blocks_by_each():
    node = sim.node(0, 8)
    spans = [sim.scheduled([0, 1, 5 + i], 8 + i % 4, 9 + i % 4, node) for i in range(6)]
    lists = listed(spans, 4)
    assert columns(lists.wide) == [(0, 4, 6, 8, "all", 0, 0), (4, 2, 6, 8, "all", 0, 4)]
    assert columns(lists.narrow) == [
        (3, 1, 3, 4, 4, 8, 6), (2, 1, 2, 3, 3, 8, 7), (1, 1, 1, 2, 2, 8, 8), (5, 1, 5, 2, 2, 8, 9), (0, 1, 0, 1, 1, 8, 10),
        (4, 1, 4, 1, 1, 8, 11),
    ]  # fmt: skip
    assert lists.blocks.tolist() == [5, 6, 7, 8, 9, 10, 0, 1]
    assert lists.merge_starts.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert lists.merge_rows.tolist() == [0, 10, 1, 8, 2, 7, 3, 6, 4, 11, 5, 9]
    assert lists.num_partials == 12


def test_a_query_of_one_item_needs_no_merge():
    lists = listed([sim.scheduled([3, 1], 5, 6), sim.scheduled([2], 0, 3)], 4)
    assert columns(lists.narrow) == [(0, 1, 0, 6, 6, 0, -1)]
    assert columns(lists.wide) == [(1, 3, 2, 3, 1, 0, -1)]
    assert (lists.blocks.tolist(), lists.merge_starts.tolist(), lists.merge_rows.tolist()) == (
        [3, 1, 2],
        [0, 0, 0, 0, 0],
        [],
    )


@pytest.mark.parametrize(
    ("programs", "heads", "least", "keys"),
    [
        (1, 1, 1, [64]),
        (2, 1, 1, [32, 32]),
        (3, 1, 1, [24, 20, 20]),
        (8, 4, 1, [32, 32]),
        (1000, 1, 1, [8] * 6 + [4] * 4),  # more would cost more than they save
        (1000, 1, 12, [16, 12, 12, 12, 12]),
        (1000, 1, 65, [64]),
    ],
)
def test_long_ranges_are_split_for_the_programs_that_there_are(programs, heads, least, keys):
    spans = [sim.scheduled(list(range(16)), 63, 64)]
    lists = listed(spans, 4, narrow=Lane(1, programs, heads, least))
    assert lists.narrow[:, NUM_KEYS].tolist() == keys
    check(spans, 4, lists)


@pytest.mark.parametrize(
    ("programs", "splits"), slow_but([(132, 2), (100, 3)], [(132, 2), (64, 1), (100, 3), (1000, 15)])
)
def test_ranges_are_split_no_finer_than_keeps_all_programs_busy(programs, splits):
    """8 tiles of 16384 keys for 8 heads: of 132 programs 128 are busy all the time with 2 splits, but only 96 with 3."""
    node = sim.node(0, 16384)
    spans = [sim.scheduled([*range(512), 600 + i], 16384, 16385, node) for i in range(32)]
    lists = listed(spans, 32, wide=Lane(4, programs, 8, 512))
    assert len(lists.wide) == 8 * splits
    check(spans, 32, lists)


def test_the_costly_items_come_first_those_of_the_same_keys_together():
    node = sim.node(0, 2048)
    spans = [sim.scheduled([*range(8), 20 + i], 2048, 2049, node) for i in range(8)]
    lists = listed(spans, 256, wide=Lane(4, 6, 1, 640))
    got = [(item[POSITION], item[NUM_KEYS], item[Q_START]) for item in lists.wide.tolist()]
    assert got == [(512, 768, 0), (512, 768, 4), (1280, 768, 0), (1280, 768, 4), (0, 512, 0), (0, 512, 4)]
