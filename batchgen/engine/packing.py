"""A step's works as arrays: which tokens go in, and where logits come out. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.spans import Sequence as Running
from batchgen.engine.steps import Work


def size_of(works: Sequence[Work]) -> int:
    """Tokens of the works."""
    return sum(work.stop - work.start for work in works)


def tokens_of(works: Sequence[Work]) -> NDArray[np.int64]:
    """[T] the packed batch; 0 where only the device knows the token (`drawn_of`)."""
    tokens = np.zeros(size_of(works), dtype=np.int64)
    at = 0
    for work in works:
        size = work.stop - work.start
        if size > 1 or not _is_unseen(work):
            tokens[at : at + size] = work.span.tokens(work.start, work.stop)
        at += size
    return tokens


def drawn_of(works: Sequence[Work]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[M] places in the packed batch whose token was drawn in the step before and is not on the host yet, and [M] their sequences' slots."""
    places: list[int] = []
    slots: list[int] = []
    end = 0
    for work in works:
        end += work.stop - work.start
        if _is_unseen(work):
            assert isinstance(work.span, Running)
            places.append(end - 1)
            slots.append(work.span.slot)
    return np.asarray(places, dtype=np.int64), np.asarray(slots, dtype=np.int64)


def _is_unseen(work: Work) -> bool:
    """Whether the host has not seen the work's last token. It is the only one then: a sequence that comes back is known whole."""
    span = work.span
    return isinstance(span, Running) and span.unseen > 0 and work.stop == span.end


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
