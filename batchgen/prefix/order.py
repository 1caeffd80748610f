"""Depth-first order of prompts, and what neighbours in it share. Token arrays in, integers out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchgen.request import TokenArray

_KEY_TOKENS = 1 << 24  # tokens in keys at once: 64 MiB, however long the prompts are
_LEAST_WIDTH = 64


def token_key(tokens: TokenArray) -> bytes:
    """Tokens as big-endian bytes: they compare as the tokens do, a prefix before what it begins."""
    return tokens.astype(">i4").tobytes()


def common_length(a: TokenArray, b: TokenArray) -> int:
    """Number of leading tokens that a and b share."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differ = a[:n] != b[:n]
    at = int(differ.argmax())
    return at if differ[at] else n


def depth_first_order(prompts: Sequence[TokenArray]) -> NDArray[np.int64]:
    """Indices of the prompts sorted by `token_key`; equal prompts keep their order.

    Keys are made of a slice of the prompts at a time, after skipping what all of a run share: a whole second copy of
    the prompts would double the memory of a window, and a long prefix common to all would be compared again and again.
    """
    order = list(range(len(prompts)))
    unsorted = [(0, len(prompts), 0)]  # runs [lo, hi) of `order` that agree on their first `depth` tokens
    while unsorted:
        lo, hi, depth = unsorted.pop()
        members = order[lo:hi]
        depth = _agreed_depth(prompts, members, depth)
        width = max(_LEAST_WIDTH, _KEY_TOKENS // max(1, len(members)))
        keys = [token_key(prompts[m][depth : depth + width]) for m in members]
        ranks = sorted(range(len(members)), key=keys.__getitem__)
        order[lo:hi] = [members[r] for r in ranks]
        start = 0
        for i in range(1, len(ranks) + 1):
            if i < len(ranks) and keys[ranks[i]] == keys[ranks[start]]:
                continue
            # Equal keys shorter than the slice are whole rests: those prompts are equal, and in order.
            if i - start > 1 and len(keys[ranks[start]]) == 4 * width:
                unsorted.append((lo + start, lo + i, depth + width))
            start = i
    return np.array(order, dtype=np.int64)


def _agreed_depth(prompts: Sequence[TokenArray], members: list[int], depth: int) -> int:
    """How many leading tokens all members share, which is at least `depth`."""
    if not members:
        return depth
    first = prompts[members[0]]
    end = len(first)
    for m in members[1:]:
        if end == depth:
            break
        end = depth + common_length(first[depth:end], prompts[m][depth:end])
    return end


def neighbour_lengths(prompts: Sequence[TokenArray], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Entry i is what the prompts at positions i - 1 and i of `order` share; entry 0, and one more at the end, is 0."""
    shared = np.zeros(len(order) + 1, dtype=np.int64)
    if len(order) == 0:
        return shared
    indices = order.tolist()
    before = prompts[indices[0]]
    for i, index in enumerate(indices[1:], 1):
        tokens = prompts[index]
        shared[i] = common_length(before, tokens)
        before = tokens
    return shared
