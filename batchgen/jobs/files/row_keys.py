"""The keys of a job's rows. Equal requests have one key, and one result, if their results cannot differ. If they are sampled, they are told apart by
their ids, and by the number of their occurrence where these do not differ.

The first of equal requests that are sampled has their digest as its key; the keys of the others are made of the digest and their ids. `known.sqlite` in the
job's folder remembers whose key a digest is, so rows keep their keys when others are deleted, moved or inserted. It stays when the job is
finished. Results of a job whose rows had no ids, or that an earlier version has numbered, get the new keys of their rows.

    known.owners   the id of the row that has a digest as its key
    run.counts     how often a digest has come in this run
    run.ids        the ids of all rows, if they were needed
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.request import id_key, row_key

KNOWN_FILE = "known.sqlite"
KNOWN_FILES = (KNOWN_FILE, f"{KNOWN_FILE}-journal")
CACHE_KIB = 1 << 16
_KEYS_AT_ONCE = 500  # below the smallest limit of parameters that SQLite is built with
_BUSY_SECONDS = 60.0
_KEY_TABLES = (
    "CREATE TABLE IF NOT EXISTS known.owners (digest BLOB PRIMARY KEY, id BLOB, alone INTEGER) WITHOUT ROWID",
    "CREATE TABLE run.counts (digest BLOB PRIMARY KEY, seen INTEGER, others INTEGER, id BLOB, unowned INTEGER) WITHOUT ROWID",
)


@dataclass(slots=True)
class _Count:
    """How often a digest has come in this run."""

    seen: int = 0
    """Rows that have it as their key, numbered."""
    others: int = 0
    """Rows that have it as their digest and another key."""
    id: bytes | None = None
    """The id of the first of the former."""
    unowned: bool = False
    """Whether it had no owner before this run."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """The row that has a digest as its key."""

    id: bytes
    alone: bool
    """Whether no other row has had this digest. Then a row with another id takes its place when it is gone."""


class RowKeys:
    """Gives the rows of an input their keys, over any number of calls."""

    def __init__(self, db: sqlite3.Connection | None = None, folder: Path | None = None) -> None:
        """`db`: the results of the job in `folder` (`results`); None for rows of which nothing is kept. Raises `sqlite3.Error`."""
        self._kept = db is not None
        self._db = open_database(":memory:") if db is None else db
        if folder is None:
            self._db.execute("ATTACH DATABASE '' AS run")  # SQLite's name for a temporary file
            self._db.execute("ATTACH DATABASE '' AS known")
        if folder is not None:
            _attach_known(self._db, folder)
        for table in _KEY_TABLES:
            self._db.execute(table)
        self._ids_known = False

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
        self,
        digests: Sequence[bytes],
        ids: Sequence[bytes | None],
        sampled: Sequence[bool],
        all_ids: Callable[[], Iterable[bytes]] | None = None,
    ) -> list[tuple[bytes, bool]]:
        """Returns the keys of the next rows of the input, and whether an earlier row has the same key.

        `digests` are those of the rows' requests. `ids` are digests of the rows' ids; None for a row without one. `sampled` tells whether equal
        rows get results of their own. `all_ids` returns those of the
        whole input; without it, all owners are taken to be there.
        """
        ids = [own if differs else None for own, differs in zip(ids, sampled, strict=True)]
        id_keys = [None if own is None else id_key(digest, own) for digest, own in zip(digests, ids, strict=True)]
        named = [key for key in id_keys if key is not None]
        counts = self._counts([*digests, *named])
        owners = self._owners([digest for digest, own in zip(digests, ids, strict=True) if own is not None])
        finished, changed = self._finished(named), set()
        keys: list[tuple[bytes, bool]] = []
        for digest, own, other, differs in zip(digests, ids, id_keys, sampled, strict=True):
            count, owner = counts[digest], owners.get(digest)
            base = digest
            if not count.seen and not count.others:
                count.unowned = owner is None
            if own is not None and other is not None:
                if other in finished or counts[other].seen:
                    base = other
                elif count.seen:
                    base = digest if count.id == own else other
                elif owner is not None and owner.id != own and (not owner.alone or self._in_input(owner.id, all_ids)):
                    base = other
                elif owner is None or owner.id != own:
                    owners[digest] = _Owner(own, alone=True)
                    changed.add(digest)
            if base is digest:
                count.id = count.id if count.seen else own
            else:
                if self._kept and count.unowned and base not in finished:
                    self._rename(row_key(digest, count.seen + count.others), base)
                count.others += 1
                if digest in owners and owners[digest].alone:
                    owners[digest] = replace(owners[digest], alone=False)
                    changed.add(digest)
            seen = counts[base].seen
            keys.append((row_key(base, seen), False) if differs else (base, seen > 0))
            counts[base].seen += 1
        self._save(counts)
        entries = [(digest, *astuple(owners[digest])) for digest in sorted(changed)]
        self._write("INSERT OR REPLACE INTO known.owners VALUES (?, ?, ?)", entries)
        return keys

    def forget_unasked(self) -> None:
        """Forgets the owners of digests for which the job has neither a row nor a result."""
        self._db.execute(
            "DELETE FROM known.owners WHERE digest NOT IN (SELECT key FROM rows WHERE key IS NOT NULL) AND digest NOT IN (SELECT key FROM results)"
        )

    def close(self) -> None:
        self._db.close()

    def _counts(self, digests: Sequence[bytes]) -> dict[bytes, _Count]:
        counts = {digest: _Count() for digest in digests}
        # Sorted: neighbours are on one page of the table.
        for digest, *count in select_in(self._db, "SELECT * FROM run.counts WHERE digest IN", sorted(counts)):
            counts[digest] = _Count(*count)
        return counts

    def _save(self, counts: Mapping[bytes, _Count]) -> None:
        entries = ((d, c.seen, c.others, c.id, c.unowned) for d, c in sorted(counts.items()) if c.seen or c.others)
        self._write("INSERT OR REPLACE INTO run.counts VALUES (?, ?, ?, ?, ?)", entries)

    def _owners(self, digests: Sequence[bytes]) -> dict[bytes, _Owner]:
        found = select_in(self._db, "SELECT * FROM known.owners WHERE digest IN", sorted(set(digests)))
        return {digest: _Owner(own, bool(alone)) for digest, own, alone in found}

    def _finished(self, keys: Sequence[bytes]) -> set[bytes]:
        """Returns those of `keys` that have a result."""
        query = "SELECT key FROM results WHERE key IN"
        return {key for (key,) in select_in(self._db, query, keys)} if self._kept else set()

    def _in_input(self, id: bytes, all_ids: Callable[[], Iterable[bytes]] | None) -> bool:
        if all_ids is None:
            return True
        if not self._ids_known:
            self._db.execute("CREATE TABLE run.ids (id BLOB PRIMARY KEY) WITHOUT ROWID")
            self._write("INSERT OR IGNORE INTO run.ids VALUES (?)", ((one,) for one in all_ids()))
            self._ids_known = True
        return self._db.execute("SELECT 1 FROM run.ids WHERE id = ?", (id,)).fetchone() is not None

    def _rename(self, old: bytes, new: bytes) -> None:
        """Gives the result of a row, if there is one, the row's new key."""
        for (value,) in self._db.execute("SELECT value FROM results WHERE key = ?", (old,)).fetchall():
            entry = new, zlib.crc32(new + value), old
            self._db.execute("UPDATE results SET key = ?, checksum = ? WHERE key = ?", entry)
            self._db.execute("UPDATE OR IGNORE run.finished SET key = ? WHERE key = ?", (new, old))

    def _write(self, statement: str, entries: Iterable[Sequence[Any]]) -> None:
        with nullcontext() if self._db.in_transaction else transaction(self._db):
            self._db.executemany(statement, entries)


