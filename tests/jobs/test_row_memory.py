"""Rows that an earlier run has read are neither rendered nor tokenized again, as long as nothing has changed that their prompts depend on."""

import datetime as dt
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from batchgen import SamplingParams
from batchgen.errors import RowError
from batchgen.jobs.files import row_memory
from batchgen.jobs.files.results import Results
from batchgen.jobs.files.row_keys import KNOWN_FILE
from batchgen.jobs.files.row_memory import KnownRequest
from batchgen.prompts import PromptBuilder
from batchgen.records import Row
from batchgen.result import Result
from support.records import parquet_bytes

A, B, C = (letter.encode() * 16 for letter in "abc")
PROMPTS = [f"p{i}" for i in range(6)]


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Results]:
    with closing(Results(tmp_path, 5.0)) as results:
        results.row_keys = results.keys_of_rows()
        yield results


VALUES = [
    {"a": 1}, {"a": 1.0}, {"a": "1"}, {"a": True}, {"a": None}, {}, {"b": 1}, {"a": [1]}, {"a": {"b": 1}}, {"a": "\ud800"},
    {"a": dt.date(2026, 1, 1)}, {"a": "2026-01-01"}, {"a": Decimal(1)}, {"a": b"1"}, {"a": 1, "b": 2}, {"b": 2, "a": 1},
]  # fmt: skip


def test_rows_with_other_columns_or_other_settings_have_other_digests(results):
    one, two = map(results.memory_of_rows, (b"one", b"two"))
    digests = [m.digest(columns, typed=typed) for m in (one, two) for typed in (False, True) for columns in VALUES]
    assert len({*digests}) == 4 * len(VALUES)
    assert [one.digest(deepcopy(columns), typed=False) for columns in VALUES] == digests[: len(VALUES)]
    assert one.digest({"a": lambda: 1}, typed=False) is None


def test_damaged_entries_are_not_used(results, tmp_path):
    memory = results.memory_of_rows(b"")
    memory.add([(A, KnownRequest(B, is_sampled=True)), (B, KnownRequest(C, is_sampled=False))])
    memory.flush()
    with closing(sqlite3.connect(tmp_path / KNOWN_FILE)) as db, db:
        db.execute("UPDATE rows SET key = ? WHERE row = ?", (C, A))
    assert results.memory_of_rows(b"").find([A, B]) == {B: (C, False)}


def test_a_file_that_only_another_user_may_write_to_becomes_a_copy(results, tmp_path, monkeypatch):
    memory = results.memory_of_rows(b"")
    memory.add([(A, KnownRequest(B, is_sampled=True))])
    memory.flush()
    results.close()
    theirs = (tmp_path / KNOWN_FILE).stat().st_ino
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).stat().st_ino != theirs and access(path, mode))
    with closing(Results(tmp_path, 5.0)) as again:
        again.keys_of_rows()
        assert again.memory_of_rows(b"").find([A]) == {A: (B, True)}
    assert (tmp_path / KNOWN_FILE).stat().st_ino != theirs


def test_its_size_is_bounded(results, monkeypatch):
    monkeypatch.setattr(row_memory, "MAX_ROWS", 4)
    monkeypatch.setattr(row_memory, "_SPARE_ROWS", 0)
    rows = [bytes([i]) * 16 for i in range(6)]
    memory = results.memory_of_rows(b"")
    for row in rows:
        memory.add([(row, KnownRequest(row, is_sampled=False))])
        memory.flush()
    assert [*results.memory_of_rows(b"").find(rows)] == rows[:4]
    results.append(rows[0], Result(row=0, text="", finish_reason="stop"))
    results.add_rows([0], {0: rows[1]}, {})
    results.row_keys.keys([rows[2]], [A], [True])  # its key is made of its id
    memory.forget_unasked(2)
    assert [*results.memory_of_rows(b"").find(rows)] == rows[:4]
    memory.forget_unasked(1)
    assert [*results.memory_of_rows(b"").find(rows)] == rows[:3]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The rendered prompts, a list for each run that is begun with `runs_of`."""
    rendered: list[list[str]] = []
    build = PromptBuilder.build

    def counted(self: PromptBuilder, rows: Sequence[Row], params: Any = None) -> Any:
        rendered[-1] += [row.columns.get("prompt", "") for row in rows]
        return build(self, rows, params)

    monkeypatch.setattr(PromptBuilder, "build", counted)
    return rendered


WINDOWS = pytest.mark.parametrize("window", [None, 4])


@WINDOWS
def test_only_rows_that_are_new_or_changed_are_rendered(runs, built, window):
    for rows, expected in (
        (PROMPTS, PROMPTS),
        ([*PROMPTS, "new"], ["new"]),
        (["changed", *PROMPTS[1:], "new"], ["changed"]),
        ([{"prompt": "new"}, {"prompt": "p2", "n": 1}, *PROMPTS[1:]], ["p2"]),
    ):
        built.append([])
        runs.run(rows, window=window, prune=True)
        assert built[-1] == expected
        assert runs.texts() == [f"a: {row if isinstance(row, str) else row['prompt']}" for row in rows]


@WINDOWS
def test_a_known_row_without_a_result_runs(runs, built, window):
    runs.reason = lambda prompt: "timeout" if prompt in ("p1", "p4") else "stop"
    for expected in (PROMPTS, ["p1", "p4"]):
        built.append([])
        assert runs.run(PROMPTS, window=window, retry=("timeout",))[0] == expected
        assert built[-1] == expected
    assert runs.texts() == [f"a: {prompt}" for prompt in PROMPTS]


def test_rows_are_rendered_again_with_other_settings(runs, built):
    runs.reason = lambda prompt: "length" if prompt == "p1" else "stop"
    built.append([])
    runs.run(PROMPTS)
    built.append([])
    longer = SamplingParams(max_tokens=8)
    assert runs.run(PROMPTS, sampling=longer, retry=("length",))[0] == ["p1"]
    assert built[-1] == PROMPTS


def test_a_row_of_json_lines_is_another_one_in_a_table_with_types(runs):
    """A table has a null for each key that only other rows have, so nulls of its schemas are dropped."""
    rows = [{"prompt": "p", "sampling_params": {"json_schema": {"type": "string", "default": None}}}]
    assert runs.run(rows)[0] == ["p"]
    (runs.folder / "in.parquet").write_bytes(parquet_bytes(rows))
    assert runs.run(None, inputs=str(runs.folder / "in.parquet"), prune=True)[0] == ["p"]


def test_a_known_row_that_fails_this_time_fails_with_its_equals(runs, built, monkeypatch):
    runs.reason = lambda prompt: "timeout" if prompt == "p1" else "stop"
    rows = [*PROMPTS, "p1"]
    built.append([])
    runs.run(rows)
    built.append([])
    failed = [Result.from_error(1, RowError("template_error", "too slow"))]
    monkeypatch.setattr(PromptBuilder, "build", lambda self, rows, params=None: failed)
    report = runs.run(rows, retry=("timeout",))[1]
    assert (report.stats["rows_failed"], report.stats["rows_resumed"]) == (2, 5)
    assert [row["error"] is not None for row in runs.rows()] == [prompt == "p1" for prompt in rows]
