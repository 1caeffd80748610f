"""A file that is replaced is complete at every moment."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.jobs.files.disk import move_file, write_whole


def test_a_file_is_replaced_at_once_with_its_permissions_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "real.html").chmod(0o600)
    (tmp_path / "link.html").symlink_to("real.html")
    with (tmp_path / "real.html").open() as before:
        write_whole(tmp_path / "link.html", "new \udcff")
        assert before.read() == "old", "a reader that has opened the old file keeps it"
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text() == "new ?"
    assert (tmp_path / "real.html").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "real.html"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_whole(tmp_path / "pipe", "text")
    reader.join()
    assert read == ["text"]


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_file_stays_unchanged_if_its_replacement_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "f.json").write_text("old")
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "f.json", "new")
    assert contents(tmp_path) == {"f.json": "old"}


def test_a_mounted_file_is_written_in_place(tmp_path, monkeypatch):
    (tmp_path / "f.json").write_text("old and longer")
    monkeypatch.setattr(Path, "replace", failing(errno.EBUSY))
    write_whole(tmp_path / "f.json", "new")
    with pytest.raises(OSError, match="busy"):
        write_whole(tmp_path / "g.json", "new")
    assert contents(tmp_path) == {"f.json": "new"}


def test_a_file_can_be_moved_into_a_folder_that_may_be_written_to_but_not_read(tmp_path, monkeypatch):
    (tmp_path / "new").write_text("new")
    opened = os.open

    def without_permission(path, *options):
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *options)

    monkeypatch.setattr(os, "open", without_permission)
    move_file(tmp_path / "new", tmp_path / "there")
    assert (tmp_path / "there").read_text() == "new"
