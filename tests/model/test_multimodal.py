"""Of a multimodal checkpoint only the language model is loaded."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.model.multimodal import Absent, left_out
from batchgen.model.weights.weight_size import stored_tensors, weight_sizes
from support.vision import make


def sizes(folder: Path) -> dict[str, int]:
    found = {"text": 0, "vision": 0}
    with safe_open(folder / "model.safetensors", "pt") as f:
        for name in f.keys():  # noqa: SIM118
            found["vision" if "vision" in name else "text"] += 4 * f.get_tensor(name).numel()
    return found


def test_the_gpu_memory_needed_is_that_of_the_text_part(tmp_path: Path) -> None:
    make("gemma3", tmp_path)
    without = left_out(AutoConfig.from_pretrained(tmp_path))
    assert without == {"vision_tower", "multi_modal_projector"}
    tensors = stored_tensors(ModelConfig(model=str(tmp_path)))
    whole, needed = (weight_sizes(tensors, None, 4, names, on_cpu=False).kept for names in (frozenset[str](), without))
    assert whole - needed >= sizes(tmp_path)["vision"]
    assert needed <= sizes(tmp_path)["text"]


def test_running_a_part_that_was_left_out_is_an_error_that_says_so() -> None:
    with pytest.raises(
        ModelError, match="the model runs its vision_tower on text, and only the language model was loaded"
    ):
        Absent("vision_tower")(torch.zeros(1))
