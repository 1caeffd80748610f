"""Memory for packed weights: huge pages, or mapped files, whose pages the system may drop.

Every product reads all of its weights. With pages of 4 KiB, the processor spends a part of that time on looking up the pages.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import torch

from batchgen.errors import ModelError

HUGE_PAGE = 2 << 20
PIECE = 64 << 20
"""Bytes that are mapped at a time. Unused ones take no memory."""
ALIGNMENT = 128
_MADV_WILLNEED, _MADV_DONTNEED, _MADV_POPULATE_READ = 3, 4, 22
"""The last one is Linux's, from 5.14 on."""
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_COLLAPSE = 14, 15, 25
"""The last one is Linux's, from 6.1 on."""
MAPS = Path("/proc/self/maps")
"""What is mapped, where the system tells."""
_DELETED = " (deleted)"
"""The end of the name of a mapped file that has no name."""
_IN_HUBS_CACHE = "/blobs/"
"""In the path of a file that huggingface_hub has downloaded. Its name is a digest."""


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
                piece = self._map(size + HUGE_PAGE)
                self._newest = weakref.ref(piece)
                self._next = -_start_of(piece) % HUGE_PAGE
            at = self._next
            self._next += -(-size // ALIGNMENT) * ALIGNMENT
            return piece, at

    def _map(self, size: int) -> mmap.mmap:
        piece = mmap.mmap(-1, max(PIECE, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # systems without huge pages
            piece.madvise(mmap.MADV_HUGEPAGE)
        return piece


class FilePieces(_Pieces):
    """Hands out memory in files without a name, each of which vanishes with its memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._mapped = weakref.WeakSet[mmap.mmap]()
        self.nbytes = 0
        """Of all files so far."""

    def has(self, x: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the files."""
        return any(0 <= x.data_ptr() - _start_of(piece) < len(piece) for piece in self._mapped)

    def _map(self, size: int) -> mmap.mmap:
        """Raises `ModelError` if the disk is full. A page for which the disk has no room would end the process."""
        size = max(size, self.nbytes // 8)  # so that there are not too many files
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                self.nbytes += size
                piece = mmap.mmap(file.fileno(), size)
                self._mapped.add(piece)
                return piece
        except OSError as e:
            raise ModelError(
                f"the weights cannot be streamed: no room for them in {self._folder} ({e.strerror})",
                "free some space, or set XDG_CACHE_HOME to a folder on another disk",
            ) from e


_pieces = _Pieces()
_in_use: ContextVar[_Pieces] = ContextVar("pieces", default=_pieces)


@contextmanager
def pieces_in(pieces: _Pieces) -> Iterator[None]:
    """Makes `in_huge_pages` take memory of these pieces."""
    token = _in_use.set(pieces)
    try:
        yield
    finally:
        _in_use.reset(token)


def _start_of(piece: mmap.mmap) -> int:
    return torch.frombuffer(piece, dtype=torch.uint8).data_ptr()


def empty_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns room for a contiguous tensor, next to other such room, in huge pages if the system has them."""
    count = math.prod(shape)
    with torch.inference_mode(False):  # may be written in any mode
        try:
            piece, at = _in_use.get().take(count * dtype.itemsize)
        except OSError:
            return torch.empty(shape, dtype=dtype)  # torch's error says what it lacks
        return torch.frombuffer(piece, dtype=dtype, count=count, offset=at).view(*shape)


def in_huge_pages(x: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy of x in such room."""
    return empty_in_huge_pages(x.shape, x.dtype).copy_(x)


def give_back(x: torch.Tensor) -> None:
    """Returns the pages of a copy by `in_huge_pages` to the system, although its piece has other copies. Nothing may read the copy any more."""
    start, size = _pages_in(x)
    if size:
        in_file = hasattr(mmap, "MADV_REMOVE") and _advise(start, size, mmap.MADV_REMOVE)
        if not in_file:
            _advise(start, size, _MADV_DONTNEED)


def keep_pages_small(x: torch.Tensor) -> bool:
    """Makes memory of x that was not touched yet come in small pages. Returns False where the system could not make them huge later."""
    return _advise(0, 0, _MADV_COLLAPSE) and _advise(*_pages_in(x), _MADV_NOHUGEPAGE)


def make_pages_huge(x: torch.Tensor) -> None:
    """Makes huge pages of the memory of x, which keeps its numbers. Parts that were not touched yet still take none."""
    place = _pages_in(x)
    _advise(*place, _MADV_HUGEPAGE)
    _advise(*place, _MADV_COLLAPSE)


def _pages_in(x: torch.Tensor) -> tuple[int, int]:
    """Returns where the pages begin that only x lies in, and their bytes."""
    first, end = -(-x.data_ptr() // mmap.PAGESIZE), (x.data_ptr() + x.nbytes) // mmap.PAGESIZE
    return first * mmap.PAGESIZE, max(0, end - first) * mmap.PAGESIZE


def give_freed_back() -> None:
    """Returns memory to the system that was freed and that the C library keeps for later."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


class Loading:
    """Returns what loading weights leaves behind to the system, now and then: freed memory, and pages of the model's files."""

    EVERY = 256 << 20
    """Bytes of plain weights."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, weight: torch.Tensor) -> None:
        """Counts a weight that was loaded."""
        self._bytes += weight.nbytes
        if self._bytes >= self.EVERY:
            self._bytes = 0
            give_freed_back()
            drop_read_pages()


class Mapping(NamedTuple):
    """A part of the process's memory that is a file."""

    start: int
    end: int
    shared: bool
    """Whether what is written to it goes to the file, and not to memory of the process."""
    file: str


def mapped_files(*, of_models: bool = False) -> list[Mapping]:
    """Returns the files that are mapped; none where the system does not tell. `of_models`: only models' files, and those without a name."""
    found = []
    with suppress(OSError), MAPS.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            line = line.rstrip("\n")
            if of_models and not (line.endswith((".safetensors", ".gguf", _DELETED)) or _IN_HUBS_CACHE in line):
                continue  # a process has thousands of others
            place, permissions, _, _, inode, *name = line.split(maxsplit=5)
            if inode != "0":
                start, end = (int(number, 16) for number in place.split("-"))
                found.append(Mapping(start, end, permissions.endswith("s"), name[0] if name else ""))
    return found


def drop_read_pages() -> None:
    """Takes the pages of mapped weights out of the process, which reads them again if it needs them. Nothing may have written to a model's files."""
    for each in mapped_files(of_models=True):
        if each.shared or not each.file.endswith(_DELETED):
            _advise(each.start, each.end - each.start, _MADV_DONTNEED)


class Pages:
    """The pages of mapped files in which some tensors lie."""

    def __init__(self, tensors: Iterable[torch.Tensor], mapped: Sequence[Mapping]) -> None:
        """Tensors that are not in `mapped` are left out."""
        size = mmap.PAGESIZE
        places = sorted(
            (x.data_ptr() // size * size, -(-(x.data_ptr() + x.nbytes) // size) * size) for x in tensors if x.nbytes
        )
        self._places: list[list[int]] = []
        for start, end in places:
            if not any(each.start <= start < each.end for each in mapped):
                continue
            if self._places and start <= self._places[-1][1]:
                self._places[-1][1] = max(self._places[-1][1], end)
            else:
                self._places.append([start, end])

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self._places)

    def ask(self) -> None:
        """Asks the system to read the pages that are not in memory."""
        for start, end in self._places:
            _advise(start, end - start, _MADV_WILLNEED)

    def read(self) -> None:
        """Reads the pages that are not in memory, and waits for them."""
        for start, end in self._places:
            _advise(start, end - start, _MADV_POPULATE_READ)

    def drop(self) -> None:
        """Takes the pages out of the process. They stay in memory only as long as the system needs no memory."""
        for start, end in self._places:
            _advise(start, end - start, _MADV_DONTNEED)


def read_pages(some: Sequence[Pages]) -> int:
    """Reads pages that are not in memory, and waits for them. Returns how many bytes they have. All are asked for before the first is waited for."""
    for pages in some:
        pages.ask()
    for pages in some:
        pages.read()
    return sum(pages.nbytes for pages in some)


def _advise(start: int, size: int, advice: int) -> bool:
    """Calls madvise, without the lock of the interpreter. Returns whether the system has done it."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(start, size, advice) == 0)
