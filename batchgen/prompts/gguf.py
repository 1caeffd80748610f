"""The configuration and the tokenizer inside of a GGUF file, read by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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


def load_gguf(file: Path) -> tuple[Any, Any]:
    """The configuration and the tokenizer. Raises what transformers and the package gguf raise for a file that they cannot read."""
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoTokenizer

    kind = GGUFReader(file).get_field("general.file_type")
    with alone(file) as folder:
        config = AutoConfig.from_pretrained(folder, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    config.dtype = _DTYPES.get(-1 if kind is None else int(kind.contents()), "bfloat16")
    config.quantization_config = {"quant_method": METHOD}
    return config, tokenizer
