"""Requests as blocks of an Arrow stream, and the bytes that they are sorted by."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from batchgen.prefix.order import token_key
from batchgen.request import Request, TokenArray
from batchgen.sampling_params import SamplingParams

BLOCK_ROWS = 256
BLOCK_TOKENS = 1 << 16
"""A block has at most so many rows, or the rows that pass so many tokens: what a merge holds of each run."""

_TOKENS = pa.list_(pa.int32())
_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("key", pa.binary(16)),
        ("tokens", _TOKENS),
        ("completion", _TOKENS),  # the text to score, where there is one
        ("max_tokens", pa.int32()),
        ("truncated", pa.bool_()),
        ("priority", pa.float64()),
        ("settings", pa.dictionary(pa.int32(), pa.large_string())),  # parameters, and the tokens of their choices
    ]
)


def sort_key(request: Request) -> bytes:
    """Compares as (priority, tokens) do: lower priorities first, then depth-first order."""
    return _priority_key(request.priority) + token_key(request.tokens)


@lru_cache(maxsize=64)
def _priority_key(priority: float) -> bytes:
    """A float's bits compare as it does once the sign of positive ones is set, and all bits of negative ones are turned."""
    (bits,) = struct.unpack(">Q", struct.pack(">d", priority + 0.0))  # + 0.0: there is a negative zero, equal to zero
    return struct.pack(">Q", bits ^ (0xFFFFFFFFFFFFFFFF if bits >> 63 else 1 << 63))


@dataclass(slots=True, eq=False)
class Block:
    """Requests in order, and their sort keys."""

    requests: list[Request]
    keys: list[bytes]


def write_blocks(requests: Iterable[Request], file: Any) -> None:
    """Writes requests, in the order they are in, as an Arrow stream."""
    with pa.ipc.new_stream(file, _SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        for block in cut(requests):
            stream.write_batch(_batch(block))


def read_blocks(file: BinaryIO) -> Iterator[Block]:
    """The blocks of a stream, one at a time. Raises Arrow's errors where it is broken."""
    with pa.ipc.open_stream(file) as stream:
        for batch in stream:
            requests = _requests(batch)
            yield Block(requests, [sort_key(r) for r in requests])


def cut(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """The requests, in the order they are in, as what goes into one block each."""
    block: list[Request] = []
    tokens = 0
    for request in requests:
        if block and (len(block) == BLOCK_ROWS or tokens + len(request.tokens) > BLOCK_TOKENS):
            yield block
            block, tokens = [], 0
        block.append(request)
        tokens += len(request.tokens)
    if block:
        yield block


def _batch(requests: Sequence[Request]) -> pa.RecordBatch:
    columns = [
        pa.array([r.row for r in requests], pa.int64()),
        pa.array([r.key for r in requests], pa.binary(16)),
        _lists([r.tokens for r in requests]),
        pa.array([r.texts[0] if r.texts and not r.params.choices else None for r in requests], _TOKENS),
        pa.array([r.max_tokens for r in requests], pa.int32()),
        pa.array([r.truncated for r in requests], pa.bool_()),
        pa.array([r.priority for r in requests], pa.float64()),
        pa.array(_settings(requests), pa.large_string()).dictionary_encode(),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _lists(arrays: Sequence[TokenArray]) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)))


def _settings(requests: Sequence[Request]) -> list[str]:
    """Rows that have the command's own parameters have one object of them."""
    texts: list[str] = []
    made: dict[int, str] = {}
    for r in requests:
        text = made.get(id(r.params))
        if text is None:
            choices = [t.tolist() for t in r.texts] if r.params.choices else []
            text = made[id(r.params)] = json.dumps([asdict(r.params), choices])
        texts.append(text)
    return texts


@lru_cache(maxsize=1024)
def _read_settings(text: str) -> tuple[SamplingParams, tuple[TokenArray, ...]]:
    values, choices = json.loads(text)
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return SamplingParams(**fields), tuple(np.array(c, dtype=np.int32) for c in choices)


def _requests(batch: pa.RecordBatch) -> list[Request]:
    row, key, tokens, completion, max_tokens, truncated, priority, settings = batch.columns
    values, offsets = tokens.values.to_numpy(), tokens.offsets.to_pylist()
    known = [_read_settings(text) for text in settings.dictionary.to_pylist()]
    parts = zip(
        row.to_pylist(),
        key.to_pylist(),
        completion.to_pylist(),
        max_tokens.to_pylist(),
        truncated.to_pylist(),
        priority.to_pylist(),
        settings.indices.to_pylist(),
        strict=True,
    )
    requests = []
    for i, (number, row_key, scored, most, cut, level, setting) in enumerate(parts):
        params, choices = known[setting]
        texts = choices if scored is None else (np.array(scored, dtype=np.int32),)
        requests.append(
            Request(
                row=number,
                tokens=values[offsets[i] : offsets[i + 1]],
                params=params,
                max_tokens=most,
                key=row_key,
                truncated=cut,
                texts=texts,
                priority=level,
            )
        )
    return requests
