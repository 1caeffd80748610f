"""Damaged files in a job's folder: lost rows are generated again or the run is refused; no row is wrong, missing or repeated.

The whole job runs with the real tokenizer. Only the model is a fake: it answers with the prompt (`support.runs`).
"""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchgen.job
from batchgen.config import InputLimits
from batchgen.errors import BatchgenError, OutputError, UsageError
from support.damage import damaged
from support.harness import write_common_input
from support.params import examples
from support.runs import Killed, Runs


class Folder(Runs):
    """A job whose folder can be kept and restored."""

    def __init__(self, path: Path, model: Path, window: int | None) -> None:
        path.mkdir()
        super().__init__(path, model)
        self.window = window
        self.expected: dict[str, bytes] = {}
        write_common_input(path)

    def go_on(self, **options: Any) -> list[str]:
        """Runs the job and returns the generated prompts."""
        limits = InputLimits(read_rows=5, run_rows=6, window_leaves=6, batch_rows=2)
        return self.run(None, window=self.window, limits=limits, **options)[0]

    def content(self) -> bytes | None:
        return self.output.read_bytes() if self.output.exists() else None

    def keep(self, name: str) -> None:
        shutil.copytree(self.folder, self.folder.with_name(name))

    def back_to(self, name: str) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.folder.with_name(name), self.folder)


@pytest.fixture(scope="module", params=[None, 7], ids=["spooled", "windows"])
def folder(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A job saved in these states: `new`, `begun` (half of the rows generated), `generated` (all of them), `finished`, and `changed` (finished, with an input changed since)."""
    folder = Folder(tmp_path_factory.mktemp("damage") / "job", tiny_model_dir, request.param)
    folder.keep("new")
    folder.go_on(most=12)
    folder.keep("begun")
    with pytest.MonkeyPatch.context() as dying:
        dying.setattr(batchgen.job._Generation, "figures", _dies)
        folder.go_on()
    folder.keep("generated")
    folder.go_on()
    folder.keep("finished")
    write_common_input(folder.folder, 31)
    folder.keep("changed")
    return folder


def _dies(*_: Any) -> None:
    raise Killed


def expected_output(folder: Folder, state: str) -> bytes:
    """Returns the output of a run from that state without damage."""
    if state not in folder.expected:
        folder.back_to(state)
        folder.go_on()
        folder.expected[state] = folder.content() or b""
    return folder.expected[state]


def check_goes_on(folder: Folder, state: str, expected: bytes) -> str:
    """Runs the job to its end and follows the advice of an error, as a user would. Returns that error, or "" for none."""
    old = folder.content()
    try:
        folder.go_on()
        said = ""
    except UsageError as e:
        said = str(e)
        assert folder.content() == old
        folder.go_on(overwrite=True)
    except BatchgenError as e:
        said = str(e)
        assert isinstance(e, OutputError)  # noqa: PT017 - which error it is depends on the damage
        assert folder.content() == old
        folder.go_on()
    assert folder.content() == expected
    left = {p.name for p in folder.job_folder.iterdir()}
    # A finished job may have lost its keys and claims: it needs neither.
    assert left - {"keys", "known.sqlite", "claims", "report.json"} == {"manifest.json", "stats.json"}
    assert folder.go_on() == []
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
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    check_goes_on(folder, state, expected)


def test_the_input_is_read_again_if_the_error_of_a_row_is_damaged(folder):
    expected = expected_output(folder, "generated")
    folder.back_to("generated")
    with closing(sqlite3.connect(folder.job_folder / "results.sqlite")) as db, db:
        assert db.execute("UPDATE rows SET value = x'00' WHERE key IS NULL").rowcount == 2
    assert check_goes_on(folder, "generated", expected) == ""
