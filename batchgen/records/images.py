"""The images of rows: what a row says about an image, its bytes, its size and its digest. Knows nothing of models.

Needs Pillow (extra `images`), which is imported when the first image is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tempfile
import time
import urllib.parse
import warnings
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from batchgen.errors import BatchgenError, OutputError, RowError, UsageError, first_line, in_one_line
from batchgen.process.user_cache import replaced
from batchgen.records.remote import is_url, plain_name, reaching, remote

IMAGE_PARTS = frozenset(("image", "image_url", "input_image"))
"""The types of message parts that are images."""
THREADS = 8
_DOWNLOAD_S = 300.0
"""Seconds that a store may take for an image, at most."""
_PAUSES_S = (1.0, 4.0)
"""Seconds before an image is asked for again that a web server cannot send now. What fsspec uses for other stores tries again by itself."""
_NOT_NOW = frozenset((429, 500, 502, 503, 504))
"""Answers of a web server that may be another one a little later."""
_BROKEN_OFF = frozenset(("ServerDisconnectedError", "ClientPayloadError", "ClientOSError"))
"""aiohttp's errors, by name, of a connection that was made and then lost."""
KNOWN = 10_000
"""Number of files, and of sizes, that are remembered."""
_THUMBNAIL = 96
"""Width and height of a thumbnail, at most, in pixels."""
_THUMBNAILS = 2
"""Images of a row that get one."""
NO_IMAGE = "has no image: it must be a path, a URL, base64 or the bytes of a file"
_NAMES = ("image_url", "url", "path", "image")
_LONG = 200
"""Characters of a name that messages show, at most."""
_BASE64 = ("/9j/", "/0//", "iVBORw0KGgo", "R0lGOD", "UklGR")
"""What JPEG, JPEG 2000, PNG, GIF and WebP files begin with in base64."""
_LONGEST_NAME = 255
"""Characters. Longer text is base64 of other formats, if it has the characters of base64 alone."""
_ONLY_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]+")
_TURNED = frozenset((5, 6, 7, 8))
"""EXIF orientations that exchange width and height."""
_OF_THIS_MACHINE = frozenset(("file", "local", "dir", "git", "reference", "generic"))
"""Names of fsspec for files of this machine, or for what may name such files."""
_ORIENTATION = 0x0112
_PNG_MODES = frozenset(("1", "I;16", "L", "LA", "P", "RGB", "RGBA"))
_PNG_EXIF = frozenset(("exif", "Raw profile type exif", "XML:com.adobe.xmp"))


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a row names it."""

    value: str | bytes
    """A path, a URL, or the bytes of an image file."""
    where: str
    """Its place in the row, for messages, such as `messages[0].content[1]`."""
    file: str = ""
    """The row's file, to whose folder paths are relative; empty if the row comes from no file."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file that can be opened as an image."""

    path: str
    digest: bytes
    """16 bytes, of the file's bytes."""
    width: int
    height: int
    """In pixels, as it is shown: turned as its EXIF orientation says."""
    named: str
    """How messages call the image of the row (`shown`)."""


def image_of_part(part: Mapping[str, Any], where: str) -> str | bytes | None:
    """Returns what a message part of one of the `IMAGE_PARTS` says; None if it names no image. Raises `RowError("invalid_image")`."""
    encoded = part.get("base64")
    if isinstance(encoded, str):
        return _from_base64(encoded.encode(), where)
    value = next((part[name] for name in _NAMES if part.get(name) is not None), None)
    if value is None:
        return None
    if isinstance(value, Mapping) and value.get("url") is not None:
        value = value["url"]
    return reference(value, where)


def images_of_cell(value: Any) -> Any:
    """Returns what a column of images holds: a list, or one image; None for none, also in a list. In a CSV file, a list and the Hub's image feature are JSON."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):  # it is a path then
            value = json.loads(value)
    return [*map(_image_or_none, value)] if isinstance(value, list | tuple) else _image_or_none(value)


def _image_or_none(value: Any) -> Any:
    if isinstance(value, Mapping) and {"bytes", "path"} & value.keys():
        return value if value.get("bytes") or value.get("path") else None
    return None if isinstance(value, str | bytes) and not value else value


def reference(value: Any, where: str) -> str | bytes:
    """Returns a path, a URL or bytes: `value`, that of the Hub's image feature (a struct of `bytes` and `path`), or a PIL image as a file.

    Raises `RowError("invalid_image")`.
    """
    if hasattr(value, "getexif") and hasattr(value, "save"):
        return _as_png(value, where)
    if isinstance(value, Mapping) and {"bytes", "path"} & value.keys():
        if isinstance(value.get("bytes"), str) and value["bytes"]:  # as JSON lines carry them
            return _from_base64(value["bytes"].encode(), where)
        value = value.get("bytes") or value.get("path")
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    if isinstance(value, str | bytes) and value:
        return value
    raise RowError("invalid_image", f"{where} {NO_IMAGE}")


def _as_png(image: Any, where: str) -> bytes:
    """Returns an image of Pillow, which reads a file's pixels only when they are needed, as a file."""
    try:
        written, exif = io.BytesIO(), image.getexif()
        plain = image if image.mode in _PNG_MODES else image.convert("RGB")
        plain.save(written, "PNG", compress_level=1, exif=exif)
    except Exception as e:
        raise RowError("invalid_image", f"{where} cannot be read: {in_one_line(e)}") from e
    return written.getvalue()


