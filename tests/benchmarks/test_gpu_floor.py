"""The floor of a decode step and the cost of a prefill, worked out by hand."""

from benchmarks.gpu.floor import Ceiling, Cost, decode_costs, floor_seconds, prefill_flop
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


def test_a_prefill_comes_to_its_linear_layers_its_pairs_and_a_head_for_each_prompt():
    # Prompts of 3 and 2 tokens: 5 through the layers, 6 + 3 pairs.
    assert prefill_flop(SHAPE, [3, 2]) == 2 * 5 * 3 * 78 + 2 * 2 * 14 + 9 * 96
