"""Memory in huge pages for packed weights.

Every product reads all of its weights. With pages of 4 KiB, the processor spends a part of that time on looking up the pages.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

HUGE_PAGE = 2 << 20
PIECE = 64 << 20
"""Bytes that are mapped at a time. Unused ones take no memory."""
ALIGNMENT = 128


class _Pieces:
    """Hands out memory from the newest piece. A piece is unmapped when no tensor is in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: weakref.ref[mmap.mmap] | None = None
        self._next = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Returns a piece and an offset in it, at which `size` bytes are free. Raises `OSError` if there is no memory."""
        with self._lock:
            piece = None if self._newest is None else self._newest()
            if piece is None or self._next + size > len(piece):
                piece = mmap.mmap(-1, max(PIECE, size + HUGE_PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with suppress(AttributeError, OSError):  # systems without huge pages
                    piece.madvise(mmap.MADV_HUGEPAGE)
                self._newest = weakref.ref(piece)
                self._next = -_start_of(piece) % HUGE_PAGE
            at = self._next
            self._next += -(-size // ALIGNMENT) * ALIGNMENT
            return piece, at


_pieces = _Pieces()


def _start_of(piece: mmap.mmap) -> int:
    return torch.frombuffer(piece, dtype=torch.uint8).data_ptr()


def empty_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns room for a contiguous tensor, next to other such room, in huge pages if the system has them."""
    count = math.prod(shape)
    with torch.inference_mode(False):  # may be written in any mode
        try:
            piece, at = _pieces.take(count * dtype.itemsize)
        except OSError:
            return torch.empty(shape, dtype=dtype)  # torch's error says what it lacks
        return torch.frombuffer(piece, dtype=dtype, count=count, offset=at).view(*shape)


def in_huge_pages(x: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy of x in such room."""
    return empty_in_huge_pages(x.shape, x.dtype).copy_(x)


def give_back(x: torch.Tensor) -> None:
    """Returns the pages of a copy by `in_huge_pages` to the system, although its piece has other copies. Nothing may read the copy any more."""
    first, end = -(-x.data_ptr() // mmap.PAGESIZE), (x.data_ptr() + x.nbytes) // mmap.PAGESIZE
    if end > first:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE, mmap.MADV_DONTNEED)


def give_freed_back() -> None:
    """Returns memory to the system that was freed and that the C library keeps for later."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
