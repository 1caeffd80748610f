"""What a start of the command imports, and what it leaves out. The seconds are in benchmarks/NOTES.md."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=open("modules.json", "w")))
from batchgen_cli.__main__ import main
main()
"""
Start = Callable[..., set[str]]


@pytest.fixture
def start(command_environment: dict[str, str], tiny_model_dir: Path, tmp_path: Path) -> Start:
    """Runs the command with these arguments and returns what it has imported."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')

    def run(*arguments: str, code: int = 0) -> set[str]:
        words = ["run", "rows.jsonl", "-m", str(tiny_model_dir), "-o", "o.jsonl", "--max-tokens", "2", *arguments]
        done = subprocess.run(
            [sys.executable, "-c", RUN, *words], env=command_environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        return set(json.loads((tmp_path / "modules.json").read_text()))

    return run


@pytest.mark.slow
def test_a_run_imports_neither_compiler_nor_process_groups_and_the_next_not_even_torch(start: Start) -> None:
    imported = start()
    assert {"torch", "transformers"} <= imported
    heavy = {"torch._dynamo.eval_frame", "torch._inductor.config", "torch.distributed.tensor", "torch.distributed.fsdp"}
    assert not heavy & imported
    assert not {"rich", "llguidance", "accelerate", "torchao", "peft", "torchvision", "sklearn"} & imported
    nothing_to_do = start()
    assert not {"torch", "transformers", "tokenizers", "huggingface_hub", "safetensors"} & nothing_to_do


USE = """
import sys
from batchgen.config import ModelConfig
from batchgen.lean_imports import allow_lean_imports, import_transformers
allow_lean_imports()
import_transformers(ModelConfig(model={model!r}))
import torch
from transformers import LlamaForCausalLM
assert "torch._dynamo.eval_frame" not in sys.modules
mark = torch._dynamo.disable(recursive=False)(len)
assert mark is len and torch.compiler.disable(len) is len
{use}
import torch._dynamo as real
assert real.__file__ and sys.modules["torch._dynamo"] is real is torch._dynamo
assert real._trace_wrapped_higher_order_op.TransformGetItemToIndex
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
"""
USES = [
    "assert torch._dynamo.config.recompile_limit",
    "import torch._dynamo.eval_frame as part; assert part.OptimizedModule",
    "from torch._dynamo import config; assert config.recompile_limit",
    "from torch._dynamo.utils import counters",
    "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)).tolist() == [2.0, 2.0]",
]


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_what_is_put_off_is_there_for_whoever_asks(
    use: str, command_environment: dict[str, str], tiny_model_dir: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", USE.replace("{use}", use).replace("{model!r}", repr(str(tiny_model_dir)))],
        env=command_environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launched", [{}, {"WORLD_SIZE": "1"}])
def test_in_a_users_program_transformers_is_imported_as_it_always_is(
    launched: dict[str, str], command_environment: dict[str, str]
) -> None:
    code = (
        "from batchgen.lean_imports import *\n"
        f"{'allow_lean_imports()' if launched else ''}\n"
        "from batchgen.config import ModelConfig\n"
        "import_transformers(ModelConfig(model='x'))\n"
        "import torch, transformers\n"
        "assert transformers.utils.is_torch_distributed_available() == torch.distributed.is_available()\n"
        "assert torch._dynamo.__file__\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=command_environment | launched, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
