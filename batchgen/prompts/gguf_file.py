"""Reads a GGUF file: the values of its keys, and where its tensors are. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

The reader of the package gguf makes several arrays for each token of a vocabulary, which takes 5 s where this takes half a second.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchgen.errors import ModelError

OTHER_FORMAT = "give the model in the format of transformers"
"""What to do where a file is refused."""
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_TEXT, _LIST = 8, 9
"""The types of values, beside those of numbers."""
_Array = np.ndarray[Any, Any]


class GgufTensor(NamedTuple):
    """A tensor in a GGUF file."""

    name: str
    kind: str
    """The type of its numbers or blocks, such as Q4_0."""
    shape: tuple[int, ...]
    offset: int
    """In the file, in bytes."""
    nbytes: int


class GgufFile(NamedTuple):
    """What a GGUF file holds, without the tensors' numbers."""

    path: Path
    values: dict[str, Any]
    """The value of each key: a number, a text or a list of them."""
    places: dict[str, int]
    """Where the value of each key begins in the file, in bytes; that of a list where its first one does."""
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`."""
        return str(self.values.get("general.architecture"))

    def settings(self) -> dict[str, Any]:
        """Returns the values of the architecture's keys, without its name."""
        start = f"{self.architecture}."
        return {key.removeprefix(start): value for key, value in self.values.items() if key.startswith(start)}

    def numbers(self, tensor: GgufTensor) -> _Array:
        """Returns the numbers of a tensor, dequantized, float32 [of its shape]."""
        import gguf

        data = np.memmap(self.path, np.uint8, "r", tensor.offset, tensor.nbytes)
        return np.asarray(gguf.dequantize(data, gguf.GGMLQuantizationType[tensor.kind])).reshape(tensor.shape)


def read_gguf(path: Path) -> GgufFile:
    """Reads a file.

    Raises `ModelError` for a file that is cut or damaged, and for a version, a byte order or a type of tensors that is not known.
    """
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _parse(path, data)
        except (struct.error, ArithmeticError, TypeError, ValueError) as e:
            raise ModelError(f"{path} is cut or damaged", "download it again") from e


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    version, tensor_count, key_count = struct.unpack_from("<IQQ", data, 4)
    if version not in _VERSIONS:
        other = "in another byte order" if version & 0xFFFF == 0 else f"in version {version} of the format"
        raise ModelError(f"{path} is written {other}, which batchgen does not read", "convert the model again")
    values: dict[str, Any] = {}
    places: dict[str, int] = {}
    at = 24
    for _ in range(key_count):
        key, at = _text(data, at)
        if key in values:
            raise ValueError(f"{key} twice")
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        places[key] = at + 12 if kind == _LIST else at
        values[key], at = _value(data, at, kind)
    infos = []
    for _ in range(tensor_count):
        name, at = _text(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        *shape, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", data, at + 4)
        at += 16 + 8 * dimensions
        infos.append((name, kind, tuple(shape[::-1]), offset))
    if len({name for name, *_ in infos}) < len(infos):
        raise ValueError("a tensor twice")
    alignment = int(values.get("general.alignment", _ALIGNMENT))
    start = -(-at // alignment) * alignment
    tensors = tuple(_tensor(path, name, kind, shape, start + offset) for name, kind, shape, offset in infos)
    if any(tensor.offset + tensor.nbytes > len(data) for tensor in tensors):
        raise ValueError("cut")
    return GgufFile(path, values, places, tensors)


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    """Returns the value of type `kind` at `at`, and where it ends."""
    if kind == _TEXT:
        return _text(data, at)
    if kind != _LIST:
        (number,), end = _numbers(data, at, kind, 1)
        return number, end
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind != _TEXT:
        return _numbers(data, at, kind, count)
    texts = []
    for _ in range(count):
        text, at = _text(data, at)
        texts.append(text)
    return texts, at


def _numbers(data: mmap.mmap, at: int, kind: int, count: int) -> tuple[list[Any], int]:
    if kind not in _NUMBERS:
        raise ValueError(f"values of type {kind}")
    numbers = np.frombuffer(data, _NUMBERS[kind], count, at)
    return numbers.tolist(), at + numbers.nbytes


def _text(data: mmap.mmap, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + size
    if end > len(data):
        raise ValueError("cut")
    return data[at + 8 : end].decode(), end


def _tensor(path: Path, name: str, number: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if number not in list(GGMLQuantizationType):
        raise ModelError(
            f"{name} in {path} has numbers of the type {number}, which the installed version of the package gguf does not know",
            "pip install --upgrade gguf",
        )
    kind = GGMLQuantizationType(number)
    block, size = GGML_QUANT_SIZES[kind]
    return GgufTensor(name, kind.name, shape, offset, math.prod(shape) // block * size)
