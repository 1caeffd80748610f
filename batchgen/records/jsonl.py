"""JSON lines: reads one object per line, and converts values to JSON.

Reading: a line ends with `\\n`. A `\\r` before it, a byte order mark at the start of a line, and blank lines are skipped. If a key is
repeated, the last value counts. NaN, Infinity and lone surrogates (`"\\ud800"`) are accepted. A line is a malformed row, never an
exception, if it is not a JSON object in UTF-8, is nested deeper than `MAX_DEPTH`, or is longer than `MAX_LINE` bytes.

Writing (`to_json`) always gives valid JSON in valid UTF-8. Lone surrogates and Unicode's own line ends become their escapes, other values
what `json_values.plain` makes of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, BinaryIO

from batchgen.json_values import kind, plain

MAX_DEPTH = 100
"""Levels of lists and objects in a row. Every later stage can recurse over more."""
MAX_LINE = 1 << 28
"""Bytes of a line. A longer line is a decompression bomb or not a JSON line at all; it is skipped in constant memory."""
_ARRAY_HINT = " (a JSON array becomes JSONL with: jq -c '.[]')"
_MESSAGES_HINT = " (a list of messages becomes a row with: jq -c '{messages: .}')"
PYTHON_HINT = " (this is Python's form; json.dumps writes JSON)"
_COMMA_HINT = " (leave out the comma before the bracket)"
_LINE_HINT = " (objects over several lines become JSONL with: jq -c .)"
_LINE_ENDS = [(c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029"]
"""Characters that end a line for some readers (Python's `str.splitlines`), and their escapes in JSON."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
BOM = b"\xef\xbb\xbf"

Record = tuple[str, dict[str, Any] | str, int]
"""A row's place in its file, its columns or the reason why it has none, and its approximate size in bytes."""


def read_jsonl(
    stream: BinaryIO, *, max_line: int = MAX_LINE, skip_bytes: int = 1 << 20, **_: object
) -> Generator[Record, None, None]:
    """Yields (`:17`, columns or reason, bytes) of every line that is not blank.

    The rest of a line longer than `max_line` bytes is skipped, `skip_bytes` at a time.
    """
    readline, max_read = stream.readline, max_line + 1  # the end of the line does not count
    number = 0
    while line := readline(max_read):
        number += 1
        if len(line) == max_read and not line.endswith(b"\n"):
            yield f":{number}", too_long(max_line), 0
            while line and not line.endswith(b"\n"):
                line = readline(skip_bytes)
            continue
        text = line.removeprefix(BOM).strip()
        if text:
            yield f":{number}", parse_line(text), len(line)


def too_long(max_bytes: int) -> str:
    """The reason of a row whose line is too long."""
    return f"longer than {max_bytes:,} bytes"


def parse_line(line: bytes) -> dict[str, Any] | str:
    """Returns the object of one line, or the reason why it is malformed."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as e:
        return f"not UTF-8 at byte {e.start + 1}{encoding_hint(line)}"
    except json.JSONDecodeError as e:
        return f"not JSON: {e.msg.removesuffix(' at')} at column {e.colno}{_hint(e)}"
    except RecursionError:
        return f"nested more than {MAX_DEPTH} levels deep"
    except MemoryError:
        return "not usable: it takes more memory than there is"
    except ValueError:  # int() refuses to take quadratic time
        return "not usable: a whole number with thousands of digits"
    if not isinstance(value, dict):
        objects = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
        hint = _MESSAGES_HINT if any("role" in item for item in objects) else _ARRAY_HINT if objects else ""
        return f"not an object but {kind(value)}{hint}"
    # Brackets inside strings count as well, so a few rows are measured unnecessarily, but none is missed.
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} levels deep"
    return value


def encoding_hint(text: bytes) -> str:
    """Returns how to read text that is not UTF-8, if it looks like UTF-16 or an encoding of one byte for each character; empty for others."""
    if b"\0" in text:
        return " (if the file is in UTF-16: --encoding utf-16)"
    only_ascii_is_utf8 = text.decode("utf-8", "ignore").isascii()
    return " (if the file is in Latin-1 or Windows-1252: --encoding cp1252)" if only_ascii_is_utf8 else ""


def to_json(value: Any) -> bytes:
    """Returns `value` as one line of JSON in UTF-8, without a line end."""
    try:
        text = _ENCODER.encode(value)
    except (ValueError, TypeError):
        text = _ENCODER.encode(plain(value))
    if text.isascii():
        return text.encode()
    # Only lone surrogates cannot be encoded. Python's escape for them is also JSON's.
    data = text.encode("utf-8", "backslashreplace")
    for character, escape in _LINE_ENDS:
        if character in data:
            data = data.replace(character, escape)
    return data


def _hint(error: json.JSONDecodeError) -> str:
    """Returns how to correct the usual ways of writing a line that is not JSON; empty for others."""
    text, place = error.doc, error.pos
    before, after = text[:place].rstrip(), text[place:].lstrip(" ")
    if text.strip() in ("[", "[{") or (text.startswith("[{") and before.endswith(",") and not after):
        return _ARRAY_HINT
    if text.strip() == "{":
        return _LINE_HINT
    if error.msg.startswith("Invalid control character"):
        return f" (in text it is written \\u{ord(text[place]):04x})"
    if error.msg.startswith("Extra data") and after == ",":
        return " (leave out the comma after the object)"
    if error.msg.startswith("Expecting ',' delimiter"):
        return ""  # as a rule because of a quote inside a text, whatever comes after it
    if error.msg.startswith("Illegal trailing comma") or (before.endswith(",") and after.startswith(("}", "]"))):
        return _COMMA_HINT
    if re.match(r"'|(True|False|None)\b", after):
        return PYTHON_HINT
    return " (JSON has no comments)" if after.startswith(("//", "#")) else ""


def _depth(value: Any) -> int:
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        inner, depth = waiting.pop()
        if isinstance(inner, dict | list):
            deepest = max(deepest, depth)
            waiting += [(v, depth + 1) for v in (inner.values() if isinstance(inner, dict) else inner)]
    return deepest
