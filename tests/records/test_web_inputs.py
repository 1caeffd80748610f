"""Inputs of a web server give the same rows as files on disk, whether it sends ranges or not. Its answers appear in errors."""

import gzip
import io
import json
import re
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fsspec import config
from fsspec.implementations.http import HTTPFileSystem
from PIL import Image

from batchgen.errors import InputCorrupt, RowError, UsageError
from batchgen.records import remote
from batchgen.records.images import ImageSource, ImageStore
from support.progress import logged
from support.records import columns, opened, parquet_bytes

HINT = "check the address, your access to it and the connection"
LARGE = [{"id": i, "prompt": "Say hello.", "note": f"{i:05}" * 2000} for i in range(1000)]
"""10 MB, more than fsspec fetches at a time."""


class Answers(BaseHTTPRequestHandler):
    """Answers with `files[path]`, or with the status that stands there; of a list, with the next of these. The first part of a path says how."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for its head to be acknowledged

    def __init__(self, files, *arguments):
        self._files = files
        super().__init__(*arguments)

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        _, way, name = self.path.split("/")
        if way == "silent":
            self._wait()
            return
        content = self._files.get(name, 404)
        content = content.pop(0) if isinstance(content, list) else content
        status, data = (content, b"") if isinstance(content, int) else (200, content)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        ranged = way in ("ranges", "stalls", "parts", "wrong") and status == 200 and wanted is not None
        start, end = (int(wanted[1]), int(wanted[2]) + 1) if ranged else (0, len(data))
        if way == "wrong":
            start = 0
        elif ranged and way == "parts":
            end = (start + end + 1) // 2
        sent = data[start:end]
        self.send_response(206 if ranged else status)
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{start + len(sent) - 1}/{len(data)}")
        if way == "unknown":
            self.send_header("Connection", "close")  # its length is known when it ends
        else:
            self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if self.command == "GET":
            try:
                if way == "drips":
                    for place in range(len(sent) - 1):
                        self.wfile.write(sent[place : place + 1])
                        self.server.ended.wait(0.02)
                    sent = sent[-1:]
                if sent == b"broken off":
                    self.close_connection = True
                    sent = b""
                if way in ("stalls", "whole%20stalls") and len(sent) > 1:
                    self.wfile.write(sent[: len(sent) // 2])
                    self._wait()
                self.wfile.write(sent)
            except ConnectionError:
                self.close_connection = True
        self.close_connection |= way == "unknown"

    def _wait(self):
        self.wfile.flush()
        self.server.ended.wait()
        self.close_connection = True


@pytest.fixture
def web():
    """The files of a web server on this machine, by name, and its address."""
    files = {}
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Answers, files)) as server:
        server.ended = threading.Event()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield files, f"http://127.0.0.1:{server.server_port}"
        server.ended.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("way", ["ranges", "whole", "unknown", "parts", "wrong"])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_large_file_is_read_whether_the_server_sends_the_ranges_that_it_is_asked_for_others_or_the_whole(
    web, way, kind
):
    files, address = web
    lines = "".join(json.dumps(row) + "\n" for row in LARGE).encode()
    files[f"x.{kind}"] = {"jsonl": lines, "jsonl.gz": gzip.compress(lines, 0), "parquet": parquet_bytes(LARGE)}[kind]
    assert columns(f"{address}/{way}/x.{kind}") == LARGE


@pytest.mark.parametrize(
    ("way", "seekable"), [("ranges", True), ("parts", True), ("wrong", False), ("whole", False), ("unknown", False)]
)
def test_a_file_need_not_be_read_whole_if_the_server_sends_ranges(web, way, seekable):
    files, address = web
    files["x"] = bytes(range(250)) * 40
    with remote.open_remote(f"{address}/{way}/x") as file:
        assert file.seekable() is seekable
        assert file.read() == files["x"]


def test_a_stream_that_has_ended_is_not_read_again_which_aiohttp_would_warn_about(web):
    files, address = web
    rows = [{"prompt": f"number {i}"} for i in range(2000)]
    files["x.jsonl.gz"] = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    with logged("aiohttp", "WARNING") as said:
        assert columns(f"{address}/unknown/x.jsonl.gz") == rows
    assert said == []


@pytest.mark.parametrize(("status", "reason"), [(403, "403 Forbidden"), (503, "503 Service Unavailable")])
def test_what_a_server_answers_is_not_called_a_missing_file(web, status, reason):
    files, address = web
    files["x.jsonl?Signature=a"] = status
    with pytest.raises(UsageError) as caught:
        opened(f"{address}/ranges/x.jsonl?Signature=a")
    assert str(caught.value) == f"{address}/ranges/x.jsonl?Signature=a cannot be read: {reason}; {HINT}"
    with pytest.raises(UsageError) as caught:
        opened(f"{address}/ranges/no.jsonl")
    assert str(caught.value) == f"no such file: {address}/ranges/no.jsonl; check the address and your access to it"


def test_an_image_that_a_server_cannot_send_now_is_asked_for_again(web):
    files, address = web
    written = io.BytesIO()
    Image.new("RGB", (6, 4)).save(written, "PNG")
    names = {
        "now.png": [503, b"broken off", written.getvalue()],
        "later.png": [503] * 9,
        "never.png": [403, written.getvalue()],
    }
    files.update(names)
    sources = [ImageSource(f"{address}/whole/{name}", "here") for name in names]
    now, later, never = ImageStore(pauses_s=(0.0, 0.0)).locate(sources)
    assert (now.width, now.height) == (6, 4)
    assert later.message == f"here: {sources[1].value} cannot be read: 503 Service Unavailable"
    assert never.message == f"here: {sources[2].value} cannot be read: 403 Forbidden"
    assert [len(answers) for answers in names.values()] == [0, 6, 1]


def test_a_job_fetches_an_image_once_also_if_it_is_killed_in_between(web, tmp_path):
    files, address = web
    written = io.BytesIO()
    Image.new("RGB", (6, 4)).save(written, "PNG")
    files.update({"a.png": [written.getvalue(), 404], "no.png": [404, 404, written.getvalue()]})
    a, no = (ImageSource(f"{address}/whole/{name}", "here") for name in ("a.png", "no.png"))

    def located(source):
        store = ImageStore()  # as in another process
        store.folder = tmp_path
        return store.locate([source])[0]

    first = located(a)
    assert located(a) == first
    Path(first.path).write_bytes(b"")  # after a power cut
    assert located(a).message == f"here: {a.value} cannot be read: 404 Not Found"
    files["a.png"] = written.getvalue()
    assert located(a) == first
    assert Path(first.path).read_bytes() == written.getvalue()
    assert isinstance(located(no), RowError)  # 404 is no image to remember
    assert isinstance(located(no), RowError)
    assert located(no).digest == first.digest


def test_an_image_that_a_server_sends_for_too_long_fails_alone(web):
    files, address = web
    files["a.png"] = b"no image" * 25
    slow, fast = (ImageSource(f"{address}/{way}/a.png", "here") for way in ("drips", "ranges"))
    late, read = ImageStore(download_s=1).locate([slow, fast])
    assert (late.type, late.message) == (
        "invalid_image",
        f"here: {slow.value} cannot be read: the server did not answer in time",
    )
    assert read.message == f"the image {fast.value!r} of here is not an image that Pillow can read"


def test_a_web_address_that_nobody_serves_is_not_called_a_missing_file():
    with pytest.raises(UsageError, match=r"^http://127\.0\.0\.1:1/x\.jsonl cannot be read: .*Connect call failed"):
        opened("http://127.0.0.1:1/x.jsonl")


@pytest.mark.parametrize("way", ["silent", "stalls", "whole%20stalls"])
def test_a_server_that_falls_silent_is_left(web, monkeypatch, way):
    monkeypatch.setattr(remote, "_SILENCE_S", 0.1)
    HTTPFileSystem.clear_instance_cache()
    files, address = web
    files["x.jsonl"] = b'{"prompt": "one"}\n' * 100
    try:
        with pytest.raises((UsageError, InputCorrupt), match="the server did not answer in time"):
            columns(f"{address}/{way}/x.jsonl")
    finally:
        HTTPFileSystem.clear_instance_cache()


def test_limits_that_the_user_has_set_for_web_servers_stay(monkeypatch):
    monkeypatch.setitem(config.conf, "http", {"client_kwargs": {"timeout": 5, "trust_env": True}})
    HTTPFileSystem.clear_instance_cache()
    try:
        assert remote.remote("http://127.0.0.1/x.jsonl")[0].client_kwargs == {"timeout": 5, "trust_env": True}
    finally:
        HTTPFileSystem.clear_instance_cache()
