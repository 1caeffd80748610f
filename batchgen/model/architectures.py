"""Which architectures are known to be exact, and which are refused by name: a wrong answer is worse than none.

What is in neither table is for the check at loading time to decide.
"""

from __future__ import annotations

from typing import Any

from batchgen.errors import ModelError

VERIFIED_ON = ("5.17", "5.23")
"""The versions of transformers that `VERIFIED` was shown for, the newest last."""

VERIFIED = frozenset({
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe",
    "cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2",
    "jetmoe", "kolibri1", "laguna", "llama", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2",
    "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat", "olmo", "olmo2", "olmo3",
    "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
})  # fmt: skip
"""`model_type`s whose greedy output and logits equal those of `generate` (tests/parity)."""

_RECURRENT = "they keep a recurrent state besides keys and values"
_CONVOLUTION = "they keep a convolution's state besides keys and values"
_INDEXER = "an indexer of theirs chooses which keys a query sees"
_TWICE = "they run attention more than once in a layer"
_DRAFTS = "they draft for another model, whose keys and values they read"
_ENCODER = "they are encoders, whose tokens see those after them"
REFUSED = {
    "axk2": _INDEXER,
    "bailing_hybrid": _RECURRENT,
    "bamba": _RECURRENT,
    "bert": _ENCODER,
    "bert-generation": _ENCODER,
    "camembert": _ENCODER,
    "data2vec-text": _ENCODER,
    "deepseek_v32": _INDEXER,
    "deepseek_v4": "they read keys and values that stand for stretches of the text",
    "diffllama": _TWICE,
    "doge": "a mask of theirs depends on what the keys hold",
    "dots3_note_text": _INDEXER,
    "electra": _ENCODER,
    "ernie": _ENCODER,
    "falcon_h1": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "glm_moe_dsa": _INDEXER,
    "hrm_text": _TWICE,
    "hy_v4": _INDEXER,
    "jamba": _RECURRENT,
    "kimi_linear": _RECURRENT,
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "lfm3": _CONVOLUTION,
    "llama4_text": "they scale queries by their place in the batch",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "minimax": _RECURRENT,
    "minimax_m3_vl_text": _INDEXER,
    "nemotron": "their layers do not pass keyword arguments on to attention",
    "nemotron_h": _RECURRENT,
    "olmo_hybrid": _RECURRENT,
    "qwen3_5_moe_text": _RECURRENT,
    "qwen3_5_text": _RECURRENT,
    "qwen3_next": _RECURRENT,
    "qwen4_exp_text": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "roberta": _ENCODER,
    "roberta-prelayernorm": _ENCODER,
    "roc_bert": _ENCODER,
    "rwkv": _RECURRENT,
    "xlm-roberta": _ENCODER,
    "xlm-roberta-xl": _ENCODER,
    "xlstm": _RECURRENT,
    "xmod": _ENCODER,
    "zamba": _RECURRENT,
    "zamba2": _RECURRENT,
    "zaya": _CONVOLUTION,
}
"""`model_type`s that cannot be exact, and why."""

_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
# "dynamic" and "longrope" change with the longest sequence of a batch, but not below the length to which the context is
# capped for them (prompts/tokenizer.py).
_ROPES = frozenset({"default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope"})


def is_verified(config: Any) -> bool:
    """Whether this configuration's architecture is known to be exact; true of one that is refused for its settings, too."""
    return _model_type(config) in VERIFIED


def refusal(config: Any) -> str | None:
    """Why models of this configuration cannot be exact, if that is known without running one; a clause about "they"."""
    for part in (config, getattr(config, "text_config", None)):
        reason = None if part is None else _refusal(part)
        if reason is not None:
            return reason
    return None


def check_architecture(config: Any) -> None:
    """Raises `ModelError` for a configuration that is refused by name."""
    reason = refusal(config)
    if reason is not None:
        raise ModelError(f"models of type {_model_type(config)!r} are not supported: {reason}")


def _refusal(config: Any) -> str | None:
    reason = REFUSED.get(_model_type(config))
    if reason is not None:
        return reason
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return _ENCODER
    layers = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if layers:
        return f"this one has layers of type {', '.join(sorted(layers))}"
    ropes = _rope_types(config) - _ROPES
    if ropes:
        return f"this one has rotary embeddings of type {', '.join(sorted(ropes))}"
    return None


def _rope_types(config: Any) -> set[str]:
    """Of all layers: the parameters are one mapping, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, dict):
        return set()
    kinds = {r.get("rope_type", r.get("type")) for r in (rope, *rope.values()) if isinstance(r, dict)}
    return {str(kind) for kind in kinds if kind is not None}


def _model_type(config: Any) -> str:
    return str(getattr(config, "model_type", "unknown"))
