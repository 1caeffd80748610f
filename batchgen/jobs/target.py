"""The place of a finished output: a local file, which takes it by one rename, or a store, which takes it by one upload.

A job does all its work in its folder; here it only looks at what stands at its output's place, and puts the finished file there. What stands there is
known by `manifest` identities: `size`, what changes when the content does (`mtime_ns`; in a store `version`), and the `digest` of the content.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from batchgen.errors import OutputError, UsageError
from batchgen.jobs.disk import move_file
from batchgen.jobs.manifest import DIGEST, file_digest, identity, known_as
from batchgen.records.remote import (
    address,
    info_of,
    is_url,
    open_remote,
    plain_name,
    reaching,
    remote,
    version_of,
)

_STAGED = ("s3", "s3a")
"""Stores of which s3fs begins an upload that nobody sees until it is committed: so that the right to write can be tried out."""
_AT_ONCE = (*_STAGED, "gs", "gcs", "hf", "abfs", "abfss", "az")
"""Stores whose uploads appear whole or not at all. In any other the file gets its name when it is there."""
_ANOTHER = "check the address, your access to it and the connection, or use another -o"
_AGAIN = "check the connection and your access, and run the same command again: what was finished is kept"


class Target(Protocol):
    name: str
    """What the output can be read by."""
    address: str
    """What it is called wherever this process started: for the manifest."""

    def check(self) -> None:
        """Raises `UsageError` where no output can be written there, as far as that shows without writing one."""

    def exists(self) -> bool: ...

    def identity(self, digest: str | None = None) -> dict[str, Any]:
        """What the output that stands there is known by."""

    def known_as(self, identities: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The one of these that the output that stands there is; None where it is none of them."""

    def to_be(self, partial: Path, digest: str) -> dict[str, Any]:
        """What `partial` will be known by once it stands there, as far as that can be said before."""

    def put(self, partial: Path, digest: str) -> dict[str, Any]:
        """Put it there, whole in one moment, and return what it is known by now. A second time, after a crash, does no harm."""


def open_target(output: str) -> Target:
    """`output` as the user named it. Raises `UsageError` where a store's package is missing."""
    name = plain_name(output)
    return RemoteTarget(name) if is_url(name) else LocalTarget(name)


class LocalTarget:
    def __init__(self, output: str) -> None:
        self._path = Path(output).resolve()  # a link stays one
        self._output = output
        self.name = output
        self.address = str(Path(output).absolute())

    def check(self) -> None:
        if self._path.is_dir():
            raise UsageError(f"the output {self._output} is a folder", "name a file in it")
        parent = Path(self._output).parent
        if not parent.is_dir():
            raise UsageError(f"there is no folder {parent} to write to", f"make it with mkdir -p {parent}")

    def exists(self) -> bool:
        return self._path.exists()

    def identity(self, digest: str | None = None) -> dict[str, Any]:
        return identity(self._path, digest)

    def known_as(self, identities: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        return known_as(self.identity(), identities, lambda: file_digest(self._path))

    def to_be(self, partial: Path, digest: str) -> dict[str, Any]:
        return identity(partial, digest)  # a rename keeps the time

    def put(self, partial: Path, digest: str) -> dict[str, Any]:
        there = self.to_be(partial, digest)
        move_file(partial, self._path)
        return there


class RemoteTarget:
    """What a store raises is `UsageError` before the run, `OutputError` at its end.

    Only the store knows an object's version, and only when it has it. So after a crash between the upload and the manifest that
    would tell of it, the object is known by size and digest, for which it is read once.
    """

    def __init__(self, output: str) -> None:
        self.name = output
        self.address = address(output)
        if "::" in output:
            raise UsageError(f"the output {output} is a file inside another", "write it as a file of its own")
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

    def identity(self, digest: str | None = None) -> dict[str, Any]:
        info = self._info()
        if info is None:
            raise OutputError(f"{self.name} has gone while it was looked at", _AGAIN)
        return {"size": info["size"], "version": version_of(info), DIGEST: digest}

    def known_as(self, identities: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        return known_as(self.identity(), identities, self._digest)

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
            return self.identity(digest)

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

    def _digest(self) -> str:
        with reaching(self.name), open_remote(self.name) as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    def _container(self) -> str:
        """The bucket, or the repository of the Hub (`user/model`, `datasets/user/name@revision`), that must be there already."""
        parts = self._path.split("/")
        levels = 1 if self._scheme != "hf" else 3 if parts[0] in ("datasets", "spaces", "buckets") else 2
        return "/".join(parts[:levels])

    def _beside(self, suffix: str) -> str:
        folder, slash, name = self._path.rpartition("/")
        return f"{folder}{slash}.{name}.{suffix}"

    def _try_upload(self) -> None:
        """Begin an upload and give it up: no object appears, none is replaced."""
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
