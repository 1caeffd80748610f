"""A lock that allows one run at a time on one output, and a file that says which process holds it.

The lock is the kernel's (flock), so the lock of a killed run is free at once. The file names process, host and start time. If it names another
host, the lock counts as held, because flock does not work across all network file systems.
"""

from __future__ import annotations

import datetime as dt
import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchgen.errors import OutputLocked

_CLOCKS = 60.0  # seconds that the system's two clocks may have drifted apart
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Lock:
    """Holds `path` until `release`. Raises `OutputLocked`, which names the holder, and `OSError` if the file cannot be created."""

    def __init__(self, path: Path, output: str, *, leased: bool = False) -> None:
        """`leased`: this process has the job's lease (`lease.Lease`), without which no other run with shards can have the lock."""
        self.taken_over: int | None = None
        """The process id of a run that ended without releasing the lock, else None."""
        self._leased = leased
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
            raise held_by_another(output, _holder(self._fd)) from None
        except OSError as e:
            if e.errno not in _NO_FLOCK:
                raise
            kernel = False
        holder = _holder(self._fd)
        known_dead = self._leased and holder.get("leased") is True
        if holder.get("host") not in (None, socket.gethostname()) and not known_dead:
            raise OutputLocked(
                f"another run holds {output} (process {holder.get('pid')} on {holder['host']}, since {holder.get('started')}); this host cannot tell whether it still runs",
                f"wait for it; if it is dead, delete {path}",
            )
        another = holder and holder["pid"] != os.getpid()
        if another and not kernel and not known_dead and _exists(holder["pid"]):
            raise held_by_another(output, holder)
        self.taken_over = holder.get("pid")
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        } | ({"leased": True} if self._leased else {})
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(me).encode(), 0)

    def release(self) -> None:
        """Empties the file and releases the lock. (If the file were deleted, two runs could hold two files of one name.)

        If the disk is full, this process stays named in the file, and the next run takes over from a dead process.
        """
        if self._fd >= 0:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def check_free(path: Path, output: str) -> None:
    """Raises `OutputLocked` if a run on this machine holds the lock. Does not take the lock."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise held_by_another(output, _holder(fd)) from None
    except OSError:
        return  # a file system without locks: taking the lock will report it
    finally:
        os.close(fd)


def holder_of(path: Path) -> dict[str, Any]:
    """Returns who holds a lock, or held it when it died (`pid`, `host`, `started`); empty if nobody does. Does not take the lock."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    try:
        return _holder(fd)
    finally:
        os.close(fd)


def lives(holder: Mapping[str, Any]) -> bool | None:
    """Whether that process still runs; None if this host cannot tell."""
    if holder["host"] != socket.gethostname():
        return None
    if not _exists(holder["pid"]):
        return False
    stat = _process_stat(holder["pid"])
    if stat[:1] == ["Z"]:  # a zombie: it has ended, and its parent has not collected its exit status yet
        return False
    begun, named = _begun(stat), timestamp(holder["started"])
    return begun is None or named is None or begun <= named + _CLOCKS


def _process_stat(pid: int) -> list[str]:
    """Returns the fields of `/proc/PID/stat` from the state of the process on (proc(5)); empty if the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _begun(stat: list[str]) -> float | None:
    """Returns when a process started, in seconds since 1970; None if the system does not tell. Needed because process ids are used again."""
    try:
        boot = Path("/proc/stat").read_text(encoding="ascii", errors="replace").partition("\nbtime ")[2].split()[0]
        return int(boot) + int(stat[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def timestamp(time: Any) -> float | None:
    """Seconds since 1970 of a time in ISO 8601; None for anything else."""
    try:
        return dt.datetime.fromisoformat(time).timestamp()
    except (ValueError, TypeError):
        return None


def held_by_another(what: str, holder: Mapping[str, Any]) -> OutputLocked:
    """Returns the error for a lock or a lease that a process holds; `holder` is empty if that has just started."""
    who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}" if holder else "just started"
    return OutputLocked(f"another run holds {what} ({who})", "wait for it to end, or stop it")


def _holder(fd: int) -> dict[str, Any]:
    """Returns who the file names; empty if it was released or cut off while it was written."""
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    known = isinstance(holder, dict) and {"pid", "host", "started"} <= holder.keys()
    return holder if known else {}


def _exists(pid: Any) -> bool:
    """Whether a process has this id."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, TypeError):
        return False
    except PermissionError:  # it is another user's
        pass
    return True
