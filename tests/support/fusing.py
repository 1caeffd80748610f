"""Puts all of our CPU kernels into a model."""

import torch

from batchgen.kernels.decoder_layers import fuse_layers
from batchgen.kernels.fusion import Packing, fuse_linear, fuse_small_parts


@torch.inference_mode()
def fuse(model):
    """Replaces parts of a model by kernels, in place. Returns the number of replaced parts by kind."""
    count = fuse_small_parts(model)
    count.update(fuse_linear(model, Packing()))
    count["decoder layers"] = fuse_layers(model)
    return +count
