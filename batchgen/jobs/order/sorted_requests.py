"""All requests of an input in depth-first order, in constant memory.

An external merge sort. Requests are collected in runs that fit in memory; each run is sorted and written to a file. The files are then
merged. If all requests fit in one run, no file is written.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa

from batchgen.config import INPUT_LIMITS, InputLimits
from batchgen.jobs.files.disk import reading, writing
from batchgen.prefix.order import common_length, depth_first_order, token_key
from batchgen.records.writers import DigestFile
from batchgen.request import IMAGE_IDS, Image, Request, TokenArray
from batchgen.sampling_params import SamplingParams

T = TypeVar("T")

_TOKENS = pa.list_(pa.int32())
_SCHEMA = pa.schema(
    [
        ("tokens", _TOKENS),  # 0 for those of images
        ("own", pa.large_string()),  # the other fields as JSON
        (
            "common",
            pa.dictionary(pa.int32(), pa.large_string()),
        ),  # what many requests have in common: parameters, labels, tools
    ]
)


_OWN = ("row", "max_tokens", "truncated", "prompt_logprobs", "priority", "source", "long")
"""Fields of a request that JSON can hold."""


class SortedRequests:
    """Takes requests in any order and gives them back in windows, by priority and then in depth-first order.

    `folder` exists and is used for nothing else.
    """

    def __init__(self, folder: Path, limits: InputLimits = INPUT_LIMITS) -> None:
        self._folder = folder
        self._limits = limits
        self._waiting: list[Request] = []
        self._tokens = 0
        self._files_made = 0
        self.digests: dict[str, str] = {}
        """Digest of each file, by name: the runs, in the order in which they were made."""

    @classmethod
    def of(cls, folder: Path, digests: dict[str, str], limits: InputLimits = INPUT_LIMITS) -> SortedRequests:
        """The requests that an earlier process sorted into `folder`. `digests` are those of its files."""
        requests = cls(folder, limits)
        requests.digests = digests
        return requests

    @property
    def on_disk(self) -> bool:
        return bool(self.digests)

    def add(self, request: Request) -> None:
        """Adds a request. May write a file."""
        self._waiting.append(request)
        self._tokens += len(request.tokens)
        if len(self._waiting) > self._limits.run_rows or self._tokens > self._limits.max_tokens:
            *full, last = self._waiting  # one too many: a run that is just full stays in memory
            self._write_file(in_window_order(full or [last]))
            self._waiting, self._tokens = ([last], len(last.tokens)) if full else ([], 0)

    def close(self) -> None:
        """Must be called after the last request. Leaves at most `max_runs` files."""
        if self.on_disk and self._waiting:
            self._write_file(in_window_order(self._waiting))
            self._waiting = []
        while len(self.digests) > self._limits.max_runs:
            first = list(self.digests)[: self._limits.max_runs]
            self._write_file(self._merged(first))
            for name in first:
                (self._folder / name).unlink()
                del self.digests[name]

    def windows(self) -> Iterator[list[Request]]:
        """All requests. Each window is the next part of the order; inside a window the order has no meaning."""
        if self.on_disk:
            return _windows(self._merged(list(self.digests)), self._limits)
        ordered, self._waiting = in_window_order(self._waiting), []
        return _windows(ordered, self._limits)

    def _write_file(self, requests: Iterable[Request]) -> None:
        name = f"run-{self._files_made:05d}"
        self._files_made += 1
        self.digests[name] = write_requests(self._folder / name, requests, self._limits)

    def _merged(self, names: Sequence[str]) -> Iterator[Request]:
        with reading(self._folder), ExitStack() as files:
            runs = [_read(files.enter_context((self._folder / name).open("rb"))) for name in names]
            yield from heapq.merge(*runs, key=sort_key)


def bounded_windows(requests: list[Request], limits: InputLimits) -> Iterator[list[Request]]:
    """The requests of a window: as they are if they are within the limits and all or none are `long`, else in prefix order in several windows."""
    if (
        sum(r.leaves for r in requests) <= limits.window_leaves
        and sum(r.leaf_tokens for r in requests) <= limits.max_tokens
        and len({r.long for r in requests}) < 2
    ):
        return iter([requests] if requests else [])
    return _windows(in_window_order(requests), limits)


def _windows(ordered: Iterable[Request], limits: InputLimits) -> Iterator[list[Request]]:
    """The requests in windows, each with `long` ones alone or without any."""
    for _, alike in groupby(ordered, key=lambda r: r.long):
        yield from _windows_alike(alike, limits)


def _windows_alike(ordered: Iterable[Request], limits: InputLimits) -> Iterator[list[Request]]:
    window: list[Request] = []
    leaves = tokens = 0
    for batch in _batches(ordered, limits):
        count, size = sum(r.leaves for r in batch), sum(r.leaf_tokens for r in batch)
        if window and (leaves + count > limits.window_leaves or tokens + size > limits.max_tokens):
            end = _best_end(batch)
            yield window + batch[:end]
            window = batch[end:]
            leaves, tokens = sum(r.leaves for r in window), sum(r.leaf_tokens for r in window)
        else:
            window += batch
            leaves, tokens = leaves + count, tokens + size
    if window:
        yield window


def spread(windows: Iterable[list[Request]], count: int) -> list[Request]:
    """Returns `count` requests, or all if there are not as many, at about equal distances in the order. Holds at most twice as many."""
    chosen: list[Request] = []
    step, number = 1, 0
    for window in windows:
        for request in in_window_order(window):
            if number % step == 0:
                chosen.append(request)
            if len(chosen) == 2 * count:
                chosen, step = chosen[::2], 2 * step
            number += 1
    return evenly(chosen, count)


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Returns `count` of the items, or all if there are not as many, at equal distances."""
    count = min(len(items), count)
    return [items[i * len(items) // count] for i in range(count)]


def write_requests(path: Path, requests: Iterable[Request], limits: InputLimits) -> str:
    """Writes requests to a new file, in their order. Returns the digest of the file, which is on disk then."""
    with writing(path.parent), closing(DigestFile(path)) as file:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(file, _SCHEMA, options=options) as stream:
            for batch in _batches(requests, limits):
                stream.write_batch(_to_arrow(batch))
        return file.hexdigest()


def read_requests(path: Path) -> list[Request]:
    """The requests of a file that `write_requests` wrote."""
    with reading(path.parent), path.open("rb") as file:
        return list(_read(file))


def in_window_order(requests: Sequence[Request]) -> list[Request]:
    """The requests by priority, then short before long ones, and then in depth-first order."""
    ordered = [requests[i] for i in depth_first_order([r.tokens for r in requests]).tolist()]
    return sorted(ordered, key=lambda r: (r.priority, r.long))


def sort_key(request: Request) -> tuple[float, bool, bytes]:
    """A key that puts lower priorities first, short requests before long ones of the same priority, and these in depth-first order."""
    return request.priority, request.long, token_key(request.tokens)


def _best_end(ordered: Sequence[Request]) -> int:
    """Returns where a window should end: where neighbours share the fewest tokens.

    A prefix of which a window has a single row is no node there, and would be run again in the next window.
    """
    shared = [common_length(a.tokens, b.tokens) for a, b in pairwise(ordered)]
    return 1 + shared.index(min(shared)) if shared else 0


def _batches(requests: Iterable[Request], limits: InputLimits) -> Iterator[list[Request]]:
    """The requests, in their order, divided into batches."""
    batch: list[Request] = []
    tokens = 0
    for request in requests:
        if batch and (len(batch) == limits.batch_rows or tokens + request.leaf_tokens > limits.batch_tokens):
            yield batch
            batch, tokens = [], 0
        batch.append(request)
        tokens += request.leaf_tokens
    if batch:
        yield batch


def _read(file: BinaryIO) -> Iterator[Request]:
    """The requests of a file, of which one batch is in memory at a time. Raises Arrow's errors if it is damaged."""
    with pa.ipc.open_stream(file) as stream:
        for batch in stream:
            yield from _from_arrow(batch)


def _to_arrow(requests: Sequence[Request]) -> pa.RecordBatch:
    columns = [
        _token_lists([np.where(r.tokens < IMAGE_IDS, r.tokens, 0) if r.images else r.tokens for r in requests]),
        pa.array([_own_fields(r) for r in requests], pa.large_string()),
        pa.array(_common_fields(requests), pa.large_string()).dictionary_encode(),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _token_lists(arrays: Sequence[TokenArray]) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays).astype(np.int32, copy=False)))