def _attach_known(db: sqlite3.Connection, folder: Path) -> None:
    """Attaches `known.sqlite`. A damaged one is made again: then rows may get other keys."""
    for attempt in (1, 2):
        try:
            db.execute("ATTACH DATABASE ? AS known", (os.fsencode(folder / KNOWN_FILE),))
            whole = db.execute("PRAGMA known.integrity_check(1)").fetchone() == ("ok",)
            if whole and format_bytes(folder / KNOWN_FILE) in (b"", b"\1\1"):
                break
        except (sqlite3.DatabaseError, UnicodeDecodeError):  # UnicodeDecodeError: of SQLite's own message
            if attempt == 2:
                raise
        with suppress(sqlite3.OperationalError):  # it is not attached
            db.execute("DETACH DATABASE known")
        for name in KNOWN_FILES:
            (folder / name).unlink(missing_ok=True)
    db.execute("PRAGMA known.synchronous = OFF")  # what a power cut damages is made again
    db.execute(f"PRAGMA known.cache_size = -{CACHE_KIB}")


def select_in(db: sqlite3.Connection, query: str, keys: Sequence[bytes]) -> Iterator[Any]:
    """Yields the rows of a query that ends in IN, for all of these keys."""
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys[start : start + _KEYS_AT_ONCE]
        yield from db.execute(f"{query} ({','.join('?' * len(some))})", some)


def open_database(path: Path | str, *, seconds: float = _BUSY_SECONDS, uri: bool = False) -> sqlite3.Connection:
    # Several threads use the connection, one at a time.
    return sqlite3.connect(str(path), timeout=seconds, isolation_level=None, check_same_thread=False, uri=uri)


def format_bytes(path: Path) -> bytes:
    """Returns the versions of writing and reading in the header of a database: 1, or 2 with a log (WAL). Empty without a header."""
    try:
        with path.open("rb") as file:
            return file.read(20)[18:]
    except FileNotFoundError:
        return b""


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commits what is written inside; nothing of it if an exception leaves it."""
    db.execute("BEGIN")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise
