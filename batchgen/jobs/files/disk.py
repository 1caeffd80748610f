"""Writing to a disk safely: readable errors, and files that are whole after a power cut."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import re
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.errors import OutputError, UsageError
from batchgen.records.remote import file_matcher

_HINT = "check the disk and run the same command again: finished rows are kept"
_NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "fuse.",
)  # fmt: skip
_ESCAPED = re.compile(rb"\\([0-7]{3})")
"""A space, tab, line feed or backslash of a path in a list of mounts."""
_NOT_REPLACED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)
"""Errors of a file that can be written to but not replaced by another: its folder is not writable, or the file is a mount of its own."""
_HINTS = {
    errno.ENOSPC: "free some space and run the same command again: finished rows are kept",
    errno.EDQUOT: "free some of your quota and run the same command again: finished rows are kept",
    errno.EMFILE: "raise the limit of open files (ulimit -n) and run the same command again: finished rows are kept",
    errno.ENOENT: "its folder was removed while the job ran: run the same command again",
    errno.EROFS: "write to another place with -o or --work-dir",
    errno.EACCES: "check the permissions, or write to another place with -o or --work-dir",
    errno.EPERM: "check the permissions, or write to another place with -o or --work-dir",
}
_SQLITE_HINTS = {
    sqlite3.SQLITE_FULL: _HINTS[errno.ENOSPC],
    sqlite3.SQLITE_READONLY: _HINTS[errno.EROFS],
    sqlite3.SQLITE_CANTOPEN: "check its permissions and the limit of open files (ulimit -n), and run the same command again: finished rows are kept",
}


def check_parent(folder: Path) -> None:
    """Raises `UsageError` if the folder that would hold this one does not exist."""
    if not folder.parent.is_dir():
        file = next((above for above in folder.parents if above.is_file()), None)
        hint = f"create it with mkdir -p {folder.parent}" if file is None else f"{file} is a file: use another place"
        raise UsageError(f"there is no folder {folder.parent} to write to", hint)


def writing(what: str | Path) -> AbstractContextManager[None]:
    """Turns errors of the disk and of SQLite into `OutputError`, which says what cannot be written, why, and what to do."""
    return _in_words(f"{what} cannot be written")


def reading(what: str | Path) -> AbstractContextManager[None]:
    """Does the same for reading a job's own files."""
    return _in_words(f"{what} cannot be read")