def _own_fields(request: Request) -> str:
    fields = {name: getattr(request, name) for name in _OWN}
    fields["key"] = request.key.hex()
    if request.texts and not request.params.choices:
        fields["text"] = request.texts[0].tolist()
    if request.images:
        places = np.flatnonzero(request.tokens >= IMAGE_IDS).tolist()
        fields["images"] = [asdict(image) for image in request.images], places
    return json.dumps(fields)


def _common_fields(requests: Sequence[Request]) -> list[str]:
    """The parameters, the tokens of the labels and the tools of each request as JSON. Rows without parameters of their own share one object."""
    texts: list[str] = []
    made: dict[tuple[int, str], str] = {}
    for r in requests:
        text = made.get((id(r.params), r.tools))
        if text is None:
            choices = [t.tolist() for t in r.texts] if r.params.choices else []
            text = made[id(r.params), r.tools] = json.dumps([asdict(r.params), choices, r.tools])
        texts.append(text)
    return texts


@lru_cache(maxsize=1024)
def _read_common(text: str) -> tuple[SamplingParams, tuple[TokenArray, ...], str]:
    values, choices, tools = json.loads(text)
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return SamplingParams(**fields), tuple(np.array(c, dtype=np.int32) for c in choices), tools


def _from_arrow(batch: pa.RecordBatch) -> list[Request]:
    tokens, own, common = batch.columns
    values, offsets = tokens.values.to_numpy(), tokens.offsets.to_pylist()
    known = [_read_common(text) for text in common.dictionary.to_pylist()]
    requests = []
    for i, (text, place) in enumerate(zip(own.to_pylist(), common.indices.to_pylist(), strict=True)):
        params, texts, tools = known[place]
        fields = json.loads(text)
        fields["key"] = bytes.fromhex(fields["key"])
        if "text" in fields:
            texts = (np.array(fields.pop("text"), dtype=np.int32),)
        prompt = values[offsets[i] : offsets[i + 1]]
        if "images" in fields:
            shown, places = fields["images"]
            images = fields["images"] = tuple(Image(**{**of, "grid": tuple(of["grid"])}) for of in shown)
            prompt = prompt.astype(np.int64)
            prompt[places] = np.repeat([image.id for image in images], [image.count for image in images])
        requests.append(Request(tokens=prompt, params=params, texts=texts, tools=tools, **fields))
    return requests
