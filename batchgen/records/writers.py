"""Writes rows with their results to a file: JSONL, CSV or TSV (plain, gzip, zstd), or Parquet.

A writer is called any number of times and holds a bounded number of rows. Where a format cannot hold a value, it is converted: for JSON as
in `jsonl.to_json`, for CSV as in `CsvWriter`, for Parquet as in `ParquetWriter` and `SpoolingWriter`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.json_values import plain
from batchgen.records.files import DELIMITERS
from batchgen.records.jsonl import to_json
from batchgen.records.output import INPUT_FILE, TASK_NAMES, RowForm, carried_names, output_format, output_row
from batchgen.records.parquet_types import ColumnType, clean, fitted, id_text, schema_type
from batchgen.records.result_values import CODED_PARTS, decoded_embedding, plain_embedding
from batchgen.records.rows import Row
from batchgen.records.schema_metadata import carried_metadata
from batchgen.records.tables import ArrowColumns
from batchgen.result import Result

Pair = tuple[Row, Result]


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """A row group of a Parquet file ends with the row that reaches one of these."""

    rows: int = 5_000
    bytes: int = 1 << 25
    """Bytes of text."""
    logprobs: int = 1 << 18
    """Log-probabilities. As Python objects they take far more memory than their text."""

    def reached(self, rows: int, size: int, logprobs: int) -> bool:
        return rows >= self.rows or size >= self.bytes or logprobs >= self.logprobs


DEFAULT_LIMITS = GroupLimits()

_TOKEN_FIELDS = [("token", pa.string()), ("token_id", pa.int32()), ("logprob", pa.float64())]
_CHOICE = [
    ("index", pa.int32()),
    ("text", pa.string()),
    ("finish_reason", pa.string()),
    ("logprobs", pa.list_(pa.struct([*_TOKEN_FIELDS, ("top", pa.list_(pa.struct(_TOKEN_FIELDS)))]))),
]
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_CALLS_TYPE = pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)]))
RESULT_FIELDS = {
    "text": pa.string(),
    "finish_reason": pa.string(),
    "reasoning": pa.string(),
    "usage": pa.struct([("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64())]),
    "truncated": pa.bool_(),
    "valid": pa.bool_(),
    "parsed": pa.null(),  # the type is that of the schema
    "tool_calls": _CALLS_TYPE,
    "choices": pa.list_(pa.struct([*_CHOICE, ("token_ids", pa.list_(pa.int32()))])),
    "choice_probs": pa.map_(pa.string(), pa.float64()),
    "score": pa.struct([("logprob", pa.float64()), ("tokens", pa.int64()), ("greedy", pa.bool_())]),
    "prompt_logprobs": pa.list_(pa.struct(_TOKEN_FIELDS)),
    "embedding": pa.list_(pa.float32()),
    "reward": pa.float64(),
    "token_ids": pa.list_(pa.int32()),
    "error": pa.struct([("type", pa.string()), ("message", pa.string())]),
}
OPTIONAL_RESULTS = frozenset(("choices", "choice_probs", "score", "reasoning", "tool_calls")) | TASK_NAMES
"""Fields that only some results have."""


class Writer(Protocol):
    notes: list[str]
    """Notes for the user about the file. Complete once it is closed."""

    def write(self, rows: Iterable[Pair]) -> None: ...
    def close(self) -> None:
        """Writes the rows that are still held and closes the file, which is then complete and on disk."""

    def abandon(self) -> None:
        """Closes the file as it is. Never raises an error of the disk."""


class DigestFile(io.RawIOBase):
    """A file that is written once from start to end, and the digest of its bytes."""

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

    def close(self) -> None:
        """Closes the file, which is on disk then."""
        if not self.closed:
            super().close()
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._file.raw.close()  # even if the last bytes did not fit on the disk

    def abandon(self) -> None:
        """Closes the file as it is. Never raises an error of the disk."""
        super().close()
        _quietly(self._file.close)
        _quietly(self._file.raw.close)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def open_writer(
    file: DigestFile,
    output: str,
    *,
    schema: pa.Schema | None,
    spool: Path,
    form: RowForm,
    headers: Collection[tuple[str, ...]],
    in_order: bool,
    limits: GroupLimits = DEFAULT_LIMITS,
) -> Writer:
    """Returns the writer for the suffix of `output`; it writes to `file`. `schema` is `Input.schema`, `headers` are `Input.headers`.

    Without a schema, a table has the columns of all `headers`, those of any row, and a column for those `OPTIONAL_RESULTS` that any row has. `in_order`: the rows come in the order of the input.
    """
    kind, compression = output_format(output)
    if kind == "jsonl":
        return JsonlWriter(file, compression, form)
    if kind != "parquet":
        return CsvWriter(file, _Spool(spool, form, headers), DELIMITERS[kind], compression)
    if schema is None:
        return SpoolingWriter(file, _Spool(spool, form, headers), limits)
    return ParquetWriter(file, schema, form, limits, in_order=in_order)


def result_types(form: RowForm) -> dict[str, pa.DataType]:
    """Returns the Arrow types of the fields that results of this form may have."""
    there = TASK_NAMES.intersection((*form.asked, *form.optional)) - ({"parsed"} if not form.parsed else set())
    types = {
        n: t for n, t in RESULT_FIELDS.items() if (n != "token_ids" or form.token_ids) and n not in TASK_NAMES - there
    }
    if not form.token_ids:
        types["choices"] = pa.list_(pa.struct(_CHOICE))
    if "parsed" in there:
        types["parsed"] = schema_type(json.loads(form.parsed))
    if form.reasoning:
        types["usage"] = pa.struct([*types["usage"], ("reasoning_tokens", pa.int64())])
    else:
        del types["reasoning"]  # a column of the input may be called so
    own = {
        "reasoning": form.reasoning,
        "tool_calls": form.tool_calls,
        "valid": "valid" in there,
        "parsed": "parsed" in there,
    }
    types["choices"] = _with_fields(types["choices"], {name: types[name] for name, has in own.items() if has})
    return types


def _with_fields(choices: pa.ListType, more: Mapping[str, pa.DataType]) -> pa.DataType:
    """Returns the type of `choices` with more fields in each."""
    return pa.list_(pa.struct([*choices.value_type, *more.items()]))


def fixed_types(form: RowForm) -> dict[str, pa.DataType]:
    """Returns those of `result_types` for which a table has a column even if no row has them."""
    return {n: t for n, t in result_types(form).items() if n not in OPTIONAL_RESULTS or n in form.optional}


class JsonlWriter:
    """One JSON object per line, in UTF-8. The same rows give the same bytes, compressed or not."""

    def __init__(self, file: DigestFile, compression: str | None, form: RowForm) -> None:
        self.notes: list[str] = []
        self._file = file
        self._form = form
        self._stream = _packed(file, compression)

    def write(self, rows: Iterable[Pair]) -> None:
        for row, result in rows:
            self._stream.write(to_json(output_row(row, result, self._form)) + b"\n")

    def close(self) -> None:
        self._stream.close()
        self._file.close()

    def abandon(self) -> None:
        self._file.abandon()
        _quietly(self._stream.close)


def _packed(file: DigestFile, compression: str | None) -> BinaryIO | Any:
    """Returns a stream that writes to `file`, compressed with gzip, zstd or not at all."""
    if compression == "gzip":
        return gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0)
    return pa.CompressedOutputStream(file, "zstd") if compression == "zstd" else file


class ParquetWriter:
    """Rows of Parquet input. Carried columns are copied as Arrow arrays, so types, nulls and values stay as they are, and so does the
    schema's metadata (`carried_metadata`).

    If the files of the input have different types, a column has the type that all of them fit. A value that does not fit it all the same
    (a time out of range) is null; so are the columns of a malformed row. `id` is an int64 (or uint64) if all columns that it can come from
    are whole numbers that fit one, else text.
    """

    def __init__(
        self,
        file: DigestFile,
        schema: pa.Schema,
        form: RowForm,
        limits: GroupLimits,
        *,
        in_order: bool,
    ) -> None:
        self.notes: list[str] = []
        self._limits = limits
        self._form = replace(form, keep=())
        names = carried_names(schema.names, form)
        self._carried = [(name, schema.field(name).with_name(new)) for name, new in names.items()]
        there = [schema.field(n).type for n in (form.id_column, "id", "custom_id") if n in schema.names]
        fields = [pa.field("id", _id_type(there))]
        if form.input_file:
            fields.append(pa.field(INPUT_FILE, pa.string()))
        fields += [field for _, field in self._carried]
        written = pa.schema([*fields, *(pa.field(n, t) for n, t in fixed_types(form).items())])
        if "id" in schema.names and form.id_column in (None, "id"):
            names |= {"id": "id"}
        metadata = carried_metadata(schema, written, names, in_order=in_order)
        self._parquet = _ParquetFile(file, written.with_metadata(metadata))
        self._places: list[tuple[pa.RecordBatch | None, int]] = []
        """Batch and index of each row that is held; no batch for a malformed row."""
        self._rows: list[dict[str, Any]] = []
        self._bytes = self._logprobs = 0

    def write(self, rows: Iterable[Pair]) -> None:
        for row, result in rows:
            out = output_row(row, result, self._form, CODED_PARTS)
            columns = row.columns
            self._places.append((columns.batch, columns.index) if isinstance(columns, ArrowColumns) else (None, 0))
            self._rows.append(out)
            self._bytes += row.size + _bytes_of(out)
            self._logprobs += _logprob_count(out)
            if self._limits.reached(len(self._rows), self._bytes, self._logprobs):
                self._end_group()

    def close(self) -> None:
        self._end_group()
        self._parquet.close()

    def abandon(self) -> None:
        self._parquet.abandon()

    def _end_group(self) -> None:
        rows, self._rows = self._rows, []
        places, self._places = self._places, []
        self._bytes = self._logprobs = 0
        chunks: list[list[pa.Array]] = [[] for _ in self._carried]
        # Neighbours of one batch are a part of it. Arrow cannot take any rows of all types.
        for _, run in groupby(enumerate(places), key=lambda item: (id(item[1][0]), item[1][1] - item[0])):
            same = [place for _, place in run]
            columns = _columns_of(*same[0], len(same))
            for (name, field), arrays in zip(self._carried, chunks, strict=True):
                column = columns.get(name)
                arrays.append(_nulls(len(same), field.type) if column is None else _fitted(column, field.type))
        carried = {
            field.name: pa.chunked_array(arrays, field.type)
            for (_, field), arrays in zip(self._carried, chunks, strict=True)
        }
        self._parquet.write(rows, carried)


class _Spool:
    """Output rows in a file of JSON lines, for tables whose columns are known only after the last row. NaN stays NaN."""

    def __init__(self, path: Path, form: RowForm, headers: Collection[tuple[str, ...]]) -> None:
        self._path, self.form, self._headers = path, form, headers
        self.types = result_types(form)
        """Of the fields that results may have."""
        self._file = path.open("w+b")
        self._has_valid = self._carries_valid = False

    def add(self, pairs: Iterable[Pair]) -> Iterator[dict[str, Any]]:
        """Writes rows, and yields each in JSON's types."""
        for given, result in pairs:
            row = output_row(given, result, self.form, CODED_PARTS)
            self._has_valid = self._has_valid or result.valid is not None
            self._carries_valid = self._carries_valid or "valid" in given.columns
            try:
                text = json.dumps(row)
            except (TypeError, ValueError):
                row = plain(row, keep_nan=True)
                text = json.dumps(row)
            self._file.write(text.encode() + b"\n")
            yield row

    def carried(self) -> list[str]:
        """The names under which rows carry the columns of the headers. Complete after the last row."""
        return [name for header in self._headers for name in carried_names(header, self.form).values()]

    def results(self) -> dict[str, pa.DataType]:
        """`types`, and `valid` if rows had schemas of their own and no column of the input is called so. Complete after the last row."""
        if not self._has_valid or "valid" in self.types:
            return self.types
        valid = {"valid": RESULT_FIELDS["valid"]}
        types = self.types | {"choices": _with_fields(self.types["choices"], valid)}
        return types if self._carries_valid else {n: (types | valid)[n] for n in RESULT_FIELDS if n in types | valid}

    def rows(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yields every row, and its size in bytes."""
        self._file.seek(0)
        for line in self._file:
            yield json.loads(line), len(line)

    def remove(self) -> None:
        self._file.close()
        self._path.unlink()

    def abandon(self) -> None:
        _quietly(self._file.close)


class CsvWriter:
    """A table as text, in UTF-8, whose first line names the columns. A null is an empty field, empty text is `""`.

    Text is written as it is, in quotes where it needs them. A number, true, false, a list or an object is its JSON text (`to_json`).
    """

    def __init__(self, file: DigestFile, spool: _Spool, delimiter: str, compression: str | None) -> None:
        self.notes: list[str] = []
        self._file, self._spool = file, spool
        self._stream = _packed(file, compression)
        self._delimiter = delimiter
        self._needs_quotes = re.compile(f'^$|["\r\n{delimiter}]')
        self._there = dict.fromkeys(["id", *fixed_types(spool.form)])

    def write(self, rows: Iterable[Pair]) -> None:
        for row in self._spool.add(rows):
            self._there.update(dict.fromkeys(row))

    def close(self) -> None:
        results = self._spool.results()
        self._there.update(dict.fromkeys(self._spool.carried()))
        names = [n for n in self._there if n not in results] + [n for n in results if n in self._there]
        self._write_line(names)
        for row, _ in self._spool.rows():
            row["truncated"] = bool(row.get("truncated"))
            if "embedding" in results and row.get("embedding"):
                row["embedding"] = plain_embedding(decoded_embedding(row["embedding"]))
            self._write_line([row.get(name) for name in names])
        self._stream.close()
        self._file.close()
        self._spool.remove()

    def _write_line(self, values: Sequence[Any]) -> None:
        self._stream.write(self._delimiter.join(map(self._field, values)).encode() + b"\n")

    def _field(self, value: Any) -> str:
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return ""
        text = clean(value) if isinstance(value, str) else to_json(value).decode()
        if not self._needs_quotes.search(text):
            return text
        return '"' + text.replace('"', '""') + '"'

    def abandon(self) -> None:
        self._spool.abandon()
        self._file.abandon()
        _quietly(self._stream.close)


class SpoolingWriter:
    """Rows whose types are known only after the last one (from JSONL and CSV). They are spooled and converted at the end.

    The types are those of `parquet_types.ColumnType`. `id` is an int64 if all ids are whole numbers, else text.
    """

    def __init__(self, file: DigestFile, spool: _Spool, limits: GroupLimits) -> None:
        self.notes: list[str] = []
        self._limits = limits
        self._file, self._spool = file, spool
        self._there = set(fixed_types(spool.form))
        self._types: dict[str, ColumnType] = {}
        self._ids = ColumnType()

    def write(self, rows: Iterable[Pair]) -> None:
        for row in self._spool.add(rows):
            for name, value in row.items():
                if name == "id":
                    self._ids.see(value)
                elif name in self._spool.types:
                    self._there.add(name)
                else:
                    if name not in self._types:
                        self._types[name] = ColumnType()
                    self._types[name].see(value)

    def close(self) -> None:
        whole = self._ids.name in ("null", "int", "long")
        for name in self._spool.carried():
            self._types.setdefault(name, ColumnType())
        results = self._spool.results()
        if "valid" in results and self._types.pop("valid", None) is not None:
            self._there.add("valid")
        fields = [pa.field("id", pa.int64() if whole else pa.string())]
        fields += [pa.field(clean(n), t.arrow()) for n, t in self._types.items()]
        fields += [pa.field(n, t) for n, t in results.items() if n in self._there]
        parquet = _ParquetFile(self._file, pa.schema(fields))
        try:
            self._convert(parquet)
            parquet.close()
        except BaseException:
            parquet.abandon()
            raise
        self._spool.remove()
        for name, column in self._types.items():
            self.notes += [
                f"column {place!r} has values that no one Parquet type fits (of several kinds, or too large): all of them are written as JSON text"
                for place in column.mixed(name)
            ]

    def _convert(self, parquet: _ParquetFile) -> None:
        rows: list[dict[str, Any]] = []
        size = logprobs = 0
        for row, row_size in self._spool.rows():
            rows.append(row)
            size += row_size
            logprobs += _logprob_count(row)
            if self._limits.reached(len(rows), size, logprobs):
                parquet.write(rows, self._carried(rows))
                rows = []
                size = logprobs = 0
        parquet.write(rows, self._carried(rows))

    def _carried(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, pa.Array]:
        return {
            clean(name): pa.array([column.convert(row.get(name)) for row in rows], column.arrow())
            for name, column in self._types.items()
        }

    def abandon(self) -> None:
        self._spool.abandon()
        self._file.abandon()


class _ParquetFile:
    """A Parquet file under way: row groups, made of carried columns (arrays) and of results (rows of `output_row`)."""

    def __init__(self, file: DigestFile, schema: pa.Schema) -> None:
        self._file = file
        self._schema = schema
        self._parquet = pq.ParquetWriter(file, schema, compression="zstd")

    def write(self, rows: Sequence[Mapping[str, Any]], carried: Mapping[str, pa.Array | pa.ChunkedArray]) -> None:
        """Writes a row group. Columns that are not in `carried` are taken from `rows`."""
        if not rows:
            return
        arrays = [carried[f.name] if f.name in carried else result_array(rows, f) for f in self._schema]
        self._write_group(pa.Table.from_arrays(arrays, schema=self._schema))

    def _write_group(self, table: pa.Table) -> None:
        """Writes a row group; several if the values of the input's dictionaries together are more than the numbers of a column's type."""
        try:
            group = table.unify_dictionaries()
        except pa.ArrowInvalid:
            half = table.num_rows // 2
            if not half:
                raise
            self._write_group(table.slice(0, half))
            self._write_group(table.slice(half))
        else:
            self._parquet.write_table(group, row_group_size=group.num_rows)

    def close(self) -> None:
        self._parquet.close()
        self._file.close()

    def abandon(self) -> None:
        _quietly(self._parquet.close)
        self._parquet.is_open = False  # or it would be closed again when it is collected, and Python would warn
        self._file.abandon()


def result_array(rows: Sequence[Mapping[str, Any]], field: pa.Field) -> pa.Array:
    """A column of results, whose embeddings are coded. Lone surrogates in text become their escapes."""
    values = [row.get(field.name) for row in rows]
    if field.name == "truncated":
        values = [bool(v) for v in values]
    elif field.name == "id" and not pa.types.is_integer(field.type):
        values = [id_text(v) for v in values]
    elif field.name == "parsed":
        values = [fitted(v, field.type) for v in values]
    elif field.name == "choices" and field.type.value_type.get_field_index("parsed") >= 0:
        of = field.type.value_type.field("parsed").type
        values = [v and [choice | {"parsed": fitted(choice["parsed"], of)} for choice in v] for v in values]
    elif field.name == "embedding":
        values = [v and decoded_embedding(v) for v in values]
    elif field.name == "choice_probs":  # Arrow makes a map of pairs
        values = [v and list(v.items()) for v in values]
    try:
        return pa.array(values, field.type)
    except UnicodeEncodeError:
        return pa.array([_clean(v) for v in values], field.type)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    return tuple(map(_clean, value)) if isinstance(value, tuple) else value


def _columns_of(batch: pa.RecordBatch | None, first: int, count: int) -> dict[str, pa.Array]:
    """The columns of some rows of a batch, by name. A malformed row has no batch and no columns."""
    if batch is None:
        return {}
    rows = batch.slice(first, count)
    return dict(zip(rows.schema.names, rows.columns, strict=True))


def _nulls(count: int, type: pa.DataType) -> pa.Array:
    try:
        return pa.array([None] * count, type)  # `pa.nulls` has nulls in fields of a struct that allow none, too
    except pa.ArrowNotImplementedError:  # for an extension type in another one
        return pa.nulls(count, type)


def _fitted(column: pa.Array, type: pa.DataType) -> pa.Array:
    """The column as an array of `type`. A value that the type cannot hold becomes null."""
    if column.type == type:
        return column
    try:
        return column.cast(type)
    except pa.ArrowException:
        return pa.concat_arrays([_cast_one(column.slice(i, 1), type) for i in range(len(column))])


def _cast_one(value: pa.Array, type: pa.DataType) -> pa.Array:
    try:
        return value.cast(type)
    except pa.ArrowException:
        return _nulls(1, type)


def _bytes_of(value: Any) -> int:
    """Approximate number of bytes of text and numbers in a value."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(_bytes_of(v) for v in value.values())
    return sum(_bytes_of(v) for v in value) if isinstance(value, (list, tuple)) else 8


def _logprob_count(row: dict[str, Any]) -> int:
    """Number of log-probabilities in a row. With many alternatives per token, they take most of its memory."""
    of_choices = (token for choice in row.get("choices") or () for token in choice["logprobs"] or ())
    of_prompt = row.get("prompt_logprobs")  # may be a column of the input, such as vLLM's parameter of this name
    return sum(1 + len(token["top"]) for token in of_choices) + (len(of_prompt) if isinstance(of_prompt, list) else 0)


def _id_type(types: Sequence[pa.DataType]) -> pa.DataType:
    if all(pa.types.is_integer(t) and t != pa.uint64() for t in types):
        return pa.int64()
    if all(map(pa.types.is_unsigned_integer, types)):  # hashes. The number of a row without an id fits too
        return pa.uint64()
    return pa.large_string() if set(types) == {pa.large_string()} else pa.string()


def _quietly(close: Callable[[], Any]) -> None:
    try:
        close()
    except (OSError, pa.ArrowException, ValueError):  # the first error is already on its way
        return
