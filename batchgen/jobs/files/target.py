"""The place of the finished output: a local file, replaced by one rename, or an object in a store, replaced by one upload.

A job works in its folder. This module only looks at the file at the output's place and puts the finished file there. A file is recognised by
its identity: `size`, a field that changes with the content (`mtime_ns`, in a store `version`), and the content's `digest`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from batchgen.errors import OutputError, UsageError
from batchgen.jobs.files.disk import check_parent, move_file
from batchgen.jobs.files.manifest import DIGEST, digest_of, file_digest
from batchgen.records.remote import (
    address,
    info_of,
    is_url,
    object_version,
    open_remote,
    plain_name,
    reaching,
    remote,
)

_STAGED = ("s3", "s3a")
"""Stores in which an upload can be started and discarded unseen, to find out whether writing is allowed."""
_AT_ONCE = (*_STAGED, "gs", "gcs", "hf", "abfs", "abfss", "az")
"""Stores whose uploads appear whole or not at all. Elsewhere the file is uploaded under another name and then renamed."""
_ANOTHER = "check the address, your access to it and the connection, or use another -o"
_AGAIN = "check the connection and your access, and run the same command again: finished rows are kept"


def known_as(target: Target, identities: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the one of `identities` that the existing output has; None if it has none of them.

    If size and time do not match (because the file was copied, for example), a file of the right size is compared by its content: only then
    it is read.
    """
    now = target.identity()
    if all(value is not None for name, value in now.items() if name != DIGEST):
        for i in identities:
            if i | {DIGEST: None} == now:
                return i
    digests = [i[DIGEST] for i in identities if i["size"] == now["size"] and i[DIGEST]]
    content = target.digest() if digests else None
    return now | {DIGEST: content} if content in digests else None


def is_known(target: Target, identities: Sequence[dict[str, Any]]) -> bool:
    """Whether the existing output is one of `identities`, or looks like one in a store that tells only its size. Reads it only if neither is so."""
    now = target.identity()
    return any(one | {DIGEST: None} == now for one in identities) or known_as(target, identities) is not None


def open_target(output: str) -> Target:
    """Returns the target of `output`, as the user named it. Raises `UsageError` if a store's package is not installed."""
    name = plain_name(output)
    return RemoteTarget(name) if is_url(name) else LocalTarget(name)


class LocalTarget:
    """A file."""

    def __init__(self, output: str) -> None:
        self._path = Path(os.path.realpath(output))  # a link stays one
        self.name = output
        """The name under which the output can be read."""
        self.address = str(Path(output).absolute())
        """Its absolute name, for the manifest."""

    def check(self) -> None:
        """Raises `UsageError` if no output can be written there, as far as that can be found out beforehand."""
        if self._path.is_symlink():
            raise UsageError(f"the output {self.name} is a link that leads back to itself", "remove it, or name a file")
        if self._path.is_dir():
            raise UsageError(f"the output {self.name} is a folder", "name a file in it")
        if self._path.exists() and not self._path.is_file():
            why = f"the output {self.name} is a pipe or a device, which a file would replace"
            raise UsageError(why, f"write rows to it with -o - > {self.name}")
        check_parent(Path(self.name))
        if not self._path.parent.is_dir():
            why = f"the output {self.name} is a link to {Path(self.name).readlink()}, whose folder does not exist"
            raise UsageError(why, "check the link")
        if not os.access(self._path.parent, os.W_OK | os.X_OK):
            raise UsageError(
                f"{self.name} cannot be written: {self._path.parent} is read-only",
                "check its permissions, or use another -o",
            )

    def exists(self) -> bool:
        return self._path.exists()

    def identity(self) -> dict[str, Any]:
        """Returns the identity of the existing output, without its digest."""
        return _identity_at(self._path, None)

    def digest(self) -> str:
        """Returns the digest of the existing output, which is read for it."""
        return file_digest(self._path)

    def to_be(self, partial: Path, digest: str) -> dict[str, Any]:
        """Returns the identity that `partial` will have at its place, as far as it is known beforehand."""
        return _identity_at(partial, digest)  # a rename keeps the time

    def put(self, partial: Path, digest: str) -> dict[str, Any]:
        """Puts `partial` in its place atomically and returns its identity. Can be repeated after a crash."""
        there = self.to_be(partial, digest)
        move_file(partial, self._path)
        return there


