"""Counts the calls with which a process changes files in one folder. At a chosen call the process dies or the call fails.

Calls are numbered from 1. Counted are Python's writes to files (open, write, truncate), the functions of `os` that change files, and
SQLite's statements. `Plan.how`:

    kill          SIGKILL before the call
    torn          half of a write is done, then SIGKILL
    cut           a power cut before the call: only the synced contents of files and folders remain, then SIGKILL
    SIGTERM …     this signal before the call
    ENOSPC, EIO … the call fails with this error (SQLite with its own message); with `lasting`, every later call too
"""

import builtins
import errno
import fcntl
import io
import os
import signal
import sqlite3
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.jobs.files.lease import LEASE_THREAD

BY_TIME = ("progress", "under_way")
"""Statements that contain these words run at intervals of time. They are not counted, and neither are the lease's beats, so that numbers are the same in every run."""
_SQLITE = {"ENOSPC": "database or disk is full", "EROFS": "attempt to write a readonly database"}


@dataclass(frozen=True)
class Plan:
    """What happens at which call. Only calls whose line in the log contains `only` are counted."""

    how: str = ""
    at: int = 0
    only: str = ""
    lasting: bool = False


class Watch:
    """Wraps `os`, `open` and SQLite after `install`. Writes a line `name path` to the file `log` for each call, if there is one."""

    def __init__(self, folder: Path, plan: Plan, log: Path | None) -> None:
        self._folder = os.path.realpath(folder)
        self._plan = plan
        self._log = -1 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._paths: dict[int, str] = {}
        self._count = 0
        self._disk = Disk(self._folder) if plan.how == "cut" else None

    def install(self) -> None:
        for name in ("mkdir", "unlink", "rmdir", "truncate"):
            self._wrap(os, name)
        for name in ("rename", "replace", "link", "symlink"):
            self._wrap(os, name, at=1)  # the path that the call creates
        for name in ("fsync", "fdatasync", "ftruncate", "pwrite"):
            self._wrap(os, name)
        self._wrap(fcntl, "flock")
        self._wrap_os_open()
        self._wrap_open()
        self._wrap_sqlite()

    def call(self, name: str, path: Any, act: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Counts a call, and runs it or what the plan says."""
        where = self._where(path)
        if where is None or threading.current_thread().name == LEASE_THREAD:
            return act()
        plan = self._plan
        if name.startswith("sqlite") and any(word in name for word in BY_TIME):
            late = plan.lasting and self._count >= plan.at > 0
            return self._happen(name, where, act, half) if late else act()
        line = f"{name} {where}"
        if self._log >= 0:
            _write(self._log, line.encode() + b"\n")
        if plan.only in line:
            self._count += 1
            if self._count == plan.at or (plan.lasting and self._count > plan.at > 0):
                return self._happen(name, where, act, half)
        return act()

    def _happen(self, name: str, where: str, act: Callable[[], Any], half: Callable[[], Any] | None) -> Any:
        how = self._plan.how
        if how == "cut":
            self._disk.power_cut()
        if how == "torn" and half is not None:
            half()
        if how in ("kill", "torn", "cut"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif how.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[how])
        elif how in errno.errorcode.values():
            number: int = getattr(errno, how)
            if name.startswith("sqlite"):
                raise sqlite3.OperationalError(_SQLITE.get(how, "disk I/O error"))
            raise OSError(number, os.strerror(number), where)
        return act()

    def _where(self, path: Any) -> str | None:
        """The path relative to the folder; None if it is elsewhere."""
        if isinstance(path, int | io.IOBase):
            path = self._paths.get(path if isinstance(path, int) else path.fileno())
            if path is None:
                return None
        folder, name = os.path.split(os.path.abspath(path))
        full = os.path.join(os.path.realpath(folder), name)
        if full == self._folder:
            return "."
        return full[len(self._folder) + 1 :] if full.startswith(self._folder + os.sep) else None

    def _wrap(self, module: Any, name: str, at: int = 0) -> None:
        real = getattr(module, name)
        syncs = name in ("fsync", "fdatasync")

        def wrapper(*args: Any, **options: Any) -> Any:
            def act() -> Any:
                done = real(*args, **options)
                if syncs and self._disk is not None:
                    self._disk.synced(args[0])
                return done

            path = args[at]
            if options.get("dir_fd") is not None:
                path = os.path.join(self._paths[options["dir_fd"]], path)
            return self.call(name, path, act)

        setattr(module, name, wrapper)

    def _wrap_os_open(self) -> None:
        real = os.open

        def wrapper(path: Any, flags: int, *args: Any, **options: Any) -> int:
            fd: int
            inside = options.get("dir_fd")
            real_path = path if inside is None else os.path.join(self._paths[inside], path)
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or os.path.isdir(real_path):
                fd = self.call("open", real_path, lambda: real(path, flags, *args, **options))
            else:
                fd = real(path, flags, *args, **options)
            self._paths[fd] = os.path.abspath(real_path)
            return fd

        os.open = wrapper

    def _wrap_open(self) -> None:
        real, watch = io.open, self

        class WatchedFile(io.FileIO):
            def write(self, data: Any) -> int:
                whole = bytes(data)
                act = super().write
                done: int = watch.call(
                    "write", self.name, lambda: act(whole), lambda: act(whole[: (len(whole) + 1) // 2])
                )
                return done

            def truncate(self, size: int | None = None) -> int:
                act = super().truncate
                done: int = watch.call("truncate", self.name, lambda: act(size))
                return done

        def wrapper(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+") or watch._where(os.fspath(file)) is None:
                return real(file, mode, buffering, *args, **options)
            raw = watch.call(
                "open", file, lambda: WatchedFile(os.path.abspath(file), mode.replace("t", "").replace("b", ""))
            )
            watch._paths[raw.fileno()] = os.path.abspath(file)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

        builtins.open = io.open = wrapper

    def _wrap_sqlite(self) -> None:
        real, watch = sqlite3.connect, self

        class WatchedConnection(sqlite3.Connection):
            place = ""

            def execute(self, statement: str, *args: Any) -> Any:
                act = super().execute
                return watch.call(_named(statement, args), self.place, lambda: act(statement, *args))

            def executemany(self, statement: str, *args: Any) -> Any:
                act = super().executemany
                return watch.call(_named(statement, args), self.place, lambda: act(statement, *args))

        def connect(database: Any, *args: Any, **options: Any) -> Any:
            place = os.path.abspath(database) if database else ""
            connection = watch.call(
                "sqlite", place or os.devnull, lambda: real(database, *args, factory=WatchedConnection, **options)
            )
            connection.place = place or os.devnull
            return connection

        sqlite3.connect = connect


def _named(statement: str, args: tuple[Any, ...]) -> str:
    """The name of a statement in the log, such as `sqlite INSERT results`: its verb, and its table or fact."""
    words = statement.replace("(", " ").split()
    tables = [word for word in words if word in ("results", "under_way", "rows", "facts", "run.counts", "run.finished")]
    fact = args[0][0] if args and tables == ["facts"] and "?" in statement else ""
    return " ".join(filter(None, ["sqlite", words[0], *tables[:1], fact]))


class Disk:
    """What a power cut leaves of a folder at worst: file contents and folder entries as they were last synced.

    Files that exist at the start count as synced. When the write-ahead log of `results.sqlite` is synced, the database counts as synced
    too, because SQLite copies only synced pages into it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._contents: dict[int, tuple[bytes, int]] = {}
        """By inode of a file: its content on disk and its time of change."""
        self._entries: dict[int, dict[str, int]] = {}
        """By inode of a folder: the names in it on disk and their inodes."""
        self._folders: set[int] = set()
        for place, _, files in os.walk(folder):
            self._sync_folder(place)
            for name in files:
                self._sync_file(os.path.join(place, name))

    def synced(self, fd: int) -> None:
        there = os.fstat(fd)
        if stat.S_ISDIR(there.st_mode):
            self._sync_folder(fd)
        else:
            self._contents[there.st_ino] = (_content(fd, there.st_size), there.st_mtime_ns)
            self._sync_database(there.st_ino)

    def _sync_database(self, log: int) -> None:
        """Records the database of a synced log, and its name in the folder, which SQLite syncs with a new log."""
        for place, _, files in os.walk(self._folder):
            if "results.sqlite-wal" in files and os.stat(os.path.join(place, "results.sqlite-wal")).st_ino == log:
                path = os.path.join(place, "results.sqlite")
                there = os.stat(path)
                fd = _open(path, os.O_RDONLY)
                self._contents[there.st_ino] = (_content(fd, there.st_size), there.st_mtime_ns)
                _close(fd)
                entries = self._entries.setdefault(os.stat(place).st_ino, {})
                entries |= {"results.sqlite-wal": log, "results.sqlite": there.st_ino}

    def _sync_file(self, path: str) -> None:
        fd = _open(path, os.O_RDONLY)
        self.synced(fd)
        _close(fd)

    def _sync_folder(self, place: str | int) -> None:
        inode = (os.fstat(place) if isinstance(place, int) else os.stat(place)).st_ino
        entries = {}
        with os.scandir(place) as there:
            for entry in there:
                found = entry.stat(follow_symlinks=False)
                entries[entry.name] = found.st_ino
                if stat.S_ISDIR(found.st_mode):
                    self._folders.add(found.st_ino)
        self._entries[inode] = entries

    def power_cut(self) -> None:
        """Replaces the folder's contents by those on disk."""
        after = self._folder + ".after"
        self._restore(os.stat(self._folder).st_ino, after)
        for place, folders, files in os.walk(self._folder, topdown=False):
            for name in files:
                _unlink(os.path.join(place, name))
            for name in folders:
                _rmdir(os.path.join(place, name))
        for name in os.listdir(after):
            _rename(os.path.join(after, name), os.path.join(self._folder, name))
        _rmdir(after)

    def _restore(self, inode: int, place: str) -> None:
        _mkdir(place)
        for name, child in self._entries.get(inode, {}).items():
            path = os.path.join(place, name)
            if child in self._folders:
                self._restore(child, path)
            else:
                content, changed = self._contents.get(child, (b"", 0))
                fd = _open(path, os.O_WRONLY | os.O_CREAT, 0o644)
                _write(fd, content)
                _close(fd)
                os.utime(path, ns=(changed, changed))


# The unwrapped functions, for this module.
_open, _close, _write, _mkdir, _rmdir, _rename, _unlink = (
    os.open, os.close, os.write, os.mkdir, os.rmdir, os.rename, os.unlink,
)  # fmt: skip


def _content(fd: int, size: int) -> bytes:
    """The content of a file that may be open only for writing."""
    copy = _open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        return os.pread(copy, size, 0)
    finally:
        _close(copy)