@contextmanager
def _in_words(failure: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        reason = os.strerror(e.errno) if e.errno else str(e)
        raise OutputError(f"{failure}: {reason}", _HINTS.get(e.errno or 0, _HINT)) from e
    except sqlite3.Error as e:
        code = getattr(e, "sqlite_errorcode", 0) & 0xFF
        raise OutputError(f"{failure}: {e}", _SQLITE_HINTS.get(code, _HINT)) from e
    except pa.ArrowException as e:
        raise OutputError(f"{failure}: {e}", _HINT) from e


def network_file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether a folder is on a network file system. False if the system does not tell (not Linux)."""
    kind = file_system(folder, mounts)
    return kind == "fuse" or kind.startswith(_NETWORK)


def shares_memory(folder: Path) -> bool:
    """Whether processes can share memory through a file in this folder. False on some file systems of virtual machines, and of FUSE with `direct_io`."""
    trial = folder / "shared-memory"
    try:
        with trial.open("w+b") as file:
            file.truncate(mmap.PAGESIZE)
            try:
                mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
            except OSError:
                return False
        return True
    finally:
        trial.unlink(missing_ok=True)


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that a folder is on, such as `ext4` or `nfs4`; empty where the system does not say (no Linux)."""
    found, kind = Path("/"), ""
    place = folder.resolve()
    try:
        lines = mounts.read_bytes().rstrip(b"\n").split(b"\n")
    except OSError:
        return ""
    for line in lines:  # `id parent major:minor root MOUNT options … - TYPE source options`; proc(5)
        before, _, after = line.partition(b" - ")
        escaped = before.split(b" ")[4]
        mount = Path(os.fsdecode(_ESCAPED.sub(lambda octal: bytes([int(octal[1], 8)]), escaped)))
        if place.is_relative_to(mount) and len(mount.parts) >= len(found.parts):
            found, kind = mount, after.split()[0].decode()
    return kind


def sync_folder(folder: Path) -> None:
    """Makes renames and new files in `folder` survive a power cut, if the folder can be opened: one without permission to read it cannot."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no folders
            raise
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    """Replaces the file `path` by `value` as JSON. After a power cut, the old or the new file is there, never a part of one."""
    _replace(path, path.with_name(path.name + ".new"), json.dumps(value, indent=1).encode() + b"\n")
    sync_folder(path.parent)


def write_whole(path: str | Path, text: str) -> None:
    """Replaces a file by one with this text in UTF-8 (what UTF-8 cannot hold becomes `?`). A link stays a link. Raises `OSError`.

    A file that cannot be replaced is written in place: a pipe, a device, the target of `/dev/stdout` and `/dev/stderr` (which is not
    truncated then), and a file that is a mount of its own or whose folder cannot be written to.
    """
    data, place = text.encode("utf-8", "replace"), Path(path).resolve()
    stream = _standard_stream(path)
    if stream is not None:
        with os.fdopen(os.dup(stream), "wb") as file:
            file.write(data)
    elif Path(path).exists() and not place.is_file():
        Path(path).write_bytes(data)
    else:
        try:
            _replace(place, place.with_name(f".batchgen-{os.getpid()}.new"), data)
        except OSError as e:
            if e.errno not in _NOT_REPLACED or not place.is_file():
                raise
            place.write_bytes(data)


def _standard_stream(path: str | Path) -> int | None:
    """Returns the descriptor of standard output or standard error if that is what `path` names."""
    for stream in (1, 2):
        with suppress(OSError):  # no such file yet, or a closed stream
            if os.path.samestat(Path(path).stat(), os.fstat(stream)):
                return stream
    return None


def _replace(place: Path, new: Path, data: bytes) -> None:
    """Writes `data` to the file `new` and renames that to `place`. `new` never stays. Raises `OSError`."""
    try:
        with new.open("wb") as file:
            if place.exists():
                shutil.copymode(place, new)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(place)
    except BaseException:
        with suppress(OSError):  # the folder cannot be written to
            new.unlink(missing_ok=True)
        raise


def check_file(option: str, path: str | None, others: Iterable[str] = ()) -> None:
    """Raises `UsageError` if a file of the option's value cannot be written, or is one of `others`. Called before any work is done."""
    if path is None:
        return
    file, name = Path(path).absolute(), f"{option} {path}".strip()
    if not file.parent.is_dir() or file.is_dir():
        raise UsageError(f"{name} cannot be written", "name a file in a folder that exists")
    if not any(os.access(place, os.W_OK) for place in (file.parent, file)):
        raise UsageError(f"{name} cannot be written: permission denied or a read-only disk", "name another file")
    is_file_itself = file_matcher(str(file))
    for other in others if file.is_file() or not file.exists() else ():
        if is_file_itself(other):
            raise UsageError(f"{name} would replace {other}, which the job needs", "name another file")


def write_stats(path: str | None, stats: Mapping[str, Any]) -> None:
    """Writes the figures of a run to the file of `--stats`, if there is one. Raises `OutputError`."""
    if path is not None:
        try:
            write_whole(path, json.dumps(stats, indent=2) + "\n")
        except OSError as e:
            raise OutputError(f"--stats {path} cannot be written: {e.strerror}") from e


def json_digest(value: Any) -> str:
    """Returns a digest of a JSON value, by which two values are compared."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def move_file(source: Path, target: Path) -> None:
    """Renames a file. If the target is on another disk, copies the file beside the target first."""
    try:
        source.replace(target)
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
        near = target.with_name(f".{target.name}.new")
        try:
            shutil.copyfile(source, near)
            shutil.copystat(source, near)
            with near.open("rb+") as file:
                os.fsync(file.fileno())
            near.replace(target)
        except BaseException:
            near.unlink(missing_ok=True)
            raise
    sync_folder(target.parent)
