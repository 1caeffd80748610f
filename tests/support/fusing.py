"""Puts all of our CPU kernels into a model, and says which parts of a model kernels have replaced."""

import re
from collections import Counter

import torch

from batchgen.kernels.decoder_layers import fuse_layers
from batchgen.kernels.device_parts import DeviceMLP, DeviceNorm, DeviceProjection
from batchgen.kernels.experts import FusedExperts, LinearOfExperts
from batchgen.kernels.fusion import FusedGatedNorm, FusedMLP, FusedNorm, FusedPatches, fuse_linear, fuse_small_parts
from batchgen.kernels.int8 import Int8Linear
from batchgen.kernels.ops import PackedLinear
from batchgen.kernels.replacing import AdaptedLinear, Packing
from batchgen.model.weights.streamed import decoder_layers

KINDS = {
    DeviceMLP: "gated MLPs", DeviceNorm: "norms", DeviceProjection: "joint projections", FusedExperts: "experts",
    LinearOfExperts: "experts",
    FusedGatedNorm: "gated norms", FusedMLP: "gated MLPs", FusedNorm: "norms", FusedPatches: "patches",
    Int8Linear: "linear layers", PackedLinear: "linear layers",
}  # fmt: skip
FORWARDS = {
    "Attention": "rotary embeddings", "DecoderLayer": "decoder layers", "Embedding": "embeddings",
    "Linear": "linear layers", "RotaryEmbedding": "tables of cos and sin",
}  # fmt: skip
"""By the end of the class's name, the parts that keep their class and get a forward."""


def adapted(linear, rank=6, seed=0):
    """Returns a linear layer with a random adapter beside it."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, linear.in_features, generator=generator) / linear.in_features**0.5
    up = torch.randn(linear.out_features, rank, generator=generator) * 0.1
    return AdaptedLinear(linear, down.to(linear.weight.dtype), up.to(linear.weight.dtype))


def with_adapters(model, without=()):
    """Gives each linear layer of a decoder's layers an adapter, in place, but for those of these names."""
    for layer in decoder_layers(model):
        for parent in list(layer.modules()):
            for i, (name, part) in enumerate(parent._modules.items()):
                if type(part) is torch.nn.Linear and name not in without:
                    parent._modules[name] = adapted(part, seed=i)
    return model


@torch.inference_mode()
def fuse(model):
    """Replaces parts of a model by kernels, in place. Returns the number of replaced parts by kind."""
    fuse_small_parts(model)
    fuse_linear(model, Packing())
    fuse_layers(model)
    return replaced(model)


def replaced(model):
    """Returns the number of a model's parts that are kernels, or that have a forward of batchgen, by kind."""
    inner = {
        part
        for whole in model.modules()
        if isinstance(whole, FusedMLP | FusedExperts | LinearOfExperts)
        for part in whole.children()
    }
    count = Counter(KINDS[type(part)] for part in model.modules() if type(part) in KINDS and part not in inner)
    names = (type(part).__name__ for part in model.modules() if "forward" in vars(part))
    changed = filter(None, (re.search(f"({'|'.join(FORWARDS)})$", name) for name in names))
    return count + Counter(FORWARDS[end[0]] for end in changed)
