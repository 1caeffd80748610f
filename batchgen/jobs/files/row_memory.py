"""What rows have become, so that a later run of the job need not render and tokenize them again: a table of `known.sqlite` in the job's folder.

known.rows   by digest of a row and of all settings that its prompt depends on: the digest of its request, and whether this is sampled
"""

from __future__ import annotations

import hashlib
import marshal
import pickle
import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from batchgen.jobs.files.database import select_in, transaction

MAX_ROWS = 2_000_000
"""Further rows are rendered and tokenized in every run. A row takes some 60 bytes."""
_SPARE_ROWS = 1_000
_BATCH_ROWS = 20_000
"""Rows that are written together. In the order of their digests, many together change fewer pages of the table."""


class KnownRequest(NamedTuple):
    """What is remembered of a row's request."""

    key: bytes
    """`row_digest` of the request."""
    is_sampled: bool


class RowMemory:
    """The rows that the job in a folder has read. `known` must be attached to the database."""

    def __init__(self, db: sqlite3.Connection, settings: bytes) -> None:
        """`settings`: digest of all that the request of a row depends on, beside the row."""
        self._db, self._settings = db, settings
        db.execute(
            "CREATE TABLE IF NOT EXISTS known.rows (row BLOB PRIMARY KEY, key BLOB, sampled INTEGER, checksum INTEGER) WITHOUT ROWID"
        )
        self._count = self._counted()
        self._new: list[tuple[bytes, KnownRequest]] = []

    def digest(self, columns: Mapping[str, Any], *, typed: bool) -> bytes | None:
        """Returns the digest (16 bytes) of a row; None for a row that has something which cannot be digested. `typed`: `Row.typed`."""
        row = dict(columns), typed
        try:
            data = marshal.dumps(row, 2)  # a version that writes equal values equally
        except ValueError:
            try:
                data = pickle.dumps(row, 5)
            except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
                return None
        return hashlib.blake2b(data, digest_size=16, key=self._settings).digest()

    def find(self, rows: Sequence[bytes]) -> dict[bytes, KnownRequest]:
        """Returns what earlier runs have made of rows, by the rows' digests. Damaged entries are left out."""
        found = select_in(self._db, "SELECT * FROM known.rows WHERE row IN", sorted(set(rows)))
        return {
            row: KnownRequest(key, bool(s)) for row, key, s, checksum in found if _checksum(row, key, s) == checksum
        }

    def add(self, rows: Iterable[tuple[bytes, KnownRequest]]) -> None:
        """Adds rows by their digests, as far as there is room. `flush` must follow."""
        self._new += rows
        if len(self._new) >= _BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes what was added."""
        entries = [(row, key, int(s), _checksum(row, key, int(s))) for row, (key, s) in self._new]
        entries = sorted(entries[: MAX_ROWS - self._count])
        self._new = []
        if entries:
            with transaction(self._db):
                self._db.executemany("INSERT OR REPLACE INTO known.rows VALUES (?, ?, ?, ?)", entries)
            self._count += len(entries)

    def forget_unasked(self, rows: int) -> None:
        """Writes what was added. Drops rows for which the job has neither a row nor a result, if there are many beside the `rows` rows of the output."""
        self.flush()
        if self._counted() > 2 * rows + _SPARE_ROWS:
            asked = "SELECT key FROM rows WHERE key IS NOT NULL UNION SELECT digest FROM run.counts UNION SELECT key FROM results"
            self._db.execute(f"DELETE FROM known.rows WHERE key NOT IN ({asked})")

    def _counted(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM known.rows").fetchone()[0])


def _checksum(row: bytes, key: bytes, sampled: int) -> int:
    return zlib.crc32(row + key + bytes([sampled]))
