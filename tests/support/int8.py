"""Inputs of a layer in 8 bits, as its kernels round them."""

import torch

from batchgen.kernels.build import library
from batchgen.kernels.int8 import STEP, Rounding


def largest_whole(size: int) -> int:
    """Returns the largest whole number that inputs of rows of `size` numbers become: more than 127 where they are held in 16 bits."""
    return 127 if library().batchgen_int8_bytes() == 1 else min(2**15 - 1, (2**31 - 1) // (128 * size))


def rounded_inputs(x: torch.Tensor, rounding: Rounding = Rounding.ROTATED) -> torch.Tensor:
    """Returns x [..., K], rotated if it is to be, in float64 as the kernels read it: whole numbers times the scale of a row or of each group of it."""
    x = rotated(x.float()) if rounding is Rounding.ROTATED else x.float()
    size, most = x.shape[-1], largest_whole(x.shape[-1])
    grouped = rounding is Rounding.GROUPS and most == 127
    return torch.cat([_rounded_group(some, most) for some in x.split(STEP if grouped else size, -1)], -1)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Returns x [..., K] in float32 with its whole blocks of 64 rotated, in the order of the kernels' sums."""
    whole = x.shape[-1] // 64 * 64
    blocks = x[..., :whole]
    for half in (32, 16, 8, 4, 2, 1):
        a, b = blocks.reshape(-1, 2, half).unbind(1)
        blocks = torch.stack((a + b, a - b), 1)
    return torch.cat((blocks.view(*x.shape[:-1], whole) / 8, x[..., whole:]), -1)


def _rounded_group(x: torch.Tensor, most: int) -> torch.Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, most) / largest  # `most / largest` would be the rounded reciprocal times it
    return (x * torch.where(largest > 0, inverse, 0.0)).round().double() * (largest / most)
