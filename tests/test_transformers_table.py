"""The table of transformers' classes is made once for each version of its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from batchgen.process.transformers_table import with_stored_table

TABLE = {
    frozenset({"torch", "vision"}): {"llama.modeling_llama": {"LlamaModel", "LlamaForCausalLM"}},
    frozenset(): {"llama.configuration_llama": {"LlamaConfig"}},
}


class Process:
    """A process that asks for the table of a folder. `read` are the folders whose files it had to read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.table_of = with_stored_table(self._define)

    def _define(self, path: str, prefix: str | None = None) -> Any:
        self.read.append(path)
        before = f"{prefix}." if prefix else ""
        return {needed: {before + name: set(of) for name, of in modules.items()} for needed, modules in TABLE.items()}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "transformers" / "models"
    (folder / "llama").mkdir(parents=True)
    (folder / "__init__.py").write_text("a")
    (folder / "llama" / "modeling_llama.py").write_text("b")
    return folder


def test_the_files_are_read_once_and_each_process_gets_the_same_table(models: Path) -> None:
    first, second = Process(), Process()
    assert first.table_of(models / "__init__.py") == first.table_of(str(models)) == TABLE
    assert second.table_of(str(models)) == TABLE
    assert (first.read, second.read) == ([str(models)], [])
    assert second.table_of(models, prefix="models")[frozenset()] == {
        "models.llama.configuration_llama": {"LlamaConfig"}
    }


def test_a_table_that_is_changed_by_its_reader_stays_whole(models: Path) -> None:
    process = Process()
    process.table_of(models)[frozenset()]["llama.configuration_llama"].clear()
    assert process.table_of(models) == TABLE


def test_other_folders_are_read_every_time(models: Path) -> None:
    process = Process()
    for _ in range(2):
        process.table_of(models / "llama", prefix="models.llama")
    assert process.read == [str(models / "llama")] * 2
    assert not (models.parents[1] / "cache").exists()


@pytest.mark.parametrize("change", ["changed", "another time", "added"])
def test_after_a_change_of_the_files_the_table_is_made_again_and_the_old_one_removed(models: Path, change: str) -> None:
    Process().table_of(models)
    file = models / "llama" / "modeling_llama.py"
    if change == "changed":
        stat = file.stat()
        file.write_text("longer")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "added":
        (models / "llama" / "new.py").write_text("")
    else:
        os.utime(file, ns=(1, 1))
    process = Process()
    assert process.table_of(models) == TABLE
    assert process.read == [str(models)]
    assert len(list((models.parents[1] / "cache" / "batchgen" / "transformers-tables").iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"torch": 1}', b'{"torch": {"a": 1}}', b"\xff"])
def test_a_damaged_table_is_made_again(models: Path, content: bytes) -> None:
    Process().table_of(models)
    (stored,) = (models.parents[1] / "cache" / "batchgen" / "transformers-tables").iterdir()
    stored.write_bytes(content)
    assert Process().table_of(models) == TABLE
    process = Process()
    assert (process.table_of(models), process.read) == (TABLE, [])


def test_without_a_cache_folder_the_table_is_made_for_each_process(models: Path) -> None:
    (models.parents[1] / "cache").write_text("a file")
    for process in (Process(), Process()):
        assert process.table_of(models) == TABLE
        assert process.read == [str(models)]
