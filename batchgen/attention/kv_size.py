"""The size of a token's keys and values in all layers, from a model's configuration alone. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BIAS_WIDTH = 16
"""Numbers by which keys with a bias are wider (`attention/base.py`)."""


def kv_numbers(config: Any, attention_layers: int | None = None) -> int:
    """Returns how many numbers are kept of a token; 0 if the configuration does not say. `config` is a language model's.

    `attention_layers`: how many of the layers attend, in a model where others do not.
    """
    count = getattr(config, "num_hidden_layers", None)
    layers = list(_layers(config, count)) if isinstance(count, int) else []
    needed = ("num_attention_heads", "hidden_size")
    if not layers or not all(isinstance(getattr(of, name, None), int) for of, _ in layers for name in needed):
        return 0
    if attention_layers is not None:
        return attention_layers * _layer_numbers(config, None)
    times = 2 if getattr(config, "model_type", None) == "diffllama" else 1  # keys beside each half of the values
    return times * sum(_layer_numbers(layer, kind) for layer, kind in layers)


def _layers(config: Any, count: int) -> Iterator[tuple[Any, str | None]]:
    """The configuration and the type of each layer that keeps KV: of Gemma 4, they differ, and the last ones may read that of others. The layers of
    Mllama that see an image alone are left out."""
    kinds = getattr(config, "layer_types", None) or [None] * count
    own = getattr(config, "per_layer_config", None)
    of_images = getattr(config, "cross_attention_layers", None) or ()
    for layer, kind in zip(range(count - (getattr(config, "num_kv_shared_layers", None) or 0)), kinds, strict=False):
        if layer not in of_images:
            yield (config if own is None else own[layer]), kind


def _layer_numbers(config: Any, kind: str | None) -> int:
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # MLA: expanded to the heads' keys and values
        return int(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "multi_query", False):
        kv_heads = 1
    if kind == "full_attention" and getattr(config, "global_head_dim", None):  # Gemma 4 before transformers 5.20
        width = config.global_head_dim
        if getattr(config, "attention_k_eq_v", False):
            kv_heads = getattr(config, "num_global_key_value_heads", None) or kv_heads
    model_type = getattr(config, "model_type", None)
    if model_type == "falcon":
        shared = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
        kv_heads = heads if config.alibi else shared
    if model_type in ("bloom", "doge", "mpt") or (model_type == "falcon" and config.alibi):
        return int(kv_heads * (2 * width + BIAS_WIDTH))
    if model_type == "mimo_v2_flash" and kind == "sliding_attention":
        kv_heads *= 2
    if model_type == "jetmoe":  # a copy for each expert of a token's queries
        kv_heads *= config.num_experts_per_tok
    return int(kv_heads * (width + (getattr(config, "v_head_dim", None) or width)))
