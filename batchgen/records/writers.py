"""Output rows into a file: JSONL (plain, gzip, zstd) or Parquet.

A writer takes rows as `output_row` makes them, in any number of calls, and holds a bounded number of them.
Conversions where a format cannot hold a value: `jsonl.to_json` for JSON; for Parquet see `ParquetWriter` and `SpoolingWriter`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.records.arrow_values import array_of
from batchgen.records.jsonl import plain, to_json
from batchgen.records.output import INPUT_FILE, RowForm, carried_names, output_format
from batchgen.records.parquet_types import ColumnType, clean, id_text

GROUP_ROWS = 5_000
GROUP_BYTES = 1 << 25
"""A row group is at most so many rows, or the rows that pass so many bytes of text."""
GROUP_LOGPROBS = 1 << 18
"""Or the rows that pass so many log-probabilities, which as Python's objects are far larger."""

_TOKEN = [("token", pa.string()), ("token_id", pa.int32()), ("logprob", pa.float64())]
_CHOICE = [
    ("index", pa.int32()),
    ("text", pa.string()),
    ("finish_reason", pa.string()),
    ("logprobs", pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))]))),
]
RESULT_FIELDS = {
    "text": pa.string(),
    "finish_reason": pa.string(),
    "usage": pa.struct([("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64())]),
    "truncated": pa.bool_(),
    "choices": pa.list_(pa.struct([*_CHOICE, ("token_ids", pa.list_(pa.int32()))])),
    "choice_probs": pa.map_(pa.string(), pa.float64()),
    "score": pa.struct([("logprob", pa.float64()), ("tokens", pa.int64()), ("greedy", pa.bool_())]),
    "token_ids": pa.list_(pa.int32()),
    "error": pa.struct([("type", pa.string()), ("message", pa.string())]),
}
OPTIONAL_RESULTS = frozenset(("choices", "choice_probs", "score"))
"""Fields that only some results have."""


class Writer(Protocol):
    def write(self, rows: Iterable[dict[str, Any]]) -> None: ...
    def close(self) -> None:
        """Write what is held and close; the file is then whole and on disk."""

    def abandon(self) -> None:
        """Close without finishing, whatever state the disk is in."""


class DigestFile(io.RawIOBase):
    """A file that is written once from its start to its end, and the digest of its bytes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.blake2b(digest_size=16)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self.closed:
            super().close()
            try:
                self._file.close()
            finally:
                self._file.raw.close()  # also where the last bytes did not fit

    def abandon(self) -> None:
        """Close, whatever state the disk is in."""
        _quietly(self.close)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def open_writer(
    file: DigestFile,
    output: str,
    *,
    schema: pa.Schema | None,
    spool: Path,
    form: RowForm,
    optional: Collection[str] = (),
) -> Writer:
    """The writer for the suffix of `output`, which writes to `file`. `schema`: `Input.schema`.

    `optional`: those of `OPTIONAL_RESULTS` that Parquet has a column for whether a row has them or not. Beyond these there is one for
    what any row has, except where the schema was known from the start.
    """
    kind, compression = output_format(output)
    if kind == "jsonl":
        return JsonlWriter(file, compression)
    results = {n: t for n, t in RESULT_FIELDS.items() if n != "token_ids" or form.token_ids}
    if not form.token_ids:
        results["choices"] = pa.list_(pa.struct(_CHOICE))
    if schema is None:
        return SpoolingWriter(file, spool, results, optional)
    results = {n: t for n, t in results.items() if n not in OPTIONAL_RESULTS or n in optional}
    carried = carried_names(schema.names, form)
    fields = [f.with_name(carried[f.name]) for f in schema if f.name in carried]
    id_type = _id_type([schema.field(n).type for n in (form.id_column, "id", "custom_id") if n in schema.names])
    source = [pa.field(INPUT_FILE, pa.string())] if form.input_file else []
    fields = [pa.field("id", id_type), *source, *fields, *(pa.field(n, t) for n, t in results.items())]
    return ParquetWriter(file, pa.schema(fields))


class JsonlWriter:
    """One JSON object a line, in UTF-8. The same rows give the same bytes, compressed or not."""

    def __init__(self, file: DigestFile, compression: str | None) -> None:
        self._file = file
        self._stream: BinaryIO | Any = file
        if compression == "gzip":
            self._stream = gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0)
        elif compression == "zstd":
            import zstandard  # for these files alone

            self._stream = zstandard.ZstdCompressor().stream_writer(file, closefd=False)  # type: ignore[arg-type]

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self._stream.write(to_json(row) + b"\n")

    def close(self) -> None:
        if self._stream is not self._file:
            self._stream.close()
        self._file.sync()
        self._file.close()

    def abandon(self) -> None:
        self._file.abandon()


class ParquetWriter:
    """Rows of known types: those of Parquet input, kept as they are.

    `id` is a whole number where all columns that it can come from are, else text. A value that its column cannot hold (there is none that came from it) is null.
    """

    def __init__(self, file: DigestFile, schema: pa.Schema) -> None:
        self._file = file
        self._schema = schema
        self._parquet = pq.ParquetWriter(file, schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._bytes = self._logprobs = 0

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self._rows.append(row)
            self._bytes += _size(row)
            self._logprobs += _logprobs(row)
            if len(self._rows) >= GROUP_ROWS or self._bytes >= GROUP_BYTES or self._logprobs >= GROUP_LOGPROBS:
                self.end_group()

    def close(self) -> None:
        self.end_group()
        self._parquet.close()
        self._file.sync()
        self._file.close()

    def abandon(self) -> None:
        _quietly(self._parquet.close)
        self._parquet.is_open = False  # or it is closed again when it is collected, and Python complains
        self._file.abandon()

    def end_group(self) -> None:
        """Write the rows that are held as a row group."""
        rows, self._rows = self._rows, []
        self._bytes = self._logprobs = 0
        if not rows:
            return
        columns: dict[str, list[Any]] = {f.name: [row.get(f.name) for row in rows] for f in self._schema}
        columns["truncated"] = [bool(v) for v in columns["truncated"]]
        if pa.types.is_string(self._schema.field("id").type):
            columns["id"] = [id_text(v) for v in columns["id"]]
        if "choice_probs" in columns:  # a map is made of pairs
            columns["choice_probs"] = [v and [(clean(k), p) for k, p in v.items()] for v in columns["choice_probs"]]
        arrays = [array_of(columns[f.name], f.type) for f in self._schema]
        self._parquet.write_table(pa.Table.from_arrays(arrays, schema=self._schema))


class SpoolingWriter:
    """Rows whose types are known only when the last one is there (from JSONL and CSV): spooled, converted at the end.

    The types are those of `columns.ColumnType`. `id` is a whole number where all are, else text.
    """

    def __init__(
        self, file: DigestFile, spool: Path, results: dict[str, pa.DataType], optional: Collection[str]
    ) -> None:
        self._file = file
        self._path = spool
        self._spool = spool.open("w+b")
        self._results = results
        self._there = (results.keys() - OPTIONAL_RESULTS) | set(optional)
        self._types: dict[str, ColumnType] = {}
        self._ids = ColumnType()

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            try:  # a NaN stays one: Parquet has it
                text = json.dumps(row)
            except (TypeError, ValueError):
                row = plain(row)
                text = json.dumps(row)
            self._spool.write(text.encode() + b"\n")
            for name, value in row.items():
                if name == "id":
                    self._ids.see(value)
                elif name in self._results:
                    self._there.add(name)
                else:
                    if name not in self._types:
                        self._types[name] = ColumnType()
                    self._types[name].see(value)

    def close(self) -> None:
        whole = self._ids.name in ("null", "int")
        fields = [pa.field("id", pa.int64() if whole else pa.string())]
        fields += [pa.field(clean(n), t.arrow()) for n, t in self._types.items()]
        fields += [pa.field(n, t) for n, t in self._results.items() if n in self._there]
        parquet = ParquetWriter(self._file, pa.schema(fields))
        try:
            self._convert(parquet)
            parquet.close()
        except BaseException:
            parquet.abandon()
            raise
        self._spool.close()
        self._path.unlink()

    def _convert(self, parquet: ParquetWriter) -> None:
        self._spool.seek(0)
        size = 0
        for line in self._spool:
            row = json.loads(line)
            for name, column in self._types.items():
                row[clean(name)] = column.convert(row.get(name))
            size += len(line)
            parquet.write([row])
            if size >= GROUP_BYTES:
                parquet.end_group()
                size = 0

    def abandon(self) -> None:
        _quietly(self._spool.close)
        self._file.abandon()


def _size(value: Any) -> int:
    """About how many bytes of text and numbers it holds."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(v) for v in value.values())
    return sum(_size(v) for v in value) if isinstance(value, (list, tuple)) else 8


def _logprobs(row: dict[str, Any]) -> int:
    """How many a row has: with many likeliest tokens they are most of its memory."""
    return sum(1 + len(token["top"]) for choice in row.get("choices") or () for token in choice["logprobs"] or ())


def _id_type(types: Sequence[pa.DataType]) -> pa.DataType:
    if all(pa.types.is_integer(t) and t != pa.uint64() for t in types):
        return pa.int64()
    return pa.string()


def _quietly(close: Callable[[], Any]) -> None:
    try:
        close()
    except (OSError, pa.ArrowException, ValueError):  # the error that matters has been raised already
        return
