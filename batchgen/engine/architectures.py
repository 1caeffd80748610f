"""Which architectures are known to be exact. A wrong answer is worse than a refusal: all others are refused by name."""

from __future__ import annotations

from typing import Any

from batchgen.errors import ModelError

VERIFIED = frozenset({
    "apertus", "arcee", "biogpt", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense",
    "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
})  # fmt: skip
"""`model_type`s whose greedy output equals `generate`'s token by token (tests/parity)."""


def check_architecture(config: Any) -> None:
    """Raises `ModelError` unless the configuration is of a verified architecture and asks nothing that would be inexact."""
    name = getattr(config, "model_type", "unknown")
    if name not in VERIFIED:
        known = ", ".join(sorted(VERIFIED))
        raise ModelError(
            f"models of type {name!r} are not supported: their output has not been verified against transformers",
            f"verified are {known}",
        )
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if layer_types:
        raise ModelError(f"layers of type {', '.join(sorted(layer_types))} are not supported")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {r.get("rope_type") or r.get("type") for r in (rope, *rope.values()) if isinstance(r, dict)}
    inexact = kinds & {"dynamic", "longrope"}
    if inexact:
        raise ModelError(
            f"models with {inexact.pop()!r} rotary embeddings are not supported: their positions depend on the longest "
            "sequence of a batch"
        )
