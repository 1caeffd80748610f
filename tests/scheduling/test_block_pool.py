import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.scheduling.block_pool import BlockPool


def test_runs_come_from_the_low_end_and_single_blocks_from_the_high_end():
    pool = BlockPool(8)
    assert pool.allocate_run(3) == [0, 1, 2]
    assert pool.allocate(2) == [7, 6]
    assert pool.allocate_run(1) == [3]
    assert pool.allocate(1) == [5]
    assert (pool.num_used, pool.num_free) == (7, 1)


def test_a_run_is_contiguous_if_possible_and_otherwise_collected_from_gaps():
    pool = BlockPool(7)
    pool.allocate_run(7)
    pool.release([0, 2, 3, 5])
    assert pool.allocate_run(2) == [2, 3]
    pool.release([3])
    assert pool.allocate_run(3) == [0, 3, 5]


def test_single_blocks_fill_gaps_from_the_high_end():
    pool = BlockPool(5)
    pool.allocate(5)
    pool.release([1, 3])
    assert pool.allocate(2) == [3, 1]


@pytest.mark.parametrize("take", ["allocate", "allocate_run"])
def test_allocating_more_blocks_than_are_free_fails_and_takes_nothing(take):
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(ValueError, match=r"^3 blocks wanted, 2 free$"):
        getattr(pool, take)(3)
    assert pool.num_free == 2


def test_a_free_block_can_be_neither_shared_nor_released():
    pool = BlockPool(3)
    with pytest.raises(ValueError, match=r"^block 2 is free and cannot be shared$"):
        pool.share([2])
    with pytest.raises(ValueError, match=r"^block 1 is free already$"):
        pool.release([1])


def test_check_accepts_only_the_exact_references_of_the_tables():
    pool = BlockPool(4)
    a, b = pool.allocate(1), pool.allocate(1)
    pool.share(a)
    pool.check([a, [*a, *b]])
    for wrong in ([a, b], [a, a, b, b], [a, a, b, [0]], []):
        with pytest.raises(AssertionError, match="block references do not match the block tables"):
            pool.check(wrong)


@given(st.lists(st.tuples(st.sampled_from(["run", "single", "share", "release"]), st.integers(0, 9)), max_size=40))
def test_the_counts_add_up_after_any_sequence_of_calls(steps):
    pool, tables = BlockPool(12), []
    for what, number in steps:
        if what in ("run", "single") and number <= pool.num_free:
            blocks = pool.allocate_run(number) if what == "run" else pool.allocate(number)
            assert len(set(blocks)) == number
            assert not any(block in table for table in tables for block in blocks)
            tables.append(blocks)
        elif what == "share" and tables:
            table = tables[number % len(tables)]
            pool.share(table)
            tables.append(list(table))
        elif what == "release" and tables:
            pool.release(tables.pop(number % len(tables)))
        pool.check(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 12
