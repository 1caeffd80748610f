"""What of a multimodal checkpoint is loaded: its language model, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForConditionalGeneration, LlamaConfig

from batchgen.errors import ModelError
from batchgen.model.loader import loaded_bytes
from batchgen.model.multimodal import Absent, left_out, model_class
from support.params import FULL

SIZE = 4 if FULL else 1  # `make test-slow` measures the memory of a process, in which a small model would not show
TEXT = {
    "vocab_size": 4096, "hidden_size": 128 * SIZE, "intermediate_size": 512 * SIZE, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
VISION = {
    "hidden_size": 256 * SIZE, "intermediate_size": 1024 * SIZE, "num_hidden_layers": 5, "num_attention_heads": 16,
    "image_size": 896, "patch_size": 14,
}  # fmt: skip
LOAD = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from transformers import AutoConfig
from batchgen.config import ModelConfig
from batchgen.model.loader import load_model

def peak():
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))

config = ModelConfig(model=sys.argv[1], device="cpu", dtype="float32", compile="off")
hf_config = AutoConfig.from_pretrained(sys.argv[1])
before = peak()
model = load_model(config, SimpleNamespace(hf_config=hf_config, head=None))
for p in model.module.parameters():
    p.sum()
print(json.dumps([peak() - before, sum(p.numel() * 4 for p in model.module.parameters())]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 with a vision part more than four times as large as the text part, as transformers writes it."""
    folder = tmp_path_factory.mktemp("gemma3")
    config = AutoConfig.for_model("gemma3", text_config=TEXT, vision_config=VISION)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def sizes(folder: Path) -> dict[str, int]:
    found = {"text": 0, "vision": 0}
    with safe_open(folder / "model.safetensors", "pt") as f:
        for name in f.keys():  # noqa: SIM118
            found["vision" if "vision" in name else "text"] += 4 * f.get_tensor(name).numel()
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_that_of_the_text_part(checkpoint: Path) -> None:
    on_disk = sizes(checkpoint)
    assert on_disk["vision"] > 4 * on_disk["text"]
    done = subprocess.run([sys.executable, "-c", LOAD, str(checkpoint)], capture_output=True, text=True, check=True)
    grown, loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded <= on_disk["text"]
    assert grown < 2.5 * on_disk["text"]  # the file's pages and, for a moment, what is made of them


def test_the_room_that_a_gpu_needs_is_that_of_the_text_part(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    without = left_out(config)
    assert without == {"vision_tower", "multi_modal_projector"}
    files = [checkpoint / "model.safetensors"]
    whole, needed = loaded_bytes(files, torch.float32), loaded_bytes(files, torch.float32, without)
    assert whole - needed >= sizes(checkpoint)["vision"]
    assert needed <= sizes(checkpoint)["text"]


def test_a_model_of_text_alone_is_loaded_as_ever() -> None:
    assert model_class(LlamaConfig()) is AutoModelForCausalLM
    assert left_out(LlamaConfig()) == frozenset()


def test_a_part_that_is_left_out_says_so_when_it_is_run() -> None:
    with pytest.raises(
        ModelError, match="the model runs its vision_tower on text, and only the language model was loaded"
    ):
        Absent("vision_tower")(torch.zeros(1))


def test_the_class_is_the_wrappers_own_by_name(checkpoint: Path) -> None:
    kind: Any = model_class(AutoConfig.from_pretrained(checkpoint))
    assert kind.__name__ == "Gemma3ForConditionalGeneration"
    assert issubclass(kind, Gemma3ForConditionalGeneration)
