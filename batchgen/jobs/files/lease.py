"""A lease: one process of all machines that see a folder holds it. The holder renews the lease; the others notice when it stops doing so.

It allows one run at a time on an output, and on each shard of one. File locks are not enough here. On some network file systems a lock holds on one machine only, and a machine that is gone may leave its
locks behind. A lease needs two properties of a file system, and NFS has both since version 3: if several machines create a file with `O_EXCL`, only
one succeeds; and a machine that opens a file sees what was written before the file was closed.

The folder contains `claim-000001`, `claim-000002`…. Each start creates the next claim, and the last claim counts. Every few seconds its
holder writes a new beat into it. A lease is free if its holder has released it, or if the beat has not changed for a minute. The holder also
locks its claim (flock): on the same machine the lock tells at once whether it lives. The waiting process measures that minute with its own clock; the clocks of two machines
are never compared. A holder that was suspended for a minute finds a newer claim, and stops before it writes anything.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchgen.errors import OutputLocked, UsageError
from batchgen.jobs.files.disk import file_system, writing

LEASE_THREAD = "batchgen-lease"
_KEPT = 100
"""Claims that stay beside the last one. A process that is slow to create the next claim must not find its number free again."""
_SIZE = 4096
"""Bytes of a claim, padded: a beat overwrites it in place by one write."""
_CLAIM = re.compile(r"claim-(\d{6,})")
_OBJECT_STORES = re.compile(
    r"fuse\.(gcsfuse|s3fs|goofys|geesefs|mountpoint-s3|mount-s3|rclone|blobfuse2?|ossfs|hf-mount)"
)
"""File systems over an object store: there a file that must be new may be made twice."""


@dataclass(frozen=True, slots=True)
class Beats:
    """Seconds between two renewals, seconds without a renewal after which the holder counts as dead, and seconds between two looks at it."""

    every: float = 5.0
    silent: float = 60.0
    look: float = 0.5


DEFAULT_BEATS = Beats()
SILENT_SECONDS = 30.0
"""After so long without a sign of life the process of another machine is called silent: six beats."""


class Lease:
    """A claim on `folder`, held until `release`. The folder's parent must exist.

    Raises `OutputLocked` naming the holder if another process has it. `tell` is called with a sentence before a wait of up to
    `beats.silent` seconds, to see whether a process of another machine still lives.
    """

    def __init__(
        self,
        folder: Path,
        what: str,
        tell: Callable[[str], None] = lambda _: None,
        beats: Beats = DEFAULT_BEATS,
        *,
        unsharded: bool = False,
    ) -> None:
        """`unsharded`: the holder is a run of the whole job without shards. Its claim says so."""
        self._folder, self._what = folder, what
        self._beats = beats
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._me = {"pid": os.getpid(), "started": started, **_this_machine(), "unsharded": unsharded}
        self.taken_over: dict[str, Any] | None = None
        """The dead holder that this lease was taken from."""
        self.before = ""
        """The state of the claim before this one."""
        self._told: Mapping[str, Any] = {}
        self._count = 0
        self._lost = False
        self._ended = threading.Event()
        self._writing = threading.Lock()
        with writing(folder):
            folder.mkdir(exist_ok=True)
            self._fd, self._number = self._claim(tell)
            try:
                self._me |= {"number": self._number, "locked": _locked(self._fd)}
                self._beat()
            except BaseException:
                os.close(self._fd)
                _claim_path(folder, self._number).unlink(missing_ok=True)
                raise
            _claim_path(folder, self._number - _KEPT).unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run, name=LEASE_THREAD, daemon=True)
        self._thread.start()

    def tell(self, progress: Mapping[str, Any]) -> None:
        """Sets the progress that the next renewals write beside the holder's name."""
        self._told = progress

    def check(self) -> None:
        """Raises `OutputLocked` if another process has taken the lease over. Must be called before every write that the lease protects."""
        if not self._lost and _clock() - self._beaten > self._beats.silent / 2:
            with writing(self._folder):
                self._beat()  # this process was suspended, or the folder could not be reached
        if self._lost:
            raise OutputLocked(
                f"{self._what} was taken over by another run: this one had given no sign of life for {self._beats.silent:.0f} seconds",
                "leave it to the other run",
            )

    def release(self, state: str = "released") -> None:
        """Releases the lease. `state` stays in the claim. Does nothing the second time."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            if not self._lost:
                self._beat(state)
        os.close(self._fd)

    def _claim(self, tell: Callable[[str], None]) -> tuple[int, int]:
        while True:
            number, holder = last_claim(self._folder)
            if holder is not None and _is_running(holder):
                if not self._is_dead(number, holder, tell):
                    raise held_by_another(self._what, holder)
                self.taken_over = holder
            self.before = "" if holder is None else str(holder.get("state", "running"))
            with suppress(FileExistsError):
                return os.open(
                    _claim_path(self._folder, number + 1), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644
                ), number + 1

    def _is_dead(self, number: int, holder: dict[str, Any], tell: Callable[[str], None]) -> bool:
        alive = is_alive_here(self._folder, holder)
        if alive is not None:
            return not alive
        silent = self._beats.silent if holder else self._beats.every  # a claim without content was made a moment ago
        who = f"was last held by process {holder['pid']} on {holder['host']}" if holder else "is claimed"
        tell(f"{self._what} {who}: looking for up to {silent:.0f} seconds whether its process still runs")
        until = _clock() + silent
        while _clock() < until:
            time.sleep(self._beats.look)
            now, other = last_claim(self._folder)
            if now != number or other != holder:
                return other is None or not _is_running(other)
        return True

    def _run(self) -> None:
        while not self._ended.wait(self._beats.every):
            with suppress(OSError):  # it is tried again, and `check` looks before anything is written
                self._beat()

    def _beat(self, state: str = "running") -> None:
        with self._writing:
            if last_claim(self._folder, read=False)[0] > self._number:
                self._lost = True
                return
            self._count += 1
            now = datetime.now(UTC).isoformat(timespec="seconds")
            claim = self._me | {"state": state, "beat": self._count, "seen": now, "told": dict(self._told)}
            data = json.dumps(claim).encode()
            if len(data) > _SIZE:
                data = json.dumps(claim | {"told": {}}).encode()
            os.pwrite(self._fd, data.ljust(_SIZE), 0)
            os.fsync(self._fd)
            self._beaten = _clock()


def last_claim(folder: Path, *, read: bool = True) -> tuple[int, dict[str, Any] | None]:
    """Returns the number and the content of the last claim on a folder; (0, None) if there is none. Changes nothing."""
    try:
        numbers = [int(m[1]) for name in os.listdir(folder) if (m := _CLAIM.fullmatch(name))]  # noqa: PTH208 - names alone
    except FileNotFoundError:
        return 0, None
    number = max(numbers, default=0)
    if not number or not read:
        return number, None
    try:
        claim = json.loads(_claim_path(folder, number).read_bytes())
    except (ValueError, FileNotFoundError):
        claim = None  # it was made a moment ago
    return number, claim if isinstance(claim, dict) else {}


def _is_running(claim: Mapping[str, Any]) -> bool:
    """Whether a claim was not released. One that cannot be read was made a moment ago."""
    return bool(claim.get("state", "running") == "running")


def check_free_here(folder: Path, what: str) -> None:
    """Raises `OutputLocked` if a process of this machine holds the lease. Does not take it."""
    _, holder = last_claim(folder)
    if holder and _is_running(holder) and is_alive_here(folder, holder):
        raise held_by_another(what, holder)


def holder_of_lease(folder: Path) -> dict[str, Any] | None:
    """Returns the holder that a claim names; None if there is none, or if it was a process of this machine that no longer exists."""
    _, holder = last_claim(folder)
    if holder is None or not _is_running(holder) or is_alive_here(folder, holder) is False:
        return None
    return holder


def is_alive_here(folder: Path, holder: Mapping[str, Any]) -> bool | None:
    """Returns whether the holder that a claim on `folder` names is running; None if it may be a process of another machine, or cannot be asked."""
    if holder.get("locked") is not True or any(holder.get(name) != value for name, value in _this_machine().items()):
        return None
    try:
        fd = os.open(_claim_path(folder, holder["number"]), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _locked(fd: int) -> bool:
    """Locks a claim. The kernel releases the lock when the process ends, in whatever way. Returns False if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _claim_path(folder: Path, number: int) -> Path:
    return folder / f"claim-{number:06d}"


def held_by_another(what: str, holder: Mapping[str, Any]) -> OutputLocked:
    """Returns the error for a lease that a process holds; `holder` is empty if that has just started."""
    who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}" if holder else "just started"
    return OutputLocked(f"another run holds {what} ({who})", "wait for it to end, or stop it")


def seconds_since(text: Any) -> float | None:
    """Seconds since a time in ISO 8601, which another machine's clock may have told; None for anything else."""
    try:
        return time.time() - datetime.fromisoformat(text).timestamp()
    except (ValueError, TypeError):
        return None


def check_shared_folder(folder: Path) -> None:
    """Raises `UsageError` for a file system on which a lease cannot be trusted."""
    kind = file_system(folder)
    if _OBJECT_STORES.fullmatch(kind):
        raise UsageError(
            f"{folder} is on {kind}, where two machines can make the same file, so shards cannot be kept apart",
            "name a folder on a disk, on NFS or on a cluster's file system with --work-dir",
        )


def _this_machine() -> dict[str, str]:
    """Returns what identifies this machine since it was started."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"host": socket.gethostname(), "boot": boot}


def _clock() -> float:
    """Seconds, those in which the machine was suspended too."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
