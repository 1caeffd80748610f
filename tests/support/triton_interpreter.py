"""Whether batchgen's kernels for GPUs can run on Triton's interpreter, on the CPU. Import it where triton is there."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from batchgen.attention import triton_kernels


@triton.jit
def count_kernel(end: Any, out: Any) -> None:
    for i in tl.range(0, tl.load(end)):
        tl.store(out + i, i + 1)


def skip_unless_interpreted() -> None:
    """Skips the test where the kernels are compiled (`-m gpu`), and where the interpreter cannot run a loop."""
    if not triton_kernels.INTERPRETED:
        pytest.skip("the kernels are compiled")
    why = _failure()
    if why:
        pytest.skip(f"Triton's interpreter does not work here: {why}")


@cache
def _failure() -> str:
    """What goes wrong in a loop of three rounds: that of triton 3.6 fails beside numpy 2.4 and newer."""
    out = torch.zeros(3, dtype=torch.int32)
    try:
        count_kernel[(1,)](torch.tensor([3], dtype=torch.int32), out)
    except Exception as e:
        return str(e)
    assert out.tolist() == [1, 2, 3]
    return ""
