import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prefix import plan_prefixes, resident_lengths


def arrays(lists):
    return [np.array(ids, dtype=np.int32) for ids in lists]


def common(a, b):
    return max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])


def residents(lists, paths):
    prompts = arrays(lists)
    return resident_lengths(plan_prefixes(prompts, 16), prompts, arrays(paths))


token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=20)


@given(token_lists, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), max_size=6))
def test_residents_are_the_longest_matches_over_all_requests(lists, paths):
    ordered = sorted(lists)
    expected = []
    for i, path in enumerate(paths):
        lengths = [common(path, ids) for ids in ordered]
        if max(lengths, default=0) > 0:
            expected.append((i, lengths.index(max(lengths)), max(lengths)))
    assert residents(lists, paths) == expected


def test_comparisons_grow_with_the_logarithm_of_the_requests():
    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            Counted.reads += 1
            return super().__getitem__(index)

    prompts = Counted(arrays([[i, i] for i in range(1024)]))
    plan = plan_prefixes(prompts, 16)
    Counted.reads = 0
    assert resident_lengths(plan, prompts, arrays([[700, 0]])) == [(0, 700, 1)]
    assert Counted.reads <= 2 * 11 + 2
