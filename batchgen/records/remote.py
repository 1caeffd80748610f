"""Files in a store, by fsspec URL: access, versions, and their bytes, read in ranges.

Knows nothing about formats. Whatever a store's package raises leaves this module as one of our errors or as an `OSError`.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchgen.errors import BatchgenError, UsageError, first_line

_READ_AHEAD = 1 << 23  # of a sequential read; s3fs reads 50 MiB ahead, far too much for ten rows of a large file
_SILENCE_S = 60.0  # of a web server
_OF_THE_EXTRA = ("s3", "s3a", "gs", "gcs", "http", "https")
"""Stores for which the extra `remote` has all that fsspec needs."""
_OTHER_NAMES = {"s3a": "s3", "gcs": "gs", "az": "abfs", "ssh": "sftp"}
"""Second names of stores."""
_WEB = ("http://", "https://")
_LISTED_FROM = 8
"""Files of one folder for which it is listed. A folder can have many others."""
# Fields that change with a file's content, the best first: digests and versions, then times.
_VERSIONS = (
    "ETag", "etag", "generation", "md5Hash", "blob_id", "xet_hash", "sha", "CRC",
    "LastModified", "last_modified", "Last-Modified", "updated", "modified", "mtime", "created",
)  # fmt: skip


class StoreError(OSError):
    """A store failed while a file was read. Trying again may succeed."""


def is_url(name: str) -> bool:
    return "://" in name


def plain_name(name: str) -> str:
    """Returns the path that a `file://` URL names, and any other name unchanged."""
    scheme, separator, path = name.partition("://")
    return path if separator and scheme.lower() in ("file", "local") else name


def address(url: str) -> str:
    """Returns the normal spelling of a URL: `s3://bucket/x` for `S3:///bucket/x`. Other slashes are part of the key and stay."""
    scheme, _, path = url.partition("://")
    return f"{scheme.lower()}://{path.lstrip('/')}"


def remote(url: str, *, verb: str = "read") -> tuple[Any, str]:
    """Returns the fsspec file system of a URL and the path in it. Raises `UsageError` if a package that it needs is not installed."""
    with reaching(url, verb=verb):
        scheme, _, place = url.partition("://")
        on_the_web = scheme.lower() in ("http", "https")
        if not place.strip("/") or (on_the_web and place.startswith("/")):
            raise UsageError(
                f"{url} cannot be {verb}: it names no {'host' if on_the_web else 'file'}",
                "use a path, or a URL such as s3://bucket/rows.jsonl",
            )
        try:
            from fsspec.core import url_to_fs

            fs, path = url_to_fs(url)
        except ImportError as e:
            raise UsageError(f"{url} cannot be {verb}: {e}", _packages_for(scheme)) from e
        except ValueError as e:
            raise UsageError(
                f"{url} cannot be {verb}: {e}", "use a path, or a URL such as s3://bucket/rows.jsonl"
            ) from e
    if "http" in fs.protocol:
        _limit_silence(fs)
    return fs, path


def _packages_for(scheme: str) -> str:
    """Returns how to install what reads a store."""
    if scheme.lower() in _OF_THE_EXTRA or find_spec("fsspec") is None:
        return "pip install 'batchgen-llm[remote]' (fsspec and the store's package)"
    return "pip install that package: fsspec needs it for this store"


def _limit_silence(fs: Any) -> None:
    """Sets a limit of a web server's silence, unless the user has set limits for fsspec. Otherwise aiohttp ends every request after five minutes, silent or not."""
    from aiohttp import ClientTimeout

    fs.client_kwargs.setdefault("timeout", ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S))


@contextmanager
def reaching(
    url: str,
    *,
    verb: str = "read",
    hint: str = "check the address, your access to it and the connection",
    error: type[BatchgenError] = UsageError,
) -> Iterator[None]:
    """Turns whatever a store raises into an error of one line. Every store has errors of its own: botocore's, aiohttp's, the Hub's."""
    try:
        yield
    except BatchgenError:
        raise
    except Exception as e:
        raise error(f"{url} cannot be {verb}: {_reason(e)}", hint) from e


def _reason(error: BaseException) -> str:
    """Returns the first line of an error's message; of a web server's answer, its status and that status in words."""
    if _is_of_the_web(error):
        return "404 Not Found" if error.__cause__ is None else _reason(error.__cause__)
    if isinstance(error, TimeoutError):  # fsspec's own has no message
        return "the server did not answer in time"
    status, message = (getattr(error, name, None) for name in ("status", "message"))  # of aiohttp, whose text has more
    if status is not None:
        return f"{status} {message}" if status and message else type(error).__name__
    return first_line(error)


def object_version(info: Mapping[str, Any]) -> str | None:
    """Returns a field of the store's info that changes with the file's content; None if there is none."""
    for name in _VERSIONS:
        if info.get(name):
            return f"{name} {info[name]}"
    return None


