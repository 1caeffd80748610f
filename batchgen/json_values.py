"""JSON of rows, and values in its types: what Parquet, numpy and Python programs hold and JSON has no form for."""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any, *, keep_nan: bool = False) -> Any:
    """Returns `value` in JSON's types: bytes are base64, dates and times ISO 8601, durations seconds, a Decimal is a string of its digits.

    NaN and the infinities are null, unless they are to be kept. Scalars and arrays of numpy and Arrow are what they hold; anything else is its `str`.
    """
    if isinstance(value, float):
        return value if keep_nan or math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else str(k): plain(v, keep_nan=keep_nan) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, keep_nan=keep_nan) for v in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.date | dt.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    for held in ("tolist", "as_py"):
        if hasattr(value, held):
            return plain(getattr(value, held)(), keep_nan=keep_nan)
    return str(value)  # of a Decimal, its digits


def kind(value: Any) -> str:
    """Returns what a value is, in the words of a data file: "text", "a list", "null"…"""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, bytes):
        return "bytes"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
