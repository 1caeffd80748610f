"""What lies in a store, by its fsspec URL: how it is reached, what the store says of it, and its bytes, read in ranges.

Knows nothing of formats. What a store's package raises, whatever it is, leaves here as one of our errors or as an `OSError`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from batchgen.errors import BatchgenError, UsageError

_READ_AHEAD = 1 << 23  # of a sequential read; s3fs's own is 50 MiB, which for ten rows of a large file is a lot
# What changes with a file's content, the best first: digests and versions, then times.
_VERSIONS = (
    "ETag", "etag", "generation", "md5Hash", "blob_id", "xet_hash", "sha", "CRC",
    "LastModified", "last_modified", "Last-Modified", "updated", "modified", "mtime", "created",
)  # fmt: skip


class StoreError(OSError):
    """A store failed while something was read from it: the rest may be there another time."""


def is_url(name: str) -> bool:
    return "://" in name


def plain_name(name: str) -> str:
    """The path that a `file://` URL names; any other name as it is."""
    scheme, separator, path = name.partition("://")
    return path if separator and scheme.lower() in ("file", "local") else name


def address(url: str) -> str:
    """One spelling of a URL: `S3:///bucket/x` is `s3://bucket/x`. Other slashes are the store's business: they are part of a key."""
    scheme, _, path = url.partition("://")
    return f"{scheme.lower()}://{path.lstrip('/')}"


def remote(url: str, *, verb: str = "read") -> tuple[Any, str]:
    """The fsspec file system of a URL and the path in it. Raises `UsageError` where what it needs is not installed."""
    with reaching(url, verb=verb):
        try:
            from fsspec.core import url_to_fs

            fs, path = url_to_fs(url)
        except ImportError as e:
            raise UsageError(
                f"{url} cannot be {verb}: {e}", "pip install 'batchgen[remote]' (fsspec and the store's package)"
            ) from e
        except ValueError as e:
            raise UsageError(
                f"{url} cannot be {verb}: {e}", "use a path, or a URL such as s3://bucket/rows.jsonl"
            ) from e
    return fs, path


@contextmanager
def reaching(
    url: str,
    *,
    verb: str = "read",
    hint: str = "check the address, your access to it and the connection",
    error: type[BatchgenError] = UsageError,
) -> Iterator[None]:
    """Turns whatever a store raises into one line. No two stores have the same errors: botocore's, aiohttp's, the Hub's."""
    try:
        yield
    except BatchgenError:
        raise
    except Exception as e:
        raise error(f"{url} cannot be {verb}: {reason(e)}", hint) from e


def reason(error: BaseException) -> str:
    """The first line of what an error says."""
    said = (error.strerror if isinstance(error, OSError) else None) or str(error).strip() or type(error).__name__
    return said.splitlines()[0]


def version_of(info: Mapping[str, Any]) -> str | None:
    """What the store says that changes when a file's content does; None where it says nothing of that kind."""
    for name in _VERSIONS:
        if info.get(name):
            return f"{name} {info[name]}"
    return None


def info_of(fs: Any, path: str) -> Mapping[str, Any] | None:
    """What the store says of a file or folder; None where there is none."""
    try:
        info: Mapping[str, Any] = fs.info(path)
    except FileNotFoundError:
        return None
    return info


def open_remote(url: str) -> io.BufferedReader:
    """Its bytes; seekable where the store reads ranges. Raises `StoreError`, here and later."""
    return io.BufferedReader(_Stream(url), 1 << 18)


class _Stream(io.RawIOBase):
    """A file of a store. Everything it raises is an `OSError`, which those who read a file know."""

    def __init__(self, url: str) -> None:
        self._fs, path = remote(url)  # kept: a zip file closes with its file system
        self._file: Any = None
        with _as_os_error():
            self._file = self._fs.open(path, "rb", block_size=_READ_AHEAD)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        with _as_os_error():
            return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _as_os_error():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        with _as_os_error():
            return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        with _as_os_error():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._file is not None:
                with _as_os_error():
                    self._file.close()


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except BatchgenError:  # a signal came while the store was waited for
        raise
    except Exception as e:
        raise StoreError(reason(e)) from e
