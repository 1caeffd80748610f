"""A step's works as arrays: which tokens go in, and where logits come out. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.steps import Work


def size_of(works: Sequence[Work]) -> int:
    """Tokens of the works."""
    return sum(work.stop - work.start for work in works)


def tokens_of(works: Sequence[Work]) -> NDArray[np.int64]:
    """[T] the packed batch."""
    return np.concatenate([w.span.tokens(w.start, w.stop) for w in works]).astype(np.int64)


def wanted_of(works: Sequence[Work]) -> NDArray[np.int64]:
    """[N] places in the packed batch whose logits are wanted."""
    places: list[int] = []
    end = 0
    for work in works:
        end += work.stop - work.start
        places += range(end - (work.stop - work.logits), end)
    return np.asarray(places, dtype=np.int64)


def halves(works: Sequence[Work]) -> tuple[list[Work], list[Work]]:
    """Works of two or more tokens as two sets of about as many, in their order; one of them may be cut in two."""
    room = size_of(works) // 2
    first: list[Work] = []
    second: list[Work] = []
    for work in works:
        cut = min(work.stop, work.start + room)
        room -= cut - work.start
        if cut > work.start:
            first.append(Work(work.span, work.start, cut, min(work.logits, cut)))
        if cut < work.stop:
            second.append(Work(work.span, cut, work.stop, max(work.logits, cut)))
    return first, second
