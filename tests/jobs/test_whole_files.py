"""A file that is replaced is whole at every moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from batchgen.jobs.disk import write_whole


def test_a_file_is_replaced_by_a_whole_one_and_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    with (tmp_path / "real.html").open() as before:
        write_whole(tmp_path / "link.html", "new \udcff")
        assert before.read() == "old", "a reader that has opened the old file keeps it"
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text() == "new ?"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "real.html"]


def test_a_file_that_cannot_be_written_whole_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f.json").write_text("old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "f.json", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("f.json", "old")]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_whole(tmp_path / "pipe", "text")
    reader.join()
    assert read == ["text"]
