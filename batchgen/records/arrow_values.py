"""Python values as Arrow arrays of given types: the inverse of what `tables` makes of a Parquet file's values.

What came from a column of the type goes back as it was, at any depth, also a time that Python cannot hold and `tables` made text of. A string that is
not UTF-8 loses its lone surrogates; any other value that the type cannot hold is null.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from batchgen.records.parquet_types import clean

_REFUSED = (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError)
_FAR_DATE = re.compile(r"(-?\d+)(-\d\d-\d\d.*)")
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097  # after which the calendar repeats
_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def array_of(values: Sequence[Any], type: pa.DataType) -> pa.Array:
    """An array of `type`, as long as `values`."""
    try:
        return pa.array(values, type)
    except _REFUSED:
        pass
    try:
        return _part_by_part(values, type)
    except _REFUSED:
        return pa.concat_arrays([_single(value, type) for value in values])


def _part_by_part(values: Sequence[Any], type: pa.DataType) -> pa.Array:
    """The same, made of the arrays that `type` consists of, so that one value inside does not spoil those around it."""
    t = pa.types
    mask = pa.array([value is None for value in values])
    if isinstance(type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type, array_of([_stored(v) for v in values], type.storage_type))
    if t.is_dictionary(type):
        return array_of(values, type.value_type).dictionary_encode().cast(type)
    if t.is_struct(type):
        children = [array_of([v and v.get(field.name) for v in values], field.type) for field in type]
        return pa.StructArray.from_arrays(children, fields=list(type), mask=mask)
    if t.is_fixed_size_list(type):
        filled = [item for v in values for item in (v or [None] * type.list_size)]
        return pa.FixedSizeListArray.from_arrays(array_of(filled, type.value_type), type=type, mask=mask)
    if not t.is_nested(type):
        return pa.concat_arrays([_single(value, type) for value in values])
    items = [item for v in values for item in v or ()]
    offsets = pa.array(accumulate((len(v or ()) for v in values), initial=0), _offset_type(type))
    if t.is_map(type):
        keys = array_of([key for key, _ in items], type.key_type)
        return pa.MapArray.from_arrays(offsets, keys, array_of([i for _, i in items], type.item_type), type, mask=mask)
    inside = array_of(items, type.value_type)
    if t.is_list_view(type) or t.is_large_list_view(type):
        kind = pa.ListViewArray if t.is_list_view(type) else pa.LargeListViewArray
        sizes = pa.array([len(v or ()) for v in values], offsets.type)
        return kind.from_arrays(offsets[:-1], sizes, inside, type, mask=mask)
    return (pa.ListArray if t.is_list(type) else pa.LargeListArray).from_arrays(offsets, inside, type, mask=mask)


def _offset_type(type: pa.DataType) -> pa.DataType:
    large = pa.types.is_large_list(type) or pa.types.is_large_list_view(type)
    return pa.int64() if large else pa.int32()


def _stored(value: Any) -> Any:
    return value.bytes if isinstance(value, uuid.UUID) else value


def _single(value: Any, type: pa.DataType) -> pa.Array:
    attempts: list[Callable[[], pa.Array]] = [
        lambda: pa.array([value], type),
        lambda: pa.array([clean(value)], type),
        lambda: _time(value, type),
        lambda: pa.array([value]).cast(type),
        lambda: pa.array([int(value)], type),
    ]
    for attempt in attempts:
        try:
            return attempt()
        except _REFUSED:
            continue
    return pa.nulls(1, type)


def _time(text: str, type: pa.DataType) -> pa.Array:
    """A time of day in nanoseconds, or a day of a year that has more or less than four digits, from Arrow's own text."""
    if pa.types.is_time64(type):
        return pa.array([f"1970-01-01T{text}"]).cast(pa.timestamp(type.unit)).cast(pa.int64()).cast(type)
    far = _FAR_DATE.fullmatch(text)
    if far is None:
        raise ValueError(text)
    year = int(far[1])
    near = 2000 + year % _CYCLE_YEARS
    days = (year - near) // _CYCLE_YEARS * _CYCLE_DAYS
    whole = pa.int32() if pa.types.is_date32(type) else pa.int64()
    count = pa.array([f"{near}{far[2]}"]).cast(type).cast(whole)[0].as_py()
    per_day = 1 if pa.types.is_date32(type) else _PER_DAY[type.unit]
    return pa.array([count + days * per_day], whole).cast(type)
