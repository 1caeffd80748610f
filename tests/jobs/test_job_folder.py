"""A job's folder when the job begins, is killed, continues, finishes, and changes."""

import json
import socket
from pathlib import Path

import pytest

from batchgen.config import JobConfig
from batchgen.errors import OutputLocked
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.results import Results
from batchgen.jobs.opening import find_finished
from batchgen.records import open_input
from support.jobs import FINISHED_FILES, SETTINGS, job_open
from support.python_process import holding


def test_a_job_leaves_its_output_and_a_small_folder(run, write_input):
    write_input(["a", "fail", "cut"])
    job, generated = run(token_ids=True)
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    first, second, third = (json.loads(line) for line in Path("o.jsonl").read_text().splitlines())
    assert first == {
        "id": 0, "prompt": "a", "text": "A", "finish_reason": "stop", "usage": usage, "token_ids": [1, 2],
        "error": None,
    }  # fmt: skip
    assert second["error"] == {"type": "does_not_fit", "message": "too big"}
    assert third["truncated"] is True
    assert generated == ["cut", "fail", "a"]
    assert job.notes == []
    assert Path("o.jsonl.job/keys").stat().st_size == 48
    assert sorted(p.name for p in Path("o.jsonl.job").iterdir()) == FINISHED_FILES


def test_a_disk_that_the_output_has_filled_does_not_fail_the_job(run, write_input, monkeypatch):
    write_input(["a", "fail", "cut"])
    with monkeypatch.context() as patch:
        patch.setattr(Results, "shrink", lambda self, keys: None)
        job, _ = run()
    assert job.notes == [
        "the disk is full, so o.jsonl.job/results.sqlite stays; the same command removes it once there is space"
    ]
    assert Path("o.jsonl.job/results.sqlite").exists()
    whole = Path("o.jsonl").read_bytes()
    job, generated = run()
    assert (job.finished is not None, generated, Path("o.jsonl").read_bytes()) == (True, [], whole)
    assert sorted(p.name for p in Path("o.jsonl.job").iterdir()) == FINISHED_FILES


def test_only_a_command_that_would_find_nothing_to_do_is_known_to_have_finished_its_job(run, write_input):
    def is_finished(digest: str, **options) -> bool:
        config = JobConfig(inputs="in.jsonl", model="m", output="o.jsonl", **options)
        source = open_input(["in.jsonl"], format=None, output="o.jsonl")
        return find_finished("o.jsonl", digest=digest, input=source, config=config) is not None

    spec = {"settings": SETTINGS | {"chat": False}, "stats": {"job": {"finish_reasons": {"stop": 11, "error": 1}}}}
    write_input(["fail", *"abcdefghijk"])
    run(digest="digest", **spec)
    assert is_finished("digest")
    assert is_finished("digest", prune=True)  # nothing to remove
    assert not is_finished("another")
    assert not is_finished("digest", limit=3)
    assert not is_finished("digest", retry="errors")
    write_input(["fail", *"abcdefghij"])
    assert not is_finished("digest")
    run(digest="digest", **spec)
    assert is_finished("digest")
    assert not is_finished("digest", prune=True)  # the result of "k" is still there
    run(digest="", overwrite=True, **spec)
    assert not is_finished("")  # the command cannot be known


def test_a_killed_run_is_named_and_continued(run, texts, write_input):
    write_input(["a", "b", "c"])
    run(stop_after=2)
    claims = Path("o.jsonl.job/claims").absolute()
    with (
        holding(Lease, claims, "o.jsonl") as process,
        pytest.raises(OutputLocked, match=f"process {process.pid} on {socket.gethostname()}"),
    ):
        job_open()
    job, generated = run()
    assert generated == ["a"]
    assert job.notes == [f"an earlier run (process {process.pid}) was killed; this run continues it"]
    assert texts() == ["A", "B", "C"]


def test_rows_are_kept_in_every_format_of_the_output(run, write_input):
    for output in ("o.parquet", "o.jsonl.gz", "o.jsonl.zst"):
        write_input(["a", "fail", "cut"])
        run(output, token_ids=True)
        write_input(["a", "fail", "cut", "d"])
        assert run(output, token_ids=True)[1] == ["d"]
        rows = list(open_input([output], format=None, output=None).rows())
        assert [r.columns["text"] for r in rows] == ["A", None, "CUT", "D"]
        assert [r.columns["token_ids"] for r in rows] == [[1, 2], None, [1, 2], [1, 2]]
        assert [bool(r.columns.get("truncated")) for r in rows] == [False, False, True, False]
        assert rows[1].columns["error"] == {"type": "does_not_fit", "message": "too big"}


@pytest.mark.parametrize("output", ["o.csv", "o.tsv.gz"])
def test_the_results_of_a_csv_output_are_kept_in_the_folder(run, write_input, output):
    write_input(["a", "fail", "cut"])
    run(output, token_ids=True)
    write_input(["d", "a", "fail"])
    job, generated = run(output, token_ids=True, prune=True)
    assert generated == ["d"]
    assert job.notes[0] == f"{output} was finished: 3 of its results are used again"
    rows = [row.columns for row in open_input([output], format=None, output=None).rows()]
    assert [(row["text"], row["token_ids"]) for row in rows] == [("D", "[1, 2]"), ("A", "[1, 2]"), ("", "")]
    assert rows[2]["error"] == '{"type": "does_not_fit", "message": "too big"}'


def test_malformed_rows_never_have_a_key(run):
    Path("in.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    run()
    assert Path("o.jsonl.job/keys").read_bytes()[16:] == bytes(16)
    assert json.loads(Path("o.jsonl").read_text().splitlines()[1])["error"] == {
        "type": "invalid_row",
        "message": "in.jsonl:2: not JSON: Expecting value at column 1",
    }
    Path("in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert run()[1] == ["b"]


def test_other_versions_of_packages_are_only_noted(run, write_input):
    write_input(["a", "b"])
    run(stop_after=1, mentions={"transformers": "5.17.0", "torch": "2.11"})
    job, generated = run(mentions={"transformers": "5.23.0", "torch": "2.11"})
    assert generated == ["a"]
    assert job.notes == ['o.jsonl was started with other versions: transformers was "5.17.0", is "5.23.0"']


def test_damaged_keys_are_not_trusted(run, write_input):
    write_input(["a"])
    run()
    Path("o.jsonl.job/keys").write_bytes(b"x" * 16)
    write_input(["a", "b"])
    job, generated = run()
    assert generated == ["b", "a"]
    assert job.notes == [
        "o.jsonl.job/keys is damaged, so the rows of o.jsonl cannot be recognised: they are generated again"
    ]
