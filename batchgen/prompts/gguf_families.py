"""The families of GGUF files that batchgen reads by itself: what the keys of a file say of its model, and what llama.cpp's converter does to weights.

A family is an entry of `FAMILIES`. transformers reads the other architectures (`gguf_settings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_COMMON = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
"""The settings of configurations, by the keys that every family has."""
_MIXTURE = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_WINDOW = frozenset({"attention.sliding_window_pattern"})
_NO_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
"""The rotary embedding of configurations whose default scales it. `gguf_rope.py` gives it what the file says."""

Values = Mapping[str, Any]
"""The keys of a file without the name of its architecture."""
Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a file's tensors."""


def _nothing(values: Values, shapes: Shapes) -> Mapping[str, Any]:
    return {}


class GgufFamily(NamedTuple):
    """How the models of a type lie in a file."""

    model_type: str
    settings: Mapping[str, str] = {}
    """More names of settings by keys, beside `_COMMON`."""
    more: Callable[[Values, Shapes], Mapping[str, Any]] = _nothing
    """Returns the settings that no single key holds."""
    read: frozenset[str] = frozenset()
    """The keys that `more` and `gguf_rope.py` read, beside those that have a name."""
    must: Mapping[str, Any] = {}
    """Keys with the only value that the model type can have."""
    biases: Mapping[str, str] = {}
    """Settings that say whether the file has tensors, by the ends of their names."""
    pairs: bool = False
    """Whether the two numbers of a rotary pair lie side by side in queries and keys, where transformers has them half a head apart."""
    shift: float = 0.0
    """What the converter adds to the weights of norms."""
    interleaved: bool = False
    """Whether the outputs of the experts' gates alternate with the others in the model, and weights of experts are [E, in, out] there."""

    def known(self) -> frozenset[str]:
        """The keys that are read, beside those that must have a value."""
        return frozenset({*_COMMON, *self.settings, *self.read, "vocab_size", "attention.layer_norm_epsilon"})


def _with_sliding_window(period: int) -> Callable[[Values, Shapes], dict[str, Any]]:
    """Returns a reader of which layers see a window. Without a pattern in the file, the last of each `period` layers sees everything."""

    def read(values: Values, shapes: Shapes) -> dict[str, Any]:
        pattern, count = values.get("attention.sliding_window_pattern", period), values["block_count"]
        slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(count)]
        return {"layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides[:count]]}

    return read


def _gpt_oss(values: Values, shapes: Shapes) -> dict[str, Any]:
    rope = {**_NO_ROPE, "truncate": False}  # no key says that YaRN's limits are not rounded
    return {**_with_sliding_window(2)(values, shapes), "rope_parameters": rope}


FAMILIES: Mapping[str, Mapping[str, GgufFamily]] = {
    "gpt-oss": {
        "": GgufFamily(
            "gpt_oss", _MIXTURE | {"expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window"},
            _gpt_oss, read=_WINDOW, biases={"attention_bias": ".attn_q.bias"}, interleaved=True,
        )
    },
}  # fmt: skip
"""The families of an architecture. The first applies whose key the file has, with a value that is not 0; the key "" stands for every file."""


def family_of(architecture: str, values: Values) -> GgufFamily | None:
    """Returns the family of a file; None if transformers reads its architecture, or nobody does."""
    families = FAMILIES.get(architecture, {})
    return next((family for key, family in families.items() if not key or values.get(key)), None)


def family_config(family: GgufFamily, values: Values, shapes: Shapes) -> Any:
    """Returns the configuration of a file's model, with the rotary embedding that its model type has by default."""
    from transformers import AutoConfig

    names = _COMMON | dict(family.settings)
    settings = {name: values[key] for key, name in names.items() if key in values}
    settings |= {name: any(tensor.endswith(end) for tensor in shapes) for name, end in family.biases.items()}
    settings |= {
        "vocab_size": shapes["token_embd.weight"][0], "tie_word_embeddings": "output.weight" not in shapes, "bos_token_id": None, "pad_token_id": None,
        **family.more(values, shapes),
    }  # fmt: skip
    return AutoConfig.for_model(family.model_type, **settings)
