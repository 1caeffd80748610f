"""The script for `hf jobs uv run`, docs/hub_job.py."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from support.hub import TOKEN, FakeRepo, fake_hub

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "hub_job.py"
HEADER = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
"""The regular expression of PEP 723 for such a header."""


def command_of(*arguments: str) -> list[str]:
    return runpy.run_path(str(SCRIPT))["command_of"](list(arguments))


def test_the_scripts_header_names_this_distribution_and_one_of_its_extras():
    (found,) = re.finditer(HEADER, SCRIPT.read_text(encoding="utf-8"))
    lines = found["content"].splitlines(keepends=True)
    header = tomllib.loads("".join(line.removeprefix("# ").removeprefix("#") for line in lines))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needs,) = header["dependencies"]
    name, extra = needs.removesuffix("]").split("[")
    assert (found["type"], name, header["requires-python"]) == ("script", project["name"], project["requires-python"])
    assert extra in project["optional-dependencies"]


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (["me/a", "me/b", "--model", "m"], ["run", "hf://datasets/me/a", "-o", "b.parquet", "--push", "me/b", "--model", "m"]),
        (["me/a@v1", "out.parquet", "--split", "test"], ["run", "hf://datasets/me/a@v1", "-o", "out.parquet", "--split", "test"]),
        (["s3://b/a.jsonl", "o.jsonl.gz", "-n", "2"], ["run", "s3://b/a.jsonl", "-o", "o.jsonl.gz", "-n", "2"]),
    ],
)  # fmt: skip
def test_the_scripts_arguments_become_those_of_run(given, command):
    assert command_of(*given) == command


def test_options_before_the_two_names_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        command_of("--model", "m", "me/a", "me/b")
    assert capsys.readouterr().err.endswith("error: INPUT and OUTPUT come before the options\n")


def test_the_script_reads_a_dataset_and_pushes_another(tiny_model_dir, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    with fake_hub(monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.repos["me/prompts"] = FakeRepo({"test.jsonl": b'{"prompt": "one"}\n'}, private=True)
        done = cli(*command_of("me/prompts", "me/answers", "--model", str(tiny_model_dir), "--max-tokens", "2"))
        assert done.code == 0, done.err
        assert "data/train-00000-of-00001.parquet" in hub.repos["me/answers"].files
