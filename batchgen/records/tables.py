"""CSV and Parquet: a table's rows as dictionaries, streamed.

CSV, read by Python's csv module: the first line names the columns (an empty name becomes `column_3`, a repeated one `name_2`); every value
is a string, an empty field the empty string. A field may be quoted, with `""` for a quote and line ends inside. Blank lines are
not rows (in a file of one column, blanks are a value). A row with another number of fields, broken quoting, invalid UTF-8, or a line or field longer than `jsonl.MAX_LINE` is malformed; broken quoting in the header raises `csv.Error`.

Parquet, read by small record batches of one row group at a time: values as Arrow gives them. A time that Python cannot hold (nanoseconds) is
its ISO text, one beyond the calendar its number; a string that is not UTF-8 makes its row malformed.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Generator, Sequence
from itertools import repeat
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.records.jsonl import MAX_LINE, Record, too_long

PARQUET_BATCH = 256
"""Rows made into Python objects at a time: a row can be a long document."""
PARQUET_BATCH_BYTES = 1 << 26
"""Fewer, where the rows of their group are so long that they pass this."""
_PIECE = 1 << 20
_ENDS = ("\n", "\r")
_UNDECODED = re.compile("[\udc80-\udcff]")


BROKEN_TABLE = (csv.Error, pa.ArrowException, UnicodeDecodeError, OverflowError)
"""What reading a damaged table raises, beyond what its stream does. Arrow's Python side decodes a footer's names by itself."""


class _Invalid(str):
    """The reason why a row's value cannot be had."""


def read_csv(stream: BinaryIO) -> Generator[Record, None, None]:
    """(`:17`, columns or reason, bytes) of every record; 17 is the line it begins on."""
    csv.field_size_limit(MAX_LINE)  # of the whole process, there is no other; the default ends a job at 128 KiB
    # surrogateescape: a byte that is not UTF-8 spoils its row, not the file.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield from _csv_records(_Lines(text))
    finally:
        text.detach()  # the stream is not ours to close


class _Lines:
    """The lines of a text. One that is too long raises `csv.Error`, is passed over, and the next one follows."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._readline = text.readline
        self.count = 0
        """Lines read."""
        self._cut = False  # between \r and \n

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._readline(MAX_LINE + 1)
        if self._cut and line == "\n":
            line = self._readline(MAX_LINE + 1)
        self._cut = False
        if not line:
            raise StopIteration
        self.count += 1
        if len(line) <= MAX_LINE:
            return line
        long = not line.endswith(_ENDS)
        while line and not line.endswith(_ENDS):
            line = self._readline(_PIECE)
        self._cut = line.endswith("\r")
        if long:
            raise csv.Error(too_long(MAX_LINE))
        return line


def _csv_records(lines: _Lines) -> Generator[Record, None, None]:
    reader = csv.reader(lines, strict=True)
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
            header = _column_names(fields)
        else:
            yield f":{line}", _csv_columns(header, fields), sum(map(len, fields))


def _csv_columns(header: Sequence[str], fields: Sequence[str]) -> dict[str, Any] | str:
    if len(fields) != len(header):
        return f"{len(fields)} field{'s'[: len(fields) != 1]} where the header has {len(header)}"
    for name, value in zip(header, fields, strict=True):
        if not value.isascii() and _UNDECODED.search(value):
            return f"column {name!r} is not UTF-8"
    return dict(zip(header, fields, strict=True))


def _column_names(fields: Sequence[str]) -> list[str]:
    names: list[str] = []
    taken = set(fields)
    for place, field in enumerate(fields, 1):
        name = field or f"column_{place}"
        again = 1
        while name in names or (name != field and name in taken):
            again += 1
            name = f"{field or f'column_{place}'}_{again}"
        names.append(name)
    return [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in names]


def open_parquet(stream: BinaryIO) -> pq.ParquetFile | None:
    """The file, its footer read; None for an empty one. Raises one of `BROKEN_TABLE` where it is broken."""
    if stream.seek(0, io.SEEK_END) == 0:
        return None
    stream.seek(0)
    return pq.ParquetFile(stream, buffer_size=1 << 20, page_checksum_verification=True)


def read_parquet(stream: BinaryIO) -> Generator[Record, None, None]:
    """(`:row 17`, columns or reason, bytes) of every row, from 0. Raises one of `BROKEN_TABLE` where the file is broken."""
    file = open_parquet(stream)
    if file is None:
        return
    number = end = 0
    # Group by group: a broken one must not take those before it along.
    for place in range(file.num_row_groups):
        group = file.metadata.row_group(place)
        end += group.num_rows
        for batch in file.iter_batches(_batch_rows(group), row_groups=[place], use_threads=False):
            names = batch.schema.names
            size = batch.nbytes // max(1, batch.num_rows)
            columns = [_values(c) for c in batch.columns]
            for values in zip(*columns, strict=True) if names else repeat((), batch.num_rows):
                bad = [f"column {n!r} {v}" for n, v in zip(names, values, strict=True) if isinstance(v, _Invalid)]
                yield f":row {number}", bad[0] if bad else dict(zip(names, values, strict=True)), size
                number += 1
        if number != end:  # Arrow says nothing where a column ends early
            raise pa.ArrowInvalid(f"row group {place} has {group.num_rows + number - end} of {group.num_rows} rows")


def _batch_rows(group: Any) -> int:
    row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
    return int(max(1, min(PARQUET_BATCH, PARQUET_BATCH_BYTES // row_bytes)))


def _values(column: pa.Array) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return [_value(scalar) for scalar in column]
    return values


def _value(scalar: pa.Scalar) -> Any:
    try:
        return _python(scalar)
    except UnicodeDecodeError:
        return _Invalid("is not UTF-8")
    except (ValueError, OverflowError, pa.ArrowException) as e:
        return _Invalid(f"cannot be read: {str(e).splitlines()[0]}")


def _python(scalar: pa.Scalar) -> Any:
    """`scalar.as_py()`, with text for the times that Python cannot hold."""
    try:
        return scalar.as_py()
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
        if not pa.types.is_duration(scalar.type):
            text = scalar.cast(pa.string()).as_py().replace(" ", "T")
            if not _beyond(scalar):
                return text
        return str(scalar.value)  # no calendar goes that far: the number that the column holds


def _beyond(scalar: pa.Scalar) -> bool:
    """Whether Arrow cannot say a time either. With a zone it says another time then, without one that it is out of range."""
    if pa.types.is_timestamp(scalar.type):
        scalar = scalar.cast(pa.timestamp(scalar.type.unit))
    return bool(scalar.cast(pa.string()).as_py().startswith("<"))
