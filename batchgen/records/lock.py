"""One run at a time on one output: a lock that dies with its process, and a file that says who holds it.

The lock is the kernel's (flock), so that a killed run's is free at once. The file names process, host and start; another host's name
in it stands, because flock does not reach over every network file system.
"""

from __future__ import annotations

import datetime as dt
import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from batchgen.errors import OutputLocked

_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Lock:
    """Holds `path` until `release`. Raises `OutputLocked` naming the holder; `OSError` where the file cannot be made."""

    def __init__(self, path: Path, output: str) -> None:
        self.taken_over: int | None = None
        """The process of a run that ended without releasing the lock."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(path, output)
        except BaseException:
            os.close(self._fd)
            raise

    def _take(self, path: Path, output: str) -> None:
        kernel = True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked(output, _holder(self._fd)) from None
        except OSError as e:
            if e.errno not in _NO_FLOCK:
                raise
            kernel = False
        holder = _holder(self._fd)
        if holder.get("host") not in (None, socket.gethostname()):
            raise OutputLocked(
                f"another run holds {output} (process {holder.get('pid')} on {holder['host']}, since {holder.get('started')}), and whether it still runs cannot be seen from this host",
                f"wait for it; if it is dead, delete {path}",
            )
        if holder and not kernel and _alive(holder.get("pid")):
            raise _locked(output, holder)
        self.taken_over = holder.get("pid")
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(me).encode(), 0)

    def release(self) -> None:
        """Empties the file (unlinking it would let two runs hold two files of one name) and lets go."""
        if self._fd >= 0:
            try:
                os.ftruncate(self._fd, 0)
            finally:
                os.close(self._fd)
                self._fd = -1


def _locked(output: str, holder: dict[str, Any]) -> OutputLocked:
    who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}" if holder else "just started"
    return OutputLocked(f"another run holds {output} ({who})", "wait for it to end, or stop it")


def _holder(fd: int) -> dict[str, Any]:
    """Who the file names; empty where it was released, or cut while it was written."""
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    known = isinstance(holder, dict) and {"pid", "host", "started"} <= holder.keys()
    return holder if known else {}


def _alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, TypeError):
        return False
    except PermissionError:
        return True
    return int(pid) != os.getpid()
