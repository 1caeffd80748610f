"""CSV, TSV and Parquet: the rows of a table as dictionaries, streamed.

CSV is read by Python's csv module; TSV differs in its delimiter only. The first line names the columns: an empty name becomes
`column_3`, a repeated one `name_2`. Every value is a string; an empty field is the empty string. A field may be quoted, with `""` for a
quote and with line ends inside. Blank lines are not rows (if there is one column, blanks are a value). A row is malformed if it has
another number of fields, broken quoting, invalid UTF-8, or a line or field longer than `jsonl.MAX_LINE`. Broken quoting in the header
raises `csv.Error`.

Parquet is read in small record batches, one row group at a time. Values are those of Arrow's `to_pylist`; a repeated column becomes
`name_2`. A time that Python cannot hold (nanoseconds) becomes its ISO text, a time beyond the calendar its number, and a time in a zone
that this machine does not know is in UTC. A string that is not UTF-8 makes its row malformed. A row also knows its record batch, so
that its columns can be written again without a conversion.
"""

from __future__ import annotations

import csv
import datetime as dt
import io
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from decimal import Decimal
from functools import cache, partial
from itertools import repeat
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import first_line
from batchgen.records.jsonl import MAX_LINE, Record, encoding_hint, too_long
from batchgen.stats import counted

PARQUET_BATCH = 256
"""Number of rows that are made Python objects at a time. A row can be a long document."""
_LARGE_DICTIONARY = 1 << 20  # bytes
_ENDS = ("\n", "\r")
_OFFSET = re.compile(r"([+-]\d\d)(\d\d)$")
"""The offset at the end of a time that Arrow writes, which lacks the colon of ISO 8601."""
_UTC = "+00:00"
_UNDECODED = re.compile("[\udc80-\udcff]")


BROKEN_TABLE = (csv.Error, pa.ArrowException, UnicodeDecodeError, OverflowError)
"""The exceptions that reading a damaged table raises, in addition to those of its stream. Arrow's Python layer decodes the names in a footer itself."""


class _Invalid(str):
    """The reason why a value of a row cannot be read."""


class ArrowColumns(dict[str, Any]):
    """The columns of a Parquet row as Python values, and where the row is in Arrow: row `index` of `batch`."""

    __slots__ = ("batch", "index")

    def __init__(self, values: dict[str, Any], batch: pa.RecordBatch, index: int) -> None:
        super().__init__(values)
        self.batch = batch
        self.index = index


OnHeader = Callable[[Sequence[str], pa.Schema | None], None]
"""Is called with the names of a table's columns, and their types if it is Parquet."""


def _ignore(*_: object) -> None:
    return


def read_csv(
    stream: BinaryIO,
    *,
    delimiter: str = ",",
    on_rename: Callable[[str, str], None] = _ignore,
    on_header: OnHeader = _ignore,
    max_line: int = MAX_LINE,
    skip_chars: int = 1 << 20,
    **_: object,
) -> Generator[Record, None, None]:
    """Yields (`:17`, columns or reason, bytes) of every record; 17 is the line that it begins on.

    `on_rename` is called with the old and the new name of each column whose name is repeated, `on_header` before the first row. The rest of a
    line longer than `max_line` characters is skipped, `skip_chars` at a time.
    """
    # It holds for the whole process; there is no other way. The default would end a job at 128 KiB.
    csv.field_size_limit(max_line)
    # surrogateescape: a byte that is not UTF-8 makes its row malformed, not the file.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield from _csv_records(_CsvLines(text, max_line, skip_chars), delimiter, on_rename, on_header)
    finally:
        text.detach()  # the caller closes the stream


read_tsv = partial(read_csv, delimiter="\t")


