"""The rows that are measured."""

import random

from benchmarks.workloads import WORKLOADS, varied_lengths


def words(count: int) -> str:
    return " w" * count


def test_varied_lengths_go_from_one_token_to_256_and_are_the_same_each_time():
    rows = varied_lengths(words, random.Random(1))
    lengths = sorted(out for _, out in rows)
    assert rows == varied_lengths(words, random.Random(1))
    assert len(rows) == 128
    assert lengths[0] == 1
    assert lengths[32] <= 8
    assert lengths[-32] >= 32
    assert 128 < lengths[-1] <= 256


def test_every_workload_says_what_it_is():
    assert list(WORKLOADS) == [
        "shared-prefix",
        "nested-groups",
        "few-shot",
        "nothing-shared",
        "long-prefix",
        "varied-lengths",
    ]
    assert all(workload.__doc__ for workload in WORKLOADS.values())
