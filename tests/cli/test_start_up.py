"""Which modules a start of the command imports, and which it does not. The seconds are in benchmarks/NOTES.md."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from support.gguf import save_tiny_llama_with_merges, write_gguf
from support.models import reference_model
from support.quantized import make
from support.shapes import SCALED_ROPES, SHAPES
from support.tiny_model import save_tiny_llama

RUN = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=open("modules.json", "w")))
from batchgen_cli.__main__ import main
main()
"""
Start = Callable[..., set[str]]


@pytest.fixture
def start(python: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path) -> Start:
    """Runs the command with these arguments and returns what it has imported."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')

    def run(*arguments: str, code: int = 0) -> set[str]:
        words = ["run", "rows.jsonl", "-m", str(tiny_model_dir), "-o", "o.jsonl", "--max-tokens", "2", *arguments]
        done = python(RUN, *words)
        assert done.returncode == code, done.stderr
        return set(json.loads((tmp_path / "modules.json").read_text()))

    return run


@pytest.mark.slow
def test_a_run_imports_neither_compiler_nor_process_groups_and_the_next_not_even_torch(start: Start) -> None:
    imported = start()
    assert {"torch", "transformers"} <= imported
    heavy = {"torch._dynamo.eval_frame", "torch._inductor.config", "torch.distributed.tensor", "torch.distributed.fsdp"}
    assert not heavy & imported
    assert not {"torch.export.exported_program", "torch._decomp", "torch._refs", "sympy", "scipy"} & imported
    foreign = {"llguidance", "accelerate", "torchao", "peft", "torchvision", "sklearn"} & imported
    assert not foreign
    nothing_to_do = start()
    assert not {"torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "rich"} & nothing_to_do


@pytest.mark.slow
def test_tables_are_written_and_read_without_pandas(start: Start) -> None:
    pytest.importorskip("pandas")
    for words in (("-o", "o.parquet"), ("-o", "o.parquet", "--overwrite", "--window", "1")):
        assert not {"pandas", "pyarrow.pandas_compat"} & start(*words)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of libraries about each other
@pytest.mark.parametrize("kind", ["GGUF", "fp8", "awq"])
def test_the_command_loads_models_that_transformers_loads_with_accelerate_only(
    kind: str, python: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    if kind == "GGUF":
        pytest.importorskip("gguf")
        model = tmp_path / "model.gguf"
        write_gguf(save_tiny_llama_with_merges(tmp_path / "original"), model, "Q8_0")
    else:
        make(kind, model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model_dir / name, model)
    row = {"url": "/v1/completions", "body": {"prompt": [5, 6, 7]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"custom_id": "a", "method": "POST", **row}))
    words = ["run", "rows.jsonl", "-m", str(model), "-o", "o.jsonl", "--max-tokens", "2", "--device", "cpu"]
    done = python(RUN, *words)
    assert done.returncode == 0, done.stderr


def test_llama_3_whose_rotary_embeddings_need_a_part_of_torch_that_is_put_off_runs_through_the_command(
    start: Start, tmp_path: Path
) -> None:
    save_tiny_llama(
        tmp_path / "llama3", rope_parameters={"rope_theta": 10000.0, **SCALED_ROPES["llama3"], "rope_type": "llama3"}
    )
    start("--model", str(tmp_path / "llama3"))
    assert json.loads((tmp_path / "o.jsonl").read_text())["usage"]["completion_tokens"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"model_type": "llama"}, {"quantization_config": {"quant_method": "fp8"}}, None])
def test_accelerate_is_left_out_for_a_cached_model_of_the_hub_that_does_not_need_it(
    settings: dict[str, object] | None, python: Callable[..., Any], tmp_path: Path
) -> None:
    model = tmp_path / "hub" / "models--org--name"
    if settings is not None:
        (model / "snapshots" / "abc").mkdir(parents=True)
        (model / "snapshots" / "abc" / "config.json").write_text(json.dumps(settings))
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("abc")
    code = (
        "import sys\n"
        "from batchgen.config import ModelConfig\n"
        "from batchgen.process.lean_imports import *\n"
        "allow_lean_imports()\n"
        "import_transformers(ModelConfig(model='org/name'))\n"
        "import transformers, torch\n"
        "assert transformers.utils.is_accelerate_available() == (sys.argv[1] == 'True' or torch.cuda.is_available())"
    )
    pytest.importorskip("accelerate")
    needed = settings is None or "quantization_config" in settings
    done = python(code, str(needed), environment={"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")})
    assert done.returncode == 0, done.stderr


USE = """
import inspect, sys
from batchgen.config import ModelConfig
from batchgen.process.lean_imports import allow_lean_imports, finish_torch, import_transformers
allow_lean_imports()
import_transformers(ModelConfig(model={model!r}))
import torch
from transformers import LlamaForCausalLM
inspect.getmodule(inspect.currentframe())
late = {"torch._dynamo.eval_frame", "torch.export.exported_program", "torch._decomp", "sympy"}
assert not late & sys.modules.keys()
mark = torch._dynamo.disable(recursive=False)(len)
assert mark is len and torch.compiler.disable(len) is len
{use}
import torch._dynamo as real
assert real.__file__ and sys.modules["torch._dynamo"] is real is torch._dynamo
assert real._trace_wrapped_higher_order_op.TransformGetItemToIndex
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
assert torch.export.Dim is sys.modules["torch.export"].Dim
finish_torch()
assert torch.Generator().manual_seed(3).initial_seed() == 3
assert torch._decomp is sys.modules["torch._decomp"]
assert type(torch._dynamo) is type(torch.export) is type(torch._meta_registrations) is type(sys)
"""
USES = [
    "assert torch._dynamo.config.recompile_limit",
    "import torch._dynamo.eval_frame as part; assert part.OptimizedModule and part is torch._dynamo.eval_frame",
    "from torch._dynamo import config; assert config.recompile_limit",
    "from torch._dynamo.utils import counters",
    "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)).tolist() == [2.0, 2.0]",
    "assert torch.export.Dim('n').__name__ == 'n'",
    "from torch.export import Dim",
    "import torch.export.dynamic_shapes as part; assert part is torch.export.dynamic_shapes",
    "import torch._decomp as part; assert part is sys.modules['torch._decomp'] and part.decomposition_table",
    "finish_torch()",
    "import torch.utils._content_store",
    "from torch._subclasses import FakeTensorMode\nwith FakeTensorMode(): assert torch.cumsum(torch.ones(3), 0).shape == (3,)",
    """class Double(torch.nn.Module):
    def forward(self, x): return x * 2