def decode_image(file: io.BufferedIOBase) -> Any:
    """Returns the image [height, width] of a file as a PIL image in RGB, as transformers loads it: turned by its EXIF orientation, the first frame of
    an animation. Raises whatever Pillow raises."""
    from PIL import ImageOps

    with _opened(file) as image:
        ImageOps.exif_transpose(image, in_place=True)
        return image if image.mode == "RGB" else image.convert("RGB")


def open_file(path: str) -> io.BufferedIOBase:
    """Opens a regular file. Raises `OSError`, also for what has no end or may wait for a writer: devices and pipes."""
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError("it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file")
    return Path(path).open("rb")


def _opened(file: io.BufferedIOBase) -> Any:
    """Reads an image's header. Raises whatever Pillow raises."""
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a large image; PIL raises an error for one of twice that size
        image = Image.open(cast(IO[bytes], file))
    if image.format == "EPS":
        raise UnidentifiedImageError("PostScript is a program, which Pillow would run in Ghostscript")
    return image


def thumbnails(columns: Mapping[str, Any], image_columns: Sequence[str], file: str) -> list[str]:
    """Returns small pictures of a row's first images as `data:` URLs, JPEG. Images that are not on this machine or cannot be read are left out.

    `image_columns` are those that hold images themselves; elsewhere they are parts of messages. `file` is the row's.
    """
    found = islice(_images_in(columns, frozenset(image_columns)), _THUMBNAILS)
    return [url for value in found if (url := _thumbnail(ImageSource(value, "", file))) is not None]


def _images_in(value: Any, image_columns: Container[str]) -> Iterator[str | bytes]:
    if isinstance(value, Mapping):
        if value.get("type") in IMAGE_PARTS:
            with suppress(RowError):
                if (named := image_of_part(value, "")) is not None:
                    yield named
            return
        for name, inner in value.items():
            if name in image_columns:
                inner = images_of_cell(inner)
                for one in inner if isinstance(inner, list) else [inner]:
                    with suppress(RowError):
                        yield reference(one, "")
            else:
                yield from _images_in(inner, ())
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _images_in(inner, ())


def _thumbnail(source: ImageSource) -> str | None:
    from PIL import ImageOps

    try:
        data = source.value
        if isinstance(data, str) and (place := _place(source)) is not None:
            if is_url(place):
                return None
            file: io.BufferedIOBase = open_file(place)
        else:
            file = io.BytesIO(_inline_bytes(source))
        with file, _opened(file) as image:
            image.draft("RGB", (_THUMBNAIL, _THUMBNAIL))  # a JPEG is decoded at about this size
            small = ImageOps.exif_transpose(image).convert("RGB")
        small.thumbnail((_THUMBNAIL, _THUMBNAIL))
        written = io.BytesIO()
        small.save(written, "JPEG", quality=60)
    except Exception:  # noqa: BLE001 - Pillow's readers raise errors of many kinds for damaged files; the row has failed with the reason
        return None
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode("ascii")


