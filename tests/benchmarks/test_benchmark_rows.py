"""The rows that are measured, and the figures that are put together from several runs."""

import random

import pytest

from benchmarks.around import InPlace, model_seconds
from benchmarks.roofline import Shape
from benchmarks.scaling import prefix_copies
from benchmarks.workloads import WORKLOADS, varied_lengths


def words(count: int) -> str:
    return " w" * count


def test_varied_lengths_go_from_one_token_to_256_and_are_the_same_each_time() -> None:
    rows = varied_lengths(words, random.Random(1))
    lengths = sorted(out for _, out in rows)
    assert rows == varied_lengths(words, random.Random(1))
    assert len(rows) == 128
    assert lengths[0] == 1
    assert lengths[32] <= 8
    assert lengths[-32] >= 32
    assert 128 < lengths[-1] <= 256


def test_every_workload_says_what_it_is() -> None:
    assert list(WORKLOADS) == [
        "shared-prefix",
        "nested-groups",
        "few-shot",
        "nothing-shared",
        "long-prefix",
        "varied-lengths",
    ]
    assert all(workload.__doc__ for workload in WORKLOADS.values())


def test_the_model_takes_for_each_further_row_what_twice_the_rows_took_more() -> None:
    real = [{"rows": 512, "model_s": 10.0}, {"rows": 1024, "model_s": 15.12}]
    assert model_seconds(real, 20_512) == pytest.approx(10.0 + 0.01 * 20_000)


@pytest.mark.parametrize(("copies", "rows_share"), [(1, True), (256, False)])
def test_what_the_pool_holds_more_tells_how_often_the_prefix_is_there(copies: int, rows_share: bool) -> None:
    shape = Shape(hidden=2, layers=3, heads=2, kv_heads=1, head_dim=4, intermediate=5, vocabulary=7, dtype="bfloat16")
    token = 3 * 2 * 4 * 2  # layers, keys and values, numbers, bytes
    by_length = [
        {"prefix_tokens": 1024, "kv_bytes_peak": 5000},
        {"prefix_tokens": 8192, "kv_bytes_peak": 5000 + copies * token * 7168},
    ]
    assert prefix_copies(by_length, shape) == copies
    assert (prefix_copies(by_length, shape) < 1.1) is rows_share


def test_what_stands_in_for_the_forward_is_not_counted_and_gives_other_logits_each_time() -> None:
    import torch

    from batchgen.scheduling.batch import ScheduledSpan

    in_place = InPlace(5, torch.float32)
    spans = [ScheduledSpan(None, 0, 4, 3), ScheduledSpan(None, 0, 2, 2), ScheduledSpan(None, 7, 8, 7)]  # type: ignore[arg-type]
    batch = type("Batch", (), {"spans": spans})()
    first, second = in_place.run(batch), in_place.run(batch)
    assert first.shape == (2, 5)
    assert not torch.equal(first, second)
    assert in_place.run(type("Batch", (), {"spans": spans[1:2]})()) is None
    assert in_place.not_counted(lambda: 7)() == 7
    assert in_place.seconds > 0
