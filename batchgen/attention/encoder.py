"""Attention of image encoders on the CPU, by the kernel that also serves the model's own layers (kernels/src/attention.cpp).

Shapes: B tiles of an image, H query heads, K key/value heads, T tokens, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from batchgen.attention.base import LayerOptions
from batchgen.attention.cpu_backend import attend_to_first

MIN_TOKENS = 384
"""With fewer tokens, torch's attention is as fast (benchmarks/NOTES.md)."""


class EncoderAttention(TorchFunctionMode):
    """While it is entered, our kernel computes what `scaled_dot_product_attention` would, for many tokens that all see the same tokens.

    Encoders of all families call that function. What the kernel does not cover is left to torch.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention:
            out = _attend(*args, **kwargs)
            if out is not None:
                return out
        return function(*args, **kwargs)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """Takes what `scaled_dot_product_attention` takes, and returns its [B, H, T, V]; None if the kernel does not cover it."""
    if dropout_p or is_causal or query.dim() != 4 or query.shape[2] < MIN_TOKENS or query.shape[2] != key.shape[2]:
        return None
    if query.dtype not in (torch.float32, torch.bfloat16) or (query.shape[1] != key.shape[1] and not enable_gqa):
        return None
    seen = seen_keys(attn_mask, key.shape[2])
    if not seen:
        return None
    options = LayerOptions(query.shape[3] ** -0.5 if scale is None else scale)
    tiles = [attend_to_first(*tile, seen, options) for tile in zip(query, key, value, strict=True)]
    return torch.stack(tiles).transpose(1, 2)


def seen_keys(mask: torch.Tensor | None, keys: int) -> int:
    """Returns the number of keys, the first ones, that every query sees alone; 0 if the mask says anything else."""
    if mask is None:
        return keys
    if mask.dtype != torch.bool:
        return 0 if mask.any() else keys
    count = int(mask[(0,) * (mask.dim() - 1)].sum())
    return count if bool((mask == (torch.arange(keys) < count)).all()) else 0
