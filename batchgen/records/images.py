"""The images of rows: what a row says about an image, its bytes, its size and its digest. Knows nothing of models.

Needs Pillow (extra `images`), which is imported when the first image is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import shutil
import tempfile
import threading
import urllib.parse
import warnings
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from batchgen.errors import BatchgenError, RowError, UsageError
from batchgen.records.remote import is_url, plain_name, reaching, remote, short_reason

IMAGE_PARTS = frozenset(("image", "image_url", "input_image"))
"""The types of message parts that are images."""
THREADS = 8
KNOWN = 10_000
"""Number of files, and of sizes, that are remembered."""
_THUMBNAIL = 96
"""Width and height of a thumbnail, at most, in pixels."""
_THUMBNAILS = 2
"""Images of a row that get one."""
_NAMES = ("image_url", "url", "path", "image")
_TURNED = frozenset((5, 6, 7, 8))
"""EXIF orientations that exchange width and height."""
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


def image_of_part(part: Mapping[str, Any], where: str) -> str | bytes:
    """Returns what a message part of one of the `IMAGE_PARTS` says. Raises `RowError("invalid_image")`."""
    encoded = part.get("base64")
    if isinstance(encoded, str):
        return _from_base64(encoded, where)
    value = next((part[name] for name in _NAMES if part.get(name) is not None), None)
    if isinstance(value, Mapping) and value.get("url") is not None:
        value = value["url"]
    return reference(value, where)


def reference(value: Any, where: str) -> str | bytes:
    """Returns a path, a URL or bytes: `value`, that of the Hub's image feature (a struct of `bytes` and `path`), or a PIL image as a file.

    Raises `RowError("invalid_image")`.
    """
    if hasattr(value, "getexif") and hasattr(value, "save"):
        written, exif = io.BytesIO(), value.getexif()
        plain = value if value.mode in _PNG_MODES else value.convert("RGB")
        plain.save(written, "PNG", compress_level=1, exif=exif)
        return written.getvalue()
    if isinstance(value, Mapping) and {"bytes", "path"} & value.keys():
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str | bytes) and value:
        return value
    raise RowError("invalid_image", f"{where} has no image: it must be a path, a URL, base64 or the bytes of a file")


def decode_image(data: bytes) -> Any:
    """Returns the image [height, width] of a file as a PIL image in RGB, as transformers loads it: turned by its EXIF orientation, the first frame of
    an animation. Raises whatever Pillow raises."""
    from PIL import ImageOps

    with _opened(data) as image:
        turned = ImageOps.exif_transpose(image)
        return turned.convert("RGB")


def _opened(data: bytes) -> Any:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a large image; PIL raises an error for one of twice that size
        return Image.open(io.BytesIO(data))


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
                yield image_of_part(value, "")
            return
        for name, inner in value.items():
            if name in image_columns:
                for one in inner if isinstance(inner, list | tuple) else [inner]:
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
        if isinstance(data, str):
            place = data if data.startswith("data:") else _place(data, source)
            if is_url(place):
                return None
            data = _from_data_url(data, "") if data.startswith("data:") else Path(place).read_bytes()
        with _opened(data) as image:
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

    def __init__(self) -> None:
        self.folder: Path | None = None
        """Where they are kept; None for a temporary folder of this process."""
        self._known: dict[tuple[str, int, int], ImageFile] = {}
        """By path, time of the last change and size; at most `KNOWN`."""

    def locate(self, sources: Sequence[ImageSource]) -> list[ImageFile | RowError]:
        """Returns the file of each image, or the error of its row (`invalid_image`). Files are read in several threads."""
        if len(sources) < 2:
            return [self._located(source) for source in sources]
        return list(self._threads.map(self._located, sources))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, "batchgen-images")

    @cached_property
    def _temporary(self) -> Path:
        folder = tempfile.mkdtemp(prefix="batchgen-images-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _located(self, source: ImageSource) -> ImageFile | RowError:
        named = shown(source)
        try:
            if isinstance(source.value, bytes):
                return self._kept(source.value, named)
            if source.value.startswith("data:"):
                return self._kept(_from_data_url(source.value, source.where), named)
            place = _place(source.value, source)
            if is_url(place):
                return self._kept(_fetched(place), named)
            return self._of_file(place, named)
        except RowError as e:
            return e
        except BatchgenError as e:
            return RowError("invalid_image", f"{source.where}: {e.message}")
        except OSError as e:
            return RowError("invalid_image", f"{named} cannot be read: {short_reason(e)}")

    def _of_file(self, path: str, named: str) -> ImageFile:
        stat = Path(path).stat()
        key = (path, stat.st_mtime_ns, stat.st_size)
        found = self._known.get(key)
        if found is None:
            found = _file_of(path, Path(path).read_bytes(), named)
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[key] = found
        return found

    def _kept(self, data: bytes, named: str) -> ImageFile:
        folder = self._temporary if self.folder is None else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        file = _file_of("", data, named)
        path = folder / file.digest.hex()
        if not path.exists():
            new = folder / f"{path.name}.{threading.get_ident()}.partial"
            new.write_bytes(data)
            new.replace(path)
        return ImageFile(
            str(path.absolute()), file.digest, file.width, file.height
        )  # workers may run in another folder


def shown(source: ImageSource) -> str:
    """Returns how an image is called in a message."""
    if isinstance(source.value, bytes) or source.value.startswith("data:"):
        return f"the image of {source.where}"
    return f"the image {source.value!r} of {source.where}"


def image_digest(data: bytes) -> bytes:
    """Returns the digest (16 bytes) of an image file's bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _file_of(path: str, data: bytes, named: str) -> ImageFile:
    """Reads only the header of the image. Raises `RowError("invalid_image")`."""
    try:
        with _opened(data) as image:
            width, height = image.size
            # Of a PNG without such a block, PIL would decode all pixels to look for it.
            has_exif = image.format != "PNG" or not _PNG_EXIF.isdisjoint(image.info)
            turned = has_exif and image.getexif().get(_ORIENTATION) in _TURNED
    except Exception as e:  # noqa: BLE001 - Pillow's readers raise errors of many kinds for damaged files
        what = "is not an image that Pillow can read" if data else "is empty"
        reason = f" ({short_reason(e)})" if type(e).__name__ == "DecompressionBombError" else ""
        raise RowError("invalid_image", f"{named} {what}{reason}") from None
    return ImageFile(path, image_digest(data), *((height, width) if turned else (width, height)))


def _place(name: str, source: ImageSource) -> str:
    """Returns the absolute path or the URL of an image. Raises `RowError` for a local path in a file that is not local."""
    local = not is_url(source.file) or plain_name(source.file) != source.file
    scheme = name.partition(":")[0].lower()
    path = urllib.parse.unquote(urllib.parse.urlparse(name).path) if scheme == "file" else name
    if scheme != "file" and is_url(name):
        return name
    if not local:
        if scheme == "file" or Path(path).is_absolute():
            raise RowError(
                "invalid_image", f"{shown(source)} is a local file, which only rows of a local file may name"
            )
        return f"{source.file.rpartition('/')[0]}/{path}"
    return str((Path(plain_name(source.file)).parent / path).resolve())


def _fetched(url: str) -> bytes:
    fs, path = remote(url)
    with reaching(url):
        return bytes(fs.cat_file(path))


def _from_data_url(url: str, where: str) -> bytes:
    kind, _, content = url.partition(",")
    return _from_base64(content, where) if kind.rstrip().endswith(";base64") else urllib.parse.unquote_to_bytes(content)


def _from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RowError("invalid_image", f"{where} is not valid base64") from None
