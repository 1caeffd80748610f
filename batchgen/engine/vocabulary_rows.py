"""Rows of the vocabulary's width on the device, lent to sequences that have penalties."""

from __future__ import annotations

import torch


class VocabularyRows:
    """A tensor [rows, V] on the device whose rows are lent to sequences; allocated and grown when a row is taken."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.rows = torch.zeros((0, width), dtype=dtype, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        """A free row, set to zeros."""
        if not self._free:
            old = len(self.rows)
            self._free = list(range(2 * old + 7, old - 1, -1))
            # Not an inference tensor even under inference mode: those cannot be changed outside it.
            with torch.inference_mode(False), torch.no_grad():
                self.rows = torch.cat([self.rows, self.rows.new_zeros((old + 8, self.rows.shape[1]))])
        row = self._free.pop()
        self.rows[row].zero_()
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)
