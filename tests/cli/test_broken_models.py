"""Every broken or foreign model folder is refused in one line of its own; most of them before transformers is imported."""

import re
from pathlib import Path

import pytest
import transformers

from support.broken_models import BROKEN, broken_model


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
