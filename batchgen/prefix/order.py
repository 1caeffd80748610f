"""Depth-first order of prompts, and what neighbours in that order share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchgen.request import IMAGE_IDS, TokenArray


def token_key(tokens: TokenArray) -> bytes:
    """The tokens as big-endian bytes: 8 for a token of an image, else 4. Keys compare as token sequences do; a prefix comes before everything it begins."""
    if tokens.dtype == np.int32:
        return tokens.astype(">i4").tobytes()
    kept = np.ones((len(tokens), 8), dtype=bool)
    kept[tokens < IMAGE_IDS, :4] = False
    return tokens.astype(">i8").view(np.uint8).reshape(-1, 8)[kept].tobytes()


def common_length(a: TokenArray, b: TokenArray) -> int:
    """Number of leading tokens that a and b share."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differ = a[:n] != b[:n]
    at = int(differ.argmax())
    return at if differ[at] else n


def depth_first_order(
    prompts: Sequence[TokenArray], *, max_key_tokens: int = 1 << 24, min_key_width: int = 64
) -> NDArray[np.int64]:
    """Indices of the prompts, sorted by `token_key`. Equal prompts keep their order.

    All sort keys together hold about `max_key_tokens` tokens (64 MiB), and each at least `min_key_width`, however long the prompts are.

    Sort keys are made of one slice of the prompts at a time, after the tokens that all prompts of a run share. Whole keys would
    double the memory of a window, and would compare a long common prefix again and again.
    """
    order = list(range(len(prompts)))
    unsorted = [(0, len(prompts), 0)]  # runs [lo, hi) of `order` that agree on their first `depth` tokens
    while unsorted:
        lo, hi, depth = unsorted.pop()
        members = order[lo:hi]
        depth = _agreed_depth(prompts, members, depth)
        width = max(min_key_width, max_key_tokens // max(1, len(members)))
        keys = [token_key(prompts[m][depth : depth + width]) for m in members]
        ranks = sorted(range(len(members)), key=keys.__getitem__)
        order[lo:hi] = [members[r] for r in ranks]
        start = 0
        for i in range(1, len(ranks) + 1):
            if i < len(ranks) and keys[ranks[i]] == keys[ranks[start]]:
                continue
            # If the prompts end in the slice, they are equal, and in order.
            if i - start > 1 and len(prompts[members[ranks[start]]]) >= depth + width:
                unsorted.append((lo + start, lo + i, depth + width))
            start = i
    return np.array(order, dtype=np.int64)


def _agreed_depth(prompts: Sequence[TokenArray], members: list[int], depth: int) -> int:
    """Number of leading tokens that all members share. They are known to share `depth` tokens."""
    if not members:
        return depth
    first = prompts[members[0]]
    end = len(first)
    agreed = first[depth:end].tobytes()  # comparing bytes takes a third of the time
    for m in members[1:]:
        if prompts[m][depth:end].tobytes() != agreed:
            end = depth + common_length(first[depth:end], prompts[m][depth:end])
            agreed = first[depth:end].tobytes()
        if end == depth:
            break
    return end


def neighbour_lengths(prompts: Sequence[TokenArray], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """[prompts + 1] Entry i is the number of leading tokens that positions i - 1 and i of `order` share.

    The first and the last entry are 0.
    """
    ordered = [prompts[i] for i in order.tolist()]
    shared = np.zeros(len(ordered) + 1, dtype=np.int64)
    shared[1:-1] = [common_length(before, tokens) for before, tokens in pairwise(ordered)]
    return shared
