"""The keys of a GGUF file. Each is read here or by `gguf_rope.py`, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchgen.errors import ModelError
from batchgen.prompts.gguf_families import FAMILIES, VARIANTS, GgufFamily, Values, head_size
from batchgen.prompts.gguf_file import GgufFile

OTHER_FORMAT = "give the model in the format of transformers"
"""What to do where a file is refused."""
_NOTHING: tuple[Any, ...] = (0, "", [])
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),
    "pooling_type": (0, 3),
    "rope.scaling.finetuned": (False, True),
}
"""Values that change nothing, of keys that are not read: softmax for the gates, the last token for embeddings. Those of other keys: `_NOTHING`."""
_OTHER_PARTS = ("vision.", "audio.", "mm.")
"""The beginnings of keys that are not about text."""
_ROPE_KEYS = {
    "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
"""The keys that `gguf_rope.py` reads for every family."""


def family_of(file: Path, architecture: str, values: Values) -> GgufFamily:
    """Returns the family of a file with these settings. Raises `ModelError` if its architecture is not known."""
    key, variant = VARIANTS.get(architecture, ("", None))
    family = variant if values.get(key) else FAMILIES.get(architecture)
    if family is not None:
        return family
    raise ModelError(
        f"batchgen does not read models of the architecture {architecture!r} from GGUF files: {file}", OTHER_FORMAT
    )


def check_settings(file: GgufFile) -> None:
    """Raises `ModelError` for a model of an architecture that is not known, and for a setting that is not read and may change what the model computes."""
    architecture, values = file.architecture, file.settings()
    family = family_of(file.path, architecture, values)
    size, local = head_size(values), values.get("attention.key_length_swa")
    only = {
        "attention.value_length": size, "attention.value_length_swa": local, "rope.dimension_count": size, "rope.dimension_count_swa": local,
        "rope.freq_base_swa": values.get("rope.freq_base"),
        "attention.sliding_window": max(values.get("attention.sliding_window", 0), values.get("context_length", 0)),  # of all texts
    }  # fmt: skip
    for key, value in values.items():
        if key in family.must:
            unread = value != family.must[key]
        else:
            known = key in family.known() | _ROPE_KEYS or key.startswith(_OTHER_PARTS)
            unread = not known and value not in (*_HARMLESS.get(key, _NOTHING), only.get(key))
        if unread:
            raise ModelError(
                f"{file.path} sets {architecture}.{key} to {value}, which batchgen does not read", OTHER_FORMAT
            )
