"""A model with all of our kernels for the CPU in it."""

import torch

from batchgen.kernels.decoder_layers import fuse_layers
from batchgen.kernels.fusion import ExactPacking, fuse_linear, fuse_small_parts


@torch.inference_mode()
def fuse(model, packing=None):
    """Replaces what can be replaced, in place. Returns how many parts of each kind."""
    count = fuse_small_parts(model)
    count.update(fuse_linear(model, packing or ExactPacking()))
    count["decoder layers"] = fuse_layers(model)
    return +count
