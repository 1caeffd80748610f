"""The settings that a GGUF file gives its model. transformers reads a part of them; the others are read here, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchgen.errors import ModelError
from batchgen.prompts.gguf_families import GgufFamily, Values, family_of

OTHER_FORMAT = "give the model in the format of transformers"
"""What to do where a file is refused."""
_KNOWN = {
    "block_count", "context_length", "embedding_length", "vocab_size", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.key_length", "attention.value_length",
}  # fmt: skip
"""Keys that are read for every architecture, by transformers or here. The others of an architecture follow."""
_RECURRENT = {f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")}
_HYBRID = _RECURRENT | {"full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers"}
_EXPERTS = {"expert_count", "expert_used_count"}
_KNOWN_OF: dict[str, set[str]] = {
    "bloom": set(),
    "falcon": {"tensor_data_layout"},
    "gemma2": {"attention.sliding_window"},
    "gemma3": {"attention.sliding_window"},
    "gpt2": set(),
    "lfm2": {"shortconv.l_cache"},
    "llama": {"tensor_data_layout"},
    "mamba": _RECURRENT,
    "minimax-m2": {*_EXPERTS, "expert_gating_func"},
    "nemotron": set(),
    "phi3": set(),
    "qwen2": set(),
    "qwen2moe": _EXPERTS,
    "qwen3": set(),
    "qwen35": _HYBRID,
    "qwen35moe": {*_HYBRID, *_EXPERTS, "expert_feed_forward_length", "expert_shared_feed_forward_length"},
    "qwen3moe": _EXPERTS,
    "stablelm": {"use_parallel_residual"},
    "starcoder2": set(),
}
_HEAD = {"attention.key_length": "head_dim"}
_SOFTCAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_SETTINGS: dict[str, dict[str, str]] = {
    "bloom": {"context_length": "seq_length"},
    "falcon": {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
    "gemma2": _SOFTCAPS,
    "gemma3": {"final_logit_softcapping": "final_logit_softcapping"},
    "gpt2": {"context_length": "n_positions"},
    "llama": _HEAD,
    "minimax-m2": {"expert_feed_forward_length": "intermediate_size"},
    "nemotron": _HEAD | {"attention.layer_norm_epsilon": "norm_eps"},
    "phi3": _HEAD | {"attention.sliding_window": "sliding_window"},
    "qwen2": _HEAD,
    "qwen2moe": _HEAD | {
        "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3": _HEAD,
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "starcoder2": _HEAD | {"attention.sliding_window": "sliding_window"},
}  # fmt: skip
"""The settings of configurations that transformers leaves at their defaults, by their keys."""
_BIASES = {
    "attention_bias": ".attn_q.bias",
    "mlp_bias": ".ffn_up.bias",
    "use_bias": ".ffn_up.bias",
    "bias": ".attn_qkv.bias",
}
"""Settings that no key has: whether the file has tensors with these names."""
_BIASES_OF = {
    "falcon": ("bias",),
    "llama": ("attention_bias", "mlp_bias"),
    "nemotron": ("attention_bias", "mlp_bias"),
    "qwen3": ("attention_bias",),
    "qwen3moe": ("attention_bias",),
    "starcoder2": ("use_bias",),
}
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""The layers of the Gemmas of 27B, which alone do not divide the products of attention by the root of a head's size."""
_NOTHING: tuple[Any, ...] = (0, "", [])
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),
    "pooling_type": (0, 3),
}
"""Values that change nothing, of keys that are not read: softmax for the gates, the last token for embeddings. Those of other keys: `_NOTHING`."""
_OTHER_PARTS = ("vision.", "audio.", "mm.")
"""The beginnings of keys that are not about text."""
_ROPE_KEYS = {
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
"""The keys that `gguf_rope.py` reads for every family."""


def check_settings(file: Path, reader: Any) -> None:
    """Raises `ModelError` for a model of an architecture that is not known, and for a setting that is not read and may change what the model computes.

    `reader`: a `gguf.GGUFReader` of the file.
    """
    architecture, values = settings_of(reader)
    family = family_of(architecture, values)
    if family is not None:
        _check_family(file, architecture, family, values)
        return
    if architecture not in _KNOWN_OF:
        raise ModelError(
            f"batchgen does not read models of the architecture {architecture!r} from GGUF files: {file}", OTHER_FORMAT
        )
    known = _KNOWN | _KNOWN_OF[architecture] | _SETTINGS.get(architecture, {}).keys()
    for key, value in values.items():
        unread = (
            key not in known
            and not key.startswith((*_OTHER_PARTS, "rope."))
            and value not in _HARMLESS.get(key, _NOTHING)
        )
        if key == "attention.sliding_window" and unread:
            unread = value < values.get("context_length", 0)
        if key == "attention.value_length":
            unread = value != values.get("attention.key_length", value)
        if architecture == "falcon" and key == "attention.head_count_kv":
            unread = value != 1  # the rows of queries, keys and values have another order
        if unread:
            raise _unread(file, architecture, key, value)


def _check_family(file: Path, architecture: str, family: GgufFamily, values: Values) -> None:
    size = values.get("attention.key_length") or values["embedding_length"] // values["attention.head_count"]
    local = values.get("attention.key_length_swa")
    only = {
        "attention.value_length": size, "attention.value_length_swa": local, "rope.dimension_count": size, "rope.dimension_count_swa": local,
        "rope.freq_base_swa": values.get("rope.freq_base"), "rope.scaling.finetuned": True, **family.must,
    }  # fmt: skip
    for key, value in values.items():
        unknown = key not in family.known() | _ROPE_KEYS and not key.startswith(_OTHER_PARTS)
        if unknown and (value != only[key] if key in only else value not in _HARMLESS.get(key, _NOTHING)):
            raise _unread(file, architecture, key, value)


def _unread(file: Path, architecture: str, key: str, value: Any) -> ModelError:
    return ModelError(f"{file} sets {architecture}.{key} to {value}, which batchgen does not read", OTHER_FORMAT)


def set_settings(config: Any, reader: Any) -> None:
    """Gives the configuration that transformers has read from a file the settings that it has left at their defaults.

    `reader`: a `gguf.GGUFReader` of the file.
    """
    text = config.get_text_config()
    architecture, values = settings_of(reader)
    for key, name in _SETTINGS.get(architecture, {}).items():
        if key in values:
            setattr(text, name, values[key] or None)
    for name in _BIASES_OF.get(architecture, ()):
        setattr(text, name, any(tensor.name.endswith(_BIASES[name]) for tensor in reader.tensors))
    if architecture in _LARGEST:
        largest = text.num_hidden_layers == _LARGEST[architecture]
        size = text.hidden_size // text.num_attention_heads if largest else text.head_dim
        text.query_pre_attn_scalar = size
    if "attention.recurrent_layers" in values:
        layers = values["attention.recurrent_layers"][: text.num_hidden_layers]
        text.layer_types = ["linear_attention" if recurrent else "full_attention" for recurrent in layers]


def value_of(reader: Any, key: str) -> Any:
    """Returns the value of a key of the file that a `gguf.GGUFReader` reads; None if it has none."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def settings_of(reader: Any) -> tuple[str, dict[str, Any]]:
    """Returns the architecture, and the values of its keys without its name."""
    architecture = str(value_of(reader, "general.architecture"))
    start = f"{architecture}."
    keys = [key for key in reader.fields if key.startswith(start)]
    return architecture, {key.removeprefix(start): value_of(reader, key) for key in keys}
