"""Chunk hashes: the identity of a chunk-aligned prefix, the same in every window and on every machine."""

from __future__ import annotations

import hashlib

from batchgen.request import TokenArray

_TOKEN_BYTES = 4


def chunk_hashes(tokens: TokenArray, chunk_size: int) -> list[bytes]:
    """Hashes of a prompt's whole chunks, 16 bytes each; hash i identifies the first (i + 1) * chunk_size tokens.

    Chained: hash i is blake2b-128 of hash i - 1 (nothing for the first) and the chunk's tokens as little-endian int32.
    Tokens after the last whole chunk have no part in it. Raises `ValueError` for a chunk_size below 1.
    """
    return continue_hashes(b"", tokens, chunk_size)


def continue_hashes(previous: bytes, tokens: TokenArray, chunk_size: int) -> list[bytes]:
    """Goes on with a chain: the hashes of the chunks of `tokens`, which come after the prefix with hash `previous`."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    data = tokens.astype("<i4", copy=False).tobytes()
    width = chunk_size * _TOKEN_BYTES
    hashes: list[bytes] = []
    for start in range(0, len(data) - width + 1, width):
        previous = hashlib.blake2b(previous + data[start : start + width], digest_size=16).digest()
        hashes.append(previous)
    return hashes
