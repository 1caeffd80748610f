"""Prefixes remembered from earlier windows, for the statistics."""

import numpy as np
import pytest

from batchgen.jobs.order.windows import KeptPrefixes
from batchgen.prefix import plan_prefixes


@pytest.mark.parametrize(
    ("limits", "windows", "carried"),
    [
        ({}, ["aaaa1 aaaa2", "bbbb1 bbbb2", "aaaa3 bbx"], [0, 0, 4 + 2]),
        ({}, ["aaaa1 bbbb1", "aaaa2 aaaa3"], [0, 0]),
        ({"max_paths": 2}, ["aaaa1 aaaa2", "bbbb1 bbbb2", "aaaa1 aaaa2", "cccc1 cccc2", "bbbb3", "aaaa3", "cccc3"], [0, 0, 4, 0, 0, 4, 4]),
        ({"paths_of_a_window": 1}, ["aaaa1 aaaa2 aaaa3 bbbbbb1 bbbbbb2", "aaaa4 bbbbbb4"], [0, 4]),
    ],
    ids=["of any earlier window", "of several rows", "not the oldest ones", "those that save the most tokens"],
)  # fmt: skip
def test_prefixes_are_remembered(limits, windows, carried):
    prefixes = KeptPrefixes(**limits)
    for window, expected in zip(windows, carried, strict=True):
        tokens = [np.frombuffer(prompt.encode(), dtype=np.uint8).astype(np.int32) for prompt in window.split()]
        assert prefixes.carried(plan_prefixes(tokens, 2), tokens) == expected
