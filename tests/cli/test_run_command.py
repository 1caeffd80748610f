"""`batchgen run` as its users see it: files, streams, exit codes."""

import pytest

from support.records import json_rows

pytestmark = pytest.mark.usefixtures("loaded_once")


def test_a_file_of_prompts_in_a_file_of_completions_out(cli, write_jsonl, tiny_model_dir):
    source = write_jsonl([{"prompt": "one", "x": 1}, {"prompt": "two", "x": 2}])
    outcome = cli("run", source, "-m", tiny_model_dir, "--max-tokens", "3")
    assert (outcome.code, outcome.out) == (0, "")
    rows = json_rows(source.with_name("prompts.out.jsonl"))
    assert [list(row) for row in rows] == [["id", "prompt", "x", "text", "finish_reason", "usage", "error"]] * 2
    assert [(row["id"], row["prompt"], row["x"]) for row in rows] == [(0, "one", 1), (1, "two", 2)]


def test_failed_rows_are_counted_and_the_first_reasons_shown(cli, write_jsonl, tiny_model_dir):
    bad = ['{"prompt": "a"', "[1]", '{"prompt": null}', '{"prompt": 5}', '{"q": "x"}', '{"prompt": ""}', '"text"']
    source = write_jsonl([{"prompt": "fine"}, *bad])
    outcome = cli("run", source, "-m", tiny_model_dir, "--max-tokens", "3")
    assert outcome.code == 3
    assert "2 done, 6 failed" in outcome.err
    told = outcome.err.split("the first rows that failed:\n")[1].splitlines()
    assert len(told) == 5
    assert [line.split(": ")[:2] for line in told[:2]] == [[f"  {source}:{n}", "invalid_row"] for n in (2, 3)]


def test_standard_input_goes_to_standard_output_and_nothing_else_does(cli, tiny_model_dir):
    outcome = cli("run", "-", "-m", tiny_model_dir, "--max-tokens", "2", stdin='{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert outcome.code == 0
    assert [row["prompt"] for row in outcome.rows] == ["a", "b"]
    assert "standard output" in outcome.err


def test_quiet_says_nothing(cli, write_jsonl, tiny_model_dir):
    source = write_jsonl([{"prompt": "one", "seed": 1}])  # a note would be due
    outcome = cli("run", source, "-m", tiny_model_dir, "--max-tokens", "2", "-q")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_texts_may_come_from_files(cli, write_jsonl, tiny_chat_model_dir, tmp_path):
    (tmp_path / "system.txt").write_text("Be brief.")
    (tmp_path / "prefix.txt").write_text("Read: ")
    (tmp_path / "t.j2").write_text("{{ a }} and {{ b }}")
    source = write_jsonl([{"a": "x", "b": "y"}])
    options = ("--system", f"@{tmp_path}/system.txt", "--prefix", f"@{tmp_path}/prefix.txt")
    outcome = cli(
        "run", source, "-m", tiny_chat_model_dir, "--template", tmp_path / "t.j2", "--max-tokens", "1", *options
    )
    assert outcome.code == 0
    assert "through the chat template" in outcome.err
    (row,) = json_rows(source.with_name("prompts.out.jsonl"))
    rendered = ["B", "S", *"Be brief.", "E", "U", *"Read: x and y", "E", "A"]
    assert row["usage"]["prompt_tokens"] == len(rendered)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("boom\nmore"), "RuntimeError: boom; run the command again with -v to see where"),
        (
            PermissionError(13, "Permission denied", "m/x.json"),
            "m/x.json cannot be used: Permission denied; check its permissions",
        ),
        (
            OSError(36, "File name too long", "aa.jsonl"),
            "aa.jsonl cannot be used: File name too long; choose a shorter name",
        ),
        (
            OSError(24, "Too many open files", "p/model.safetensors"),
            "p/model.safetensors cannot be used: Too many open files; raise the limit of open files (ulimit -n)",
        ),
        (OSError(24, "Too many open files"), "Too many open files; raise the limit of open files (ulimit -n)"),
        (
            OSError(5, "Input/output error"),
            "OSError: [Errno 5] Input/output error; run the command again with -v to see where",
        ),
        (
            FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/']"),
            "No usable temporary directory found in ['/tmp', '/']; set TMPDIR to a folder that has room and can be written to",
        ),
        (
            RuntimeError("can't start new thread"),
            "can't start new thread; raise the limit of processes (ulimit -u, or --pids-limit of a container)",
        ),
        (MemoryError(), "out of memory; lower --window or --kv-memory"),
        (KeyboardInterrupt(), "interrupted by SIGINT"),
    ],
)
def test_whatever_goes_wrong_is_one_line(error, line, cli, write_jsonl, monkeypatch):
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("batchgen.job.run_job", fail)
    outcome = cli("run", write_jsonl([]), "-m", "x")
    assert outcome.code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert outcome.err == f"batchgen: error: {line}\n"
