"""Damaged files in a job's folder: lost rows are generated again or the run is refused; no row is wrong, missing or repeated.

The whole job runs with the real tokenizer. Only the model is a fake: it answers with the prompt (`support.runs`).
"""

from __future__ import annotations

import importlib
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchgen.job
import batchgen.job_setup
from batchgen import JobConfig, ModelConfig, SamplingParams, run_job
from batchgen.errors import BatchgenError, OutputError, UsageError
from batchgen.prompts import load_tokenizer
from support.harness import TINY_SPOOL, write_common_input
from support.params import examples
from support.runs import Killed, Oracle


class Folder:
    """A job in a folder, run in this process."""

    def __init__(self, path: Path, model: Path, window: int | None, oracle: Oracle) -> None:
        self.path, self.model, self.window, self.oracle = path, model, window, oracle
        self.job_folder = path / "out.jsonl.job"
        self.expected: dict[str, bytes] = {}
        write_common_input(path)

    def run(self, *, most: int | None = None, **options: Any) -> list[str]:
        """Runs the job and returns the generated prompts. The run dies after `most` prompts."""
        self.oracle.most, self.oracle.answered = most, []
        config = JobConfig(
            inputs=self.path / "in.jsonl",
            output=str(self.path / "out.jsonl"),
            model=self.model,
            sampling=SamplingParams(max_tokens=4),
            window=self.window,
            **options,
        )
        try:
            run_job(config)
        except Killed:
            assert most is not None
        return self.oracle.answered

    def output(self) -> bytes | None:
        path = self.path / "out.jsonl"
        return path.read_bytes() if path.exists() else None

    def keep(self, name: str) -> None:
        shutil.copytree(self.path, self.path.with_name(name))

    def back_to(self, name: str) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(self.path.with_name(name), self.path)


WINDOWS = {"spooled": None, "windows": 7}


@pytest.fixture(scope="module", params=WINDOWS)
def folder(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Folder]:
    """A job saved in these states: `new`, `begun` (half of the rows generated), `generated` (all of them), `finished`, and `changed` (finished, with an input changed since)."""
    tokenizer = load_tokenizer(ModelConfig(model=str(tiny_model_dir)))
    oracle = Oracle("a", lambda tokens: str(tokenizer.hf_tokenizer.decode(tokens)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batchgen.job, "open_engine", lambda *_: oracle)
        patch.setattr(batchgen.job_setup, "load_tokenizer", lambda _: tokenizer)
        for place, value in TINY_SPOOL.items():
            module, name = place.split(":")
            now = getattr(importlib.import_module(module), name)
            patch.setattr(f"{module}.{name}", replace(now, **value) if isinstance(value, dict) else value)
        folder = Folder(tmp_path_factory.mktemp("damage") / "job", tiny_model_dir, WINDOWS[request.param], oracle)
        folder.keep("new")
        folder.run(most=12)
        folder.keep("begun")
        with patch.context() as dying:
            dying.setattr(batchgen.job._Model, "figures", _dies)
            folder.run(most=1000)
        folder.keep("generated")
        folder.run()
        folder.keep("finished")
        write_common_input(folder.path, 31)
        folder.keep("changed")
        yield folder


def _dies(*_: Any) -> None:
    raise Killed


# Kinds of damage, as functions of a file's bytes.


def _cut(data: st.DataObject, content: bytes) -> bytes:
    return content[: data.draw(st.integers(0, max(0, len(content) - 1)), label="cut at")]


def _flip(data: st.DataObject, content: bytes) -> bytes:
    flipped = bytearray(content)
    for bit in data.draw(st.lists(st.integers(0, max(0, 8 * len(content) - 1)), min_size=1, max_size=3), label="bits"):
        flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def _zero(data: st.DataObject, content: bytes) -> bytes:
    at = data.draw(st.integers(0, len(content)), label="zeros from")
    return content[:at] + bytes(len(content[at : at + 200])) + content[at + 200 :]


def _append(data: st.DataObject, content: bytes) -> bytes:
    return content + data.draw(st.binary(min_size=1, max_size=50), label="appended")


def _lines(data: st.DataObject, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    chosen = data.draw(st.lists(st.integers(0, max(0, len(lines) - 1)), max_size=2 * len(lines)), label="lines")
    return b"".join(lines[i] for i in chosen) if lines else b""


def _insert(data: st.DataObject, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines)), label="inserted before line")
    return b"".join(lines[:at]) + data.draw(st.binary(max_size=50)) + b"\n" + b"".join(lines[at:])


DAMAGES = {"cut": _cut, "flipped": _flip, "zeros": _zero, "appended": _append, "lines": _lines, "inserted": _insert}


def damage(data: st.DataObject, path: Path) -> None:
    content = path.read_bytes()
    kind = data.draw(st.sampled_from([*DAMAGES] if content else ["appended"]), label="damage")
    path.write_bytes(DAMAGES[kind](data, content))


def expected_output(folder: Folder, state: str) -> bytes:
    """Returns the output of a run from that state without damage."""
    if state not in folder.expected:
        folder.back_to(state)
        folder.run()
        folder.expected[state] = folder.output() or b""
    return folder.expected[state]


def check_goes_on(folder: Folder, state: str, expected: bytes) -> str:
    """Runs the job to its end and follows the advice of an error, as a user would. Returns that error, or "" for none."""
    old = folder.output()
    try:
        folder.run()
        said = ""
    except UsageError as e:
        said = str(e)
        assert folder.output() == old
        folder.run(overwrite=True)
    except BatchgenError as e:
        said = str(e)
        assert isinstance(e, OutputError)  # noqa: PT017 - which error it is depends on the damage
        assert folder.output() == old
        folder.run()
    assert folder.output() == expected
    left = {p.name for p in folder.job_folder.iterdir()}
    # A finished job may have lost its keys and claims: it needs neither.
    assert left - {"keys", "known.sqlite", "claims", "report.json"} == {"manifest.json", "stats.json"}
    assert folder.run() == []
    return said


@settings(max_examples=examples(5, 40))
@given(data=st.data())
def test_damage_only_costs_rows_that_are_generated_again_or_is_noticed(folder, data):
    state = data.draw(st.sampled_from(["begun", "generated", "finished", "changed"]))
    expected = expected_output(folder, state)
    folder.back_to(state)
    files = sorted(p for p in folder.job_folder.rglob("*") if p.is_file())
    results = [p for p in files if p.name == "results.sqlite"]
    path = data.draw(st.sampled_from(results or files) | st.sampled_from(files), label="file")
    if data.draw(st.booleans(), label="gone"):
        path.unlink()
    else:
        damage(data, path)
    check_goes_on(folder, state, expected)


def test_the_input_is_read_again_if_the_error_of_a_row_is_damaged(folder):
    expected = expected_output(folder, "generated")
    folder.back_to("generated")
    with closing(sqlite3.connect(folder.job_folder / "results.sqlite")) as db, db:
        assert db.execute("UPDATE rows SET value = x'00' WHERE key IS NULL").rowcount == 2
    assert check_goes_on(folder, "generated", expected) == ""
