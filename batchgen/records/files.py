"""Opens an input file: format and compression by suffix, local or by an fsspec URL, as a stream of plain bytes."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from batchgen.config import INPUT_FORMATS
from batchgen.errors import UsageError
from batchgen.records.jsonl import BOM
from batchgen.records.remote import is_url, object_version, open_remote, reaching, remote

*_OTHERS, _LAST = INPUT_FORMATS
ANY_FORMAT = f"{', '.join(_OTHERS)} or {_LAST}"
"""The names of the formats, for messages."""
DELIMITERS = {"csv": ",", "tsv": "\t"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BROKEN = (OSError, EOFError, zlib.error)
"""The exceptions that reading a cut or damaged stream raises."""
_PACKED = (
    (re.compile(rb"\x1f\x8b"), "gzip", ".gz"),
    (
        re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
        "zstandard",
        ".zst",
    ),  # or a frame to skip, as pzstd writes it
)
_UNPACKED_BY = {b"BZh": ("bzip2", "bzip2 -dc"), b"\xfd7zXZ": ("xz", "xz -dc"), b"PK\x03\x04": ("zip", "unzip -p")}
# Plain and encrypted. A number follows, not text: the first column of a CSV file may be called PARENT.
_PARQUET = re.compile(rb"PAR[1E][^\x00-\x08\x0b\x0c\x0e-\x1f]{0,3}[\x00-\x08\x0b\x0c\x0e-\x1f]", re.DOTALL)
_LFS = b"version https://git-lfs"
_UTF16 = (
    (re.compile(rb"\xff\xfe|\xfe\xff"), "utf-16"),  # byte order marks
    (re.compile(rb"([^\0]\0){2}"), "utf-16-le"),
    (re.compile(rb"(\0[^\0]){2}"), "utf-16-be"),
)
_AT_COMMIT = re.compile(r"(hf://datasets/[^/@]+/[^/@]+)@[0-9a-f]{40}/")
_PIECE = 1 << 10


def in_job_folder(name: str, folder: Path = Path()) -> bool:
    """Whether a file, named from `folder`, is in the folder of a job."""
    return any(p.suffix == ".job" and (folder / p / "manifest.json").exists() for p in Path(name).parents)


def is_lost_link(path: str | Path) -> bool:
    """Whether a path is a link to nothing: a file that should be there, which is not to be passed over among many."""
    return Path(path).is_symlink() and not Path(path).exists()


def split_name(name: str) -> tuple[str, str | None, str | None]:
    """Returns stem, format and compression by the suffixes of a file's name: (`a`, `csv`, `gzip`) for `a.csv.gz`."""
    if is_url(name):
        name = next(part for part in name.split("::") if is_url(part))  # zip://x.jsonl::s3://bucket/a.zip
    if name.startswith(("http://", "https://")):
        name = name.partition("?")[0]  # a signed address
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    stem, compression = base, None
    for suffix, kind in COMPRESSIONS.items():
        if base.lower().endswith(suffix):
            stem, compression = base[: -len(suffix)], kind
    for kind, known in INPUT_FORMATS.items():
        if stem.lower().endswith(known.suffixes):
            return stem.rpartition(".")[0], kind, compression
    return stem, None, compression


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input, known to exist."""

    name: str
    """As the user named it; `-` is standard input."""
    format: str
    """One of `INPUT_FORMATS`."""
    compression: str | None = None
    """gzip or zstd"""
    folder: str = ""
    """The folder to which a relative name refers; the current one if empty."""
    encoding: str | None = None
    """Of text; None for UTF-8."""

    @property
    def _path(self) -> Path:
        return Path(self.folder, self.name)

    @property
    def is_text(self) -> bool:
        return INPUT_FORMATS[self.format].is_text

    @property
    def shown(self) -> str:
        return "<stdin>" if self.name == "-" else self.name

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Yields its bytes, decompressed, in UTF-8 if they are text, and buffered; seekable if they are not text."""
        with self._raw() as raw:
            stream = raw if self.compression is None else decompressed(raw, self.compression)
            if self.name == "-":
                stream = self._checked(raw)
            if self.encoding is not None:
                stream = _in_utf8(stream, self.encoding, self.shown)
            if self.is_text or (self.name != "-" and self.compression is None and raw.seekable()):
                yield stream
                return
            with tempfile.TemporaryFile() as whole:
                shutil.copyfileobj(stream, whole, 1 << 20)
                whole.seek(0)
                yield whole

    def fingerprint(self) -> dict[str, Any] | None:
        """Returns what shows whether the file has changed; None if that cannot be known (a pipe, a store without versions).

        Downloads nothing. Raises `UsageError` if a store cannot be reached.
        """
        read = {} if self.encoding is None else {"encoding": self.encoding}
        if is_url(self.name):
            fs, path = remote(self.name)
            with reaching(self.name):
                info = fs.info(path)
            version = object_version(info)
            if version is None:
                return None
            name = _AT_COMMIT.sub(r"\1/", self.name)  # a commit that leaves the file alone does not change it
            return {"path": name, "size": info.get("size"), "version": version, **read}
        path_ = self._path
        if not path_.is_file():
            return None
        stat = path_.stat()
        return {"path": str(path_.absolute()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, **read}

    def is_read_once(self) -> bool:
        """Whether it has no `fingerprint`: another reading could find something else."""
        return self.fingerprint() is None if is_url(self.name) else not self._path.is_file()

    def is_hollow(self) -> bool:
        """Whether a local file has no bytes, although a file without rows would have some in its format or compression."""
        path = Path(self.name)
        packed = self.compression is not None or self.format == "parquet"
        return packed and not is_url(self.name) and path.is_file() and path.stat().st_size == 0

    def check_start(self) -> None:
        """Raises `UsageError` if the first bytes of a local file show that its content is not what its name says."""
        path = Path(self.name)
        if not is_url(self.name) and path.is_file():
            with suppress(OSError):  # whoever reads the rows says where the file cannot be read
                self._check_content(path)

    def _check_content(self, path: Path) -> None:
        with path.open("rb") as file:
            start = file.read(len(_LFS))
        if start == _LFS:
            raise UsageError(f"{self.name} is a Git LFS pointer, not the file itself", "run `git lfs pull`")
        if not start:
            return
        for magic, kind, suffix in _PACKED:
            if magic.match(start) and self.compression != COMPRESSIONS[suffix]:
                raise UsageError(f"{self.name} is compressed with {kind}", f"give it a name that ends with {suffix}")
            if not magic.match(start) and self.compression == COMPRESSIONS[suffix]:
                raise UsageError(f"{self.name} is not compressed with {kind}", f"give it a name without {suffix}")
        if self.compression is not None:
            return
        self._check_kind(start, self.name)
        if self.format == "parquet" and not start.startswith((b"PAR1", b"PARE", bytes(4))):
            raise UsageError(
                f"{self.name} is not a Parquet file", "say what it is with --input-format jsonl, csv or tsv"
            )
        if self.format == "jsonl" and not start.startswith(b'{"'):  # as nearly every file of many does
            self._check_lines(path)

    def _check_kind(self, start: bytes, name: str) -> None:
        """Raises `UsageError` if the first bytes of a text are those of Parquet, or of UTF-16 and it is to be read as UTF-8."""
        if _PARQUET.match(start) and self.format != "parquet":
            raise UsageError(f"{name} is a Parquet file", "use --input-format parquet")
        for pattern, encoding in _UTF16:
            if self.is_text and self.encoding is None and pattern.match(start):
                raise UsageError(f"{name} is in UTF-16, not in UTF-8", f"use --encoding {encoding}")

    def _check_lines(self, path: Path) -> None:
        """Raises `UsageError` if the first line of a file of JSON lines only begins an array or an object.

        A lone `{` before a line that begins an object of its own is not the file's form but one malformed row.
        """
        with self.open() as file:
            pieces = (line.removeprefix(BOM).strip() for line in iter(partial(file.readline, _PIECE), b""))
            lines = filter(None, pieces)
            first, second = next(lines, b""), next(lines, b"")
        filters = {b"{": ".", b"[": "'.[]'", b"[{": "'.[]'"}
        if first in filters and not (first == b"{" and second.startswith(b"{")):
            what = "pretty-printed JSON (objects over several lines)" if first == b"{" else "a JSON array"
            name, to = shlex.quote(self.name), shlex.quote(str(path.with_name(f"lines-{path.name}")))
            raise UsageError(
                f"{self.name} looks like {what}, not an object on each line",
                f"convert it: jq -c {filters[first]} {name} > {to}",
            )

    def _checked(self, raw: BinaryIO) -> BinaryIO:
        """Returns standard input, decompressed if its first bytes are those of gzip or zstd. Raises `UsageError` if they show another format."""
        stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)  # type: ignore[type-var]
        start = stream.peek(8)[:8]
        for magic, _, suffix in _PACKED:
            if magic.match(start):
                return decompressed(stream, COMPRESSIONS[suffix])
        for foreign, (program, unpack) in _UNPACKED_BY.items():
            if start.startswith(foreign):
                raise UsageError(
                    f"standard input is compressed with {program}", f"unpack it first: {unpack} | batchgen run -"
                )
        self._check_kind(start, "standard input")
        return stream

    def can_change_in_store(self) -> bool:
        """Whether it lies in a store, and its name does not fix its version."""
        return is_url(self.name) and not _AT_COMMIT.match(self.name)

    @contextmanager
    def _raw(self) -> Iterator[BinaryIO]:
        if self.name == "-":
            if sys.stdin is None:  # the shell's <&-
                raise UsageError("standard input is closed", "give it rows, or name a file")
            yield sys.stdin.buffer  # and leave it open
            return
        with open_remote(self.name) if is_url(self.name) else self._path.open("rb") as raw:
            yield raw


def decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    """Returns the plain bytes of a gzip or zstd stream, buffered. Reading raises one of `BROKEN` if it is cut or damaged."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))


def _in_utf8(raw: BinaryIO, encoding: str, name: str) -> BinaryIO:
    """Returns the text of a stream in UTF-8. What cannot be decoded becomes a byte that is not UTF-8, so that only its row is malformed."""
    decoder = codecs.getincrementaldecoder(encoding)(_UNDECODABLE)

    def convert(piece: pa.Buffer) -> bytes:
        try:
            return decoder.decode(piece, not piece).encode("utf-8", "surrogateescape")  # the last piece is empty
        except UnicodeError as e:  # of UTF-16 and UTF-32
            usual = codecs.lookup(encoding).name
            raise UsageError(
                f"{name} has no byte order mark, which --encoding {encoding} needs", f"use {usual}-le or {usual}-be"
            ) from e

    return io.BufferedReader(pa.TransformInputStream(pa.PythonFile(raw, "r"), convert))


_UNDECODABLE = "batchgen.undecodable"
codecs.register_error(_UNDECODABLE, lambda e: ("\ufffd\udcff", e.end))  # type: ignore[attr-defined]
