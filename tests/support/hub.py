"""A server that answers the requests to the Hub that reading and pushing a dataset need.

Large files (Parquet) are uploaded through Git LFS, as huggingface_hub does without the package hf_xet: it asks for an address, uploads the file,
has the upload verified, and makes a commit that names the file by its digest.
"""

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
from huggingface_hub import constants

TOKEN = "hf_good"
READ_ONLY = "hf_reader"
RESOLVE = "/{repo_id}/resolve/{revision}/{filename}"


@dataclass
class FakeRepo:
    files: dict[str, bytes]
    private: bool = False
    revisions: tuple[str, ...] = ("main", "v1", "refs/convert/parquet")
    messages: list[str] = field(default_factory=list)
    """The message of each commit that was pushed."""

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class FakeHub:
    repos: dict[str, FakeRepo] = field(default_factory=dict)
    failing: str = ""
    """Requests whose path contains this text are answered with 400."""
    endpoint: str = ""
    uploaded: dict[str, bytes] = field(default_factory=dict)
    """Uploaded large files by their SHA-256."""


@contextmanager
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Runs the server, and makes huggingface_hub use it without a token."""
    from huggingface_hub import HfFileSystem, constants

    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + RESOLVE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    HfFileSystem.clear_instance_cache()
    try:
        yield hub
    finally:
        HfFileSystem.clear_instance_cache()
        server.shutdown()
        server.server_close()


def cache_model(monkeypatch: pytest.MonkeyPatch, folder: Path, model: Path, *, offline: bool) -> Path:
    """Puts a model into a cache of the hub in `folder`, as org/name. Returns where its files are. `offline`: huggingface_hub asks no hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HF_HUB_OFFLINE", str(int(offline)))
    repo = folder / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    return Path(shutil.copytree(model, repo / "snapshots" / "abc"))


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path.partition("?")[0])
        if self.hub.failing and self.hub.failing in path:
            return self._send(b'{"error": "the server is on fire"}', 400)  # 500 would be retried for half a minute
        if path == "/api/whoami-v2":
            return self._whoami()
        if path == "/api/validate-yaml":  # checks a card before its commit
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if found := re.fullmatch(r"/(store|verify)/(\w+)", path):
            return self._large_file(found[1], found[2], body)
        if found := re.fullmatch(r"/datasets/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._give_addresses(json.loads(body)) if self._role == "write" else self._send(b"", 403)
        match = re.fullmatch(r"(?:/api)?/datasets/([^/]+/[^/]+)(/.*)?", path)
        repo = self.hub.repos.get(match[1]) if match else None
        if match is None or repo is None or (repo.private and self._role is None):
            return self._send(b'{"error": "Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})
        return self._of_repo(match[1], repo, match[2] or "", body)

    def _of_repo(self, name: str, repo: FakeRepo, rest: str, body: bytes) -> None:
        info = {"id": name, "sha": repo.commit, "private": repo.private}
        revision, path = "", ""
        for known in (*repo.revisions, repo.commit):
            if found := re.fullmatch(rf"/(revision|tree|paths-info|resolve|preupload|commit)/{known}(?:/(.*))?", rest):
                revision, rest, path = known, found[1], found[2] or ""
                break
        if not rest:
            return self._json(info)
        if not revision:
            return self._send(b'{"error": "Invalid rev id"}', 404, {"X-Error-Code": "RevisionNotFound"})
        if rest == "revision":
            return self._json(info)
        if rest == "tree":
            return self._json(_listing(repo, path, recursive="recursive=true" in self.path.lower()))
        if rest == "paths-info":  # huggingface_hub 1 asks this
            everything = _listing(repo, "", recursive=True)
            return self._json([entry for entry in everything if entry["path"] in parse_qs(body.decode())["paths"]])
        if rest == "resolve":
            if path not in repo.files:
                return self._send(b"", 404, {"X-Error-Code": "EntryNotFound"})
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            part = repo.files[path][int(first) : int(last) + 1 if last else None]
            return self._send(part, 206, {"X-Repo-Commit": repo.commit})
        if self._role != "write":
            return self._send(b'{"error": "Forbidden"}', 403)
        if rest == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = ["lfs" if path.endswith(".parquet") else "regular" for path in paths]
            files = [
                {"path": path, "uploadMode": mode, "shouldIgnore": False}
                for path, mode in zip(paths, modes, strict=True)
            ]
            return self._json({"files": files})
        return self._commit(name, repo, body)

    def _give_addresses(self, asked: dict[str, Any]) -> None:
        """Answers with the addresses to upload and verify each large file; none for a file that is already there."""
        objects = []
        for file in asked["objects"]:
            digest = file["oid"]
            actions = {
                "upload": {"href": f"{self.hub.endpoint}/store/{digest}"},
                "verify": {"href": f"{self.hub.endpoint}/verify/{digest}"},
            }
            objects.append(file if digest in self.hub.uploaded else file | {"actions": actions})
        self._json({"transfer": "basic", "objects": objects})

    def _large_file(self, what: str, digest: str, body: bytes) -> None:
        if what == "store":  # the address is signed and needs no token
            assert hashlib.sha256(body).hexdigest() == digest
            self.hub.uploaded[digest] = body
            return self._send(b"")
        right = json.loads(body) == {"oid": digest, "size": len(self.hub.uploaded[digest])}
        return self._send(b"{}", 200 if right and self._role == "write" else 403)

    def _commit(self, name: str, repo: FakeRepo, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repo.messages.append(value["summary"])
            elif line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                assert value["size"] == len(self.hub.uploaded[value["oid"]])
                repo.files[value["path"]] = self.hub.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                del repo.files[value["path"]]
        url = f"{self.hub.endpoint}/datasets/{name}/commit/{repo.commit}"
        self._json({"success": True, "commitOid": repo.commit, "commitUrl": url})

    def _whoami(self) -> None:
        if self._role is None:
            return self._send(b'{"error": "Invalid credentials in Authorization header"}', 401)
        return self._json({"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": self._role}}})

    def _create(self, asked: dict[str, Any]) -> None:
        if self._role != "write":
            return self._send(b'{"error": "Forbidden"}', 403)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = f"{self.hub.endpoint}/datasets/{name}"
        if name in self.hub.repos:
            return self._send(json.dumps({"error": "You already created this dataset repo", "url": url}).encode(), 409)
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repos[name] = FakeRepo({".gitattributes": b""}, private=bool(private))
        return self._json({"url": url, "name": name})

    @property
    def _role(self) -> str | None:
        return {f"Bearer {TOKEN}": "write", f"Bearer {READ_ONLY}": "read"}.get(self.headers.get("Authorization", ""))

    def _json(self, value: Any) -> None:
        self._send(json.dumps(value).encode())

    def _send(self, data: bytes, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), "ETag": '"x"', **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def _listing(repo: FakeRepo, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    inside = {name: data for name, data in repo.files.items() if not folder or name.startswith(f"{folder}/")}
    start = len(folder) + 1 if folder else 0
    folders = {name[: name.index("/", start)] for name in inside if "/" in name[start:]}
    entries = [{"type": "directory", "oid": "d", "size": 0, "path": name} for name in sorted(folders)]
    for name, data in sorted(inside.items()):
        if recursive or "/" not in name[start:]:
            oid = hashlib.sha1(data).hexdigest()
            entries.append({"type": "file", "oid": oid, "size": len(data), "path": name})
    return entries
