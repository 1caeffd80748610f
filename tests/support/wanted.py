"""Which logits are wanted, as the model takes it."""

import numpy as np

from batchgen.model.wanted_logits import Wanted


def bits(wanted: np.ndarray) -> Wanted:
    """Returns bool [N, V] as bits."""
    fill = -wanted.shape[1] % 64
    return np.packbits(np.pad(wanted, ((0, 0), (0, fill))), axis=1, bitorder="little").view(np.uint64)
