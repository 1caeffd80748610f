"""The sizes of the states of a model's recurrent layers, from its configuration alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ATTENDS = frozenset({
    "full_attention", "sliding_attention", "indexed_attention", "qwen_sparse_attention", "attention", "hybrid", "hybrid_sliding",
})  # fmt: skip
"""Types of layers that have keys and values."""
RECURS = frozenset({"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "recurrent"})
"""Types of layers that have a state."""

MAMBA = frozenset({"falcon_mamba", "jamba", "mamba", "zamba"})
"""Families with layers of Mamba's first version."""
WITHOUT_ATTENTION = frozenset({"falcon_mamba", "mamba", "mamba2"})
"""Families all of whose layers have a state and nothing else."""


def attention_layers(config: Any) -> int:
    """Returns the number of layers with keys and values in a language model's configuration; 0 if it does not say how many layers there are."""
    if config.model_type in WITHOUT_ATTENTION:
        return 0
    kinds = _kinds(config)
    if kinds is None or config.model_type == "falcon_h1":  # its layers have both side by side
        return int(getattr(config, "num_hidden_layers", 0))
    return sum(kind in ATTENDS for kind in kinds)


def _kinds(config: Any) -> Sequence[str] | None:
    """The type of each layer; None if the configuration does not say. Older versions of transformers have another name for it in some families."""
    kinds: Sequence[str] | None = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return kinds


def recurrent_layers(config: Any) -> int:
    """Returns the number of layers with a state. `config` is of a verified family with recurrent layers (`model/architectures.py`)."""
    kinds = _kinds(config)
    if kinds is None or config.model_type in WITHOUT_ATTENTION | {"falcon_h1"}:
        return int(config.num_hidden_layers)
    return sum(kind in RECURS for kind in kinds)


def num_states(config: Any) -> int:
    """Returns the number of states that a sequence has: one for each recurrent layer, for each head of such a layer of Zamba, and for each
    per-layer embedding of Qwen4-exp. `config` is as for `recurrent_layers`.
    """
    heads = config.n_mamba_heads if config.model_type == "zamba" else 1
    return recurrent_layers(config) * heads + _embeddings(config)


def _embeddings(config: Any) -> int:
    return len(getattr(config, "ple_layer_ids", None) or ())


def state_bytes(config: Any, dtype_bytes: int) -> int:
    """Returns the bytes of one sequence's state in all recurrent layers. Each input of a convolution takes `dtype_bytes`.

    `config` is as for `recurrent_layers`.
    """
    total = recurrent_layers(config) * _layer_bytes(config, dtype_bytes)
    if _embeddings(config):
        taps, channels = (config.ple_conv_kernel_size - 1) * config.ngram_size, config.hc_count * config.hidden_size
        total += _embeddings(config) * (taps * channels * dtype_bytes + 4 * (config.ngram_size - 1))
    return total


def _layer_bytes(config: Any, dtype_bytes: int) -> int:
    if hasattr(config, "conv_L_cache"):  # a short convolution alone
        return int((config.conv_L_cache - 1) * config.hidden_size * dtype_bytes)
    if hasattr(config, "cca_time0"):  # compressed convolutional attention
        taps, heads = (
            config.cca_time0 + config.cca_time1 - 2,
            config.num_attention_heads + 1.5 * config.num_key_value_heads,
        )
        return int(taps * heads * config.head_dim * dtype_bytes)
    if hasattr(config, "linear_num_value_heads"):  # gated delta rule
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        heads = config.linear_num_value_heads
        channels = 2 * config.linear_num_key_heads * key + heads * value
        return int((config.linear_conv_kernel_dim - 1) * channels * dtype_bytes + 4 * heads * key * value)
    if hasattr(config, "linear_num_heads"):  # Kimi delta attention
        heads, size = config.linear_num_heads, config.linear_head_dim
        return int((config.linear_conv_kernel_dim - 1) * 3 * heads * size * dtype_bytes + 4 * heads * size * size)
    if hasattr(config, "lru_width"):  # RG-LRU
        return int(config.lru_width * ((config.conv1d_width - 1) * dtype_bytes + 4))
    if config.model_type == "minimax":  # lightning attention
        size = config.head_dim or config.hidden_size // config.num_attention_heads
        return int(4 * config.num_attention_heads * size * size)
    if config.model_type in MAMBA:
        expands = config.model_type in ("jamba", "zamba")
        channels = config.mamba_expand * config.hidden_size if expands else config.intermediate_size
        taps = _first(config, "mamba_d_conv", "conv_kernel") - 1
        return int(channels * (taps * dtype_bytes + 4 * _first(config, "mamba_d_state", "state_size")))
    heads = _first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    size = _first(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    state = _first(config, "mamba_d_state", "ssm_state_size", "state_size")
    groups = _first(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    taps = _first(config, "mamba_d_conv", "conv_kernel") - 1
    return taps * (heads * size + 2 * groups * state) * dtype_bytes + 4 * heads * size * state


def _first(config: Any, *names: str) -> int:
    """Returns the first of these settings that the configuration has. Families name them differently."""
    return int(next(getattr(config, name) for name in names if hasattr(config, name)))
