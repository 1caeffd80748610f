"""Tells whether batchgen's GPU kernels can run on Triton's interpreter, on the CPU. Needs triton."""

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
    """Skips the test if the kernels are compiled (`-m gpu`) or the interpreter cannot run a loop."""
    if not triton_kernels.INTERPRETED:
        pytest.skip("the kernels are compiled")
    why = _failure()
    if why:
        pytest.skip(f"Triton's interpreter does not work here: {why}")


@cache
def _failure() -> str:
    """The error of a loop of three iterations, or "". The interpreter of triton 3.6 fails with numpy 2.4 and newer."""
    out = torch.zeros(3, dtype=torch.int32)
    try:
        count_kernel[(1,)](torch.tensor([3], dtype=torch.int32), out)
    except Exception as e:
        return str(e)
    assert out.tolist() == [1, 2, 3]
    return ""
