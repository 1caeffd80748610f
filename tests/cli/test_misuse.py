"""Misuse gives one line and its exit code, before a tokenizer is loaded."""

import os
import re

import pytest

from batchgen.jobs.files.lease import Lease
from batchgen.prompts.params import NAMES
from support.misuse import MISUSES, make_files
from support.params import slow_but


@pytest.mark.parametrize(("line", "code", "message"), MISUSES, ids=[line for line, _, _ in MISUSES])
def test_misuse_is_told_in_one_line_before_a_tokenizer_is_loaded(
    line, code, message, cli, tiny_model_dir, tmp_path, monkeypatch
):
    def load_tokenizer(config: object) -> None:
        raise AssertionError("a tokenizer is being loaded")

    monkeypatch.setattr("batchgen.job_setup.load_tokenizer", load_tokenizer)
    make_files(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    names = {"R": "rows.jsonl", "M": str(tiny_model_dir), "EMPTY": ""}
    outcome = cli(*(names.get(word, word) for word in line.split()))
    assert (outcome.code, outcome.out) == (code, ""), outcome
    said = outcome.err.removeprefix("batchgen: error: ")
    expected = message.replace("MODEL", str(tiny_model_dir)).replace("NAMES", ", ".join(sorted(NAMES)))
    assert said == f"{expected}\n" or (message == "ANY" and re.fullmatch(r"[^\n]+; [^\n]+\n", said)), said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    slow_but(
        [["--prompt-column", "q"]],
        [["-o", "no/o.jsonl"], ["--regex", "a("], ["--prompt-column", "q"], ["-o", "mine.jsonl"]],
    ),
)
def test_misuse_imports_nothing_that_is_slow(arguments, python, tiny_model_dir, tmp_path):
    make_files(tmp_path)
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules))))\n"
        "from batchgen_cli.app import run_command\n"
        "run_command(sys.argv[1:])\n"
    )
    words = ["run", "rows.jsonl", "-m", str(tiny_model_dir), *arguments]
    done = python(code, *words)
    assert (done.returncode, done.stdout) == (2, "[]\n")


def test_a_held_output_is_told_before_a_tokenizer_is_loaded(cli, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.job_setup.load_tokenizer", None)
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    claims = tmp_path / "o.jsonl.job" / "claims"
    claims.parent.mkdir()
    lease = Lease(claims, "o.jsonl")
    outcome = cli("run", "rows.jsonl", "-m", tiny_model_dir, "-o", "o.jsonl")
    lease.release()
    assert (outcome.code, outcome.out) == (75, "")
    assert outcome.err.startswith(f"batchgen: error: another run holds o.jsonl (process {os.getpid()} on ")
    assert len(list(claims.iterdir())) == 1


def test_a_current_folder_that_was_deleted_is_named(cli, tiny_model_dir, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    make_files(tmp_path)
    monkeypatch.chdir(gone)
    gone.rmdir()
    refused = cli("run", tmp_path / "rows.jsonl", "-m", tiny_model_dir, "-o", tmp_path / "out.jsonl")
    assert (refused.code, refused.err) == (
        2, "batchgen: error: the current folder no longer exists; change to another one with cd\n",
    )  # fmt: skip
    assert cli("run", "--help").code == 0


def test_a_run_that_ended_before_its_first_result_binds_no_other(cli, write_jsonl, tiny_model_dir, tmp_path):
    run = ("run", "-m", tiny_model_dir, write_jsonl([{"prompt": "a"}]), "-o", tmp_path / "out.jsonl")
    first = cli(*run, "--kv-memory", "1B")
    assert (first.code, first.err.splitlines()[-1]) == (
        2, "batchgen: error: --kv-memory 1B does not hold a block of 32 tokens (8.0 KiB); give 8KiB or more, or lower --chunk-size",
    )  # fmt: skip
    assert cli(*run, "--max-tokens", "2").code == 0
    assert "was made with other settings: max_tokens was 2, is 3" in cli(*run, "--max-tokens", "3").err
