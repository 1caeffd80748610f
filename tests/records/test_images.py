"""Images of rows: where they may be, and what is wrong with those that cannot be read."""

import base64
import io
import os
import struct
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchgen.errors import OutputError, RowError
from batchgen.records.images import (
    ImageFile,
    ImageSource,
    ImageStore,
    decode_image,
    image_digest,
    image_of_part,
    reference,
)


def digest(data: bytes) -> bytes:
    return image_digest(io.BytesIO(data))


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


RED = encoded(Image.new("RGB", (6, 4), "red"))
BASE64 = base64.b64encode(RED).decode()


@pytest.fixture
def locate(tmp_path: Path) -> Callable[..., ImageFile | RowError]:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red one.png").write_bytes(RED)

    def one(value: str | bytes, file: str | None = None) -> ImageFile | RowError:
        store = ImageStore()
        store.folder = tmp_path / "kept"
        (found,) = store.locate([ImageSource(value, "messages[0].content[1]", file or str(tmp_path / "rows.jsonl"))])
        return found

    return one


@pytest.mark.parametrize(
    "name", ["pictures/red one.png", "FOLDER/pictures/red one.png", "file://FOLDER/pictures/red%20one.png"]
)
def test_paths_are_relative_to_the_rows_file(locate, tmp_path, name):
    found = locate(name.replace("FOLDER", str(tmp_path)))
    assert found == ImageFile(str(tmp_path / "pictures" / "red one.png"), digest(RED), 6, 4, found.named)
    assert found.named.startswith("the image '")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "value",
    [
        RED,
        f"data:image/png;base64,{BASE64}",
        f"DATA:image/jpeg;BASE64,{BASE64[:40]}\n{BASE64[40:]}",
        f"data:image/png;base64,{urllib.parse.quote(BASE64, safe='')}",
        f"data:,{urllib.parse.quote_from_bytes(RED)}",
        BASE64,
        "memory://red.png",
    ],
    ids=["bytes", "data", "in two lines", "quoted", "without base64", "base64 alone", "store"],
)
def test_other_images_are_kept_once_under_their_digest(locate, tmp_path, value):
    import fsspec

    fsspec.filesystem("memory").pipe("/red.png", RED)
    for _ in range(2):
        found = locate(value)
        assert found == ImageFile(str(tmp_path / "kept" / digest(RED).hex()), digest(RED), 6, 4, found.named)
        whose = " 'memory://red.png'" if value == "memory://red.png" else ""
        assert found.named == f"the image{whose} of messages[0].content[1]"
    assert [path.read_bytes() for path in (tmp_path / "kept").iterdir() if path.suffix != ".url"] == [RED]


def test_an_image_that_cannot_be_kept_is_no_fault_of_its_row(locate, tmp_path):
    (tmp_path / "kept").write_text("a file in the folder's place")
    with pytest.raises(OutputError, match=f"^images cannot be kept in {tmp_path}/kept: File exists; free some space"):
        locate(RED)


def test_an_image_of_many_rows_is_fetched_once(tmp_path, monkeypatch):
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/red.png", RED)
    fetched: list[str] = []
    monkeypatch.setattr(type(store), "cat_file", lambda self, path: fetched.append(path) or RED)
    sources = [ImageSource("memory://red.png", "here", str(tmp_path / "rows.jsonl"))] * 10
    assert {file.digest for file in ImageStore().locate(sources)} == {digest(RED)}
    assert fetched == ["/red.png"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((name, "a local file") for name in ("/etc/passwd", "file:///etc/passwd", "local:///etc/passwd", "LOCAL:///etc/passwd")),
        *((name, "a local file") for name in ("git:///x:a.png", "reference://a.png", "generic://file:///etc/passwd")),
        *((name, "a chain of URLs") for name in ("simplecache::file:///etc/passwd", "zip://a.png::/etc/x.zip", "a.png::/etc/x.zip")),
    ],
)  # fmt: skip
def test_rows_of_a_remote_file_name_no_local_images(name, what, locate):
    error = locate(name, "memory://folder/rows.jsonl")
    assert (error.type, error.message) == (
        "invalid_image",
        f"the image {name!r} of messages[0].content[1] is {what}, which only rows of a local file may name",
    )


@pytest.mark.parametrize(
    "file", ["memory://folder/rows.jsonl", "simplecache::memory://folder/rows.jsonl", "zip://folder/rows.jsonl::ZIP"]
)
def test_paths_of_a_remote_file_are_relative_to_its_url(file, locate, tmp_path):
    import fsspec

    fsspec.filesystem("memory").pipe("/folder/red.png", RED)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("folder/red.png", RED)
    assert locate("red.png", file.replace("ZIP", f"{tmp_path}/x.zip")).digest == digest(RED)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "TIFF", "PPM", "ICO"])
