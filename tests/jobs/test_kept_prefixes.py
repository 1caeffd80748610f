"""Prefixes remembered from earlier windows, for the statistics."""

import numpy as np

from batchgen.jobs.order.windows import KeptPrefixes
from batchgen.prefix import plan_prefixes


def carried(prefixes: KeptPrefixes, *prompts: str) -> int:
    tokens = [np.frombuffer(prompt.encode(), dtype=np.uint8).astype(np.int32) for prompt in prompts]
    return prefixes.carried(plan_prefixes(tokens, 2), tokens)


def test_a_prefix_is_remembered_from_any_earlier_window():
    prefixes = KeptPrefixes()
    assert carried(prefixes, "aaaa1", "aaaa2") == 0
    assert carried(prefixes, "bbbb1", "bbbb2") == 0
    assert carried(prefixes, "aaaa3", "bbx") == 4 + 2


def test_a_prefix_of_only_one_row_is_not_remembered():
    prefixes = KeptPrefixes()
    carried(prefixes, "aaaa1", "bbbb1")
    assert carried(prefixes, "aaaa2", "aaaa3") == 0


def test_the_oldest_are_forgotten_first():
    prefixes = KeptPrefixes(max_paths=2)
    carried(prefixes, "aaaa1", "aaaa2")
    carried(prefixes, "bbbb1", "bbbb2")
    carried(prefixes, "aaaa1", "aaaa2")
    carried(prefixes, "cccc1", "cccc2")
    assert carried(prefixes, "bbbb3") == 0
    assert carried(prefixes, "aaaa3") == carried(prefixes, "cccc3") == 4


def test_the_prefixes_that_save_the_most_tokens_are_remembered():
    prefixes = KeptPrefixes(paths_of_a_window=1)
    carried(prefixes, "aaaa1", "aaaa2", "aaaa3", "bbbbbb1", "bbbbbb2")
    assert carried(prefixes, "aaaa4", "bbbbbb4") == 4
