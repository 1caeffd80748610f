"""Images of rows: where they may be, and what is wrong with those that cannot be read."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchgen.errors import RowError
from batchgen.records.images import (
    ImageFile,
    ImageSource,
    ImageStore,
    decode_image,
    image_digest,
    image_of_part,
    reference,
)


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


RED = encoded(Image.new("RGB", (6, 4), "red"))


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
    assert found == ImageFile(str(tmp_path / "pictures" / "red one.png"), image_digest(RED), 6, 4)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("value", [RED, "data:image/png;base64," + base64.b64encode(RED).decode(), "memory://red.png"])
def test_other_images_are_kept_once_under_their_digest(locate, tmp_path, value):
    import fsspec

    fsspec.filesystem("memory").pipe("/red.png", RED)
    for _ in range(2):
        assert locate(value) == ImageFile(str(tmp_path / "kept" / image_digest(RED).hex()), image_digest(RED), 6, 4)
    assert [path.read_bytes() for path in (tmp_path / "kept").iterdir()] == [RED]


def test_rows_of_a_remote_file_name_no_local_images(locate):
    import fsspec

    fsspec.filesystem("memory").pipe("/folder/red.png", RED)
    assert locate("red.png", "memory://folder/rows.jsonl").digest == image_digest(RED)
    for name in ("/etc/passwd", "file:///etc/passwd"):
        error = locate(name, "memory://folder/rows.jsonl")
        assert (error.type, error.message) == (
            "invalid_image",
            f"the image {name!r} of messages[0].content[1] is a local file, which only rows of a local file may name",
        )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("missing.png", "the image 'missing.png' of messages[0].content[1] cannot be read: No such file or directory"),
        ("rows.txt", "the image 'rows.txt' of messages[0].content[1] is not an image that Pillow can read"),
        (b"hello", "the image of messages[0].content[1] is not an image that Pillow can read"),
        ("empty.png", "the image 'empty.png' of messages[0].content[1] is empty"),
        ("data:image/png;base64,AA*", "messages[0].content[1] is not valid base64"),
        ("memory://no.png", "messages[0].content[1]: memory://no.png cannot be read: /no.png"),
    ],
)  # fmt: skip
def test_what_is_no_image_fails_with_the_name_of_its_place(locate, tmp_path, value, message):
    (tmp_path / "rows.txt").write_text("red")
    (tmp_path / "empty.png").touch()
    error = locate(value)
    assert (error.type, error.message) == ("invalid_image", message)


def test_a_decompression_bomb_is_refused_without_decoding(locate, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    error = locate(RED)
    assert error.type == "invalid_image"
    assert error.message.startswith(
        "the image of messages[0].content[1] is not an image that Pillow can read (Image size (24 pixels)"
    )


def test_sizes_are_those_after_turning_by_exif(locate):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(Image.new("RGB", (6, 4), "red"), "JPEG", exif=exif)
    found = locate(turned)
    assert (found.width, found.height) == (4, 6)
    assert decode_image(turned).size == (4, 6)


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.new("CMYK", (6, 4)), "TIFF"),
        encoded(Image.new("I;16", (6, 4), 1000), "PNG"),
        encoded(Image.new("RGBA", (6, 4), (255, 0, 0, 128)), "PNG"),
        encoded(Image.new("P", (6, 4)), "GIF", save_all=True, append_images=[Image.new("P", (6, 4), 3)]),
        encoded(Image.new("L", (6, 4), 7), "JPEG"),
    ],
    ids=["cmyk", "16 bits", "transparent", "animated", "grey"],
)
def test_every_kind_of_image_becomes_rgb_as_transformers_loads_it(data):
    from transformers.image_utils import load_image

    assert decode_image(data).tobytes() == load_image(Image.open(io.BytesIO(data))).tobytes()
    assert decode_image(data).mode == "RGB"


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
    ],
)  # fmt: skip
def test_parts_of_messages_name_images_as_openai_and_transformers_do(part, value):
    assert image_of_part(part, "here") == value


@pytest.mark.parametrize("value", [None, "", 5, {"bytes": None, "path": None}, {}, []])
def test_a_part_without_an_image_is_an_error(value):
    with pytest.raises(RowError, match=r"^here has no image: it must be a path, a URL, base64 or the bytes of a file$"):
        reference(value, "here")
