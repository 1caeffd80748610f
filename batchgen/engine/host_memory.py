"""Keeps freed memory in the process. On the CPU a step allocates about as much as it computes; with the C library's defaults
large blocks go back to the system and come again as zeroed pages, a third of a step's time (benchmarks/NOTES.md)."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc


def keep_freed_memory() -> bool:
    """Tells glibc to reuse large blocks, not to unmap them; process-wide. False where the C library is another."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False  # musl, say
    # 32 MiB is the largest threshold that glibc takes; larger blocks are mapped each for itself.
    wanted = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20))
    return all([mallopt(option, value) == 1 for option, value in wanted])
