"""Inputs of a layer in 8 bits, as its kernels round them."""

import torch

from batchgen.kernels.build import library
from batchgen.kernels.int8 import STEP
from batchgen.kernels.isa import instruction_set


def largest_whole(size: int) -> int:
    """Returns the largest whole number that inputs of rows of `size` numbers become: more than 127 where they are held in 16 bits."""
    return 127 if library().batchgen_int8_bytes() == 1 else min(2**15 - 1, (2**31 - 1) // (128 * size))


def rounded_inputs(x: torch.Tensor) -> torch.Tensor:
    """Returns x [..., K] in float64 as the kernels read it: whole numbers times the scale of each group of a row."""
    size, most = x.shape[-1], largest_whole(x.shape[-1])
    whole_rows = most > 127 or instruction_set() == "amx"
    return torch.cat([_rounded_group(some, most) for some in x.float().split(size if whole_rows else STEP, -1)], -1)


def _rounded_group(x: torch.Tensor, most: int) -> torch.Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, most) / largest  # `most / largest` would be the rounded reciprocal times it
    return (x * torch.where(largest > 0, inverse, 0.0)).round().double() * (largest / most)
