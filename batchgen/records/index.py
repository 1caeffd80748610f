"""Two tables of 16-byte keys for one run, on disk so that memory does not grow with the rows: where a key's result stands in
the journal, and how often a digest has come. Made anew from the journal at every start, so it needs no care in a crash."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_ASKED_AT_ONCE = 500  # below the least limit of parameters that SQLite is built with
_CACHE_KIB = 1 << 16


class Index:
    def __init__(self, path: Path | None) -> None:
        """An empty index in the file `path`, replaced if it is there; None: in a temporary file that goes with it."""
        if path is not None:
            path.unlink(missing_ok=True)
        # "" is SQLite's name for a temporary file; the connection may be used from whichever thread runs the job.
        self._db = sqlite3.connect(str(path or ""), isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._db.execute("CREATE TABLE places (key BLOB PRIMARY KEY, place INTEGER) WITHOUT ROWID")
        self._db.execute("CREATE TABLE counts (digest BLOB PRIMARY KEY, seen INTEGER) WITHOUT ROWID")
        self._db.execute("BEGIN")  # one for the whole run: nothing here outlives it

    def add(self, places: Iterable[tuple[bytes, int]]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO places VALUES (?, ?)", places)

    def places(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        return dict(self._get("SELECT key, place FROM places WHERE key IN", sorted(keys)))

    def occurrences(self, digests: Sequence[bytes]) -> list[int]:
        """How often each digest has come before, in this call and all earlier ones."""
        # Sorted: neighbours are on one page of the table.
        seen = dict(self._get("SELECT digest, seen FROM counts WHERE digest IN", sorted(set(digests))))
        numbers: list[int] = []
        for digest in digests:
            numbers.append(seen.get(digest, 0))
            seen[digest] = numbers[-1] + 1
        self._db.executemany("INSERT OR REPLACE INTO counts VALUES (?, ?)", sorted(seen.items()))
        return numbers

    def close(self) -> None:
        self._db.close()

    def _get(self, query: str, keys: Sequence[bytes]) -> Iterator[tuple[bytes, int]]:
        for start in range(0, len(keys), _ASKED_AT_ONCE):
            asked = keys[start : start + _ASKED_AT_ONCE]
            yield from self._db.execute(f"{query} ({','.join('?' * len(asked))})", asked)
