"""A column of every type of Arrow that a table may have, with values at the ends of what the type holds."""

from decimal import Decimal
from typing import Any

import pyarrow as pa

NS = 1_577_836_800_000_000_001  # 2020, and a nanosecond: more than Python's datetime holds
FAR = 9_223_372_036_854  # seconds: the year 294247


def extension(type: pa.DataType, values: list[Any]) -> pa.ExtensionArray:
    return pa.ExtensionArray.from_storage(type, pa.array(values, type.storage_type))


COLUMNS = {
    "bool": pa.array([True, False, None]),
    "int8": pa.array([-128, 127, None], pa.int8()),
    "uint64": pa.array([2**64 - 1, 0, None], pa.uint64()),
    "float16": pa.array([1.5, -0.25, None], pa.float16()),
    "float32": pa.array([0.1, float("inf"), None], pa.float32()),
    "decimal32": pa.array([Decimal("1.10"), Decimal("-2.00"), None], pa.decimal32(5, 2)),
    "decimal128": pa.array([Decimal("1.10"), Decimal("-2.00"), None], pa.decimal128(20, 2)),
    "decimal256": pa.array([Decimal("1.10"), Decimal("9" * 45 + ".01"), None], pa.decimal256(60, 2)),
    "large string": pa.array(["a", "", None], pa.large_string()),
    "string view": pa.array(["a", "longer than is kept in line", None], pa.string_view()),
    "binary": pa.array([b"\xff\x00", b"", None]),
    "large binary": pa.array([b"\xff", b"", None], pa.large_binary()),
    "binary of fixed size": pa.array([b"ab", b"\xff\x00", None], pa.binary(2)),
    "null": pa.nulls(3),
    "date": pa.array([0, -719_163, None], pa.date32()),
    "date beyond the calendar": pa.array([10_000_000, -1_000_000, 2_000_000_000, None], pa.date32()),
    "date64": pa.array([0, 86_400_000, None], pa.date64()),
    "time of seconds": pa.array([1, 86_399, None], pa.time32("s")),
    "time of nanoseconds": pa.array([1, 2_001, None], pa.time64("ns")),
    "timestamp of seconds": pa.array([1, -1, None], pa.timestamp("s")),
    "timestamp with a zone": pa.array([1_603_585_800_000_000, 1_603_589_400_000_000, None], pa.timestamp("us", "Europe/Berlin")),  # an hour that comes twice
    "timestamp with an offset": pa.array([1, 2, None], pa.timestamp("ms", "+05:30")),
    "timestamp of nanoseconds": pa.array([NS, 0, None], pa.timestamp("ns")),
    "timestamp of nanoseconds with a zone": pa.array([NS, 0, None], pa.timestamp("ns", "Europe/Berlin")),
    "timestamp beyond the calendar": pa.array([FAR * 1000 + 7, -FAR * 1000, None], pa.timestamp("ms")),
    "timestamp beyond the calendar with a zone": pa.array([FAR * 1000 + 7, 0, None], pa.timestamp("ms", "UTC")),
    "duration": pa.array([1, 10**12, None], pa.duration("s")),
    "duration of nanoseconds": pa.array([1, 1_000, None], pa.duration("ns")),
    "dictionary": pa.array(["a", "b", None, "a"]).dictionary_encode(),
    "ordered dictionary of small indices": pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), ["a", "b"], ordered=True),
    "dictionary of nanoseconds": pa.array([NS, 0, None], pa.timestamp("ns")).dictionary_encode(),
    "list of dictionary": pa.ListArray.from_arrays([0, 1, 2, 3], pa.array(["a", "b", None]).dictionary_encode()),
    "list of struct": pa.array([[{"a": 1, "b": "x"}, None], [], None], pa.list_(pa.struct([("a", pa.int32()), ("b", pa.string())]))),
    "list of what is never null": pa.array([[1], [], None], pa.list_(pa.field("item", pa.int32(), nullable=False))),
    "list of null": pa.array([[], [None], None], pa.list_(pa.null())),
    "large list": pa.array([[1], [], None], pa.large_list(pa.int64())),
    "list view": pa.array([[1], [], None], pa.list_view(pa.int64())),
    "list of fixed size": pa.array([[1.5, 2.5], [3.0, None], None], pa.list_(pa.float32(), 2)),
    "struct in struct": pa.array([{"a": None, "b": {"c": [1]}}, {"a": 1, "b": None}, None], pa.struct([("a", pa.int8()), ("b", pa.struct([("c", pa.list_(pa.int16()))]))])),
    "map": pa.array([[("a", 1), ("b", None), ("a", 2)], [], None], pa.map_(pa.string(), pa.int32())),
    "map in struct": pa.array([{"m": [("a", 1)]}, {"m": None}, None], pa.struct([("m", pa.map_(pa.string(), pa.int32()))])),
    "uuid": extension(pa.uuid(), [b"a" * 16, b"b" * 16, None]),
    "json": extension(pa.json_(), ['{"a": 1}', "[]", None]),
    "bool8": extension(pa.bool8(), [1, 0, None]),
    "opaque": extension(pa.opaque(pa.string(), "t", "v"), ["a", "b", None]),
    "tensor": extension(pa.fixed_shape_tensor(pa.int32(), [2]), [[1, 2], [3, 4], None]),
    "list of uuid": pa.ListArray.from_arrays([0, 1, 2, 2], extension(pa.uuid(), [b"a" * 16, b"b" * 16])),
}  # fmt: skip
