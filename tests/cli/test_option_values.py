"""How the texts of options become values. `test_misuse.py` has those that are refused."""

from operator import attrgetter

import pytest
import typer.main

from batchgen.config import JobConfig, ModelConfig
from batchgen.options import json_schema_file
from batchgen_cli.app import _with_values, app
from batchgen_cli.options import job_config


def parsed(*arguments: str) -> JobConfig:
    """Returns the job that these options ask for."""
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    with run.make_context("run", ["x.jsonl", "-m", "m", *arguments]) as ctx:
        return job_config(ctx.params)


def test_what_is_not_given_is_the_default():
    assert parsed() == JobConfig(inputs=("x.jsonl",), model=ModelConfig(model="m"))


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--keep all", "keep", None),
        ("--keep none", "keep", ()),
        ("--keep a,b,", "keep", ("a", "b")),
        ("--row-params a,b", "prompts.row_params", ("a", "b")),
        ("--batch-size auto", "engine.batch_size", None),
        ("--batch-size 12", "engine.batch_size", 12),
        ("", "prompts.chat", None),
        ("--chat", "prompts.chat", True),
        ("--no-chat", "prompts.chat", False),
        ("--no-share", "engine.share", False),
        ("--window all", "window", "all"),
        ("--window 7", "window", 7),
        ("--stop a --stop b", "sampling.stop", ("a", "b")),
        ("--stop-token-id 5", "sampling.stop_token_ids", (5,)),
        ("--prefix a@b\\n", "prompts.prefix", "a@b\\n"),
        ('--chat-template-kwargs {"a":[1]}', "prompts.chat_template_kwargs", {"a": [1]}),
        ("--choices A,B,C", "sampling.choices", ("A", "B", "C")),
        ('--choices ["a,b","c"]', "sampling.choices", ("a,b", "c")),
        ("--seed 3", "sampling.given", ("seed",)),
        ("--seed 3", "sampling.seed", 3),
        ("--temperature 2", "sampling.temperature", 2.0),
        ("--max-tokens 20 --ignore-eos", "sampling.ignore_eos", True),
        ("--max-tokens 20 --ignore-eos", "sampling.max_tokens", 20),
    ],
)
def test_a_text_becomes_a_value(arguments, field, value):
    assert attrgetter(field)(parsed(*arguments.split())) == value


def test_a_schema_is_that_of_its_file_blanks_apart(tmp_path):
    path = tmp_path / "s.json"
    path.write_text('\ufeff{\n "type": "object",  "properties": {"b": {}, "a": {}}}\n')
    assert json_schema_file("--json-schema", path) == '{"type": "object", "properties": {"b": {}, "a": {}}}'


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("--ray", ["--ray=auto"]),
        ("--ray rows.jsonl", ["--ray=auto", "rows.jsonl"]),
        ("--ray --limit 3", ["--ray=auto", "--limit", "3"]),
        ("--ray head:6379", ["--ray", "head:6379"]),
        ("--ray ray://head:10001", ["--ray", "ray://head:10001"]),
        ("--ray local", ["--ray", "local"]),
        ("--ray=10.0.0.1:6379", ["--ray=10.0.0.1:6379"]),
        ("--measure", ["--measure=32"]),
        ("--measure 8 rows.jsonl", ["--measure", "8", "rows.jsonl"]),
        ("--measure rows.jsonl", ["--measure=32", "rows.jsonl"]),
    ],
)
def test_the_address_of_a_cluster_and_the_rows_to_measure_may_be_left_out(given, taken):
    assert _with_values(given.split()) == taken


def test_without_the_package_ray_says_how_to_install_it(cli, tiny_model_dir, write_jsonl, monkeypatch):
    monkeypatch.setattr("batchgen.preflight.find_spec", lambda name: None)
    outcome = cli("run", write_jsonl([{"prompt": "x"}]), "-m", tiny_model_dir, "--ray")
    assert (outcome.code, outcome.err) == (
        2,
        "batchgen: error: --ray needs the package ray; install it with pip install 'batchgen-llm[ray]'\n",
    )