def test_bytes_in_base64_can_be_read_again(kind, locate):
    data = encoded(Image.effect_noise((32, 32), 50).convert("RGB"), kind)
    text = base64.b64encode(data).decode()
    for value in (text, reference({"bytes": text, "path": None}, "here")):
        assert locate(value).digest == digest(data)


def test_an_image_of_pillow_that_cannot_be_written_is_an_error_of_its_row():
    closed = Image.new("RGB", (2, 2))
    closed.close()
    cut = Image.open(io.BytesIO(encoded(Image.effect_noise((64, 64), 80).convert("RGB"), "JPEG")[:900]))
    for image in (cut, Image.new("RGB", (0, 0)), closed):
        with pytest.raises(RowError, match=r"^here cannot be read: ") as raised:
            reference(image, "here")
        assert raised.value.type == "invalid_image"


def test_a_megabyte_of_blanks_is_no_image(locate):
    assert isinstance(locate("A" * 300 + " " * 1_000_000 + "."), RowError)


HERE = "messages[0].content[1]"
NO_IMAGE = f"of {HERE} is not an image that Pillow can read"
UNREADABLE = f"of {HERE} cannot be read:"
BOMB = "could be decompression bomb DOS attack.)"


def png_of_size(width: int, height: int) -> bytes:
    """A PNG file whose header declares a size that its data lack."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return RED[:12] + header + struct.pack(">I", zlib.crc32(header)) + RED[33:]


def jpeg_of_size(side: int) -> bytes:
    data = bytearray(encoded(Image.new("RGB", (6, 4), "red"), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    return bytes(data)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("missing.png", f"the image 'missing.png' {UNREADABLE} No such file or directory"),
        ("~/red.png", f"the image '~/red.png' {UNREADABLE} No such file or directory"),
        ("rows.txt", f"the image 'rows.txt' {NO_IMAGE}"),
        ("page.html", f"the image 'page.html' {NO_IMAGE}"),
        ("paper.pdf", f"the image 'paper.pdf' {NO_IMAGE} (it is a PDF file: make images of its pages, as pdftoppm -png does)"),
        ("program.eps", f"the image 'program.eps' {NO_IMAGE}"),
        ("cut.jpg", f"the image 'cut.jpg' {NO_IMAGE}"),
        ("empty.png", f"the image 'empty.png' of {HERE} is empty"),
        ("pictures", f"the image 'pictures' {UNREADABLE} it is a folder"),
        ("pipe.png", f"the image 'pipe.png' {UNREADABLE} it is not a regular file"),
        ("/dev/zero", f"the image '/dev/zero' {UNREADABLE} it is not a regular file"),
        ("loop.png", f"the image 'loop.png' {UNREADABLE} Too many levels of symbolic links"),
        ("a\0.png", f"the image 'a\\x00.png' {UNREADABLE} its path has a null character"),
        ("x" * 300 + ".png", f"the image '{'x' * 200}…' {UNREADABLE} File name too long"),
        ("/" + "x" * 300, f"the image '/{'x' * 199}…' {UNREADABLE} File name too long"),  # which is no base64
        ("file:///no%20such.png", f"the image 'file:///no%20such.png' {UNREADABLE} No such file or directory"),
        (b"hello", f"the image {NO_IMAGE}"),
        (png_of_size(20_000, 20_000), f"the image {NO_IMAGE} (Image size (400000000 pixels) exceeds limit of 178956970 pixels, {BOMB}"),
        (jpeg_of_size(65_500), f"the image {NO_IMAGE} (Image size (4290250000 pixels) exceeds limit of 178956970 pixels, {BOMB}"),
        ("data:image/png;base64,AA*", f"{HERE} is not valid base64"),
        ("data:image/png;base64,iVBORw0KGgo", f"{HERE} is not valid base64"),
        ("data:image/png;base64,", f"the image of {HERE} is empty"),
        ("data:,hello", f"the image {NO_IMAGE}"),
        ("iVBORw0KGgo", f"{HERE} is not valid base64"),
        ("memory://no.png", f"{HERE}: memory://no.png cannot be read: /no.png"),
        ("http://", f"{HERE}: http:// cannot be read: it names no host"),
        ("foo://red.png", f"{HERE}: foo://red.png cannot be read: Protocol not known: foo"),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_what_is_no_image_fails_with_the_name_of_its_place(locate, tmp_path, value, message):
    (tmp_path / "rows.txt").write_text("red")
    (tmp_path / "page.html").write_text("<html><body>404</body></html>")
    (tmp_path / "paper.pdf").write_bytes(b"%PDF-1.4\n%%EOF")
    (tmp_path / "program.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n")
    (tmp_path / "cut.jpg").write_bytes(encoded(Image.new("RGB", (6, 4)), "JPEG")[:40])
    (tmp_path / "empty.png").touch()
    (tmp_path / "loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "pipe.png")
    error = locate(value)
    assert (error.type, error.message) == ("invalid_image", message)


def turned(kind: str, orientation: int = 6) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.new("RGB", (6, 4), "red"), kind, exif=exif)


def with_late_chunk(data: bytes, name: bytes) -> bytes:
    """A PNG file whose first chunk of this name stands behind the pixels."""
    start = data.index(name) - 4
    end = start + 12 + int.from_bytes(data[start : start + 4])
    return data[:start] + data[end:-12] + data[start:end] + data[-12:]


def png_with_text(name: bytes, value: bytes = b"a long comment" * 20) -> bytes:
    chunk = b"tEXt" + name + b"\0" + value
    return RED[:-12] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + RED[-12:]


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (turned("JPEG"), (4, 6)),
        (turned("TIFF"), (4, 6)),
        (turned("TIFF", 3), (6, 4)),
        (encoded(Image.new("RGB", (6, 4)), "TIFF"), (6, 4)),
        (turned("WEBP"), (4, 6)),
        (turned("PNG"), (4, 6)),
        (with_late_chunk(turned("PNG"), b"eXIf"), (4, 6)),
        (png_with_text(b"XML:com.adobe.xmp", b'<x tiff:Orientation="6"/>'), (4, 6)),
        (png_with_text(b"date:create"), (6, 4)),
        (RED, (6, 4)),
    ],
)
def test_sizes_are_those_after_turning_by_exif(data, size, locate):
    assert decode_image(io.BytesIO(data)).size == size
    found = locate(data)
    assert (found.width, found.height) == size


def test_the_size_of_a_png_is_found_without_decoding_it(locate, monkeypatch):
    from PIL import PngImagePlugin

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", None)
    assert locate(png_with_text(b"date:create")).width == 6


KINDS = {
    "cmyk": encoded(Image.new("CMYK", (6, 4), (9, 99, 0, 50)), "JPEG"),
    "cmyk tiff": encoded(Image.new("CMYK", (6, 4)), "TIFF"),
    "16 bits": encoded(Image.new("I;16", (6, 4), 1000), "PNG"),
    "transparent": encoded(Image.new("RGBA", (6, 4), (255, 0, 0, 128)), "PNG"),
    "palette": encoded(Image.new("P", (6, 4), 1), "PNG", transparency=1),
    "animated": encoded(Image.new("P", (6, 4)), "GIF", save_all=True, append_images=[Image.new("P", (6, 4), 3)]),
    "animated webp": encoded(
        Image.new("RGB", (6, 4), 5), "WEBP", save_all=True, append_images=[Image.new("RGB", (6, 4), 99)]
    ),
    "float": encoded(Image.new("F", (6, 4), 0.5), "TIFF"),
    "one pixel": encoded(Image.new("RGB", (1, 1), "red"), "PNG"),
    "grey": encoded(Image.new("L", (6, 4), 7), "JPEG"),
}


@pytest.mark.parametrize("data", KINDS.values(), ids=KINDS)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
def test_every_kind_of_image_becomes_rgb_as_transformers_loads_it(data):
    from transformers.image_utils import load_image

    assert decode_image(io.BytesIO(data)).tobytes() == load_image(Image.open(io.BytesIO(data))).tobytes()
    assert decode_image(io.BytesIO(data)).mode == "RGB"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, "a.png"),
        ({"type": "image_url", "image_url": "a.png"}, "a.png"),
        ({"type": "input_image", "image_url": "a.png"}, "a.png"),
        ({"type": "image", "path": "a.png"}, "a.png"),
        ({"type": "image", "url": "https://x/a.png"}, "https://x/a.png"),
        ({"type": "image", "image": "a.png"}, "a.png"),
        ({"type": "image", "image": {"bytes": b"x", "path": None}}, b"x"),
        ({"type": "image", "image": {"bytes": None, "path": "a.png"}}, "a.png"),
        ({"type": "image", "base64": "eA=="}, b"x"),
        ({"type": "image", "image": {"bytes": "eA==", "path": None}}, b"x"),
        ({"type": "image", "image": Path("a.png")}, "a.png"),
        ({"type": "image", "image": bytearray(b"x")}, b"x"),
        ({"type": "image"}, None),
    ],
)  # fmt: skip
def test_parts_of_messages_name_images_as_openai_and_transformers_do(part, value):
    assert image_of_part(part, "here") == value


@pytest.mark.parametrize("value", [None, "", 5, {"bytes": None, "path": None}, {}, []])
def test_a_part_without_an_image_is_an_error(value):
    with pytest.raises(RowError, match=r"^here has no image: it must be a path, a URL, base64 or the bytes of a file$"):
        reference(value, "here")
