"""Of a multimodal checkpoint only the language model is loaded."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, Gemma3ForConditionalGeneration

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.model.multimodal import Absent, left_out
from batchgen.model.weights.sizes import stored_tensors, weight_sizes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("gemma3"), 1)


def saved(folder: Path, size: int) -> Path:
    """A Gemma 3 checkpoint. From size 4 on, its vision part is more than four times as large as its text part, and shows in the memory of a process."""
    text = {
        "vocab_size": 4096, "hidden_size": 128 * size, "intermediate_size": 512 * size, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    }  # fmt: skip
    vision = {
        "hidden_size": 256 * size, "intermediate_size": 1024 * size, "num_hidden_layers": 5, "num_attention_heads": 16,
        "image_size": 896, "patch_size": 14,
    }  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def sizes(folder: Path) -> dict[str, int]:
    found = {"text": 0, "vision": 0}
    with safe_open(folder / "model.safetensors", "pt") as f:
        for name in f.keys():  # noqa: SIM118
            found["vision" if "vision" in name else "text"] += 4 * f.get_tensor(name).numel()
    return found


def test_the_gpu_memory_needed_is_that_of_the_text_part(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    without = left_out(config)
    assert without == {"vision_tower", "multi_modal_projector"}
    tensors = stored_tensors(ModelConfig(model=str(checkpoint))) or []
    whole, needed = (weight_sizes(tensors, None, 4, names, on_cpu=False).kept for names in (frozenset[str](), without))
    assert whole - needed >= sizes(checkpoint)["vision"]
    assert needed <= sizes(checkpoint)["text"]


def test_running_a_part_that_was_left_out_is_an_error_that_says_so() -> None:
    with pytest.raises(
        ModelError, match="the model runs its vision_tower on text, and only the language model was loaded"
    ):
        Absent("vision_tower")(torch.zeros(1))
