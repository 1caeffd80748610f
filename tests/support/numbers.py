"""Random numbers for the tests of kernels, and the types and activations that they run with."""

import pytest
import torch
from torch.nn.functional import gelu, silu

from batchgen.kernels.ops import Activation

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
dtypes = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
ACTS = {Activation.SILU: silu, Activation.GELU_TANH: lambda x: gelu(x, approximate="tanh")}


def numbers(*shape, dtype=FLOAT32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