def _identity_at(path: Path, digest: str | None) -> dict[str, Any]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, DIGEST: digest}


class RemoteTarget:
    """An object in a store, with the methods of `LocalTarget`. Its errors become `UsageError` before the run and `OutputError` at the end.

    An object's version is known only after the upload. If a crash happens before the manifest has the version, the object is recognised by
    size and digest; it is read once for that.
    """

    def __init__(self, output: str) -> None:
        self.name = output
        self.address = address(output)
        if "::" in output:
            raise UsageError(f"the output {output} is a file inside an archive", "write it as a separate file")
        self._scheme = self.address.partition("://")[0]
        if self._scheme in ("http", "https"):
            raise UsageError(
                f"the output {output} is a web address", "name a local file, or a store: s3://bucket/o.jsonl"
            )
        self._fs, self._path = remote(output, verb="written")

    def check(self) -> None:
        there = self._info()
        if there is not None and there["type"] == "directory":
            raise UsageError(f"the output {self.name} is a folder", "name a file in it")
        with reaching(self.name, verb="written", hint=_ANOTHER):
            if self._scheme in _STAGED:
                self._try_upload()
            elif self._scheme in _AT_ONCE:
                self._fs.info(self._container())
            else:
                self._try_file()

    def exists(self) -> bool:
        return self._info() is not None

    def identity(self) -> dict[str, Any]:
        info = self._info()
        if info is None:
            raise OutputError(f"{self.name} was removed while batchgen looked at it", _AGAIN)
        return _identity_of(info, None)

    def digest(self) -> str:
        with reaching(self.name), open_remote(self.name) as file:
            return digest_of(file)

    def to_be(self, partial: Path, digest: str) -> dict[str, Any]:
        return {"size": partial.stat().st_size, "version": None, DIGEST: digest}

    def put(self, partial: Path, digest: str) -> dict[str, Any]:
        with reaching(self.name, verb="written", hint=_AGAIN, error=OutputError):
            if self._scheme in _AT_ONCE:
                self._upload(partial, self._path)
            else:
                near = self._beside("new")
                self._upload(partial, near)
                self._fs.mv(near, self._path)
            self._fs.invalidate_cache(self._path)
            return _identity_of(self._fs.info(self._path), digest)

    def _upload(self, partial: Path, path: str) -> None:
        # s3fs holds ten parts of 50 MB at a time unless told otherwise
        options = {"max_concurrency": 2} if self._scheme in _STAGED else {}
        self._fs.put_file(str(partial), path, **options)
        self._fs.invalidate_cache(path)
        arrived, size = self._fs.info(path)["size"], partial.stat().st_size
        if arrived != size:
            raise OSError(f"{arrived} of {size} bytes arrived")

    def _info(self) -> Mapping[str, Any] | None:
        with reaching(self.name, verb="reached", hint=_ANOTHER):
            self._fs.invalidate_cache(self._path)
            return info_of(self._fs, self._path)

    def _container(self) -> str:
        """Returns the bucket or the repository of the Hub (`user/model`, `datasets/user/name@revision`), which must exist."""
        parts = self._path.split("/")
        levels = 1 if self._scheme != "hf" else 3 if parts[0] in ("datasets", "spaces", "buckets") else 2
        return "/".join(parts[:levels])

    def _beside(self, suffix: str) -> str:
        folder, slash, name = self._path.rpartition("/")
        return f"{folder}{slash}.{name}.{suffix}"

    def _try_upload(self) -> None:
        """Starts an upload and discards it. No object appears or is replaced."""
        file = self._fs.open(self._path, "wb", autocommit=False)
        try:
            file.close()
        finally:
            file.discard()

    def _try_file(self) -> None:
        near = self._beside("try")
        try:
            self._fs.pipe_file(near, b"")
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(near)


def _identity_of(info: Mapping[str, Any], digest: str | None) -> dict[str, Any]:
    return {"size": info["size"], "version": object_version(info), DIGEST: digest}


Target: TypeAlias = LocalTarget | RemoteTarget
