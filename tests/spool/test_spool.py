"""The external sort of a job's requests: whatever the sizes of runs, blocks and windows, the order and the requests are exact."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.request import Request
from batchgen.sampling_params import SamplingParams
from batchgen.spool import Spool
from batchgen.spool import blocks as blocks_module
from batchgen.spool import spool as spool_module
from batchgen.spool.blocks import sort_key

DEFAULT = SamplingParams()


def tokens(*ids: int):
    return np.array(ids, dtype=np.int32)


def request(row: int, ids, *, priority: float = 0.0, params: SamplingParams = DEFAULT, texts=(), truncated=False):
    key = row.to_bytes(16, "big")
    return Request(
        row=row, tokens=tokens(*ids), params=params, max_tokens=7 + row, key=key, truncated=truncated,
        texts=tuple(tokens(*t) for t in texts), priority=priority,
    )  # fmt: skip


def plain(r: Request):
    values = {f.name: getattr(r, f.name) for f in fields(r)}
    return values | {"tokens": r.tokens.tolist(), "texts": [t.tolist() for t in r.texts]}


@pytest.fixture
def small(monkeypatch):
    def set_(rows=5, tokens=1000, block=2, runs=3):
        monkeypatch.setattr(spool_module, "RUN_ROWS", rows)
        monkeypatch.setattr(spool_module, "WINDOW_ROWS", rows)
        monkeypatch.setattr(spool_module, "MOST_TOKENS", tokens)
        monkeypatch.setattr(spool_module, "MOST_RUNS", runs)
        monkeypatch.setattr(blocks_module, "BLOCK_ROWS", block)

    return set_


def spooled(folder, requests):
    spool = Spool(folder)
    for r in requests:
        spool.add(r)
    spool.close()
    return spool


def test_what_fits_one_run_never_touches_the_disk(tmp_path, small) -> None:
    small(rows=5)
    spool = spooled(tmp_path, [request(i, [9 - i, 1]) for i in range(5)])
    assert not spool.on_disk
    assert [[r.row for r in w] for w in spool.windows()] == [[4, 3, 2, 1, 0]]
    assert list(tmp_path.iterdir()) == []
    assert list(Spool(tmp_path).windows()) == []


def test_a_run_in_memory_has_windows_too(tmp_path, small, monkeypatch) -> None:
    small(rows=3)
    monkeypatch.setattr(spool_module, "RUN_ROWS", 9)
    spool = spooled(tmp_path, [request(i, [9 - i, 1]) for i in range(9)])
    assert not spool.on_disk
    assert [[r.row for r in w] for w in spool.windows()] == [[8, 7, 6], [5, 4, 3, 2], [1, 0]]


def test_one_row_more_is_sorted_on_disk(tmp_path, small) -> None:
    small(rows=5)
    spool = spooled(tmp_path, [request(i, [9 - i, 1]) for i in range(6)])
    assert spool.on_disk
    assert [sorted(r.row for r in w) for w in spool.windows()] == [[1, 2, 3, 4, 5], [0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(spool.digests)


def test_lower_priorities_come_first_and_depth_first_order_among_equals(tmp_path, small) -> None:
    small(rows=2, block=1)
    levels = [0.0, -1.5, 3.0, -0.0, 1e300, -1e300, 0.25]
    spool = spooled(tmp_path, [request(i, [i], priority=p) for i, p in enumerate(levels)])
    assert [r.row for w in spool.windows() for r in sorted(w, key=sort_key)] == [5, 1, 0, 3, 6, 2, 4]


def test_everything_of_a_request_comes_back_from_disk(tmp_path, small) -> None:
    small(rows=1, block=2)
    own = SamplingParams(temperature=0.1, stop=("\ud800", "b"), seed=-5)
    labels = SamplingParams(choices=("yes", "no"))
    requests = [
        request(0, [1, 2], params=own, truncated=True),
        request(1, [3], params=labels, texts=[[4, 5], [6]], priority=2.5),
        request(2, [3], params=labels, texts=[[4, 5], [6]]),
        request(3, [7], texts=[[1, 2, 3]]),
        request(4, range(300)),
    ]
    spool = spooled(tmp_path, requests)
    back = {r.row: r for w in Spool.of(tmp_path, spool.digests).windows() for r in w}
    assert [plain(back[i]) for i in range(5)] == [plain(r) for r in requests]
    assert back[4].tokens.dtype == np.int32


def test_a_request_longer_than_a_window_has_one_for_itself(tmp_path, small) -> None:
    small(rows=100, tokens=10)
    spool = spooled(tmp_path, [request(0, range(50)), request(1, [1]), request(2, range(1, 30))])
    assert [[r.row for r in w] for w in spool.windows()] == [[0], [1], [2]]


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(prompts, st.sampled_from([0.0, 0.0, 1.0, -2.0])), max_size=60),
    window=st.integers(1, 12),
    most_tokens=st.sampled_from([3, 20, 10_000]),
    block=st.integers(1, 5),
    runs=st.integers(2, 4),
)
def test_windows_follow_each_other_in_order_and_hold_every_request_once(
    tmp_path_factory, small, rows, window, most_tokens, block, runs
) -> None:
    small(window, most_tokens, block, runs)
    folder = tmp_path_factory.mktemp("spool")
    requests = [request(i, ids, priority=p) for i, (ids, p) in enumerate(rows)]
    spool = spooled(folder, requests)
    windows = [sorted(w, key=sort_key) for w in spool.windows()]
    flat = [r for w in windows for r in w]
    assert [sort_key(r) for r in flat] == sorted(sort_key(r) for r in requests)
    assert sorted(r.row for r in flat) == list(range(len(rows)))
    assert all(len(w) <= window + block * runs for w in windows)
    assert len(list(folder.iterdir())) <= runs
    again = [r.row for w in Spool.of(folder, spool.digests).windows() for r in w] if spool.on_disk else []
    assert again == ([r.row for w in spool.windows() for r in w] if spool.on_disk else [])
