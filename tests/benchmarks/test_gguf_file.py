"""The GGUF files of the benchmarks."""

from __future__ import annotations

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")


def test_numbers_that_q4_k_holds_are_written_and_read_unchanged():
    from benchmarks.engines.gguf_file import q4_k_blocks

    numbers = np.random.default_rng(0)
    scales, minima = numbers.integers(1, 64, (2, 3 * 2, 8, 1))
    scales[:, 5], minima[:, 6] = 63, 63  # the largest gives the scale in float16
    codes = numbers.integers(0, 16, (3 * 2, 8, 32))
    codes[..., :2] = 0, 15
    weight = (codes * scales / 64 - minima / 256).astype(np.float32).reshape(3, 512)
    blocks = q4_k_blocks(weight)
    assert blocks.shape == (3, 288)
    assert np.array_equal(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K), weight)
