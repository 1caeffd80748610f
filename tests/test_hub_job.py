"""A job whose input is a dataset of the Hub, from the command line; the Hub is a server of this process."""

from __future__ import annotations

import json

import pytest

from support.hub import FakeRepo, fake_hub


@pytest.fixture
def hub(monkeypatch):
    with fake_hub(monkeypatch) as hub:
        yield hub


def lines(*prompts: str) -> bytes:
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts).encode()


def test_a_job_over_a_dataset_is_finished_until_its_files_change(hub, cli, tmp_path, tiny_model_dir, read_jsonl):
    repo = hub.repos["user/rows"] = FakeRepo({"train.jsonl": lines("one", "two"), "test.jsonl": lines("three")})
    output = tmp_path / "out.jsonl"
    command = [
        "run",
        "hf://datasets/user/rows",
        "--split",
        "train",
        "-m",
        tiny_model_dir,
        "-o",
        output,
        "--max-tokens",
        4,
    ]
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


def test_a_plan_of_a_dataset_and_a_refused_choice(hub, cli, tiny_model_dir):
    hub.repos["user/rows"] = FakeRepo({"train.jsonl": lines("one", "two"), "test.jsonl": lines("three")})
    plan = cli("plan", "hf://datasets/user/rows", "--split", "test+train", "-m", tiny_model_dir)
    assert (plan.code, plan.out.splitlines()[0]) == (0, "rows               3, as raw text")
    refused = cli("run", "hf://datasets/user/rows", "-m", tiny_model_dir, "-o", "out.jsonl")
    assert (refused.code, refused.err) == (
        2,
        "batchgen: error: hf://datasets/user/rows has several splits; choose with --split: train, test, or all\n",
    )
