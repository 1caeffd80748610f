"""Accounting of the page pool: which pages are free and how many hold each of the others. Integers only; the tensors are `kv_cache`'s.

Runs for prefix nodes are taken from the low end, contiguous where possible, so that a node's KV is one slice of the
pool; single pages of sequences from the high end, so that they stay close together and can be read as one view.
"""

from __future__ import annotations

from collections.abc import Iterable

_FREE, _USED = 1, 0


class PagePool:
    """`num_pages` pages with reference counts. A page is free when nothing refers to it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free_map = bytearray([_FREE]) * num_pages  # a byte a page: `find` searches runs at memory speed
        self._references = [0] * num_pages
        self.num_free = num_pages
        self.peak_used = 0

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def allocate_run(self, count: int) -> list[int]:
        """`count` pages from the low end, contiguous if any free run is long enough. Raises `ValueError` when too few are free."""
        self._require(count)
        if count == 0:
            return []
        first = self._free_map.find(bytes([_FREE]) * count)
        if first >= 0:
            pages = list(range(first, first + count))
        else:
            pages, at = [], -1
            while len(pages) < count:
                at = self._free_map.find(_FREE, at + 1)
                pages.append(at)
        self._take(pages)
        return pages

    def allocate(self, count: int) -> list[int]:
        """`count` pages from the high end, highest first. Raises `ValueError` when too few are free."""
        self._require(count)
        pages: list[int] = []
        at = self.num_pages
        while len(pages) < count:
            at = self._free_map.rfind(_FREE, 0, at)
            pages.append(at)
        self._take(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each of these pages, which must be in use."""
        references = self._references  # every row that starts passes here with all pages of its prefix
        for page in pages:
            count = references[page]
            if not count:
                raise ValueError(f"page {page} is free and cannot be shared")
            references[page] = count + 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less; a page that nothing refers to becomes free."""
        references = self._references
        for page in pages:
            count = references[page]
            if not count:
                raise ValueError(f"page {page} is free already")
            references[page] = count - 1
            if count == 1:
                self._free_map[page] = _FREE
                self.num_free += 1

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raises `AssertionError` unless the references are exactly those of `tables` and the free map agrees."""
        held = [0] * self.num_pages
        for table in tables:
            for page in table:
                held[page] += 1
        assert held == self._references, "page references do not match the block tables"
        free = sum(1 for count in held if count == 0)
        assert free == self.num_free == self._free_map.count(_FREE), "free pages do not add up"
        assert all((self._free_map[p] == _FREE) == (held[p] == 0) for p in range(self.num_pages))

    def _require(self, count: int) -> None:
        if count > self.num_free:
            raise ValueError(f"{count} pages wanted, {self.num_free} free")

    def _take(self, pages: list[int]) -> None:
        for page in pages:
            self._free_map[page] = _USED
            self._references[page] = 1
        self.num_free -= len(pages)
        self.peak_used = max(self.peak_used, self.num_used)
