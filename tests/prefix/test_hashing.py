import hashlib

import numpy as np
import pytest

from batchgen.prefix import chunk_hashes


def tokens(*ids):
    return np.array(ids, dtype=np.int32)


def test_a_hash_is_blake2b_of_the_hash_before_and_the_little_endian_chunk():
    first = hashlib.blake2b(b"\x01\0\0\0\x02\0\0\0", digest_size=16).digest()
    second = hashlib.blake2b(first + b"\x03\0\0\0\x2c\x01\0\0", digest_size=16).digest()
    assert chunk_hashes(tokens(1, 2, 3, 300), 2) == [first, second]


def test_a_chunk_size_below_one_is_refused():
    with pytest.raises(ValueError, match=r"^chunk_size must be at least 1, not 0$"):
        chunk_hashes(tokens(1), 0)
