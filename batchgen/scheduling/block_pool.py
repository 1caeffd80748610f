"""Accounts for the block pool: which blocks are free, and how many references each of the others has. The tensors are in `kv_cache`.

Prefix nodes take runs of blocks from the low end, contiguous if possible, so that a node's KV is one slice of the pool. Sequences
take single blocks from the high end, so that these stay close together and can be read as one view.
"""

from __future__ import annotations

from collections.abc import Iterable

_FREE, _USED = 1, 0


class BlockPool:
    """`num_blocks` blocks with reference counts. A block is free when nothing refers to it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # One byte for each block, so that `find` searches for runs at the speed of memory.
        self._free_map = bytearray([_FREE]) * num_blocks
        self._references = [0] * num_blocks
        self.num_used = self.peak_used = 0

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    def allocate_run(self, count: int) -> list[int]:
        """Returns `count` blocks from the low end, contiguous if a free run is long enough. Raises `ValueError` if too few are free."""
        self._require(count)
        if count == 0:
            return []
        first = self._free_map.find(bytes([_FREE]) * count)
        if first >= 0:
            blocks = list(range(first, first + count))
        else:
            blocks, at = [], -1
            while len(blocks) < count:
                at = self._free_map.find(_FREE, at + 1)
                blocks.append(at)
        self._take(blocks)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks from the high end, the highest first. Raises `ValueError` if too few are free."""
        self._require(count)
        blocks: list[int] = []
        at = self.num_blocks
        while len(blocks) < count:
            at = self._free_map.rfind(_FREE, 0, at)
            blocks.append(at)
        self._take(blocks)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of these blocks. Raises `ValueError` for a free block."""
        references = self._references  # a local name: each row that starts shares all blocks of its prefix
        for block in blocks:
            count = references[block]
            if not count:
                raise ValueError(f"block {block} is free and cannot be shared")
            references[block] = count + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Removes a reference from each of these blocks. Blocks without references become free. Raises `ValueError` for a free block."""
        references = self._references
        for block in blocks:
            count = references[block]
            if not count:
                raise ValueError(f"block {block} is free already")
            references[block] = count - 1
            if count == 1:
                self._free_map[block] = _FREE
                self.num_used -= 1

    def num_references(self, block: int) -> int:
        """Number of references to the block."""
        return self._references[block]

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raises `AssertionError` unless the references are exactly those of `tables` and the free map agrees with them."""
        held = [0] * self.num_blocks
        free_map = bytearray([_FREE]) * self.num_blocks
        for table in tables:
            for block in table:
                held[block] += 1
                free_map[block] = _USED
        assert held == self._references, "block references do not match the block tables"
        assert free_map == self._free_map, "the free map does not match the block tables"
        assert free_map.count(_FREE) == self.num_free, "free blocks do not add up"

    def _require(self, count: int) -> None:
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")

    def _take(self, blocks: list[int]) -> None:
        for block in blocks:
            self._free_map[block] = _USED
            self._references[block] = 1
        self.num_used += len(blocks)
        self.peak_used = max(self.peak_used, self.num_used)
