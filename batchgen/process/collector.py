"""Makes Python's garbage collector run less often while a job runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_collections() -> Iterator[None]:
    """Makes the collector run some hundred times less often. A job makes millions of small objects and no reference cycles, and looking for
    cycles took a fifth of the time of reading rows. A start of the command makes about 420,000 objects and needs no collection at all."""
    before = gc.get_threshold()
    gc.set_threshold(500_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
