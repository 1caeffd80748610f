"""The simulation of many workers, with claims that hold for any measured costs."""

from __future__ import annotations

from benchmarks.cluster import Shape, fetched_pieces, one_driver, static_shards


class Small(Shape):
    rows = 1_000_000
    workers = 50
    spread = 0.0


class Uneven(Small):
    spread = 0.2


def test_equal_workers_that_wait_for_nothing_are_never_idle() -> None:
    assert static_shards(Small(), 0.0)["idle_share"] == 0.0
    assert fetched_pieces(Small(), 0.0, 1)["idle_share"] == 0.0
    assert one_driver(Small(), 0.0)["idle_share"] == 0.0


def test_static_shards_wait_for_the_slowest_and_fetched_pieces_do_not() -> None:
    static, fetched = static_shards(Uneven(), 0.0), fetched_pieces(Uneven(), 0.0, 1, piece=1_000)
    assert fetched["idle_share"] < 0.05 < static["idle_share"]
    assert fetched["prefix_tokens_again"] > static["prefix_tokens_again"] == 49 * Small.prefix


def test_a_driver_that_is_slower_than_its_workers_sets_the_time() -> None:
    assert one_driver(Small(), 0.01)["hours"] == round(1_000_000 * 0.01 / 3600, 3)
