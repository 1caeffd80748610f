import numpy as np

from batchgen.sampling.philox import philox4x64, uniforms

ONES = 0xFFFFFFFFFFFFFFFF


def test_philox_equals_numpys_on_random_counters_and_keys():
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**64, (200, 4), dtype=np.uint64)
    counters[:, 0] |= 1  # numpy adds one to the counter before its first block: avoid the carry
    keys = rng.integers(0, 2**64, (200, 2), dtype=np.uint64)
    got = philox4x64(counters, keys)
    for counter, key, block in zip(counters, keys, got, strict=True):
        before = counter - np.array([1, 0, 0, 0], dtype=np.uint64)
        assert np.random.Philox(counter=before, key=key).random_raw(4).tolist() == block.tolist()


def first():
    """The number of the key 0, without a seed, for the first token of the first choice."""
    return uniforms(np.zeros((1, 2), dtype=np.uint64), *[np.zeros(1, dtype=np.int64)] * 3)[0]


def test_a_uniform_has_53_bits_of_the_first_word():
    assert first() == (0x16554D9ECA36314C >> 11) / 2**53


def test_the_largest_uniform_is_below_one(monkeypatch):
    monkeypatch.setattr("batchgen.sampling.philox.philox4x64", lambda counters, keys: np.full((1, 4), ONES, np.uint64))
    assert first() == 1 - 2.0**-53
