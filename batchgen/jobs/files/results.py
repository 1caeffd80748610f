"""Finished results, unfinished completions and progress of a job: one SQLite database, `results.sqlite` in the job's folder.

    results    what became of a row, by its key: the result, or the row of a finished output that has it (then without a reason); each value
               carries a checksum of its own
    forgotten  results whose rows run again (`--retry`), until the output is written: a refused run puts them back
    under_way  what there is of completions that are not finished, by the key of their row: each entry continues the one before it
    rows       the rows of this run's output: the key of each, or the result of a row that never became a request
    equal      how many rows wait for the result of an equal row, by key
    taken      the keys under which rows of the finished output that got ids have taken over their results (`row_keys`), by those that they had
    facts      single values: the progress of the run, and what the first reading of the input has read

The database is in WAL mode. Results are committed about four times a second (`job.KEEP_SECONDS`), together with the rows under way: a killed
process loses what came since, and the next run generates it again. The log is synced every `flush_every` seconds, so a power cut loses at
most the results since then. `status` reads the database from another process. On a network file system, where two hosts cannot share a WAL,
and on one where processes cannot share memory, the database uses a rollback journal and commits every `flush_every` seconds.

Data of this run only (the keys of the finished output, and what `row_keys` counts) is in a second, unsynced database, `run.sqlite`.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from batchgen.errors import OutputLocked
from batchgen.jobs.files.database import CACHE_KIB, format_bytes, is_damage, open_database, select_in, transaction
from batchgen.jobs.files.disk import network_file_system, shares_memory, writing
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.row_keys import RowKeys
from batchgen.jobs.files.row_memory import RowMemory
from batchgen.jobs.reuse_output import result_of_row
from batchgen.records.result_values import completion_values, completions_of, result_of_values, result_values
from batchgen.result import Completion, Result

RESULTS_FILE = "results.sqlite"
_LOG_FILES = tuple(f"{RESULTS_FILE}-{kind}" for kind in ("wal", "shm", "journal"))
RESULTS_FILES = (RESULTS_FILE, *_LOG_FILES, f"{RESULTS_FILE}.new", "run.sqlite")
"""All files that the two databases may leave in the folder."""
FORMAT = 2
"""`user_version` of the database."""
_READ_SECONDS = 2.0
_COLUMNS = "key BLOB PRIMARY KEY, reason TEXT, value BLOB, checksum INTEGER, stays INTEGER NOT NULL DEFAULT 0"
_TABLES = f"""
CREATE TABLE IF NOT EXISTS results ({_COLUMNS});
CREATE TABLE IF NOT EXISTS forgotten ({_COLUMNS});
CREATE TABLE IF NOT EXISTS under_way (
    key BLOB, number INTEGER, start INTEGER, tokens INTEGER NOT NULL, value BLOB, checksum INTEGER,
    PRIMARY KEY (key, number, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY, key BLOB, value BLOB, checksum INTEGER);
CREATE TABLE IF NOT EXISTS equal (key BLOB PRIMARY KEY, rows INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS taken (old BLOB PRIMARY KEY, key BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB, checksum INTEGER);
"""


class Results:
    """The results of one job. Only the holder of the folder's lease may open the database for writing."""

    def __init__(self, folder: Path, flush_every: float, lease: Lease | None = None) -> None:
        """`lease` is checked before every write. Raises `OSError` or `sqlite3.Error` if the disk cannot be written."""
        self.folder = folder
        self._flush_every, self._held_by = flush_every, lease
        self.damaged = 0
        """Number of damaged results, which were dropped."""
        self._without_log = network_file_system(folder) or not shares_memory(folder)
        self._connection = self._opened()
        self._new: list[tuple[bytes, str, bytes, int]] = []
        """Entries of `results` that are not in the database yet: in order of their keys, many together take a third of the time."""
        self._ended: list[tuple[bytes]] = []
        """Keys of those that were under way."""
        self._synced = time.monotonic()
        self._known = 0
        """`count`, kept up to date without counting."""
        self._earlier = 0
        """The last place of a result of an earlier run."""
        self._any_equal = bool(self._number("SELECT EXISTS(SELECT 1 FROM equal)"))
        """Whether rows wait for the result of an equal row."""
        self._begun: dict[bytes, dict[int, Completion]] = {}
        """The completions of `under_way`, by the row's key and the completion's number."""

    # -- opening

    def _opened(self) -> sqlite3.Connection:
        path = self.folder / RESULTS_FILE
        try:
            return self._checked(path)
        except (UnicodeDecodeError, sqlite3.DatabaseError) as e:  # UnicodeDecodeError: of SQLite's own message
            if not is_damage(e):
                raise
        self.damaged += _salvage(path, self.folder / f"{RESULTS_FILE}.new")
        for name in _LOG_FILES:  # they belong to the damaged file
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / f"{RESULTS_FILE}.new").replace(path)
        return self._checked(path)

    def _checked(self, path: Path) -> sqlite3.Connection:
        """Opens the database, reads every result once and drops damaged ones. Raises errors of SQLite, `DatabaseError` for what is not a whole database of this form."""
        if format_bytes(path) not in (b"", b"\1\1", b"\2\2"):
            raise sqlite3.DatabaseError("SQLite would read it and not write it")
        db = open_database(path)
        try:
            db.execute(f"PRAGMA journal_mode = {'TRUNCATE' if self._without_log else 'WAL'}")
            db.execute(f"PRAGMA synchronous = {'FULL' if self._without_log else 'NORMAL'}")
            db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                raise sqlite3.DatabaseError(f"its format is {version}")
            _make_tables(db)
            (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            bad = [key for key, result in _read_all(db) if result is None]
            if bad:
                self.damaged += len(bad)
                with transaction(db):
                    db.executemany("DELETE FROM results WHERE key IS ?", [(key,) for key in bad])
                    # The first reading counted the damaged rows as finished.
                    db.execute("DELETE FROM facts WHERE name = 'reading'")
            (self.folder / "run.sqlite").unlink(missing_ok=True)
            # Bytes, because a path need not be UTF-8.
            db.execute("ATTACH DATABASE ? AS run", (os.fsencode(self.folder / "run.sqlite"),))
            _make_run_tables(db)
        except BaseException:
            db.close()
            raise
        return db

    @property
    def _db(self) -> sqlite3.Connection:
        if self._new:
            self._write_new()
        return self._connection

    def _write_new(self) -> None:
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        new = sorted(self._new, key=itemgetter(0))
        self._connection.executemany("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, 0)", new)
        self._connection.executemany("DELETE FROM under_way WHERE key = ?", self._ended)
        self._new, self._ended = [], []  # not before: a disk that is full for a moment must not cost them

    def _number(self, query: str, values: Sequence[Any] = ()) -> int:
        """Returns the number that a query finds, 0 for none."""
        found = self._db.execute(query, values).fetchone()
        return int((found and found[0]) or 0)

    # -- results

    @property
    def count(self) -> int:
        """Number of results."""
        self._known = self._number("SELECT count(*) FROM results")
        self._earlier = self._number("SELECT max(rowid) FROM results")
        return self._known

    def memory_of_rows(self, settings: bytes) -> RowMemory:
        """Returns what earlier runs have made of rows with these settings. `keys_of_rows` must have been called."""
        return RowMemory(self._db, settings)

    def keys_of_rows(self) -> RowKeys:
        """Returns what gives the rows of this run their keys. Called once."""
        return RowKeys(self._db, self.folder)

    def stored(self, keys: Sequence[bytes]) -> dict[bytes, Result]:
        """Returns the stored results of `keys`. Their row numbers are meaningless."""
        found: dict[bytes, Result] = {}
        for key, value, checksum in select_in(self._db, "SELECT key, value, checksum FROM results WHERE key IN", keys):
            result = decode(key, value, checksum)
            if result is not None:
                found[key] = result
        return found

    def of_this_run(self, keys: Sequence[bytes]) -> set[bytes]:
        """Returns those of `keys` whose results were stored since `count` was asked for."""
        found = select_in(self._db, "SELECT key, rowid FROM results WHERE key IN", keys)
        return {key for key, place in found if place > self._earlier}

    def append(self, key: bytes, result: Result) -> None:
        """Stores one result. `commit` or `flush` must follow."""
        self._new.append(_entry(key, result))
        self._known += 1
        if self._begun.pop(key, None) is not None:
            self._ended.append((key,))

    def add_missing(self, entries: Iterable[tuple[bytes, Result | bytes]]) -> None:
        """Stores the results whose keys have none yet, or the rows of an output that have them, and writes them to disk."""
        self._end_transaction()
        with transaction(self._db):
            self._db.executemany(
                "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, 0)",
                (
                    (key, "", result, zlib.crc32(key + result)) if isinstance(result, bytes) else _entry(key, result)
                    for key, result in entries
                ),
            )
        self.flush()

    def take_from(self, folder: Path) -> int:
        """Copies the results and the work under way from the database of another folder, which no process may be using. Returns the number of results.

        Damaged entries are left out, and counted in `damaged`. Everything is on disk when this returns.
        """
        with closing(Results(folder, 0.0)) as other:  # reads every result once
            self.damaged += other.damaged
        self._end_transaction()
        self._db.execute("ATTACH DATABASE ? AS other", (os.fsencode(folder / RESULTS_FILE),))
        try:
            with transaction(self._db):
                taken = self._db.execute("INSERT OR REPLACE INTO main.results SELECT * FROM other.results").rowcount
                # A row's parts continue each other, so parts of two databases must not mix.
                self._db.execute("DELETE FROM main.under_way WHERE key IN (SELECT key FROM other.under_way)")
                self._db.execute("INSERT INTO main.under_way SELECT * FROM other.under_way")
        finally:
            self._db.execute("DETACH DATABASE other")
        self.flush()
        return taken

    def keep_beside_output(self, keys: Sequence[bytes]) -> None:
        """Marks results that stay when the output is finished, because it does not hold them whole."""
        self._many("UPDATE results SET stays = 1 WHERE key = ?", [(key,) for key in keys])

    # -- work under way

    def under_way(self) -> dict[bytes, dict[int, Completion]]:
        """Returns the unfinished completions of earlier runs, by row key and by the completion's number."""
        self._write_one("DELETE FROM under_way WHERE key IN (SELECT key FROM results)")
        self._begun = {}
        for key, number, start, _, value, checksum in self._db.execute(
            "SELECT * FROM under_way ORDER BY key, number, start"
        ):
            earlier = self._begun.get(key, {}).get(number)
            part = _part(key, number, start, value, checksum)
            # The parts after a damaged one have nothing to continue.
            if part is not None and start == (0 if earlier is None else len(earlier.token_ids)):
                self._begun.setdefault(key, {})[number] = part if earlier is None else _with_part(earlier, part)
        return {key: dict(begun) for key, begun in self._begun.items()}

    def keep_under_way(self, completions: Mapping[bytes, Mapping[int, Completion]]) -> None:
        """Stores the tokens so far of unfinished completions. Only what has come since the last call is written.

        A power cut loses what came after the last `flush`; a kill loses nothing.
        """
        self._check()
        parts, again = [], []
        for key, begun in completions.items():
            kept = self._begun.setdefault(key, {})
            for number, completion in begun.items():
                earlier, kept[number] = kept.get(number), completion
                if earlier is not None and _length_and_reason(earlier) == _length_and_reason(completion):
                    continue
                if earlier is not None and completion.token_ids[: len(earlier.token_ids)] != earlier.token_ids:
                    again.append((key, number))
                    earlier = None
                parts.append(_part_entry(key, number, 0 if earlier is None else len(earlier.token_ids), completion))
        self._many("DELETE FROM under_way WHERE key = ? AND number = ?", again)
        self._many("INSERT OR REPLACE INTO under_way VALUES (?, ?, ?, ?, ?, ?)", parts)
        self.commit()

    @property
    def tokens_under_way(self) -> int:
        """Completion tokens that are kept of rows that are not finished."""
        return self._number("SELECT sum(tokens) FROM under_way WHERE key NOT IN (SELECT key FROM results)")

    # -- the rows of this run's output

    def begin_rows(self) -> None:
        """Drops all rows, before the input is read from its start."""
        self.forget_reading()
        self._write_one("DELETE FROM rows")
        self._write_one("DELETE FROM equal")
        self._any_equal = False

    def add_rows(self, rows: Sequence[int], keys: Mapping[int, bytes], results: Mapping[int, Result]) -> None:
        """Adds rows of the output by their numbers: each has a key, or a result in `results`, which may have those of others too."""
        entries = []
        for number in rows:
            key, value = keys.get(number), b""
            if key is None:
                value = encode(results[number])
            entries.append((number, key, value, zlib.crc32(number.to_bytes(8, "big") + value)))
        self._many("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", entries)

    def add_equal(self, rows: Mapping[bytes, int]) -> None:
        """Adds numbers of rows that wait for the result of an equal row, by key."""
        statement = "INSERT INTO equal VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET rows = rows + excluded.rows"
        self._many(statement, list(rows.items()))
        self._any_equal |= bool(rows)

    def equal_rows(self, key: bytes) -> int:
        """Returns how many further rows wait for the result of this key. A shard does not know them: the merge counts them."""
        return self._number("SELECT rows FROM equal WHERE key = ?", (key,)) if self._any_equal else 0

    def rows(self, first: int, last: int) -> tuple[dict[int, bytes], dict[int, Result]]:
        """Returns the rows from `first` to `last` that are in the output: the keys of those that became requests, and the results of all.

        Equal rows have one result, whose row number is meaningless. A result that is damaged or missing is left out.
        """
        keys: dict[int, bytes] = {}
        found: dict[int, Result | None] = {}
        of_key: dict[bytes, Result | None] = {}
        query = """SELECT number, rows.key, coalesce(results.value, rows.value), coalesce(results.checksum, rows.checksum)
            FROM rows LEFT JOIN results ON results.key = rows.key WHERE number BETWEEN ? AND ? ORDER BY number"""
        for number, key, value, checksum in self._db.execute(query, (first, last)):
            if key is None:
                found[number] = _failed_row(number, value, checksum)
                continue
            keys[number] = key
            if key not in of_key:
                of_key[key] = decode(key, value, checksum)
            found[number] = of_key[key]
        return keys, {number: result for number, result in found.items() if result is not None}

    def failed_rows(self) -> Iterator[Result | None]:
        """Yields the results of the rows that never became requests, in input order; None for a damaged one."""
        return _read_failed(self._db)

    @property
    def row_count(self) -> int:
        return self._number("SELECT count(*) FROM rows")

    @property
    def end_of_rows(self) -> int:
        """The number after that of the last row."""
        return self._number("SELECT max(number) + 1 FROM rows")

    def forget(self, reasons: Sequence[str]) -> None:
        """Drops the results that ended for one of these reasons, so that their rows run again."""
        rows = _read_all(self._db, "WHERE reason = ''")
        self._many("UPDATE results SET reason = ? WHERE key = ?", [(r.reason, key) for key, r in rows if r is not None])
        if "error" in reasons:
            of_failed = "key IN (SELECT key FROM results WHERE reason = 'error')"
            self._write_one(f"UPDATE run.finished SET failed = 1 WHERE {of_failed}")
        marks = ",".join("?" * len(reasons))
        self._put_aside(f"reason IN ({marks})", [tuple(reasons)])
        self.forget_reading()
        self.flush()  # before the manifest says that the results were dropped

    def forget_cut(self) -> None:
        """Drops completions that were cut by their length: those of unfinished rows, and all results with at least one such completion."""
        cut = [
            (key,)
            for key, result in _read_all(self._db)
            if result is not None and any(c.finish_reason == "length" for c in result.completions)
        ]
        self._put_aside("key = ?", cut)
        begun = self.under_way().items()
        ended = [(key, number) for key, parts in begun for number, c in parts.items() if c.finish_reason == "length"]
        self._many("DELETE FROM under_way WHERE key = ? AND number = ?", ended)
        self.forget_reading()
        self.flush()  # before the manifest names the new limit, which the remaining results fit

    def _put_aside(self, condition: str, entries: Sequence[Sequence[Any]]) -> None:
        self._many(f"INSERT OR REPLACE INTO forgotten SELECT * FROM results WHERE {condition}", entries)
        self._many(f"DELETE FROM results WHERE {condition}", entries)

    @property
    def forgotten_count(self) -> int:
        """Number of results that `forget` and `forget_cut` have dropped since the last output was written, and that there are not again."""
        return self._number("SELECT count(*) FROM forgotten WHERE key NOT IN (SELECT key FROM results)")

    def forgotten(self, keys: Sequence[bytes]) -> set[bytes]:
        """Returns those of the keys that had such a result."""
        return {key for (key,) in select_in(self._db, "SELECT key FROM forgotten WHERE key IN", keys)}

    def restore_forgotten(self) -> None:
        """Puts these results back, instead of newer ones."""
        self._write_one("INSERT OR REPLACE INTO results SELECT * FROM forgotten")
        self._drop_forgotten()

    def settle_forgotten(self, *, usable: bool) -> None:
        """Keeps newer results instead of them. If they are `usable`, a result whose row was not there to run again stays."""
        if usable:
            self._write_one("INSERT OR IGNORE INTO results SELECT * FROM forgotten")
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        self._write_one("DELETE FROM forgotten")
        self._write_one("DELETE FROM facts WHERE name = 'retry'")

    def drop_new(self) -> None:
        """Drops the results that were stored since `count` was asked for."""
        self._write_one("DELETE FROM results WHERE rowid > ?", (self._earlier,))

    def forget_unasked(self) -> None:
        """Drops the results that no row of the output asks for."""
        self._write_one("DELETE FROM results WHERE key NOT IN (SELECT key FROM rows WHERE key IS NOT NULL)")

    # -- the finished output

    def know_finished(self, keys: Iterable[bytes]) -> None:
        """Stores the keys of the rows of the existing output."""
        with transaction(self._db):
            statement = "INSERT INTO run.finished VALUES (?, 1, 0) ON CONFLICT (key) DO UPDATE SET rows = rows + 1"
            self._db.executemany(statement, ((key,) for key in keys))

    def know_taken(self) -> None:
        """Gives rows of the existing output the keys under which a run that was killed has taken over their results."""
        key = "(SELECT key FROM taken WHERE old = finished.key)"
        self._db.execute(f"UPDATE OR IGNORE run.finished SET key = {key} WHERE key IN (SELECT old FROM taken)")

    def rows_of_output(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Returns how many rows of the existing output have each of these keys, without keys that none has."""
        return dict(select_in(self._db, "SELECT key, rows FROM run.finished WHERE key IN", keys))

    @property
    def equal_rows_of_output(self) -> int:
        """Number of rows of the existing output whose key an earlier one has."""
        return self._number("SELECT coalesce(sum(rows - 1), 0) FROM run.finished")

    @property
    def finished_at_hand(self) -> int:
        """Number of results of the existing output that this run has."""
        return self._number("SELECT count(*) FROM run.finished JOIN results USING (key)")

    def compared(self) -> tuple[int, int, int, int]:
        """Returns three numbers of rows: in the finished output, of these missing from the new output (rows that had failed and run again do
        not count), and new in the new output. The fourth is the number of results for which the new output has no row."""
        ours = "(SELECT key, count(*) AS rows FROM rows WHERE key IS NOT NULL GROUP BY key) AS ours"
        less = "sum(max(0, {0}.rows - coalesce({1}.rows, 0))), sum({1}.rows IS NULL) FROM"
        (finished,) = self._db.execute("SELECT sum(rows) FROM run.finished").fetchone()
        gone, unasked = self._db.execute(
            f"SELECT {less.format('f', 'ours')} run.finished AS f LEFT JOIN {ours} USING (key) WHERE f.failed = 0"
        ).fetchone()
        (new, _) = self._db.execute(
            f"SELECT {less.format('ours', 'f')} {ours} LEFT JOIN run.finished AS f USING (key)"
        ).fetchone()
        return finished or 0, gone or 0, new or 0, unasked or 0

    def shrink(self, keys: Iterable[bytes]) -> bool | None:
        """Drops the results of these keys, which a finished output holds, and all data of the run. Returns whether any results remain.

        If none remain, the files can be removed and nothing is written to them: the output may have taken the last space on the disk.
        Returns None if there is not even space for that; a later call does the rest.
        """
        self._end_transaction()
        try:
            self._db.execute("DELETE FROM run.finished")
            self.know_finished(keys)
            held = "stays = 0 AND key IN (SELECT key FROM run.finished)"
            if not self._number(f"SELECT EXISTS(SELECT 1 FROM results WHERE NOT ({held}))"):
                return False
            with transaction(self._db):
                self._db.execute(f"DELETE FROM results WHERE {held}")
                for table in ("forgotten", "under_way", "rows", "equal", "taken", "facts"):
                    self._db.execute(f"DELETE FROM {table}")
            self._db.execute("VACUUM main")
        except sqlite3.OperationalError as e:
            if e.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            return None
        return True

    # -- facts

    def fact(self, name: str) -> Any:
        """Returns the value of a name; None if there is none or it is damaged."""
        return _fact(self._db, name)

    def set_fact(self, name: str, value: Any) -> None:
        data = _json(value)
        entry = (name, data, zlib.crc32(name.encode() + data))
        self._write_one("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", entry)

    def keep_progress(self, figures: Mapping[str, Any]) -> None:
        """Stores the progress of the run, for `status` in another process."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        self.set_fact("progress", {**figures, "results": self._known, "updated": now})

    def forget_reading(self) -> None:
        """Makes sure that no later run uses the first reading of the input."""
        self._write_one("DELETE FROM facts WHERE name = 'reading'")

    # -- writing

    def _write_one(self, statement: str, values: Sequence[Any] = ()) -> None:
        if self._without_log and not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
        self._db.execute(statement, values)

    def _many(self, statement: str, entries: Sequence[Sequence[Any]]) -> None:
        if entries:
            with transaction(self._db):
                self._db.executemany(statement, entries)

    def commit(self) -> None:
        """Makes everything that was written survive the end of this process. On a network file system only `flush` does.

        Raises `OutputError` within `flush_every` seconds if the database was removed: no run could go on from what is written to it.
        """
        self._check()
        if not self._without_log:
            self._end_transaction()
        if time.monotonic() - self._synced >= self._flush_every:
            with writing(self.folder):
                (self.folder / RESULTS_FILE).stat()
            self.flush()

    def _end_transaction(self) -> None:
        if self._db.in_transaction:
            self._db.execute("COMMIT")

    def flush(self) -> None:
        """Writes everything to disk."""
        self._check()
        with writing(self.folder):
            self._end_transaction()
            if not self._without_log:
                with suppress(FileNotFoundError):  # nothing was written since the last checkpoint, which has synced
                    fd = os.open(self.folder / f"{RESULTS_FILE}-wal", os.O_RDWR)
                    try:
                        os.fsync(fd)
                    finally:
                        os.close(fd)
        self._synced = time.monotonic()

    def _check(self) -> None:
        """Drops what was not committed if another process has taken over the lease. Raises `OutputLocked` then."""
        try:
            if self._held_by is not None:
                self._held_by.check()
        except OutputLocked:
            self._new.clear()
            self._ended.clear()
            self._connection.rollback()
            raise

    def close(self) -> None:
        """Closes the database, which then is one file on disk. Does nothing the second time."""
        try:
            with suppress(sqlite3.ProgrammingError):  # closed already
                self._end_transaction()
        finally:
            self._connection.close()


def _make_tables(db: sqlite3.Connection) -> None:
    for statement in filter(str.strip, _TABLES.split(";")):
        db.execute(statement)
    if db.execute("PRAGMA user_version").fetchone() != (FORMAT,):
        db.execute(f"PRAGMA user_version = {FORMAT}")


def _make_run_tables(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA run.journal_mode = OFF")
    db.execute("PRAGMA run.synchronous = OFF")
    db.execute(f"PRAGMA run.cache_size = -{CACHE_KIB}")
    db.execute(
        "CREATE TABLE run.finished (key BLOB PRIMARY KEY, rows INTEGER NOT NULL, failed INTEGER NOT NULL) WITHOUT ROWID"
    )


def read_facts(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any], int | None]:
    """Returns facts by name and the number of results of a job that another process may be running; ({}, None) if they cannot be read now."""
    if not (folder / RESULTS_FILE).exists():
        return {}, None
    try:
        with closing(_read_only(folder)) as db:
            (count,) = db.execute("SELECT count(*) FROM results").fetchone()
            return {name: value for name in names if (value := _fact(db, name)) is not None}, int(count)
    except (sqlite3.Error, UnicodeDecodeError):
        return {}, None


def read_results(folder: Path) -> Iterator[Result]:
    """Yields the results that a job has so far, one at a time, of rows that became requests and of others; -1 stands for the row of the former.

    Another process may be running the job. Ends early if the database cannot be read now.
    """
    for _, result in read_keyed_results(folder):
        yield result
    with suppress(sqlite3.Error, UnicodeDecodeError), closing(_read_only(folder)) as db:
        yield from filter(None, _read_failed(db))


def read_keyed_results(folder: Path) -> Iterator[tuple[bytes, Result]]:
    """Yields those of rows that became requests, with their keys (`read_results`)."""
    with suppress(sqlite3.Error, UnicodeDecodeError), closing(_read_only(folder)) as db:
        for key, result in _read_all(db):
            if result is not None:
                yield key, result


def _read_only(folder: Path) -> sqlite3.Connection:
    """Opens the database to read it. Another process may be writing it. Raises `sqlite3.Error`."""
    path = folder / RESULTS_FILE
    # A closed WAL database has no log. It is opened as immutable, which creates none. Another one may be in use.
    closed = format_bytes(path) == b"\2\2" and not (folder / f"{RESULTS_FILE}-wal").exists()
    address = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if closed else ''}"
    return open_database(address, seconds=_READ_SECONDS, uri=True)


def _fact(db: sqlite3.Connection, name: str) -> Any:
    row = db.execute("SELECT value, checksum FROM facts WHERE name = ?", (name,)).fetchone()
    if row is None or not isinstance(row[0], bytes) or zlib.crc32(name.encode() + row[0]) != row[1]:
        return None
    try:
        return json.loads(row[0])
    except ValueError:
        return None


def _failed_row(number: int, value: bytes, checksum: int) -> Result | None:
    """Returns the result of a row that never became a request; None if its entry is damaged."""
    result = decode(number.to_bytes(8, "big"), value, checksum)
    return None if result is None else replace(result, row=number)


def _read_all(db: sqlite3.Connection, where: str = "") -> Iterator[tuple[Any, Result | None]]:
    for key, value, checksum in db.execute(f"SELECT key, value, checksum FROM results {where}"):
        yield key, decode(key, value, checksum)


def _read_failed(db: sqlite3.Connection) -> Iterator[Result | None]:
    query = "SELECT number, value, checksum FROM rows WHERE key IS NULL ORDER BY number"
    return (_failed_row(*entry) for entry in db.execute(query))


def _salvage(damaged: Path, new: Path) -> int:
    """Writes a new database with the results that can still be read. Returns how many were lost: at least 1, because the number may not be known."""
    lost = 1
    new.unlink(missing_ok=True)
    with closing(open_database(new)) as into:
        _make_tables(into)
        with transaction(into):
            for key, value, checksum, stays in _readable(damaged):
                result = decode(key, value, checksum)
                if result is None:
                    lost += 1
                else:
                    entry = (*_entry(key, result), 1 if stays else 0)
                    into.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?)", entry)
    return lost


def _readable(damaged: Path) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yields the results that can be read: from the first one forwards and from the last one backwards, up to the damage."""
    for order in ("ASC", "DESC"):
        with suppress(sqlite3.Error, UnicodeDecodeError), closing(open_database(damaged)) as db:
            yield from db.execute(f"SELECT key, value, checksum, stays FROM results NOT INDEXED ORDER BY rowid {order}")


def _entry(key: bytes, result: Result) -> tuple[bytes, str, bytes, int]:
    value = encode(result)
    return key, result.reason, value, zlib.crc32(key + value)


_ENCODER = json.JSONEncoder(ensure_ascii=False)


def _json(value: Any) -> bytes:
    # Python's JSON can hold infinities. Only lone surrogates cannot be encoded; Python's escape for them is also JSON's.
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def _length_and_reason(completion: Completion) -> tuple[int, str]:
    return len(completion.token_ids), completion.finish_reason


def _with_part(earlier: Completion, part: Completion) -> Completion:
    logprobs = None if part.logprobs is None else (earlier.logprobs or ()) + part.logprobs
    return replace(part, token_ids=earlier.token_ids + part.token_ids, logprobs=logprobs)


def _part_entry(key: bytes, number: int, start: int, completion: Completion) -> tuple[bytes, int, int, int, bytes, int]:
    """The entry of a completion's tokens from number `start` on."""
    logprobs = None if completion.logprobs is None else completion.logprobs[start:]
    part = replace(completion, token_ids=completion.token_ids[start:], logprobs=logprobs)
    value = _json(completion_values((part,), token_ids=True)[0])
    return key, number, start, len(part.token_ids), value, _part_checksum(key, number, start, value)


def _part(key: bytes, number: int, start: int, value: bytes, checksum: int) -> Completion | None:
    """Returns the tokens of an entry; None if it is damaged."""
    try:
        if _part_checksum(key, number, start, value) != checksum:
            return None
        return completions_of([json.loads(value)])[0]
    except (ValueError, TypeError, KeyError):
        return None


def _part_checksum(key: bytes, number: int, start: int, value: bytes) -> int:
    return zlib.crc32(key + number.to_bytes(8, "big") + start.to_bytes(8, "big") + value)


def encode(result: Result) -> bytes:
    """Returns a result as JSON, without its row number and without fields that have their defaults."""
    return _json(result_values(result))


def decode(key: bytes, value: bytes, checksum: int) -> Result | None:
    """Returns the result of an entry, with row -1; None if it is damaged, was written by a version with other fields, or is the row of an output
    that does not hold it whole."""
    try:
        if zlib.crc32(key + value) != checksum:
            return None
        values = json.loads(value.decode())
        return result_of_row(values) if "usage" in values else result_of_values(values)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
