"""The function that transformers' layers call for attention, and its registration with transformers.

Shapes: T packed tokens, H query heads, K key/value heads, G = H/K query heads a key/value head, D key size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from batchgen.attention.kv_size import BIAS_WIDTH
from batchgen.errors import ModelError

NAME = "batchgen"


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """The options of a layer's attention beside softmax(q k^T * scale) v."""

    scale: float
    sliding_window: int | None = None
    """A query at position p only sees keys after position p - `sliding_window`."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: torch.Tensor | None = None
    """[H] an extra score for each head, which takes probability and has no value."""
    causal: bool = False
    """Whether a token never sees the tokens after it, also inside of an image whose tokens see one another in other layers."""


def register() -> None:
    """Registers our attention with transformers as `attn_implementation="batchgen"`.

    No mask function is registered, because the plan says which keys a query sees. transformers then builds no mask; with a mask function
    it would first copy the positions from the device, and wait for them.
    """
    AttentionInterface.register(NAME, attention_forward)


# Keyword arguments that change no result of a packed step without dropout, gradients or padding.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits",
     "is_causal", "position_embeddings", "past_key_value", "past_key_values", "cache", "logits_to_keep", "return_dict", "head_mask",
     "layer_idx", "num_items_in_batch", "input_ids"}
)  # fmt: skip


class EveryKey:
    """Stands where a model expects a mask, or the keys that an indexer has chosen: a query sees every key before it."""

    dtype = torch.bool

    def __getitem__(self, index: Any) -> EveryKey:
        return self

    def __and__(self, other: EveryKey) -> EveryKey:
        return self

    def is_floating_point(self) -> bool:
        return False


EVERY_KEY = EveryKey()
_BIAS_UNIT = 64.0
"""What the numbers of a bias are multiplied by: without it float16 would not hold those of 10,000 tokens. A power of 2, so nothing is rounded."""


def attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | EveryKey | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, step_attention: Any = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The function that transformers' layers call. Takes query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, V].

    Raises `ModelError` for anything that the plan does not cover: no answer is better than a wrong one.
    """
    if getattr(module, "mask_is_key_bias", False) and isinstance(attention_mask, torch.Tensor) and scaling is not None:
        bias_KT = attention_mask[0, :: query.shape[1] // key.shape[1], 0]
        query, key = with_key_bias(query, key, bias_KT, scaling)
        attention_mask = EVERY_KEY
    if step_attention is None:
        raise ModelError(f"{type(module).__name__} does not pass keyword arguments on to attention")
    unknown = [
        name for name, value in kwargs.items() if value is not None and value is not EVERY_KEY and name not in _HARMLESS
    ]
    asks = {
        ", ".join(unknown): bool(unknown),
        "a mask": attention_mask is not None and attention_mask is not EVERY_KEY,
        "no causal mask": kwargs.get("is_causal") is False or getattr(module, "is_causal", None) is False,
        "dropout": bool(dropout),
        # Features that a module has but leaves to a mask or to its own code.
        "a sliding window in its mask": sliding_window is None and _slides(module),
        "sinks of its own": s_aux is None and getattr(module, "sinks", None) is not None,
    }
    for what, asked in asks.items():
        if asked:
            raise ModelError(f"{type(module).__name__} asks attention for {what}, which is not supported")
    options = LayerOptions(
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        causal=sliding_window is None and _images_slide(module),
    )
    number: Any = getattr(module, "layer_number", None)
    layer = getattr(module, "layer_idx", None) if number is None else number()
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} has no layer index")
    query_scale = getattr(module, "query_scale", None)
    if query_scale is not None:
        query = query_scale(query)
    out = step_attention(layer, query[0], key[0], value[0], options)
    return out.unsqueeze(0).contiguous(), None  # some models ask for a view of it


def with_key_bias(
    query: torch.Tensor, key: torch.Tensor, bias_KT: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns queries [1, H, T, D + 16] and keys [1, K, T, D + 16] whose scores, scaled, have the bias of their key [K, T] in them.

    The bias of the query's own token is subtracted, which does not change a softmax: what is left is small for near keys, so that scores
    of 16 bits tell them apart.
    """
    left = bias_KT.float() / (scaling * _BIAS_UNIT)
    parts = []
    for _ in range(3):  # of 16 bits each, they are together as exact as float32
        parts.append(left.to(key.dtype))
        left = left - parts[-1].float()
    bias = torch.stack(parts, -1)[None]
    own = bias.repeat_interleave(query.shape[1] // key.shape[1], 1).to(query.dtype)
    fill = BIAS_WIDTH - 2 * len(parts)
    query_tail = torch.cat([torch.full_like(own, _BIAS_UNIT), -own], -1)
    key_tail = torch.cat([bias, torch.full_like(bias, _BIAS_UNIT)], -1)
    pad = torch.nn.functional.pad
    return torch.cat([query, pad(query_tail, (0, fill))], -1), torch.cat([key, pad(key_tail, (0, fill))], -1)


def _images_slide(module: torch.nn.Module) -> bool:
    """Whether the tokens of an image see one another only in layers with a sliding window, as in Gemma 4, but in all layers of Gemma 4 Unified."""
    config = getattr(module, "config", None)
    unified = getattr(config, "model_type", "") == "gemma4_unified_text"
    return not unified and getattr(config, "use_bidirectional_attention", None) == "vision"


def _slides(module: torch.nn.Module) -> bool:
    """Whether the configuration has a sliding window in this module's layer."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or ()
    slides = isinstance(layer, int) and layer < len(kinds) and kinds[layer] == "sliding_attention"
    return slides and getattr(config, "sliding_window", None) is not None
