"""The external sort of a job's requests gives the exact order and requests for any sizes of runs, batches and windows."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.config import InputLimits, JobConfig
from batchgen.jobs.files.disk import json_digest
from batchgen.jobs.order.requests import asked_of
from batchgen.jobs.order.sorted_requests import SortedRequests, bounded_windows, sort_key
from batchgen.request import Request
from batchgen.sampling_params import SamplingParams
from support.params import examples
from support.requests import request as plain_request

DEFAULT = SamplingParams()


def tokens(*ids: int):
    return np.array(ids, dtype=np.int32)


def request(row: int, ids, *, params: SamplingParams = DEFAULT, **fields):
    return plain_request(row, ids, 7 + row, params=params, source=f"rows.jsonl:{row + 1}", **fields)


def plain(r: Request):
    values = {f.name: getattr(r, f.name) for f in fields(r)}
    return values | {"tokens": r.tokens.tolist(), "texts": [t.tolist() for t in r.texts]}


def limits(rows=5, tokens=1000, batch=2, runs=3, window=None):
    return InputLimits(
        run_rows=rows, window_leaves=window or rows, max_tokens=tokens, max_runs=runs, batch_rows=batch,
        batch_tokens=min(tokens, 1 << 16),
    )  # fmt: skip


def sorted_requests(folder, requests, limits):
    made = SortedRequests(folder, limits)
    for r in requests:
        made.add(r)
    made.close()
    return made


def test_only_more_requests_than_fit_one_run_are_sorted_on_disk(tmp_path):
    made = sorted_requests(tmp_path, [request(i, [9 - i, 1]) for i in range(5)], limits(rows=5))
    assert not made.on_disk
    assert [[r.row for r in w] for w in made.windows()] == [[4, 3, 2, 1, 0]]
    assert list(tmp_path.iterdir()) == []
    assert list(SortedRequests(tmp_path).windows()) == []
    made = sorted_requests(tmp_path, [request(i, [9 - i, 1]) for i in range(6)], limits(rows=5))
    assert made.on_disk
    assert [sorted(r.row for r in w) for w in made.windows()] == [[1, 2, 3, 4, 5], [0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(made.digests)


LABELS = {"params": SamplingParams(choices=("a", "b", "c")), "texts": [[4], [5], [6, 7]]}


@pytest.mark.parametrize("rows", [2, 100])
def test_a_window_is_limited_by_its_labels_and_their_tokens(tmp_path, rows):
    """Each label is planned with the prompt before it: three labels of a prompt of two tokens are ten tokens."""
    requests = [request(i, [9 - i, 1], **LABELS) for i in range(5)]
    for bounds in ({"window": 6}, {"window": 100, "tokens": 20}):
        made = sorted_requests(tmp_path, requests, limits(rows=rows, batch=1, **bounds))
        assert made.on_disk == (rows == 2)
        assert [sorted(r.row for r in w) for w in made.windows()] == [[3, 4], [1, 2], [0]]


def test_rows_that_arrive_together_are_planned_in_prefix_order_where_their_labels_are_too_many():
    requests = [request(i, [9 - i, 1], **LABELS) for i in range(5)]
    assert list(bounded_windows(requests, limits(window=15))) == [requests]
    cut = bounded_windows(requests, limits(window=6, batch=1))
    assert [[r.row for r in w] for w in cut] == [[4, 3], [2, 1], [0]]
    assert list(bounded_windows([], limits())) == []


def test_a_request_comes_back_from_disk_unchanged(tmp_path):
    own = SamplingParams(temperature=0.1, stop=("\ud800", "b"), seed=-5)
    labels = SamplingParams(choices=("yes", "no"))
    requests = [
        request(0, [1, 2], params=own, truncated=True),
        request(1, [3], params=labels, texts=[[4, 5], [6]], priority=2.5),
        request(2, [3], params=labels, texts=[[4, 5], [6]]),
        request(3, [7], texts=[[1, 2, 3]]),
        request(4, range(300), tools='[{"name": "é"}]'),
    ]
    made = sorted_requests(tmp_path, requests, limits(rows=1, batch=2))
    back = {r.row: r for w in SortedRequests.of(tmp_path, made.digests).windows() for r in w}
    assert [plain(back[i]) for i in range(5)] == [plain(r) for r in requests]
    assert back[4].tokens.dtype == np.int32
    assert back[1].texts is back[2].texts, "the tokens of labels are in memory once"


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@settings(max_examples=examples(15, 150))
@given(
    rows=st.lists(st.tuples(prompts, st.sampled_from([0.0, -0.0, 1.0, -1.5, 1e300, -1e300])), max_size=60),
    window=st.integers(1, 12),
    max_tokens=st.sampled_from([3, 20, 10_000]),
    batch=st.integers(1, 5),
    runs=st.integers(2, 4),
)
def test_windows_follow_each_other_in_order_and_hold_every_request_once(
    tmp_path_factory, rows, window, max_tokens, batch, runs
):
    folder = tmp_path_factory.mktemp("made")
    requests = [request(i, ids, priority=p) for i, (ids, p) in enumerate(rows)]
    given_limits = limits(window, max_tokens, batch, runs)
    made = sorted_requests(folder, requests, given_limits)
    windows = [sorted(w, key=sort_key) for w in made.windows()]
    flat = [r for w in windows for r in w]
    assert [sort_key(r) for r in flat] == sorted(sort_key(r) for r in requests)
    assert sorted(r.row for r in flat) == list(range(len(rows)))
    merged = (
        batch * runs
    )  # requests that a merge gives at a time: what one left over and the next one gives can be a window
    assert all(len(w) <= max(window, merged) + merged for w in windows)
    assert len(list(folder.iterdir())) <= runs
    if made.on_disk:
        later = SortedRequests.of(folder, made.digests, given_limits)
        assert [[r.row for r in w] for w in later.windows()] == [[r.row for r in w] for w in made.windows()]


def test_a_reading_is_not_used_with_options_that_give_other_rows_or_keys():
    config = JobConfig(inputs=("a.jsonl",), model="m")
    changes = {"id_column": "name", "output_format": "openai", "limit": 3, "input_format": "csv"}
    others = [replace(config, **{name: value}) for name, value in changes.items()]
    asked = [json_digest(asked_of(each, [])) for each in (config, *others)]
    assert len(set(asked)) == len(asked)
