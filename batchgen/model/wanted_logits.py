"""Only the logits that are wanted: a grammar often allows a few tokens, and the output layer of a small model is up to half of its work.

The output layer multiplies by its weights panel by panel. Rows that want few logits get those of some panels; what else is in these rows means
nothing. The kernels compute each number alone, so those that are computed are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.kernels.build import library
from batchgen.kernels.ops import PackedLinear

Wanted = NDArray[np.uint64]
"""[N, ceil(V / 64)]: a bit for each logit of N rows, the first in the lowest bit."""
FEW = 4
"""A row wants few logits if they are in this part of the panels at most."""
WORTH = 4
"""So many rows, one of which wants few logits, are worth the copies of the others."""


@contextmanager
def only_wanted(head: Any, wanted: Callable[[], Wanted | None]) -> Iterator[None]:
    """Within this context the output layer computes only the logits that `wanted` says, if it is packed and that is faster. `wanted` is
    called when the layer runs; None for all logits."""
    if type(head) is not PackedLinear:
        yield
        return
    head.forward = partial(_some_logits, head, wanted)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward


def _some_logits(head: PackedLinear, wanted: Callable[[], Wanted | None], x: torch.Tensor) -> torch.Tensor:
    """Returns logits [..., V] of x [..., K]."""
    rows, bits = head.rows_of(x), wanted()
    width = library().batchgen_linear_panel()
    if bits is None or not 0 < len(rows) == len(bits):
        return PackedLinear.forward(head, x)
    panels = -(-head.out_features // width)
    in_panels = bits.view(f"u{width // 8}")[:, :panels] != 0
    few = in_panels.sum(axis=1) <= panels // FEW
    some = np.flatnonzero(in_panels[few].any(axis=0))
    if few.sum() * WORTH < len(few) or len(some) > panels // 2:
        return PackedLinear.forward(head, x)
    y = torch.empty(len(rows), head.out_features, dtype=x.dtype)
    many = torch.from_numpy(np.flatnonzero(~few))
    if len(many):
        y[many] = PackedLinear.forward(head, rows[many])
    return head.some_columns(rows, torch.from_numpy(some), y).view(*x.shape[:-1], -1)
