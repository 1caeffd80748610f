"""Jobs on the command line whose input is a dataset of the Hub. A server in this process stands in for the Hub."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import re
import runpy
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import LLM
from support.hub import TOKEN, FakeRepo, fake_hub
from support.late import late

datasets, pl = late("datasets"), late("polars")


@pytest.fixture
def hub(monkeypatch):
    with fake_hub(monkeypatch) as hub:
        yield hub


def lines(*prompts: str) -> bytes:
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts).encode()


def test_a_job_on_a_dataset_is_complete_until_the_files_change(hub, cli, tmp_path, tiny_model_dir, read_jsonl):
    repo = hub.repos["user/rows"] = FakeRepo({"train.jsonl": lines("one", "two"), "test.jsonl": lines("three")})
    output = tmp_path / "out.jsonl"
    command = [
        "run", "hf://datasets/user/rows", "--split", "train", "-m", tiny_model_dir, "-o", output, "--max-tokens", 4,
    ]  # fmt: skip
    done = cli(*command)
    assert (done.code, [row["prompt"] for row in read_jsonl(output)]) == (0, ["one", "two"])
    assert "batchgen: hf://datasets/user/rows: split train, 1 file\n" in done.err
    repo.files["README.md"] = b"# Rows"
    again = cli(*command)
    assert again.code == 0
    assert again.err.endswith(f"{output} is complete (2 rows): nothing to do\n")
    repo.files["train.jsonl"] = lines("one", "two", "four")
    more = cli(*command)
    assert more.code == 0
    assert "1 done, 2 kept from an earlier run" in more.err
    assert [row["prompt"] for row in read_jsonl(output)] == ["one", "two", "four"]


def test_a_dataset_can_be_planned_and_an_unclear_split_is_refused(hub, cli, tiny_model_dir):
    hub.repos["user/rows"] = FakeRepo({"train.jsonl": lines("one", "two"), "test.jsonl": lines("three")})
    plan = cli("plan", "hf://datasets/user/rows", "--split", "test+train", "-m", tiny_model_dir)
    assert (plan.code, plan.out.splitlines()[0]) == (0, "rows               3, as raw text")
    refused = cli("run", "hf://datasets/user/rows", "-m", tiny_model_dir, "-o", "out.jsonl")
    assert (refused.code, refused.err) == (
        2,
        "batchgen: error: hf://datasets/user/rows has several splits; choose with --split: train, test, or all\n",
    )


COLUMNS = {
    "prompt": ["one", "two", "three"],
    "label": [0, None, 1],
    "when": [dt.datetime(2024, 5, 1, tzinfo=dt.UTC), None, dt.datetime(1999, 1, 1, tzinfo=dt.UTC)],
    "price": [decimal.Decimal("1.50"), None, decimal.Decimal("-2.00")],
    "small": [1, -1, None],
    "nested": [[{"name": "a", "scores": [0.5, None]}, {"name": None, "scores": None}], [], None],
    "text": ["mine", None, ""],
}
OWN = [name if name != "text" else "input_text" for name in COLUMNS]


def features():
    return datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["good", "bad"]),
            "when": datasets.Value("timestamp[us, tz=UTC]"),
            "price": datasets.Value("decimal128(6, 2)"),
            "small": datasets.Value("int8"),
            "nested": datasets.List(
                {"name": datasets.Value("string"), "scores": datasets.List(datasets.Value("float32"))}
            ),
            "text": datasets.Value("large_string"),
        }
    )


@pytest.fixture
def layout(tmp_path) -> Path:
    """A dataset on disk with the layout of the Hub: two configurations, one of which has its splits in Parquet files."""
    folder = tmp_path / "dataset"
    (folder / "data").mkdir(parents=True)
    rows = datasets.Dataset.from_dict(COLUMNS, features=features())
    rows.select([0, 1]).to_parquet(folder / "data" / "train-00000-of-00002.parquet")
    rows.select([2]).to_parquet(folder / "data" / "train-00001-of-00002.parquet")
    rows.select([0]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    (folder / "other.jsonl").write_bytes(lines("else"))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n  - split: test\n"
        "    path: data/test-*\n- config_name: other\n  data_files: other.jsonl\n---\n"
    )
    return folder


def test_the_four_kinds_of_tables_and_a_file_give_the_same_rows(layout, cli, tmp_path, tiny_model_dir):
    dataset = datasets.load_dataset(str(layout), split="train", cache_dir=str(tmp_path / "cache"))
    table = dataset.with_format("arrow")[:]
    output = tmp_path / "out.parquet"
    assert cli("run", layout, "--split", "train", "-m", tiny_model_dir, "-o", output, "--max-tokens", 4).code == 0
    file = pq.read_table(output)
    with LLM(tiny_model_dir) as llm:
        kinds = {
            "arrow": llm.generate_table(table, {"max_tokens": 4}),
            "pandas": pa.Table.from_pandas(
                llm.generate_table(dataset.to_pandas(), {"max_tokens": 4}), preserve_index=False
            ),
            "polars": llm.generate_table(pl.from_arrow(table), {"max_tokens": 4}).to_arrow(),
            "datasets": llm.generate_table(dataset, {"max_tokens": 4}).with_format("arrow")[:],
        }
    for kind, out in kinds.items():
        for name in ("prompt", "text", "finish_reason", "usage", "error"):
            assert out[name].to_pylist() == file[name].to_pylist(), (kind, name)
    assert [kinds["arrow"].schema.field(own).type for own in OWN] == [file.schema.field(own).type for own in OWN]
    assert [kinds["arrow"][own].to_pylist() for own in OWN] == [file[own].to_pylist() for own in OWN]


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
