"""The roofline's arithmetic, worked by hand and against a count of every query and key."""

import random

import numpy as np
import pytest

from benchmarks.rates import measure
from benchmarks.roofline import Load, Rates, Shape, load_of, seconds

SHAPE = Shape(hidden=2, layers=3, heads=2, kv_heads=1, head_dim=4, intermediate=5, vocabulary=7, dtype="float32")
LINEARS = ("qkv", "o", "gate_up", "down", "head")


def prompts(*tokens: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int32) for row in tokens]


def some_rows(seed: int) -> tuple[list[list[int]], list[int]]:
    """Rows over three tokens, so that many share, some are equal and some end inside others."""
    rnd = random.Random(seed)
    rows = [[rnd.randrange(3) for _ in range(rnd.randint(1, 7))] for _ in range(12)]
    return rows, [rnd.randint(1, 6) for _ in rows]


def counted(rows: list[list[int]], made: list[int]) -> Load:
    """The same, token by token: a token is its path."""
    trie = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    pairs = sum(map(len, trie)) + sum(len(row) + k for row, n in zip(rows, made, strict=True) for k in range(1, n))
    read = 0
    for k in range(1, max(made)):
        alive = [row for row, n in zip(rows, made, strict=True) if n > k]
        read += len({tuple(row[: i + 1]) for row in alive for i in range(len(row))}) + k * len(alive)
    drawn = sum(made)
    return Load(len(trie), len(trie) + drawn - len(rows), drawn, pairs, max(made), read)


@pytest.mark.parametrize("seed", range(20))
def test_a_workload_comes_to_what_counting_each_token_gives(seed):
    rows, made = some_rows(seed)
    assert load_of(prompts(*rows), made) == counted(rows, made)


LOAD = Load(prefill_tokens=5, layer_tokens=10, head_tokens=4, pairs=100, steps=2, kv_tokens_read=50)


def test_the_roofline_is_what_is_worked_out_by_hand():
    rates = Rates(linear=dict.fromkeys(LINEARS, 2.0), attention=4.0, bandwidth=1e9)
    # Weights of a layer: 16x2 + 2x8 + 10x2 + 2x5 = 78; of the head 7x2 = 14. 10 tokens through 3 layers, 4 through the head.
    # Attention: 100 pairs, 3 layers, 4 operations a number, 8 numbers a query.
    found = seconds(LOAD, SHAPE, rates)
    assert found["linear_arithmetic"] == (10 * 3 * 2 * 78 + 4 * 2 * 14) / 2.0
    assert found["attention_arithmetic"] == 100 * 3 * 4 * 8 / 4.0
    assert found["total"] == found["linear_arithmetic"] + found["attention_arithmetic"]


def test_reading_counts_where_it_takes_longer_than_the_arithmetic():
    rates = Rates(linear=dict.fromkeys(LINEARS, 1e9), attention=1e9, bandwidth=2.0)
    # Two steps read 3 x 78 + 14 weights of 4 bytes; 50 tokens have 3 layers of 2 x 4 numbers of 4 bytes.
    assert seconds(LOAD, SHAPE, rates)["total"] == 2 * 248 * 4 / 2.0 + 50 * 3 * 2 * 4 * 4 / 2.0


def test_rates_are_measured_for_every_weight_of_the_model():
    rates = measure(SHAPE, tokens=(8,), keys=(16,), copied_bytes=4096)
    assert set(rates.linear) == set(LINEARS)
    assert min(*rates.linear.values(), rates.attention, rates.bandwidth) > 0
