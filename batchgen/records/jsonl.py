"""JSON lines: reading one object a line, and the one way in which values become JSON.

Reading. A line ends at `\\n`; a `\\r` before it, a byte order mark at its start and blank lines are not rows' concern. Of
equal keys the last wins; NaN and Infinity and lone surrogates (`"\\ud800"`) are accepted. Anything else that is not a JSON
object in UTF-8, nested at most `MAX_DEPTH` deep, on a line of at most `MAX_LINE` bytes, makes a malformed row, never an exception.

Writing (`to_json`) is always valid JSON in valid UTF-8: NaN and Infinity become null, lone surrogates their escape, bytes base64,
dates and times ISO 8601, durations seconds, Decimal a string (digits kept), anything else its `str`.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
from collections.abc import Generator, Mapping
from typing import Any, BinaryIO

_PIECE = 1 << 20
MAX_DEPTH = 100
"""Levels of lists and objects that a row may have: well inside what every later stage can recurse over."""
MAX_LINE = 1 << 28
"""Bytes. A longer line is a compressed file's bomb, or no JSON lines at all; it is passed over in constant memory."""
BOM = b"\xef\xbb\xbf"

Record = tuple[str, dict[str, Any] | str, int]
"""A row's place in its file, its columns or the reason why it has none, and about how many bytes it takes."""


def read_jsonl(stream: BinaryIO) -> Generator[Record, None, None]:
    """(`:17`, columns or reason, bytes) of every line that is not blank."""
    readline, most = stream.readline, MAX_LINE + 1  # the line's end is not counted
    number = 0
    while line := readline(most):
        number += 1
        if len(line) == most and not line.endswith(b"\n"):
            yield f":{number}", too_long(MAX_LINE), 0
            while line and not line.endswith(b"\n"):
                line = readline(_PIECE)
            continue
        text = line.removeprefix(BOM).strip()
        if text:
            yield f":{number}", parse_line(text), len(line)


def too_long(most: int) -> str:
    return f"longer than {most:,} bytes"


def parse_line(line: bytes) -> dict[str, Any] | str:
    """The object of one line, or the reason why there is none."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as e:
        return f"not UTF-8 at byte {e.start + 1}"
    except json.JSONDecodeError as e:
        return f"not JSON: {e.msg} at column {e.colno}"
    except RecursionError:
        return f"nested more than {MAX_DEPTH} levels deep"
    except MemoryError:
        return "not usable: it takes more memory than there is"
    except ValueError:  # int() refuses to take quadratic time
        return "not usable: a whole number with thousands of digits"
    if not isinstance(value, dict):
        return f"not an object but {_kind(value)}"
    # Brackets in strings count too, so that a few rows are measured that need not be; none is missed.
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} levels deep"
    return value


def to_json(value: Any) -> bytes:
    """`value` as one line of JSON in UTF-8, without the line's end."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    # Only lone surrogates cannot be encoded, and there Python's escape is JSON's.
    return text.encode("utf-8", "backslashreplace")


def plain(value: Any) -> Any:
    """`value` in JSON's own types (the conversion of the module's docstring)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.date | dt.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    return str(value)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a string"
    if value is None:
        return "null"
    return "true or false" if isinstance(value, bool) else "a number"


def _depth(value: Any) -> int:
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        inner, depth = waiting.pop()
        if isinstance(inner, dict | list):
            deepest = max(deepest, depth)
            waiting += [(v, depth + 1) for v in (inner.values() if isinstance(inner, dict) else inner)]
    return deepest
