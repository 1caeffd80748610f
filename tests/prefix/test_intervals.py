import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prefix.tree import lcp_intervals


def intervals(*shared):
    found = lcp_intervals(np.array([0, *shared, 0], dtype=np.int64))
    rows = zip(found.first, found.last, found.end, found.parent, strict=True)
    return [tuple(map(int, row)) for row in rows], found.leaf_parent.tolist()


def test_no_positions_and_one_position_have_no_intervals():
    empty = lcp_intervals(np.zeros(1, dtype=np.int64))
    assert (len(empty.end), len(empty.leaf_parent)) == (0, 0)
    assert intervals() == ([], [-1])


def test_an_interval_reaches_over_all_that_share_as_much():
    assert intervals(3, 3) == ([(0, 3, 3, -1)], [0, 0, 0])


def test_a_parent_found_after_its_child_comes_before_it():
    assert intervals(4, 2) == ([(0, 3, 2, -1), (0, 2, 4, 0)], [1, 1, 0])


def test_several_intervals_close_at_once():
    assert intervals(1, 2, 3, 0, 5) == (
        [(0, 4, 1, -1), (1, 4, 2, 0), (2, 4, 3, 1), (4, 6, 5, -1)],
        [0, 1, 2, 2, 3, 3],
    )


def test_a_parent_between_two_depths_takes_the_child_and_stays_below_the_grandparent():
    assert intervals(1, 5, 3, 1) == (
        [(0, 5, 1, -1), (1, 4, 3, 0), (1, 3, 5, 1)],
        [0, 2, 2, 1, 0],
    )


@given(st.lists(st.integers(0, 4), max_size=14))
def test_intervals_are_the_maximal_runs_of_every_length(shared):
    count = len(shared) + 1
    expected = set()
    for first in range(count):
        for last in range(first + 2, count + 1):
            end = min(shared[first : last - 1])
            left = shared[first - 1] if first else 0
            right = shared[last - 1] if last < count else 0
            if end > left and end > right:
                expected.add((first, last, end))
    rows, leaf_parents = intervals(*shared)
    assert [row[:3] for row in rows] == sorted(expected, key=lambda row: (row[0], row[2]))

    def smallest_around(first, last, end):
        around = [i for i, r in enumerate(rows) if r[0] <= first and last <= r[1] and r[2] < end]
        return max(around, key=lambda i: rows[i][2], default=-1)

    assert [row[3] for row in rows] == [smallest_around(*row[:3]) for row in rows]
    assert leaf_parents == [smallest_around(i, i + 1, 99) for i in range(count)]