class _CsvLines:
    """The lines of a text. A line that is too long raises `csv.Error` and is skipped; the next call returns the line after it."""

    def __init__(self, text: io.TextIOWrapper, max_line: int, skip_chars: int) -> None:
        self._readline = text.readline
        self._max_line = max_line
        self._skip_chars = skip_chars
        self.count = 0
        """Number of lines read."""
        self._cut = False  # between \r and \n

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._readline(self._max_line + 1)
        if self._cut and line == "\n":
            line = self._readline(self._max_line + 1)
        self._cut = False
        if not line:
            raise StopIteration
        self.count += 1
        if len(line) <= self._max_line:
            return line
        long = not line.endswith(_ENDS)
        while line and not line.endswith(_ENDS):
            line = self._readline(self._skip_chars)
        self._cut = line.endswith("\r")
        if long:
            raise csv.Error(too_long(self._max_line))
        return line


def _csv_records(
    lines: _CsvLines, delimiter: str, on_rename: Callable[[str, str], None], on_header: OnHeader
) -> Generator[Record, None, None]:
    reader = csv.reader(lines, strict=True, delimiter=delimiter)
    header: list[str] | None = None
    while True:
        line = lines.count + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as e:
            if header is None:
                raise
            yield f":{line}", f"not CSV: {e}", 0
            continue
        if not fields or (len(fields) == 1 and not fields[0].strip() and (header is None or len(header) > 1)):
            continue
        if header is None:
            header = _unique_names([field or f"column_{place}" for place, field in enumerate(fields, 1)], on_rename)
            header = [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in header]
            on_header(header, None)
        else:
            yield f":{line}", _csv_columns(header, fields), sum(map(len, fields))


def _csv_columns(header: Sequence[str], fields: Sequence[str]) -> dict[str, Any] | str:
    if len(fields) != len(header):
        return f"{counted(len(fields), 'field')} where the header has {len(header)}"
    for name, value in zip(header, fields, strict=True):
        if not value.isascii() and _UNDECODED.search(value):
            return f"column {name!r} is not UTF-8{encoding_hint(value.encode('utf-8', 'surrogateescape'))}"
    return dict(zip(header, fields, strict=True))


def _unique_names(given: Sequence[str], on_rename: Callable[[str, str], None] = _ignore) -> list[str]:
    """The names, each repeated one with a number behind it: `prompt`, `prompt_2`."""
    names: dict[str, None] = {}
    there = set(given)
    for name in given:
        unique, count = name, 1
        while unique in names or (unique != name and unique in there):
            count += 1
            unique = f"{name}_{count}"
        if unique != name:
            on_rename(name, unique)
        names[unique] = None
    return list(names)


def header_hint(names: Sequence[str]) -> str:
    """Returns what may be wrong with the header of a CSV file that lacks an expected column; "" if nothing is suspicious."""
    first = names[0] if names else ""
    if first.startswith("sep="):
        return f"delete the first line ({first!r}) of the file"
    delimiter = next((d for d in ";\t|" if d in first), None)
    if len(names) == 1 and delimiter is not None:
        return f"it looks as if {delimiter!r} is the delimiter: save the file with commas, or with tabs as .tsv"
    if any(name != name.strip() for name in names):
        return "remove the spaces around the names in the header"
    return ""


def open_parquet(stream: BinaryIO) -> pq.ParquetFile | None:
    """Opens a file and reads its footer. Returns None if it is empty, raises one of `BROKEN_TABLE` if it is damaged."""
    if stream.seek(0, io.SEEK_END) == 0:
        return None
    stream.seek(0)
    return pq.ParquetFile(stream, buffer_size=1 << 20, page_checksum_verification=True)


def parquet_schema(stream: BinaryIO) -> pa.Schema | None:
    """The columns that `read_parquet` yields, all nullable, and the metadata of the file. Returns None if the file is empty."""
    file = open_parquet(stream)
    return None if file is None else _columns_read(file)


