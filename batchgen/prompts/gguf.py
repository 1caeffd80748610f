"""The model of a GGUF file: its family, its tensors and its configuration. `gguf_tokenizer.py` makes the tokenizer.

Each key of the file is read here or by `gguf_rope.py`, or the file is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from batchgen.errors import ModelError
from batchgen.prompts.gguf_families import FAMILIES, VARIANTS, GgufFamily, Values, family_config, head_size
from batchgen.prompts.gguf_file import OTHER_FORMAT, GgufFile, GgufTensor, read_gguf
from batchgen.prompts.gguf_rope import set_rotary_embedding
from batchgen.prompts.gguf_tokenizer import GgufVocabulary, gguf_tokenizer

METHOD = "gguf"
"""The `quant_method` that a configuration from a GGUF file has here."""
ACTIVATION = "xielu."
"""The beginning of keys that hold weights."""
_DTYPES = {0: "float32", 1: "float16"}
"""The dtype of files that hold floats, by `general.file_type`. Models of all other files are computed in bfloat16."""
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


class GgufHeader(NamedTuple):
    """What a GGUF file says about its tensors."""

    architecture: str
    tensors: tuple[GgufTensor, ...]
    family: GgufFamily


_known: dict[tuple[Path, int, int], GgufHeader] = {}
"""The header of the last file, by its path, size and time."""


def gguf_header(path: Path, file: GgufFile | None = None) -> GgufHeader:
    """Returns the header of a file, which is read once. `file`: what `read_gguf` returned for it, if it has been read.

    Raises `ModelError` if its architecture is not known, and what `read_gguf` raises.
    """
    stat = path.stat()
    key = (path.resolve(), stat.st_size, stat.st_mtime_ns)
    if key not in _known:
        file = read_gguf(path) if file is None else file
        _known.clear()
        family = family_of(path, file.architecture, file.settings())
        _known[key] = GgufHeader(file.architecture, file.tensors + _of_activations(file), family)
    return _known[key]


def _of_activations(file: GgufFile) -> tuple[GgufTensor, ...]:
    """Returns the weights of activations (xIELU, in Apertus). A file has a key for each, with the numbers of all layers, and not a tensor."""
    return tuple(
        GgufTensor(f"{key}.{layer}", "F32", (1,), file.places[key] + 4 * layer, 4)
        for key, value in file.values.items()
        if key.startswith(ACTIVATION)
        for layer in range(len(value) if isinstance(value, list) else 1)
    )


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


def load_gguf(path: Path) -> tuple[Any, Any]:
    """Returns the configuration and the tokenizer.

    Raises what `read_gguf` raises, and `ModelError` for an architecture, a tokenizer or a setting that is not known.
    """
    file = read_gguf(path)
    try:
        check_settings(file)
        vocabulary, header = GgufVocabulary(file), gguf_header(path, file)
        config = family_config(header.family, file.settings(), {tensor.name: tensor.shape for tensor in header.tensors})
    except KeyError as e:
        raise ModelError(
            f"{path} has no {e.args[0]}, which models of the architecture {file.architecture!r} need", OTHER_FORMAT
        ) from e
    tokenizer = gguf_tokenizer(vocabulary)
    set_rotary_embedding(config, file)
    config.get_text_config().eos_token_id = vocabulary.end_tokens() or None
    config.dtype = _DTYPES.get(file.values.get("general.file_type", -1), "bfloat16")
    config.quantization_config = {"quant_method": METHOD}
    return config, tokenizer
