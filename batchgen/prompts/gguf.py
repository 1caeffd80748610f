"""What a GGUF file holds: its tensors, and the configuration of its model. `gguf_tokenizer.py` makes the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchgen.errors import ModelError
from batchgen.prompts.gguf_families import GgufFamily, family_config
from batchgen.prompts.gguf_rope import set_rotary_embedding
from batchgen.prompts.gguf_settings import OTHER_FORMAT, check_settings, family_of, settings_of, value_of
from batchgen.prompts.gguf_tokenizer import GgufVocabulary, gguf_tokenizer

METHOD = "gguf"
"""The `quant_method` that a configuration from a GGUF file has here."""
ACTIVATION = "xielu."
"""The beginning of keys that hold weights."""
_DTYPES = {0: "float32", 1: "float16"}
"""The dtype of files that hold floats, by `general.file_type`. Models of all other files are computed in bfloat16."""


class GgufTensor(NamedTuple):
    """A tensor in a GGUF file."""

    name: str
    kind: str
    """The type of its numbers or blocks, such as Q4_0."""
    shape: tuple[int, ...]
    offset: int
    """In the file, in bytes."""
    nbytes: int


class GgufHeader(NamedTuple):
    """What a GGUF file says about its tensors."""

    architecture: str
    tensors: tuple[GgufTensor, ...]
    family: GgufFamily


_known: dict[tuple[Path, int, int], GgufHeader] = {}
"""The header of the last file, by its path, size and time. The package gguf takes seconds to read that of a large vocabulary."""


def open_gguf(file: Path) -> Any:
    """Returns a `gguf.GGUFReader` of the file, in a third of the time: it makes several slices for each token, and numpy makes those of a memmap slowly."""
    import gguf

    class _Reader(gguf.GGUFReader):
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, value: Any) -> None:
            self._plain = value.view(np.ndarray)

    return _Reader(file)


def gguf_header(file: Path, reader: Any = None) -> GgufHeader:
    """Returns the header of a file, which is read once. `reader`: a `gguf.GGUFReader` of it, if there is one.

    Raises `ModelError` if its architecture is not known.
    """
    stat = file.stat()
    key = (file.resolve(), stat.st_size, stat.st_mtime_ns)
    if key not in _known:
        reader = open_gguf(file) if reader is None else reader
        tensors = tuple(
            GgufTensor(t.name, t.tensor_type.name, tuple(t.shape.tolist()[::-1]), int(t.data_offset), int(t.n_bytes))
            for t in reader.tensors
        )
        _known.clear()
        architecture, values = settings_of(reader)
        _known[key] = GgufHeader(architecture, tensors + _of_activations(reader), family_of(file, architecture, values))
    return _known[key]


def _of_activations(reader: Any) -> tuple[GgufTensor, ...]:
    """Returns the weights of activations (xIELU, in Apertus). A file has a key for each, with the numbers of all layers, and not a tensor."""
    fields = [field for key, field in reader.fields.items() if key.startswith(ACTIVATION)]
    return tuple(
        GgufTensor(f"{field.name}.{layer}", "F32", (1,), field.offset + sum(x.nbytes for x in field.parts[:part]), 4)
        for field in fields
        for layer, part in enumerate(field.data)
    )


def is_whole(file: Path) -> bool:
    """Whether a file is whole, judged by what the package gguf says of one that is cut: messages of numpy, about the arrays that it makes of it."""
    try:
        open_gguf(file)
    except IndexError:
        return False
    except ValueError as e:  # also of versions and types that it does not know
        return not any(word in str(e) for word in ("reshape", "larger dtype", "buffer"))
    return True


def load_gguf(file: Path) -> tuple[Any, Any]:
    """Returns the configuration and the tokenizer.

    Raises what the package gguf raises for a file that it cannot read, and `ModelError` for an architecture, a tokenizer or a setting that is not known.
    """
    reader = open_gguf(file)
    architecture, values = settings_of(reader)
    try:
        check_settings(file, reader)
        vocabulary, header = GgufVocabulary(file, reader), gguf_header(file, reader)
        config = family_config(header.family, values, {tensor.name: tensor.shape for tensor in header.tensors})
    except KeyError as e:
        raise ModelError(
            f"{file} has no {e.args[0]}, which models of the architecture {architecture!r} need", OTHER_FORMAT
        ) from e
    tokenizer = gguf_tokenizer(vocabulary)
    set_rotary_embedding(config, file, reader)
    config.get_text_config().eos_token_id = vocabulary.end_tokens() or None
    config.dtype = _DTYPES.get(value_of(reader, "general.file_type"), "bfloat16")
    config.quantization_config = {"quant_method": METHOD}
    return config, tokenizer