def numbers_within(stream: BinaryIO, limits: Mapping[str, int]) -> bool:
    """Whether the footer of a file says that no number in certain columns (of `parquet_schema`) has an absolute value beyond the column's limit."""
    file = open_parquet(stream)
    if file is None:
        return True
    read = zip(file.schema_arrow.names, _unique_names(file.schema_arrow.names), strict=True)
    within = [(name, limits[unique]) for name, unique in read if unique in limits]
    groups = map(file.metadata.row_group, range(file.num_row_groups))
    leaves = [leaf for group in groups for leaf in map(group.column, range(group.num_columns))]
    return all(
        _are_within(leaf.statistics, limit)
        for leaf in leaves
        for name, limit in within
        if f"{leaf.path_in_schema}.".startswith(f"{name}.")
    )


def _are_within(found: Any, limit: int) -> bool:
    """Whether the statistics of a column say that its whole numbers and decimals have no absolute value beyond a limit."""
    if found is None or not found.has_min_max:
        return found is not None and not found.num_values
    return all(not isinstance(end, int | Decimal) or -limit <= end <= limit for end in (found.min, found.max))


def _columns_read(file: pq.ParquetFile) -> pa.Schema:
    fields = zip(file.schema_arrow, _unique_names(file.schema_arrow.names), strict=True)
    return pa.schema(
        [field.with_name(name).with_nullable(True) for field, name in fields], metadata=file.schema_arrow.metadata
    )


def read_parquet(
    stream: BinaryIO,
    *,
    on_rename: Callable[[str, str], None] = _ignore,
    on_header: OnHeader = _ignore,
    batch_rows: int = PARQUET_BATCH,
    batch_bytes: int = 1 << 26,
) -> Generator[Record, None, None]:
    """Yields (`:row 17`, columns or reason, bytes) of every row, from 0. Columns are `ArrowColumns`.

    `batch_rows` rows are made Python objects at a time; fewer, if the rows of a row group are so long that they would pass `batch_bytes`.
    `on_rename` is called with the old and the new name of each column whose name is repeated, `on_header`, with what `parquet_schema`
    returns, before the first row. Raises one of `BROKEN_TABLE` if the file is damaged.
    """
    file = open_parquet(stream)
    if file is None:
        return
    schema = _columns_read(file)
    on_header(schema.names, schema)
    names = _unique_names(file.schema_arrow.names, on_rename)
    number = end = 0
    # One row group after the other, so that a damaged one does not hide those before it.
    for place in range(file.num_row_groups):
        group = file.metadata.row_group(place)
        end += group.num_rows
        for read in file.iter_batches(
            _batch_rows(group, batch_rows, batch_bytes), row_groups=[place], use_threads=False
        ):
            batch = (
                pa.RecordBatch.from_arrays(list(map(_with_own_values, read.columns)), names=names) if names else read
            )
            size = sum(map(_size, batch.columns)) // max(1, batch.num_rows)
            for columns in batch_columns(batch):
                yield f":row {number}", columns, size
                number += 1
        if number != end:  # Arrow reports nothing if a column ends early
            raise pa.ArrowInvalid(f"row group {place} has {group.num_rows + number - end} of {group.num_rows} rows")


def _with_own_values(column: pa.Array) -> pa.Array:
    """Returns the column; with its own values alone if it has a large dictionary without an order, which all batches of a row group have, and which
    would be written again with each row group.
    """
    kind = column.type
    if not pa.types.is_dictionary(kind) or kind.ordered or column.dictionary.nbytes <= _LARGE_DICTIONARY:
        return column
    own = column.dictionary_decode().dictionary_encode()
    return pa.DictionaryArray.from_arrays(own.indices.cast(kind.index_type), own.dictionary)


def _size(column: pa.Array) -> int:
    """Returns the bytes of a column's values."""
    values = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    return int(values.nbytes)


