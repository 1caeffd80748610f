"""A GGUF file is read as the package gguf reads it, or refused with the reason."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.prompts.gguf_file import read_gguf
from support.gguf import write_vocabulary

gguf = pytest.importorskip("gguf")
DAMAGED = "is cut or damaged; download it again"
TOKENS = [("<unk>", 2), ("<s>", 3), "a", "ü▁", "", "🎉"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    matrix = np.arange(64, dtype=np.float32).reshape(2, 32)
    tensors = {"rope_freqs.weight": [1.0, 2.5], "blk.0.attn_q.weight": matrix, "blk.0.attn_k.weight": matrix}
    others = {"a.bool": True, "a.numbers": [-1, 2, 3], "a.floats": [0.5, 1e30], "a.text": "x", "general.alignment": 32}
    kinds = {"blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q4_0, "blk.0.attn_k.weight": gguf.GGMLQuantizationType.F16}  # fmt: skip
    return write_vocabulary(tmp_path / "m.gguf", TOKENS, scores=[0.0] * 6, others=others, tensors=tensors, kinds=kinds)


def test_keys_and_tensors_are_those_that_the_package_gguf_reads(file):
    read, reader = read_gguf(file), gguf.GGUFReader(file)
    keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert read.values == keys
    assert {type(value) for value in read.values.values()} >= {bool, int, float, str, list}
    for tensor, theirs in zip(read.tensors, reader.tensors, strict=True):
        assert (tensor.name, tensor.shape) == (theirs.name, tuple(theirs.shape.tolist()[::-1]))
        assert file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes] == theirs.data.tobytes()
        exact = gguf.dequantize(theirs.data, theirs.tensor_type)
        assert np.array_equal(read.numbers(tensor), exact)
    for key, field in reader.fields.items():
        if key in read.places and field.data:
            first = field.parts[field.data[0]].tobytes()
            at = read.places[key] + (8 if gguf.GGUFValueType.STRING in field.types else 0)
            assert file.read_bytes()[at : at + len(first)] == first


def test_a_file_that_is_cut_anywhere_is_refused(file):
    whole = file.read_bytes()
    end = read_gguf(file).tensors[-1]
    for size in {*range(4, end.offset, 7), end.offset, end.offset + end.nbytes - 1}:
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=DAMAGED):
            read_gguf(file)


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_file_is_read_or_refused(file, seed):
    whole, draw = file.read_bytes(), random.Random(seed)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(4, len(whole))] = draw.choice([0, 1, 9, 127, 255])
        file.write_bytes(damaged)
        with suppress(ModelError):
            read_gguf(file)


MATRIX = b"blk.0.attn_q.weight" + b"".join(n.to_bytes(size, "little") for n, size in ((2, 4), (32, 8), (2, 8)))
"""What a file has before the type of its first matrix: the name, the number of dimensions and their sizes."""


@pytest.mark.parametrize(
    ("after", "written", "message"),
    [
        (b"GGUF", b"\x01\0\0\0", "{} is written in version 1 of the format, which batchgen does not read; convert the model again"),
        (b"GGUF", b"\0\0\0\x03", "{} is written in another byte order, which batchgen does not read; convert the model again"),
        (b"a.bool", b"\x63\0\0\0", "{} " + DAMAGED),
        (b"a.numbers\x09\0\0\0", b"\x09\0\0\0", "{} " + DAMAGED),
        (b"a.numbers\x09\0\0\0\x05\0\0\0", b"\xff" * 8, "{} " + DAMAGED),
        (b"general.alignment\x04\0\0\0", b"\0", "{} " + DAMAGED),
        (MATRIX, b"\x7f", "blk.0.attn_q.weight in {} has numbers of the type 127, which the installed version of the package gguf does not know; pip install --upgrade gguf"),
    ],
    ids=["old", "byte order", "type", "lists in lists", "length", "alignment", "type of numbers"],
)  # fmt: skip
def test_what_cannot_be_read_is_named(file, after, written, message):
    whole = file.read_bytes()
    place = whole.index(after) + len(after)
    file.write_bytes(whole[:place] + written + whole[place + len(written) :])
    with pytest.raises(ModelError) as e:
        read_gguf(file)
    assert str(e.value) == message.format(file)


def test_a_key_or_a_tensor_that_is_there_twice_is_damage(file):
    whole = file.read_bytes()
    for name, other in ((b"a.bool", b"a.text"), (b"blk.0.attn_q.weight", b"blk.0.attn_k.weight")):
        file.write_bytes(whole.replace(name, other))
        with pytest.raises(ModelError, match="is cut or damaged"):
            read_gguf(file)
