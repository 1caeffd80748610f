"""SQLite, as all databases of a job's folder use it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CACHE_KIB = 1 << 16
_KEYS_AT_ONCE = 500  # below the smallest limit of parameters that SQLite is built with
_BUSY_SECONDS = 60.0


def open_database(path: Path | str, *, seconds: float = _BUSY_SECONDS, uri: bool = False) -> sqlite3.Connection:
    """Opens or makes a database that several threads use, one at a time. `seconds`: how long it waits for another connection.

    Raises `sqlite3.Error`, and `OSError` for a path at which no file can be made.
    """
    if isinstance(path, Path):
        make_file(path)
    return sqlite3.connect(str(path), timeout=seconds, isolation_level=None, check_same_thread=False, uri=uri)


def make_file(path: Path) -> None:
    """Makes the file of a database if it is missing, with the permissions that the umask leaves. SQLite would let nobody else write to it.

    Raises `OSError`.
    """
    if not path.exists():
        path.touch()


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commits what is written inside; nothing of it if an exception leaves it. Inside another transaction, that one decides."""
    if db.in_transaction:
        yield
        return
    db.execute("BEGIN")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise


def select_in(db: sqlite3.Connection, query: str, keys: Sequence[bytes]) -> Iterator[Any]:
    """Yields the rows of a query that ends in IN, for all of these keys."""
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys[start : start + _KEYS_AT_ONCE]
        yield from db.execute(f"{query} ({','.join('?' * len(some))})", some)


def is_damage(error: Exception) -> bool:
    """Whether an error of opening a database says that it is damaged, as opposed to a failure of the disk."""
    if not isinstance(error, sqlite3.OperationalError):
        return True
    damage = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA)
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in damage


def format_bytes(path: Path) -> bytes:
    """Returns the versions of writing and reading in the header of a database: 1, or 2 with a log (WAL). Empty without a header."""
    try:
        with path.open("rb") as file:
            return file.read(20)[18:]
    except FileNotFoundError:
        return b""
