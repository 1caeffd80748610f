"""The floor of a decode step and the cost of a prefill, worked out by hand."""

import pytest
import torch

from benchmarks.gpu.decode import Interval
from benchmarks.gpu.device import shape_of
from benchmarks.gpu.floor import Ceiling, Cost, decode_costs, floor_seconds, prefill_flop
from benchmarks.gpu.serving import Moment
from benchmarks.roofline import Shape

# Weights of a layer: 16x2 + 2x8 + 10x2 + 2x5 = 78; of the head 7x2 = 14. Keys and values of a token: 3 x 2 x 1 x 4 numbers of 2 bytes.
SHAPE = Shape(hidden=2, layers=3, heads=2, kv_heads=1, head_dim=4, intermediate=5, vocabulary=7, dtype="bfloat16")


def test_each_part_of_a_step_comes_to_what_is_worked_out_by_hand():
    pair = 4 * 3 * 2 * 4  # a multiplication and an addition in each of two products, layers, heads, numbers
    assert decode_costs(SHAPE, sequences=10, shared=100, own=5) == {
        "linear layers": Cost(bytes=3 * 78 * 2, flop=2 * 10 * 3 * 78),
        "shared parts": Cost(bytes=100 * 48, flop=10 * 100 * pair),
        "own blocks": Cost(bytes=10 * 5 * 48, flop=10 * 5 * pair),
        "head": Cost(bytes=14 * 2, flop=2 * 10 * 14),
    }


def test_a_part_takes_the_larger_of_its_bytes_and_its_operations():
    ceiling = Ceiling(bandwidth=10.0, matmul=100.0)
    assert Cost(bytes=50, flop=200).seconds(ceiling) == 5.0
    assert Cost(bytes=50, flop=700).seconds(ceiling) == 7.0
    assert floor_seconds({"a": Cost(50, 200), "b": Cost(50, 700)}, ceiling) == 12.0


def test_the_prefix_is_read_once_and_multiplied_once_for_each_sequence():
    few, many = (decode_costs(SHAPE, sequences, 100, 5)["shared parts"] for sequences in (1, 256))
    assert many.bytes == few.bytes
    assert many.flop == 256 * few.flop


def test_8b_at_256_sequences_has_the_floor_that_its_figures_give():
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


def test_a_prefill_comes_to_its_linear_layers_its_pairs_and_a_head_for_each_prompt():
    # Prompts of 3 and 2 tokens: 5 through the layers, 6 + 3 pairs.
    assert prefill_flop(SHAPE, [3, 2]) == 2 * 5 * 3 * 78 + 2 * 2 * 14 + 9 * 96


def test_an_interval_of_steps_says_how_long_one_takes_and_how_much_is_read():
    # Four sequences with 64 tokens of their own sample tokens 17 to 32 in 0.32 s: the steps run tokens 16 to 31.
    interval = Interval(Moment(1.0, 100 + 4 * 16, 20), Moment(1.32, 100 + 4 * 32, 36), before=100, sequences=4)
    assert interval.seconds == pytest.approx(0.02)
    assert interval.own == 64 + (16 + 31) / 2
