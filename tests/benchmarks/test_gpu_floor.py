"""The floor of a decode step and the cost of a prefill, worked out by hand; traces; and the size from which sharing saves time."""

from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from benchmarks.gpu.decode import Interval
from benchmarks.gpu.device import shape_of
from benchmarks.gpu.floor import Ceiling, Cost, busy, decode_costs, floor_seconds, prefill_flop
from benchmarks.gpu.serving import Moment
from benchmarks.gpu.traces import Event, Trace, kind_of, outermost, summary, trace_of
from benchmarks.roofline import Shape

# Weights of a layer: 16x2 + 2x8 + 10x2 + 2x5 = 78; of the head 7x2 = 14. Keys and values of a token: 3 x 2 x 1 x 4 numbers of 2 bytes.
SHAPE = Shape(hidden=2, layers=3, heads=2, kv_heads=1, head_dim=4, intermediate=5, vocabulary=7, dtype="bfloat16")


def test_each_part_of_a_step_comes_to_what_is_worked_out_by_hand() -> None:
    pair = 4 * 3 * 2 * 4  # a multiplication and an addition in each of two products, layers, heads, numbers
    assert decode_costs(SHAPE, sequences=10, shared=100, own=5) == {
        "linear layers": Cost(bytes=3 * 78 * 2, flop=2 * 10 * 3 * 78),
        "shared parts": Cost(bytes=100 * 48, flop=10 * 100 * pair),
        "own blocks": Cost(bytes=10 * 5 * 48, flop=10 * 5 * pair),
        "head": Cost(bytes=14 * 2, flop=2 * 10 * 14),
    }


def test_a_part_takes_the_larger_of_its_bytes_and_its_operations() -> None:
    ceiling = Ceiling(bandwidth=10.0, matmul=100.0)
    assert Cost(bytes=50, flop=200).seconds(ceiling) == 5.0
    assert Cost(bytes=50, flop=700).seconds(ceiling) == 7.0
    assert floor_seconds({"a": Cost(50, 200), "b": Cost(50, 700)}, ceiling) == 12.0


def test_the_prefix_is_read_once_and_multiplied_once_for_each_sequence() -> None:
    few, many = (decode_costs(SHAPE, sequences, 100, 5)["shared parts"] for sequences in (1, 256))
    assert many.bytes == few.bytes
    assert many.flop == 256 * few.flop


def test_8b_at_256_sequences_has_the_floor_that_its_figures_give() -> None:
    """At 4 TB/s and 800 TFLOP/s; 6.98 billion weights in the layers, 525 million in the head, 128 KiB of keys and values a token."""
    costs = decode_costs(shape_of("8b", torch.bfloat16), 256, 16_384, 128)
    assert costs["linear layers"].bytes == 2 * 6_979_321_856
    assert costs["head"].bytes == 2 * 128_256 * 4096
    assert costs["own blocks"].bytes == 256 * 128 * 128 * 1024
    ceiling = Ceiling(4e12, 8e14)
    assert {name: round(cost.seconds(ceiling) * 1e3, 2) for name, cost in costs.items()} == {
        "linear layers": 4.47,
        "shared parts": 2.75,
        "own blocks": 1.07,
        "head": 0.34,
    }


def test_a_prefill_comes_to_its_linear_layers_its_pairs_and_a_head_for_each_prompt() -> None:
    # Prompts of 3 and 2 tokens: 5 through the layers, 6 + 3 pairs.
    assert prefill_flop(SHAPE, [3, 2]) == 2 * 5 * 3 * 78 + 2 * 2 * 14 + 9 * 96


def test_an_interval_of_steps_says_how_long_one_takes_and_how_much_is_read() -> None:
    # Four sequences with 64 tokens of their own sample tokens 17 to 32 in 0.32 s: the steps run tokens 16 to 31.
    interval = Interval(Moment(1.0, 100 + 4 * 16, 20), Moment(1.32, 100 + 4 * 32, 36), before=100, sequences=4)
    assert interval.seconds == pytest.approx(0.02)
    assert interval.own == 64 + (16 + 31) / 2


@pytest.mark.parametrize(
    ("intervals", "time"),
    [([], 0), ([(1, 3)], 2), ([(5, 6), (1, 3)], 3), ([(1, 4), (2, 3)], 3), ([(1, 4), (2, 6), (6, 7)], 6)],
)
def test_a_device_is_busy_while_anything_runs(intervals: list[tuple[float, float]], time: float) -> None:
    assert busy(intervals) == time


def test_where_sharing_begins_to_pay_is_where_least_is_lost() -> None:
    pytest.importorskip("triton")
    from benchmarks.gpu.kernels import best_threshold

    # Blocks of 32 tokens: 2, 8 and 32 queries x blocks; shared is the better way from 8 on.
    grid = [
        {"prefix": 32, "sharers": 2, "shared_ms": 2.0, "flat_ms": 1.0},
        {"prefix": 64, "sharers": 4, "shared_ms": 1.0, "flat_ms": 1.5},
        {"prefix": 128, "sharers": 8, "shared_ms": 1.0, "flat_ms": 4.0},
    ]
    assert best_threshold(grid) == 4
    assert best_threshold(grid[1:]) == 1
    assert best_threshold(grid[:1]) == 4


def recorded(name: str, begins: float, ends: float, kind: DeviceType = DeviceType.CUDA, note: bool = False) -> object:
    """What the profiler gives."""
    return SimpleNamespace(
        name=name, device_type=kind, is_user_annotation=note, time_range=SimpleNamespace(start=begins, end=ends)
    )


def test_a_trace_has_what_ran_on_the_device_and_not_what_was_only_marked_there() -> None:
    events = [
        recorded("aten::mm", 0, 50, DeviceType.CPU),
        recorded("gemm", 10, 30),
        recorded("step", 0, 90, note=True),
        recorded("nothing", 40, 40),
        recorded("attend_kernel", 30, 35),
    ]
    trace = trace_of(events, torch.device("cuda"), steps=2)
    assert trace == Trace((Event("gemm", 10, 30), Event("attend_kernel", 30, 35)), 2)
    assert trace.busy_us == 25


def test_a_trace_of_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"^the profiler saw nothing run on the device$"):
        trace_of([recorded("aten::mm", 0, 50, DeviceType.CPU)], torch.device("cuda"), 1)


def test_of_operations_that_call_one_another_the_outermost_count() -> None:
    events = [Event("b", 2, 3), Event("a", 0, 10), Event("c", 4, 9), Event("d", 10, 12)]
    assert [e.name for e in outermost(events)] == ["a", "d"]


def test_the_milliseconds_of_a_step_are_told_by_kind_and_by_kernel() -> None:
    events = (Event("gemm_1", 0, 4000), Event("gemm_1", 4000, 6000), Event("attend_kernel", 6000, 7000))
    found = summary(Trace(events, 2), step_ms=5.0)
    assert (found["busy_ms"], found["idle_ms"], found["launches_per_step"]) == (3.5, 1.5, 1.5)
    assert found["kinds_ms"] == {"matrix products": 3.0, "attention": 0.5}
    assert found["kernels"] == [
        {"name": "gemm_1", "per_step": 1.0, "ms": 3.0},
        {"name": "attend_kernel", "per_step": 0.5, "ms": 0.5},
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_TNN", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matrix products"),
        ("attend_kernel", "attention"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel", "norms"),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps>", "sampling"),
        ("void at::native::vectorized_elementwise_kernel<4, silu>", "element-wise and other"),
    ],
)
def test_a_kernel_is_told_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind
