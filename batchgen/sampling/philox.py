"""Uniform random numbers that depend only on what they are for: seed, row key, completion and position. Numpy on the host.

The generator is Philox4x64-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC
2011), the `Random123` library. It is counter-based and has no state, so a row gets the same numbers in any batch, in any order and
after a resume.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniforms(
    keys: NDArray[np.uint64], seeds: NDArray[np.int64], choices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Returns one number in [0, 1) per row, a multiple of 2**-53.

    `keys` [N, 2] are the row keys as two little-endian words; `seeds`, `choices` and `positions` are [N].
    """
    counters = np.zeros((len(keys), 4), dtype=np.uint64)
    counters[:, 0] = positions
    counters[:, 1] = choices
    counters[:, 2] = np.asarray(seeds, dtype=np.int64).view(np.uint64)
    bits: NDArray[np.uint64] = philox4x64(counters, keys)[:, 0] >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def philox4x64(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the four words [N, 4] that Philox4x64-10 makes of each counter [N, 4] under its key [N, 2]."""
    even, odd = counters.T[[0, 2]], counters.T[[1, 3]]
    key = keys.T.copy()
    for i in range(_ROUNDS):
        if i:
            key += _KEY_STEPS
        high, low = _multiplied(even)
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1)


def _multiplied(words: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns the high and the low halves of `words` [2, N] times the multipliers, computed by parts: numpy has no 128-bit product."""
    w1, w0 = words >> _HALF, words & _LOW
    m1, m0 = _MULTIPLIERS >> _HALF, _MULTIPLIERS & _LOW
    cross = w1 * m0 + (w0 * m0 >> _HALF)  # no sum here passes 2**64 - 1
    high = w1 * m1 + (cross >> _HALF) + (w0 * m1 + (cross & _LOW) >> _HALF)
    return high, words * _MULTIPLIERS
