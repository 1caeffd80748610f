"""The results of a job as they come: an append-only file of lines that check themselves.

A line is `CRC-32 KEY RESULT`, the first two in hexadecimal, the checksum over the rest, the result as JSON without its row number
(Python's JSON, which has infinities).
Every line is handed to the system at once, so a killed process loses none; fsync comes by time, so a power cut loses at most the last
`flush_every` seconds. A line that a cut has torn is cut off when the journal is opened; a line whose checksum is wrong is passed over,
and its row is simply generated again. Of lines with one key the last counts.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from batchgen.records.index import Index
from batchgen.records.result_values import choices_of, completions_of, plain_score, probs_of, score_of
from batchgen.result import Result

_FIELDS = {f.name: f.default for f in fields(Result) if f.name != "row"}


def encode(key: bytes, result: Result) -> bytes:
    """A line of the journal; fields that have their defaults are left out."""
    values = {n: v for n, default in _FIELDS.items() if (v := getattr(result, n)) != default}
    if result.completions:
        values["completions"] = choices_of(result, token_ids=True)
    if result.score is not None:
        values["score"] = plain_score(result.score)
    # Only lone surrogates cannot be encoded, and there Python's escape is JSON's.
    text = json.dumps(values, ensure_ascii=False).encode("utf-8", "backslashreplace")
    body = key.hex().encode() + b" " + text
    return b"%08x %b\n" % (zlib.crc32(body), body)


def decode(line: bytes) -> tuple[bytes, Result] | None:
    """Key and result (of row -1) of a line; None where the line is damaged, or holds what this version does not know."""
    checksum, _, body = line.removesuffix(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        key, _, text = body.partition(b" ")
        return bytes.fromhex(key.decode("ascii")), _result(json.loads(text))
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def checked_key(line: bytes) -> bytes | None:
    """The key of a line; None where it is damaged. What it holds is not looked at."""
    checksum, _, body = line.removesuffix(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        return bytes.fromhex(body.partition(b" ")[0].decode("ascii"))
    except ValueError:
        return None


def _result(values: dict[str, Any]) -> Result:
    if "token_ids" in values:
        values["token_ids"] = tuple(values["token_ids"])
    if "completions" in values:
        values["completions"] = completions_of(values["completions"])
    if "choice_probs" in values:
        values["choice_probs"] = probs_of(values["choice_probs"])
    if "score" in values:
        values["score"] = score_of(values["score"])
    return Result(row=-1, **values)


class Journal:
    """The journal of one job, opened for reading and appending. Only its owner may append (see `lock`)."""

    def __init__(self, path: Path, index: Index, flush_every: float, *, without_failed: bool = False) -> None:
        """`without_failed`: the results of failed rows that are there already are passed over, as if they had never come."""
        self._without_failed = without_failed
        self._file = path.open("a+b", buffering=0)
        self._index = index
        self._flush_every = flush_every
        self._synced = time.monotonic()
        self.damaged = 0
        """Lines that were passed over."""
        self._end = self._scan()

    def _scan(self) -> int:
        """Put the good lines into the index; cut off what a crash has left of a last one. Returns the file's size then."""
        place = 0

        def good_lines() -> Iterator[tuple[bytes, int]]:
            nonlocal place
            with open(self._file.fileno(), "rb", closefd=False) as lines:
                lines.seek(0)
                for line in lines:
                    if not line.endswith(b"\n"):
                        return
                    key = checked_key(line)
                    if key is None:
                        self.damaged += 1
                    elif not (self._without_failed and _failed(line)):
                        yield key, place
                    place += len(line)

        self._index.add(good_lines())
        self._file.truncate(place)
        return place

    @property
    def size(self) -> int:
        """In bytes."""
        return self._end

    def append(self, key: bytes, result: Result) -> None:
        """Add one result; on disk at the latest when the next one comes after `flush_every` seconds, or at `flush`."""
        line = encode(key, result)
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            self._file.truncate(self._end)  # the next line, should one fit, must not stick to half a line
            raise
        self._index.add([(key, self._end)])
        self._end += len(line)
        if time.monotonic() - self._synced >= self._flush_every:
            self.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def results(self, keys: Sequence[bytes]) -> dict[bytes, Result]:
        """The results that are there for `keys`; their row numbers mean nothing."""
        found: dict[bytes, Result] = {}
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for key, place in sorted(self._index.places(keys).items(), key=lambda item: item[1]):
                lines.seek(place)
                record = decode(lines.readline())
                if record is not None and record[0] == key:
                    found[key] = record[1]
        return found

    def close(self) -> None:
        self._file.close()


def _failed(line: bytes) -> bool:
    record = decode(line)
    return record is not None and record[1].error_type is not None