def check_pillow() -> None:
    """Raises `UsageError` if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as e:
        raise UsageError(f"rows have images, and Pillow is missing: {e}", "pip install 'batchgen-llm[images]'") from e


class ImageStore:
    """Finds the images of rows. Those that are not local files are kept in a folder, each once, under their digest."""

    def __init__(self, download_s: float = _DOWNLOAD_S, pauses_s: Sequence[float] = _PAUSES_S) -> None:
        self._download_s, self._pauses_s = download_s, pauses_s
        self.folder: Path | None = None
        """Where they are kept; None for a temporary folder of this process."""
        self.fetch_once = True
        """Whether a URL that the folder has is not fetched again. A program that runs on may want what the URL has now."""
        self.fail_once = True
        """Whether a URL or file that has failed is not tried again. Through a pipe, a row may come again because of that."""
        self._known: dict[tuple[str, int, int], ImageFile] = {}
        """By path, time of the last change and size; at most `KNOWN`."""
        self._failed: dict[ImageSource, RowError] = {}
        """Images that have failed, and why, with `fail_once`; at most `KNOWN`."""

    def locate(self, sources: Sequence[ImageSource]) -> list[ImageFile | RowError]:
        """Returns the file of each image, or the error of its row (`invalid_image`). Equal sources are read once, different ones in several threads.

        Raises `OutputError` if an image cannot be kept.
        """
        distinct = list(dict.fromkeys(sources))
        run = map if len(distinct) < 2 else self._threads.map
        found = dict(zip(distinct, run(self._located, distinct), strict=True))
        return [found[source] for source in sources]

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, "batchgen-images")

    @cached_property
    def _temporary(self) -> Path:
        folder = tempfile.mkdtemp(prefix="batchgen-images-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _located(self, source: ImageSource) -> ImageFile | RowError:
        found = self._failed.get(source) or self._found(source)
        if isinstance(found, RowError) and self.fail_once and not _inline(source.value):
            _remember(self._failed, source, found)
        return found

    def _found(self, source: ImageSource) -> ImageFile | RowError:
        named = shown(source)
        try:
            place = _place(source)
            if place is not None and not is_url(place):
                return self._of_file(place, named)
            if place is not None and (earlier := self._fetched_earlier(place, named)) is not None:
                return earlier
            data = _inline_bytes(source) if place is None else _fetched(place, self._download_s, self._pauses_s)
            file = _file_of("", io.BytesIO(data), named)
        except RowError as e:
            return e
        except BatchgenError as e:
            return RowError("invalid_image", f"{source.where}: {e.message}")
        except (OSError, ValueError) as e:  # ValueError: no path
            reason = "its path has a null character" if "\0" in str(source.value) else first_line(e)
            return RowError("invalid_image", f"{named} cannot be read: {reason}")
        return self._kept(file, data, place)

    def _of_file(self, path: str, named: str) -> ImageFile:
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            key = (path, status.st_mtime_ns, status.st_size)
            found = self._known.get(key)
            if found is None:
                found = _file_of(path, file, named)
                _remember(self._known, key, found)
        return replace(found, named=named)

    def _fetched_earlier(self, url: str, named: str) -> ImageFile | None:
        """Returns the image that was fetched from a URL, in this run or before the job was killed; None if there is none, whole."""
        if not self.fetch_once:
            return None
        try:
            folder = (self.folder or self._temporary).absolute()
            path = folder / (folder / _name_of(url)).read_text("ascii")
            file = self._of_file(str(path), named)
        except (OSError, ValueError, RowError):
            return None
        return file if file.digest.hex() == path.name else None

    def _kept(self, file: ImageFile, data: bytes, url: str | None) -> ImageFile:
        """Returns the image as a file in the folder of images."""
        try:
            folder = self.folder or self._temporary
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / file.digest.hex()
            if not path.exists() or path.stat().st_size != len(data):  # a power cut may leave an empty file
                with replaced(path) as new:
                    new.write_bytes(data)
            if url is not None:
                with replaced(folder / _name_of(url)) as new:
                    new.write_text(path.name, "ascii")
        except OSError as e:  # the disk is full, say: nothing is wrong with the row
            place = self.folder or "the folder of temporary files"
            raise OutputError(
                f"images cannot be kept in {place}: {e.strerror}", "free some space there, or check its permissions"
            ) from e
        return replace(file, path=str(path.absolute()))  # workers may run in another folder


def _name_of(url: str) -> str:
    """Returns the name of the file that says which image was fetched from a URL."""
    return hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() + ".url"


def shown(source: ImageSource) -> str:
    """Returns how an image is called in a message."""
    if _inline(source.value):
        return f"the image of {source.where}"
    name = str(source.value)
    return f"the image {name if len(name) <= _LONG else name[:_LONG] + '…'!r} of {source.where}"


def image_digest(file: io.BufferedIOBase) -> bytes:
    """Returns the digest (16 bytes) of an image file's bytes."""
    file.seek(0)
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()


