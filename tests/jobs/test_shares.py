"""Where the sorted requests are cut into shares."""

import errno
import mmap
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from batchgen.config import JobConfig
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.order.shares import PrefixCosts, Share, shard_bounds
from batchgen.jobs.shards import ShardFolder, ShardPlan, load_plan, shard_folder, write_plan
from support.requests import request


def cuts(costs: list[float], shared: list[int], shares: int, chunk_size: int = 1) -> list[int]:
    return shard_bounds(np.cumsum(np.array(costs)), np.array(shared, dtype=np.int32), shares, chunk_size)


GROUPS_OF_TEN = [0 if i % 10 == 0 else 500 for i in range(410)]


@pytest.mark.parametrize(
    ("costs", "shared", "shares", "chunk_size", "found"),
    [
        ([1.0] * 12, [0] * 12, 4, 1, [3, 6, 9]),
        # A cut moves to the nearest end of a group: the middle of the order, 205, would go through one.
        ([1.0] * 410, GROUPS_OF_TEN, 2, 1, [200]),
        # A group larger than a share is cut.
        ([1.0] * 100, [0] + [64] * 99, 4, 1, [25, 50, 75]),
        # A few tokens that neighbouring groups share by accident do not move a cut.
        ([1.0] * 200, [3 if i == 100 else 0 if i == 104 else 64 for i in range(200)], 2, 16, [100]),
        ([1.0] * 200, [3 if i == 100 else 0 if i == 104 else 64 for i in range(200)], 2, 1, [104]),
    ],
)
def test_requests_are_cut_into_shares_of_equal_cost_at_the_ends_of_groups(costs, shared, shares, chunk_size, found):
    assert cuts(costs, shared, shares, chunk_size) == found


@pytest.mark.parametrize(("costs", "shares", "filled"), [([1.0, 1.0, 1000.0, 1.0], 4, 3), ([1.0, 1.0], 5, 2)])
def test_some_shares_are_empty_where_one_request_costs_more_or_there_are_too_few(costs, shares, filled):
    found = [0, *cuts(costs, [0] * len(costs), shares), len(costs)]
    assert found == sorted(found)
    assert sum(b > a for a, b in pairwise(found)) == filled


def test_costs_count_a_shared_prefix_once_in_each_share(tmp_path):
    costs = PrefixCosts(tmp_path)
    costs.add([request(0, [1, 2, 3], max_tokens=1), request(1, [1, 2, 4], max_tokens=1)])
    costs.add([request(2, [1, 5, 6], max_tokens=1), request(3, [7, 8, 9], max_tokens=1)])
    assert costs.shares(1, 1) == [
        Share(0, 4, 25.0, 0)
    ]  # 12 tokens, of which 3 are shared, and 4 * 4 for one token each
    assert costs.shares(2, 1) == [Share(0, 2, 12.0, 0), Share(2, 4, 14.0, 1)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_have_every_request_of_the_plan_once_and_in_its_order(tmp_path, count):
    requests = [request(row, [row, 1, 2], max_tokens=1) for row in range(6)]
    (tmp_path / "shards").mkdir()
    windows = iter([requests[:1], requests[1:5], requests[5:]])
    config = JobConfig(inputs="i.jsonl", model="m", output="o.jsonl", shard=f"1/{count}")
    write_plan(tmp_path, ShardPlan(asked={}, rows=6, output={}), windows, config)
    plan = load_plan(tmp_path)
    manifest = SimpleNamespace(request={"retry": []})
    spec = SimpleNamespace(output="o.jsonl", manifest=manifest, flush_every=0.0)
    shards = [
        ShardFolder(tmp_path, plan, number, spec, Lease(shard_folder(tmp_path, plan, number), "a shard"))
        for number in range(1, count + 1)
    ]
    rows = [[[r.row for r in window] for window in shard.windows()] for shard in shards]
    assert [row for windows in rows for window in windows for row in window] == [*range(6)]
    assert [sum(map(len, windows)) for windows in rows] == [shard.request_count for shard in shards]
    for shard in shards:
        shard.close()
    assert count > 2 or rows == {1: [[[0], [1, 2, 3, 4], [5]]], 2: [[[0], [1, 2]], [[3, 4], [5]]]}[count]


def test_without_requests_all_shares_are_empty(tmp_path):
    assert PrefixCosts(tmp_path).shares(2, 16) == [Share(0, 0, 0.0, 0), Share(0, 0, 0.0, 0)]


def test_shares_are_cut_on_a_file_system_without_shared_memory(tmp_path, monkeypatch):
    private = mmap.mmap

    def only_private(*given, access=mmap.ACCESS_DEFAULT, **named):
        if access != mmap.ACCESS_COPY:
            raise OSError(errno.ENODEV, "No such device")  # as FUSE with direct_io
        return private(*given, access=access, **named)

    costs = PrefixCosts(tmp_path)
    costs.add([request(0, [1, 2, 3]), request(1, [4, 5, 6])])
    monkeypatch.setattr(mmap, "mmap", only_private)
    assert [(share.first, share.last) for share in costs.shares(2, 16)] == [(0, 1), (1, 2)]
