"""The keys of a job's rows. Equal requests have one key, their digest, and one result, if their results cannot differ.

A sampled row with an id has a key of its own, made of the digest and the id: it depends on no other row. Sampled rows without ids, and those
with equal ids, are told apart by the number of their occurrence.

Rows of a finished job that get ids take over the results that they have without them, in the order of the input. The table `run.counts` has how
often a digest has come in this run.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from batchgen.jobs.files.database import (
    CACHE_KIB,
    format_bytes,
    is_damage,
    make_file,
    open_database,
    select_in,
    transaction,
)
from batchgen.process.user_cache import replaced
from batchgen.request import Request, id_key, row_key

KNOWN_FILE = "known.sqlite"
KNOWN_FILES = (KNOWN_FILE, f"{KNOWN_FILE}-journal")


@dataclass(slots=True)
class _Count:
    """How often a digest has come in this run."""

    seen: int = 0
    """Rows whose keys are made of it and a number."""
    others: int = 0
    """Rows that have it as their digest, and keys made of their ids."""


class RowKeys:
    """Gives the rows of an input their keys, over any number of calls."""

    def __init__(self, db: sqlite3.Connection | None = None, folder: Path | None = None) -> None:
        """`db`: the results of the job in `folder` (`results`); None for rows of which nothing is kept. Raises `sqlite3.Error`."""
        self._kept = db is not None
        self._db = open_database(":memory:") if db is None else db
        if folder is None:
            self._db.execute("ATTACH DATABASE '' AS run")  # SQLite's name for a temporary file
        else:
            _attach_known(self._db, folder)
        self._db.execute(
            "CREATE TABLE run.counts (digest BLOB PRIMARY KEY, seen INTEGER, others INTEGER) WITHOUT ROWID"
        )

    def occurrences(self, digests: Sequence[bytes]) -> list[int]:
        """Returns how often each digest has been asked about before, in this call and all earlier ones."""
        counts = self._counts(digests)
        numbers = []
        for digest in digests:
            numbers.append(counts[digest].seen)
            counts[digest].seen += 1
        self._save(counts)
        return numbers

    def keys(
        self, digests: Sequence[bytes], ids: Sequence[bytes | None], sampled: Sequence[bool]
    ) -> list[tuple[bytes, int]]:
        """Returns the keys of the next rows of the input, and how many earlier rows have the same key.

        `digests` are those of the rows' requests. `ids` are digests of the rows' ids; None for a row without one. `sampled` tells whether equal
        rows get results of their own.
        """
        bases = [
            id_key(digest, own) if differs and own is not None else digest
            for digest, own, differs in zip(digests, ids, sampled, strict=True)
        ]
        counts = self._counts([*digests, *bases])
        finished = self._finished([base for base, digest in zip(bases, digests, strict=True) if base != digest])
        keys: list[tuple[bytes, int]] = []
        for digest, base, differs in zip(digests, bases, sampled, strict=True):
            if base != digest:
                count = counts[digest]
                if finished is not None and base not in finished and not counts[base].seen:
                    self._take_over(row_key(digest, count.seen + count.others), base)
                count.others += 1
            number = counts[base].seen
            counts[base].seen += 1
            keys.append((row_key(base, number), 0) if differs else (base, number))
        self._save(counts)
        return keys

    def keyed(self, requests: Sequence[Request], ids: Sequence[bytes | None]) -> list[tuple[Request, bool]]:
        """Returns the requests of the next rows with their `keys`, and whether an earlier row has the same key."""
        keys = self.keys([r.key for r in requests], ids, [r.is_sampled for r in requests])
        return [
            (r if r.key == key else replace(r, key=key), before > 0)
            for r, (key, before) in zip(requests, keys, strict=True)
        ]

    def close(self) -> None:
        self._db.close()

    def _counts(self, digests: Sequence[bytes]) -> dict[bytes, _Count]:
        counts = {digest: _Count() for digest in digests}
        # Sorted: neighbours are on one page of the table.
        for digest, *count in select_in(self._db, "SELECT * FROM run.counts WHERE digest IN", sorted(counts)):
            counts[digest] = _Count(*count)
        return counts

    def _save(self, counts: Mapping[bytes, _Count]) -> None:
        entries = ((digest, count.seen, count.others) for digest, count in sorted(counts.items()))
        with transaction(self._db):
            self._db.executemany("INSERT OR REPLACE INTO run.counts VALUES (?, ?, ?)", entries)

    def _finished(self, keys: Sequence[bytes]) -> set[bytes] | None:
        """Returns those of `keys` that rows of the finished output have; None if there is no such output."""
        if not self._kept or self._db.execute("SELECT EXISTS(SELECT 1 FROM run.finished)").fetchone() == (0,):
            return None
        return {key for (key,) in select_in(self._db, "SELECT key FROM run.finished WHERE key IN", keys)}

    def _take_over(self, old: bytes, key: bytes) -> None:
        """Gives a row the place in the finished output and the result that it has under an earlier key, if there is one."""
        if self._db.execute("UPDATE OR IGNORE run.finished SET key = ? WHERE key = ?", (key, old)).rowcount:
            for (value,) in self._db.execute("SELECT value FROM results WHERE key = ?", (old,)).fetchall():
                with transaction(self._db):
                    entry = key, zlib.crc32(key + value), old
                    self._db.execute("UPDATE OR IGNORE results SET key = ?, checksum = ? WHERE key = ?", entry)
                    self._db.execute("INSERT OR REPLACE INTO taken VALUES (?, ?)", (old, key))


def _attach_known(db: sqlite3.Connection, folder: Path) -> None:
    """Attaches `known.sqlite`. A damaged one is made again: then rows may get other keys. One that only another user may write to becomes a copy."""
    file = folder / KNOWN_FILE
    if file.exists() and not os.access(file, os.W_OK):
        with replaced(file) as copy:
            shutil.copyfile(file, copy)
    for attempt in (1, 2):
        make_file(file)
        try:
            db.execute("ATTACH DATABASE ? AS known", (os.fsencode(file),))
            whole = db.execute("PRAGMA known.integrity_check(1)").fetchone() == ("ok",)
            if whole and format_bytes(file) in (b"", b"\1\1"):
                break
        except (sqlite3.DatabaseError, UnicodeDecodeError) as e:  # UnicodeDecodeError: of SQLite's own message
            if attempt == 2 or not is_damage(e):
                raise
        with suppress(sqlite3.OperationalError):  # it is not attached
            db.execute("DETACH DATABASE known")
        for name in KNOWN_FILES:
            (folder / name).unlink(missing_ok=True)
    db.execute("PRAGMA known.synchronous = OFF")  # what a kill or a power cut damages is made again
    db.execute("PRAGMA known.journal_mode = MEMORY")
    db.execute(f"PRAGMA known.cache_size = -{CACHE_KIB}")
