"""What the tensors of checkpoints quantized for MLX are called in transformers. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MIXTURES = re.compile(r"(\.experts)?\.switch_(mlp|glu)\.")
_STARTS = (
    ("model.", "model."),
    ("lm_head.", "lm_head."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model.language_model."),
    ("language_model.", "model.text_model."),
    *((f"vision_tower.vision_model.{part}", f"model.vision_tower.{part}") for part in ("transformer.", "patch_conv.", "ln_pre.")),
    ("", "model."),
)  # fmt: skip
"""What names begin with in MLX and in transformers, in models that are multimodal."""
_VISUAL = ("vision_tower.", "model.visual.")
"""The same for the encoders of Qwen and GLM."""


def name_in_transformers(name: str, settings: Mapping[str, Any]) -> str:
    """Returns the name of a tensor by the one in MLX. `settings`: those of the checkpoint's quantization (`mlx_settings`).

    All experts of a mixture are one tensor in MLX, whose name is made to say `experts` in the place of an expert's number.
    """
    name = _MIXTURES.sub(".experts.", name)
    if not settings.get("is_multimodal"):
        return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
    starts = (_VISUAL, *_STARTS) if settings["model_type"].startswith(("qwen", "glm")) else _STARTS
    start, other = next((start, other) for start, other in starts if name.startswith(start))
    return f"{other}{name.removeprefix(start)}"
