"""Commands that compute nothing answer at once: they import nothing that is slow."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.params import slow_but

MODEL = {"torch", "transformers", "tokenizers"}
HELP = MODEL | {"pyarrow", "numpy", "rich"}
COMMANDS = {
    "run --help": (0, HELP),
    "--help": (0, HELP),
    "--version": (0, HELP),
    "plan --help": (0, HELP),
    "status o.jsonl": (0, MODEL),
    "run rows.jsonl -m MODEL --prompt-column q": (2, MODEL),
    "run rows.jsonl -m MODEL -o no/o.jsonl": (2, MODEL),
    "run rows.jsonl -m MODEL --regex a(": (2, MODEL),
    "run rows.jsonl -m MODEL -o mine.jsonl": (2, MODEL),
}
"""By command line: its exit code, and the modules that it does not import."""
CODE = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=open("modules.json", "w")))
from batchgen_cli.__main__ import main
main()
"""


@pytest.fixture
def imported(python: Callable[..., Any], tmp_path: Path) -> Callable[..., set[str]]:
    """Runs a command and returns the modules that it has imported."""

    def run(code: int, *words: str) -> set[str]:
        done = python(CODE, *words)
        assert done.returncode == code, done.stderr
        return set(json.loads((tmp_path / "modules.json").read_text()))

    return run


QUICK = ["run --help", "status o.jsonl", "run rows.jsonl -m MODEL --prompt-column q"]


@pytest.mark.parametrize("line", slow_but(QUICK, COMMANDS))
def test_a_command_that_computes_nothing_imports_nothing_that_is_slow(line, imported, tiny_model_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "mine.jsonl").write_text("mine\n")
    claim = {"number": 1, "state": "running", "pid": 1, "host": "elsewhere", "started": "2026-03-04T05:00:00+00:00"}
    (tmp_path / "o.jsonl.job" / "claims").mkdir(parents=True)
    (tmp_path / "o.jsonl.job" / "claims" / "claim-000001").write_text(json.dumps(claim))
    code, slow = COMMANDS[line]
    assert imported(code, *line.replace("MODEL", str(tiny_model_dir)).split()) & slow == set()


@pytest.mark.slow
def test_a_finished_job_is_recognized_without_torch_and_transformers(imported, tiny_model_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    command = ["run", "rows.jsonl", "-m", str(tiny_model_dir), "-o", "o.jsonl", "--max-tokens", "2"]
    assert {"torch", "transformers"} <= imported(0, *command)
    assert not (MODEL | {"huggingface_hub", "safetensors", "rich"}) & imported(0, *command)
