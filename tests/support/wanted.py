"""Which logits are wanted, as the model takes it, and which of them it computes."""

import numpy as np
import pytest

from batchgen.kernels.ops import PackedLinear
from batchgen.model.wanted_logits import Wanted


def bits(wanted: np.ndarray) -> Wanted:
    """Returns bool [N, V] as bits."""
    fill = -wanted.shape[1] % 64
    return np.packbits(np.pad(wanted, ((0, 0), (0, fill))), axis=1, bitorder="little").view(np.uint64)


def watch_columns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns a list to which each product of some columns adds its numbers of rows and of panels."""
    found: list[tuple[int, int]] = []
    some_columns = PackedLinear.some_columns

    def watched(self, x, panels, y):
        found.append((len(x), len(panels)))
        return some_columns(self, x, panels, y)

    monkeypatch.setattr(PackedLinear, "some_columns", watched)
    return found
