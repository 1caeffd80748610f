"""Arithmetic in float32 is exact to float32."""

import torch


def use_exact_float32() -> None:
    """Makes float32 arithmetic exact to float32 in this whole process: products on GPUs, which TF32 would compute with 10 bits of mantissa, and
    vector functions on CPUs, which MKL may compute with 12."""
    # The default, unless an environment variable or other code has changed it.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # the default is True
    # The first vector function of a process makes MKL look up the processor. If two threads do that at once, one may take the kernel of the
    # lowest accuracy (docs/decisions/0016). So one thread computes one cosine before anything else.
    torch.ones(1).cos()
