"""The rotary embedding of a GGUF file's model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.errors import ModelError
from batchgen.prompts.gguf_file import OTHER_FORMAT, GgufFile

_LLAMA3 = {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
"""How Llama 3.1 and 4 scale frequencies, beside their factor. A file holds the result alone."""
_HIGH_FACTORS = (4.0, 1.0)
"""The `high_freq_factor` of Llama 3.1 and of Llama 4 Scout, which has no frequencies between the scaled ones and the others."""
_BASE = 10000.0
"""That of files that do not say."""
_VANISHING = 1e20
_YARN = ("beta_fast", "beta_slow")
_USUALLY_ONE = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
"""Further factors of YaRN, for which transformers has no names or other rules."""


def set_rotary_embedding(config: Any, file: GgufFile) -> None:
    """Gives a configuration what the file says of the rotary embedding: its base, its dimensions and how it is scaled.

    Raises `ModelError` for a scaling that is not known.
    """
    text = config.get_text_config()
    known = getattr(text, "rope_parameters", None)
    if not isinstance(known, dict):
        return

    def value(key: str) -> Any:
        return file.values.get(f"{file.architecture}.rope.{key}")

    # With sliding windows only the layers that see everything are scaled.
    rope = known.get("full_attention", known)
    rope["rope_theta"] = float(value("freq_base") or _BASE)
    if value("freq_base_swa") is not None and "sliding_attention" in known:
        known["sliding_attention"]["rope_theta"] = float(value("freq_base_swa"))
    proportional = rope.get("rope_type") == "proportional"
    if "partial_rotary_factor" in rope and not proportional:
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        rope["partial_rotary_factor"] = (value("dimension_count") or size) / size
    original = value("scaling.original_context_length") or text.max_position_embeddings
    factor, kind = value("scaling.factor") or value("scale_linear") or 1.0, value("scaling.type") or "linear"
    tensors = {t.name: file.numbers(t) for t in file.tensors if t.name.startswith("rope_f")}
    if proportional:
        rope["partial_rotary_factor"] = _proportion(tensors.get("rope_freqs.weight"), file.path)
    elif "rope_freqs.weight" in tensors:
        rope.update(_llama3(tensors["rope_freqs.weight"], rope["rope_theta"], file.path))
    elif "rope_factors_long.weight" in tensors:
        text.original_max_position_embeddings = original
        longrope = {name: tensors[f"rope_factors_{name.split('_')[0]}.weight"].tolist() for name in ("long_factor", "short_factor")}  # fmt: skip
        rope.update(longrope, rope_type="longrope", original_max_position_embeddings=original)
        if value("scaling.attn_factor") is not None:
            rope["attention_factor"] = float(value("scaling.attn_factor"))
    elif kind == "yarn" and factor != 1:
        rope.update(rope_type="yarn", factor=float(factor), original_max_position_embeddings=original)
        rope.update({name: float(value(f"scaling.yarn_{name}")) for name in _YARN if value(f"scaling.yarn_{name}")})
        own = {name: value(f"scaling.{name}") for name in _USUALLY_ONE}
        if math.isclose(
            own["yarn_attn_factor"] or 1.0, 1 + 0.1 * math.log(factor), rel_tol=1e-6
        ):  # what YaRN does without this key
            own["yarn_attn_factor"] = 1.0
        if any(factor not in (None, 1.0) for factor in own.values()):
            raise _unknown(file.path, f"'yarn' with {' or '.join(_USUALLY_ONE)} other than 1")
    elif kind == "linear" and factor != 1:
        rope.update(rope_type="linear", factor=float(factor))
    elif kind not in ("none", "linear", "yarn", "longrope"):
        raise _unknown(file.path, f"{kind!r}")


def _llama3(factors: np.ndarray[Any, Any], base: float, file: Path) -> dict[str, Any]:
    """Returns the parameters of Llama 3.1 or 4 whose frequencies are divided by `factors` [dimensions / 2]. Raises `ModelError` if there are none."""
    largest = float(factors.max())
    if largest == 1:
        return {}
    wavelengths = 2 * math.pi * base ** (np.arange(len(factors)) / len(factors))
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
    low = _LLAMA3["low_freq_factor"]
    for high in _HIGH_FACTORS:
        smooth = np.where(turns < low, 0, 1) if high == low else np.clip((turns - low) / (high - low), 0, 1)
        if np.allclose(factors, 1 / ((1 - smooth) / largest + smooth), rtol=1e-3):
            return {"rope_type": "llama3", "factor": largest, "high_freq_factor": high, **_LLAMA3}
    raise _unknown(file, "its own (rope_freqs.weight)")


def _proportion(factors: np.ndarray[Any, Any] | None, file: Path) -> float:
    """Returns the part of the dimensions that Gemma 4 rotates: those whose frequency is divided by one, not by a number that makes it vanish."""
    if factors is None:
        return 1.0
    rotated = int((factors == 1).sum())
    if not (factors[:rotated] == 1).all() or (factors[rotated:] < _VANISHING).any():
        raise _unknown(file, "its own (rope_freqs.weight)")
    return rotated / len(factors)


def _unknown(file: Path, kind: str) -> ModelError:
    return ModelError(
        f"the rotary embedding of {file} is scaled in a way that batchgen does not know: {kind}",
        OTHER_FORMAT,
    )
