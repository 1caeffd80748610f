"""hf:// inputs, by a server that answers the few requests of the Hub's interface that reading needs."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.errors import UsageError
from batchgen.jobs.target import open_target
from batchgen.records import open_input

ROWS = [{"prompt": "one"}, {"prompt": "two"}]
JSONL = b'{"prompt": "one"}\n{"prompt": "two"}\n'


def parquet() -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), stream)
    return stream.getvalue()


FILES = {"data/a.jsonl": JSONL, "data/b.parquet": parquet(), "README.md": b"#"}


class Hub(BaseHTTPRequestHandler):
    """The dataset `user/rows` with `FILES`, at the revisions main and v1."""

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path in (
            "/api/datasets/user/rows/revision/main",
            "/api/datasets/user/rows/revision/v1",
            "/api/datasets/user/rows",
        ):
            self.send(json.dumps({"id": "user/rows", "sha": "0" * 40}).encode())
        elif path.startswith("/api/datasets/user/rows/tree/"):
            folder = path.split("/", 7)[7] if path.count("/") > 6 else ""
            self.send(json.dumps(self.listing(folder)).encode())
        elif path.startswith("/datasets/user/rows/resolve/"):
            name = path.split("/", 6)[6]
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            self.send(FILES[name][int(first) : int(last) + 1 if last else None], 206)
        else:
            self.send(b'{"error": "Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})

    def listing(self, folder):
        if "recursive=true" in self.path.lower():
            return [self.entry(name) for name in FILES]
        if not folder:
            return [{"type": "directory", "oid": "d", "size": 0, "path": "data"}, self.entry("README.md")]
        return [self.entry(name) for name in FILES if name.startswith(folder + "/")]

    def entry(self, name):
        return {"type": "file", "oid": f"oid-of-{name}", "size": len(FILES[name]), "path": name}

    def send(self, data, code=200, headers=None):
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), "ETag": '"x"', **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import HfFileSystem, constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    HfFileSystem.clear_instance_cache()
    yield
    HfFileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()


def opened(*names):
    return open_input(list(names), format=None, output=None)


@pytest.mark.parametrize("revision", ["", "@v1"])
@pytest.mark.parametrize("name", ["data/a.jsonl", "data/b.parquet"])
def test_a_file_of_a_dataset_is_read_at_its_revision(hub, revision, name):
    source = opened(f"hf://datasets/user/rows{revision}/{name}")
    assert [row.columns for row in source.rows()] == ROWS
    assert source.fingerprint() == [
        {
            "path": f"hf://datasets/user/rows{revision}/{name}",
            "size": len(FILES[name]),
            "version": f"blob_id oid-of-{name}",
        }
    ]


@pytest.mark.parametrize("pattern", ["data", "data/*", "**/[ab].*"])
def test_folders_and_globs_of_a_dataset_give_their_files(hub, pattern):
    source = opened(f"hf://datasets/user/rows/{pattern}")
    assert [f.name for f in source.files] == [
        "hf://datasets/user/rows/data/a.jsonl",
        "hf://datasets/user/rows/data/b.parquet",
    ]
    assert [row.columns for row in source.rows()] == ROWS + ROWS


@pytest.mark.parametrize("url", ["hf://datasets/user/rows/data/c.jsonl", "hf://datasets/user/none/data/a.jsonl"])
def test_what_the_hub_does_not_have_is_refused_in_one_line(hub, url):
    with pytest.raises(UsageError) as caught:
        opened(url)
    assert str(caught.value) == f"no such file: {url}; check the address and your access to it"


def test_an_output_needs_its_repository_to_be_there(hub):
    target = open_target("hf://datasets/user/rows/out/o.jsonl")
    target.check()
    assert not target.exists()
    with pytest.raises(UsageError, match=r"^hf://datasets/user/none/o\.jsonl cannot be written: "):
        open_target("hf://datasets/user/none/o.jsonl").check()


def test_offline_is_one_line(monkeypatch):
    from huggingface_hub import HfFileSystem

    HfFileSystem.clear_instance_cache()
    with pytest.raises(UsageError, match=r"^hf://datasets/user/rows/data/a\.jsonl cannot be read: [^\n]*offline"):
        opened("hf://datasets/user/rows/data/a.jsonl")
