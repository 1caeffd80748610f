"""Jobs on the command line whose input is a dataset of the Hub. A server in this process stands in for the Hub."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from support.hub import TOKEN, FakeRepo, fake_hub
from support.records import json_rows

pytestmark = pytest.mark.usefixtures("loaded_once")


@pytest.fixture
def hub(monkeypatch):
    with fake_hub(monkeypatch) as hub:
        yield hub


def lines(*prompts: str) -> bytes:
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts).encode()


def test_a_job_on_a_dataset_is_complete_until_the_files_change(hub, cli, tmp_path, tiny_model_dir):
    repo = hub.repos["user/rows"] = FakeRepo({"train.jsonl": lines("one", "two"), "test.jsonl": lines("three")})
    output = tmp_path / "out.jsonl"
    command = [
        "run", "hf://datasets/user/rows", "--split", "train", "-m", tiny_model_dir, "-o", output, "--max-tokens", 4,
    ]  # fmt: skip
    done = cli(*command)
    assert (done.code, [row["prompt"] for row in json_rows(output)]) == (0, ["one", "two"])
    assert "batchgen: hf://datasets/user/rows: split train, 1 file\n" in done.err
    repo.files["README.md"] = b"# Rows"
    again = cli(*command)
    assert again.code == 0
    assert again.err.endswith(f"batchgen: {output} is complete (2 rows): nothing to do\n")
    repo.files["train.jsonl"] = lines("one", "two", "four")
    more = cli(*command)
    assert more.code == 0
    assert "1 done, 2 kept from an earlier run" in more.err
    assert [row["prompt"] for row in json_rows(output)] == ["one", "two", "four"]


# -- the script for jobs on the Hub


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


def test_the_script_reads_a_dataset_and_pushes_another(tiny_model_dir, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    with fake_hub(monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.repos["me/prompts"] = FakeRepo({"test.jsonl": b'{"prompt": "one"}\n'}, private=True)
        done = cli(*command_of("me/prompts", "me/answers", "--model", str(tiny_model_dir), "--max-tokens", "2"))
        assert done.code == 0, done.err
        assert "data/train-00000-of-00001.parquet" in hub.repos["me/answers"].files