def info_of(fs: Any, path: str) -> Mapping[str, Any] | None:
    """Returns the store's info about a file or folder; None if it does not exist. Raises `StoreError` if a web server answers otherwise."""
    try:
        info: Mapping[str, Any] = fs.info(path)
    except FileNotFoundError as e:
        if _is_of_the_web(e) and getattr(e.__cause__, "status", 0) not in (404, 410):
            raise StoreError(_reason(e)) from e
        return None
    return info


def _is_of_the_web(error: BaseException) -> bool:
    """Whether fsspec raised a FileNotFoundError for a web address, as it does whatever went wrong. Its message is the address, its cause says what it was."""
    return isinstance(error, FileNotFoundError) and str(error).startswith(_WEB)


def look_again(urls: Iterable[str]) -> None:
    """Makes what is known of files of stores up to date: what was read of them is forgotten, and folders that have several are listed at once.

    Otherwise a store would be asked once for each file, as it still is by those who may read files and not list them.
    """
    in_folders: Counter[tuple[Any, str]] = Counter()
    for url in urls:
        fs, path = remote(url)
        fs.invalidate_cache(path)
        in_folders[fs, fs._parent(path)] += 1
    for (fs, folder), count in in_folders.items():
        if count >= _LISTED_FROM and not folder.startswith(_WEB):
            with suppress(Exception):  # every store has errors of its own
                fs.ls(folder)


def open_remote(url: str) -> io.BufferedReader:
    """Opens a file; the stream is seekable if the store can read ranges. Raises `StoreError`, also while it is read."""
    return io.BufferedReader(_StoreFile(url), 1 << 18)


class _StoreFile(io.RawIOBase):
    """A file of a store. All its errors are `OSError`s, which code that reads files expects."""

    def __init__(self, url: str) -> None:
        self._fs, path = remote(url)  # held, because a zip file closes with its file system
        self._file: Any = None
        self._is_stream, self._ended = False, False
        with _as_os_error():
            self._file = self._fs.open(path, "rb", block_size=_READ_AHEAD)
            if path.startswith(_WEB) and not _reads_ranges(self._file):
                self._file.close()
                # In one request, from its start to its end. With a size, fsspec does not ask for it.
                self._file, self._is_stream = self._fs.open(path, "rb", block_size=0, size=1), True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        with _as_os_error():
            return not self._is_stream and bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _as_os_error():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        with _as_os_error():
            return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        if self._ended:  # aiohttp warns about those who ask again
            return 0
        with _as_os_error():
            data = self._file.read(len(buffer))
        self._ended = self._is_stream and not data
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._file is not None:
                with _as_os_error():
                    self._file.close()


def _reads_ranges(file: Any) -> bool:
    """Whether a web server sends ranges of a file, by asking for the last byte. fsspec finds out only when it reads one."""
    if not file.size:
        return False
    file.cache.fetcher = partial(_whole_range, file.cache.fetcher)
    try:
        file.seek(file.size - 1)
        file.read(1)
        file.seek(0)
    except (ValueError, EOFError):
        return False
    return True


def _whole_range(fetch: Callable[[int, int], bytes], start: int, end: int) -> bytes:
    """Returns the bytes of a range, of which a web server may send any part from its start on. fsspec would take a part for the whole.

    Raises `ValueError` if it sends more: it has not read the range. Raises `EOFError` if it sends nothing.
    """
    found = bytearray(fetch(start, end))
    while len(found) < end - start:
        more = fetch(start + len(found), end)
        if not more:
            raise EOFError(f"the server has sent {start + len(found):,} of {end:,} bytes")
        found += more
    if len(found) > end - start:
        raise ValueError("the server has sent another range than it was asked for")
    return bytes(found)


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except Exception as e:
        raise StoreError(_reason(e)) from e


def _object(url: str) -> tuple[str, str]:
    """Returns what a URL means: the same for names of one store."""
    scheme, _, path = address(url).partition("://")
    return _OTHER_NAMES.get(scheme, scheme), path


def file_matcher(name: str | None) -> Callable[[str], bool]:
    """Returns what tells whether another name means the same file (none does, if it is None). Links are followed.

    The file itself is looked up once, however many names are asked about.
    """
    if name is None:
        return lambda other: False
    if is_url(name):
        there = _object(name)
        return lambda other: is_url(other) and _object(other) == there
    place = os.path.realpath(name)
    file = None
    with suppress(OSError):  # it is not there yet
        file = Path(name).stat()

    def matches(other: str) -> bool:
        if is_url(other):
            return False
        try:
            status = Path(other).stat()
        except OSError:
            return os.path.realpath(other) == place
        return file is not None and os.path.samestat(status, file)

    return matches
