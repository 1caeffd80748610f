"""Which architectures are known to be exact. A wrong answer is worse than a refusal: all others are refused by name."""

from __future__ import annotations

from typing import Any

from batchgen.errors import ModelError

VERIFIED = frozenset({"llama"})
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
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("dynamic", "longrope"):
        raise ModelError(
            f"models with {kind!r} rotary embeddings are not supported: their positions depend on the longest "
            "sequence of a batch"
        )
