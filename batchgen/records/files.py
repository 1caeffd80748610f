"""Opening one input file: its format and compression by suffix, local or by an fsspec URL, as a stream of plain bytes."""

from __future__ import annotations

import gzip
import io
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.records.remote import is_url, open_remote, reaching, remote, version_of

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BROKEN = (OSError, EOFError, zlib.error)
"""What reading a cut or damaged stream raises."""
_PIECE = 1 << 10  # small, because what one piece decompresses to, 70 MB at worst, is in memory at once


def split_name(name: str) -> tuple[str, str | None, str | None]:
    """Stem, format and compression by the suffixes of a file's name: `a.csv.gz` is (`a`, `csv`, `gzip`)."""
    if is_url(name):
        name = next(part for part in name.split("::") if is_url(part))  # zip://x.jsonl::s3://bucket/a.zip
    if name.startswith(("http://", "https://")):
        name = name.partition("?")[0]  # a signed address
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    stem, compression = base, None
    for suffix, kind in COMPRESSIONS.items():
        if base.lower().endswith(suffix):
            stem, compression = base[: -len(suffix)], kind
    for suffix, kind in SUFFIXES.items():
        if stem.lower().endswith(suffix):
            return stem[: -len(suffix)], kind, compression
    return stem, None, compression


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input, known to exist."""

    name: str
    """As the user named it; `-` is standard input."""
    format: str
    """jsonl, parquet or csv"""
    compression: str | None = None
    """gzip or zstd"""

    @property
    def shown(self) -> str:
        return "<stdin>" if self.name == "-" else self.name

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Its bytes, decompressed and buffered; seekable where the format needs that (Parquet)."""
        if self.name == "-":
            yield sys.stdin.buffer
            return
        with self._raw() as raw:
            stream = raw if self.compression is None else decompressed(raw, self.compression)
            if self.format != "parquet" or (self.compression is None and raw.seekable()):
                yield stream
                return
            with tempfile.TemporaryFile() as whole:  # Parquet is read from its end
                shutil.copyfileobj(stream, whole, 1 << 20)
                whole.seek(0)
                yield whole

    def fingerprint(self) -> dict[str, Any] | None:
        """What tells whether the file has changed; None where nothing can be said: a pipe, a store without versions.

        Nothing is downloaded for it. Raises `UsageError` where a store cannot be reached.
        """
        if is_url(self.name):
            fs, path = remote(self.name)
            with reaching(self.name):
                info = fs.info(path)
            version = version_of(info)
            if version is None:
                return None
            return {"path": self.name, "size": info.get("size"), "version": version}
        path_ = Path(self.name)
        if not path_.is_file():
            return None
        stat = path_.stat()
        return {"path": str(path_.absolute()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}

    def forget(self) -> None:
        """Drop what this process remembers of a store's listing, so that the next `fingerprint` is of what is there now."""
        if is_url(self.name):
            fs, path = remote(self.name)
            fs.invalidate_cache(path)

    def _raw(self) -> BinaryIO:
        if is_url(self.name):
            return open_remote(self.name)
        return Path(self.name).open("rb")


def decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    """The plain bytes of a gzip or zstd stream, buffered. Raises one of `BROKEN` where it is cut or damaged."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    return io.BufferedReader(_ZstdReader(raw))


class _ZstdReader(io.RawIOBase):
    """The frames of a zstandard stream, one after the other.

    zstandard's own stream reader ends quietly where a file is cut; this one raises `EOFError`, and `OSError` for a damaged one.
    """

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard  # for these files alone

        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor()
        self._damaged = zstandard.ZstdError
        self._frame: Any = None
        self._waiting = b""  # compressed bytes of the next frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            piece = self._waiting or self._raw.read(_PIECE)
            self._waiting = b""
            if not piece:
                if self._frame is not None:
                    raise EOFError("the compressed file ends in the middle of a zstandard frame")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(piece))
            except self._damaged as e:
                raise OSError(str(e)) from e
            if self._frame.eof:
                self._waiting, self._frame = self._frame.unused_data, None
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n
