"""What a GGUF file holds: its tensors, and the configuration, which transformers reads. `gguf_tokenizer.py` makes the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from batchgen.prompts.gguf_families import GgufFamily, family_config, family_of
from batchgen.prompts.gguf_rope import set_rotary_embedding
from batchgen.prompts.gguf_settings import check_settings, set_settings, settings_of, value_of
from batchgen.prompts.gguf_tokenizer import GgufVocabulary, gguf_tokenizer

METHOD = "gguf"
"""The `quant_method` that a configuration from a GGUF file has here."""
_DTYPES = {0: "float32", 1: "float16"}
"""The dtype of files that hold floats, by `general.file_type`. Models of all other files are computed in bfloat16."""


@contextmanager
def alone(file: Path) -> Iterator[str]:
    """Returns a folder that holds only a link to the file, so that transformers does not read the files next to it."""
    with TemporaryDirectory(prefix="batchgen-") as folder:
        (Path(folder) / file.name).symlink_to(file.resolve())
        yield folder


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
    family: GgufFamily | None
    """None if transformers reads the architecture."""


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
    """Returns the header of a file, which is read once. `reader`: a `gguf.GGUFReader` of it, if there is one."""
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
        _known[key] = GgufHeader(architecture, tensors, family_of(architecture, values))
    return _known[key]


@contextmanager
def instead(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Lets transformers, whose readers import functions when they run, call another function of a module."""
    plain = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, plain)


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

    Raises what transformers and the package gguf raise for a file that they cannot read, and `ModelError` for a tokenizer or a setting that is not known.
    """
    import gguf
    from transformers import AutoConfig, AutoTokenizer

    reader = open_gguf(file)
    check_settings(file, reader)
    kind = value_of(reader, "general.file_type")
    vocabulary = GgufVocabulary(file, reader)
    header = gguf_header(file, reader)
    if header.family is not None:
        shapes = {tensor.name: tensor.shape for tensor in header.tensors}
        config = family_config(header.family, settings_of(reader)[1], shapes)
    with alone(file) as folder, instead(gguf, "GGUFReader", lambda path: reader):
        if header.family is None:
            config = AutoConfig.from_pretrained(folder, gguf_file=file.name)
        tokenizer = gguf_tokenizer(vocabulary)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    if header.family is None:
        set_settings(config, reader)
    set_rotary_embedding(config, file, reader)
    config.get_text_config().eos_token_id = vocabulary.end_tokens() or None
    config.dtype = _DTYPES.get(kind, "bfloat16")
    config.quantization_config = {"quant_method": METHOD}
    return config, tokenizer