def batch_columns(batch: pa.RecordBatch) -> Generator[ArrowColumns | str, None, None]:
    """The columns of each row, or the reason why a row is malformed."""
    names = batch.schema.names
    columns = [_column_values(c) for c in batch.columns]
    for index, values in enumerate(zip(*columns, strict=True) if names else repeat((), batch.num_rows)):
        bad = [f"column {n!r} {v}" for n, v in zip(names, values, strict=True) if isinstance(v, _Invalid)]
        yield bad[0] if bad else ArrowColumns(dict(zip(names, values, strict=True)), batch, index)


def _batch_rows(group: Any, max_rows: int, max_bytes: int) -> int:
    row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
    return int(max(1, min(max_rows, max_bytes // row_bytes)))


def _column_values(column: pa.Array) -> list[Any]:
    if _has_nanoseconds(column.type):  # `to_pylist` would make values of pandas of them where pandas is installed
        return [_python_or_invalid(scalar) for scalar in column]
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return [_python_or_invalid(scalar) for scalar in column]
    return values


def _has_nanoseconds(type: pa.DataType) -> bool:
    if pa.types.is_dictionary(type):
        return _has_nanoseconds(type.value_type)
    if isinstance(type, pa.BaseExtensionType):
        return _has_nanoseconds(type.storage_type)
    if pa.types.is_timestamp(type) or pa.types.is_duration(type):
        return bool(type.unit == "ns")
    return any(_has_nanoseconds(type.field(i).type) for i in range(type.num_fields))


def _python_or_invalid(scalar: pa.Scalar) -> Any:
    try:
        return _python(scalar)
    except UnicodeDecodeError:
        return _Invalid("is not UTF-8")
    except (ValueError, OverflowError, pa.ArrowException) as e:
        return _Invalid(f"cannot be read: {first_line(e)}")


def _python(scalar: pa.Scalar) -> Any:
    """Returns `scalar.as_py()`, or text if Python cannot hold the time."""
    try:
        if not _has_nanoseconds(scalar.type) or not scalar.is_valid:
            return scalar.as_py()
        if pa.types.is_timestamp(scalar.type):
            return scalar.cast(pa.timestamp("us", scalar.type.tz)).as_py()
        if pa.types.is_duration(scalar.type):
            return dt.timedelta(microseconds=scalar.value // 1000)
        raise ValueError("its parts are read one by one")
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError, pa.ArrowException):
        if pa.types.is_struct(scalar.type):
            return {name: _python(value) for name, value in scalar.items()}
        if pa.types.is_map(scalar.type):
            return [tuple(_python(part) for part in pair.values()) for pair in scalar.values]
        if isinstance(scalar, pa.ListScalar):
            return [_python(value) for value in scalar.values]
        if pa.types.is_dictionary(scalar.type) or isinstance(scalar.type, pa.BaseExtensionType):
            return _python(scalar.value)
        if pa.types.is_timestamp(scalar.type) and not _is_known(scalar.type.tz):
            return _python(scalar.cast(pa.timestamp(scalar.type.unit, _UTC)))
        if not pa.types.is_duration(scalar.type):
            text = _OFFSET.sub(r"\1:\2", scalar.cast(pa.string()).as_py().replace(" ", "T"))
            if not _beyond(scalar):
                return text
        return str(scalar.value)  # beyond the calendar: the number that the column holds


@cache
def _is_known(zone: str | None) -> bool:
    """Whether Python and Arrow know a time zone. A machine without tzdata knows not even UTC by its name."""
    try:
        midnight = pa.scalar(0, pa.timestamp("s", zone))
        return bool(midnight.as_py() and midnight.cast(pa.string()))
    except (ValueError, pa.ArrowException):
        return False


def _beyond(scalar: pa.Scalar) -> bool:
    """Whether Arrow cannot write the time either. It would write a wrong time if there is a zone, and raises an error if there is none."""
    if pa.types.is_timestamp(scalar.type):
        scalar = scalar.cast(pa.timestamp(scalar.type.unit))
    return bool(scalar.cast(pa.string()).as_py().startswith("<"))