def _file_of(path: str, file: io.BufferedIOBase, named: str) -> ImageFile:
    """Reads only the header of the image. Raises `RowError("invalid_image")`."""
    try:
        with _opened(file) as image:
            # Newer versions of Pillow give the size of a TIFF image as it is shown.
            width, height = image.size if image.format != "TIFF" else (image.tag_v2[256], image.tag_v2[257])
            # Of a PNG without such a block, Pillow would decode all pixels to look for it.
            has_exif = image.format != "PNG" or not _PNG_EXIF.isdisjoint(image.info) or _has_late_exif(file)
            turned = has_exif and image.getexif().get(_ORIENTATION) in _TURNED
    except Exception as e:  # noqa: BLE001 - Pillow's readers raise errors of many kinds for damaged files
        what = "is not an image that Pillow can read" if file.seek(0, os.SEEK_END) else "is empty"
        reason = f" ({first_line(e)})" if type(e).__name__ == "DecompressionBombError" else ""
        file.seek(0)
        if file.read(5) == b"%PDF-":
            reason = " (it is a PDF file: make images of its pages, as pdftoppm -png does)"
        raise RowError("invalid_image", f"{named} {what}{reason}") from None
    return ImageFile(path, image_digest(file), *((height, width) if turned else (width, height)), named)


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds to a memory of at most `KNOWN`."""
    if len(memory) >= KNOWN:
        memory.clear()
    memory[key] = value


def _has_late_exif(file: io.BufferedIOBase) -> bool:
    """Whether a PNG file has a block of EXIF after its first pixels, which Pillow reads only with them."""
    place, pixels = 8, False
    while True:
        file.seek(place)
        size, kind = int.from_bytes(file.read(4)), file.read(4)
        if kind in (b"", b"IEND"):
            return False
        pixels = pixels or kind == b"IDAT"
        if pixels and kind == b"eXIf":
            return True
        if (
            pixels
            and kind in (b"tEXt", b"zTXt", b"iTXt")
            and file.read(80).partition(b"\0")[0].decode("latin-1") in _PNG_EXIF
        ):
            return True
        place += size + 12


def _inline(value: str | bytes) -> bool:
    """Whether an image's bytes are in the row: as such, in a `data:` URL, or in base64, which has no dot as names of image files have."""
    return (
        isinstance(value, bytes)
        or value[:5].lower() == "data:"
        or (value.startswith(_BASE64) and "." not in value)
        or (len(value) > _LONGEST_NAME and value[0] != "/" and _ONLY_BASE64.fullmatch(value) is not None)
    )


def _inline_bytes(source: ImageSource) -> bytes:
    """Returns the bytes of an image that is `_inline`. Raises `RowError`."""
    if isinstance(source.value, bytes):
        return source.value
    kind, comma, content = source.value.partition(",")
    if not comma:
        return _from_base64(source.value.encode(), source.where)
    data = urllib.parse.unquote_to_bytes(content)
    return _from_base64(data, source.where) if kind.rstrip().lower().endswith(";base64") else data


def _place(source: ImageSource) -> str | None:
    """Returns the absolute path or the URL of an image; None if its bytes are in the row. Raises `RowError` for a local path in a file that is not local."""
    name = source.value
    if isinstance(name, bytes) or _inline(name):
        return None
    local = not is_url(source.file) or plain_name(source.file) != source.file
    scheme = name.partition(":")[0].lower()
    path = urllib.parse.unquote(urllib.parse.urlparse(name).path) if scheme == "file" else name
    url = scheme != "file" and is_url(name)
    if not local:
        of_this_machine = scheme in _OF_THIS_MACHINE if url else scheme == "file" or Path(path).is_absolute()
        what = "a local file" if of_this_machine else "a chain of URLs" if "::" in name else None
        if what is not None:
            raise RowError("invalid_image", f"{shown(source)} is {what}, which only rows of a local file may name")
    if url:
        return name
    if not local:
        chain = source.file.split("::")  # a file in an archive, or one that is cached
        own = next(i for i, part in enumerate(chain) if "://" in part)
        chain[own] = f"{chain[own].rpartition('/')[0]}/{path}"
        return "::".join(chain)
    return str((Path(plain_name(source.file)).parent / path).absolute())


def _fetched(url: str, max_s: float, pauses_s: Sequence[float]) -> bytes:
    """Returns the bytes of a file. Only stores that fsspec reads asynchronously (the web, S3, Google's) have a limit of time."""
    from fsspec.asyn import AsyncFileSystem

    fs, path = remote(url)
    limits = {"timeout": max_s} if isinstance(fs, AsyncFileSystem) and fs.async_impl else {}
    with reaching(url):
        for pause in pauses_s:
            try:
                return bytes(fs.cat_file(path, **limits))
            except Exception as e:
                if getattr(e, "status", None) not in _NOT_NOW and type(e).__name__ not in _BROKEN_OFF:
                    raise
            time.sleep(pause)
        return bytes(fs.cat_file(path, **limits))


def _from_base64(text: bytes, where: str) -> bytes:
    try:
        return base64.b64decode(b"".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise RowError("invalid_image", f"{where} is not valid base64") from None
