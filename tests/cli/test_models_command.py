"""`batchgen models` as its users see it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import transformers

from support.broken_models import BROKEN, broken_model, settings


@pytest.mark.parametrize(
    ("files", "chat_template", "prompts"),
    [
        ("*.json *.jinja", True, "through its chat template"),
        ("config.json", None, "unknown: the folder has no tokenizer files, which a run needs"),
    ],
)
def test_a_model_that_would_run_is_told_from_its_configuration_and_what_there_is_of_its_tokenizer(
    files, chat_template, prompts, cli, tiny_chat_model_dir, tmp_path
):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (path for pattern in files.split() for path in tiny_chat_model_dir.glob(pattern)):
        shutil.copy(path, folder)
    outcome = cli("models", folder)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        f"model     {folder} (llama)",
        "          would run: its type is verified",
        "context   512 tokens",
        "size      1 layer, 262 tokens in the vocabulary, float32",
        f"prompts   {prompts}",
        "KV        256 B per token",
    ]
    shown = json.loads(cli("models", folder, "--json").out)
    assert (shown["verified"], shown["chat_template"]) == (True, chat_template)


def test_a_context_that_is_shorter_than_the_configuration_says_is_explained(cli, tiny_chat_model_dir, tmp_path):
    folder = Path(shutil.copytree(tiny_chat_model_dir, tmp_path / "model"))
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    settings(rope_parameters=rope | {"original_max_position_embeddings": 48})(folder)
    outcome = cli("models", folder)
    assert (outcome.code, outcome.err) == (0, "")
    why = "the context ends at 48 tokens: beyond that LongRoPE changes the positions of all rows that run together"
    assert outcome.out.splitlines()[2:4] == ["context   48 tokens", f"          {why}"]
    assert json.loads(cli("models", folder, "--json").out)["context_note"] == why
    assert json.loads(cli("models", tiny_chat_model_dir, "--json").out)["context_note"] is None


def test_a_model_that_would_be_refused_is_refused(cli, tiny_model_dir, tmp_path):
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    settings(architectures=["LlamaForSequenceClassification"])(folder)
    outcome = cli("models", folder)
    assert (outcome.code, outcome.out) == (1, "")
    assert "is a classifier or reward model (LlamaForSequenceClassification)" in outcome.err


def test_the_verified_and_the_refused_types_are_listed(cli):
    outcome = cli("models")
    assert (outcome.code, outcome.err) == (0, "")
    assert "qwen3" in outcome.out.replace(",", " ").split()
    assert max(map(len, outcome.out.splitlines())) <= 110
    known = json.loads(cli("models", "--json").out)
    assert "llama" in known["verified"]
    assert not set(known["verified"]) & set(known["refused"])


# -- models that are refused


def expected(name: str, folder: Path) -> str:
    message = BROKEN[name][1].replace("TRANSFORMERS", transformers.__version__)
    return (
        re.escape(re.sub(r"\bM\b(?=[/'])", lambda _: str(folder), message))
        .replace("TAIL", ".*")
        .replace("BYTES", r"[\d,]+")
    )


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused_in_a_line_of_its_own(name, command, cli, tiny_model_dir, write_jsonl, tmp_path):
    folder = broken_model(name, tiny_model_dir, tmp_path / "model")
    outcome = cli(command, write_jsonl([{"prompt": "x"}]), "-m", folder, "--no-progress")
    if command == "plan" and name in (
        "weights are gone",
        "weights are a dead link",
        "a weight of another shape",
        "tensors are missing",
        "head lost",
    ):
        return  # only loading the weights can tell
    assert (outcome.code, outcome.out) == (1, ""), outcome
    assert re.fullmatch(f"batchgen: error: {expected(name, folder)}\n", outcome.err), outcome.err