assert torch.export.export(Double(), (torch.ones(2),)).module()(torch.ones(2)).tolist() == [2.0, 2.0]""",
]


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_what_is_put_off_is_there_for_whoever_asks(use: str, python: Callable[..., Any], tiny_model_dir: Path) -> None:
    done = python(USE.replace("{use}", use).replace("{model!r}", repr(str(tiny_model_dir))))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launched", [{}, {"WORLD_SIZE": "1"}])
def test_in_a_users_program_transformers_is_imported_as_it_always_is(
    launched: dict[str, str], python: Callable[..., Any]
) -> None:
    code = (
        "from batchgen.process.lean_imports import *\n"
        f"{'allow_lean_imports()' if launched else ''}\n"
        "from batchgen.config import ModelConfig\n"
        "import_transformers(ModelConfig(model='x'))\n"
        "import torch, transformers\n"
        "assert transformers.utils.is_torch_distributed_available() == torch.distributed.is_available()\n"
        "assert torch._dynamo.__file__\n"
    )
    done = python(code, environment=launched)
    assert done.returncode == 0, done.stderr


LOAD = """
import json, sys
from pathlib import Path
from batchgen.config import ModelConfig
from batchgen.process.lean_imports import allow_lean_imports, finish_torch, import_transformers
folders = sorted(Path("models").iterdir())
allow_lean_imports()
import_transformers(ModelConfig(model=str(folders[0])))
import torch
from transformers import AutoModelForCausalLM
said = {}
def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        said[folder.name] = model(torch.arange(1, 20)[None], use_cache=False).logits[0, -1].tolist()
later = []
for folder in folders:
    try:
        load(folder)
    except NotImplementedError:
        later.append(folder)
    assert "torch._decomp" not in sys.modules, folder
assert {folder.name for folder in later} <= {"ctrl", "cwm", "llama-llama3", "minimax"}, later
assert finish_torch()
for folder in later:
    load(folder)
print(json.dumps(said))
"""


@pytest.mark.slow
def test_every_verified_architecture_loads_the_same_without_what_is_put_off(
    python: Callable[..., Any], tmp_path: Path
) -> None:
    import torch

    expected = {}
    for name in SHAPES:
        if name.split("/")[0] in CONFIG_MAPPING:
            model, folder = reference_model(name), name.replace("/", "-")
            model.save_pretrained(tmp_path / "models" / folder)
            with torch.no_grad():
                expected[folder] = model(torch.arange(1, 20)[None], use_cache=False).logits[0, -1].tolist()
    done = python(LOAD)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.keys() == expected.keys()
    for name, logits in expected.items():
        assert said[name] == pytest.approx(logits, rel=1e-4, abs=1e-4), name


NUMPY = """
import os, sys
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            print("while numpy is imported:", os.environ.get("OPENBLAS_NUM_THREADS"))
sys.meta_path.insert(0, Spy())
from batchgen.process.lean_imports import allow_lean_imports, import_arrow
if sys.argv[1] == "command":
    allow_lean_imports()
import_arrow()
import numpy
print("afterwards:", os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.parametrize(
    ("process", "chosen", "during", "afterwards"),
    [("command", None, "1", "None"), ("command", "3", "3", "3"), ("program", None, "None", "None")],
)
def test_the_command_alone_keeps_numpy_from_starting_threads_and_leaves_the_environment_as_it_was(
    process: str, chosen: str | None, during: str, afterwards: str, command_environment: dict[str, str]
) -> None:
    environment = {name: value for name, value in command_environment.items() if name != "OPENBLAS_NUM_THREADS"}
    if chosen is not None:
        environment["OPENBLAS_NUM_THREADS"] = chosen
    done = subprocess.run(
        [sys.executable, "-c", NUMPY, process], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"while numpy is imported: {during}\nafterwards: {afterwards}\n"
