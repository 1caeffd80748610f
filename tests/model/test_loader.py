import logging
import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.model import loader, multimodal
from batchgen.model.adapter import prepare
from batchgen.model.loader import load_model, pick_device
from batchgen.model.vision import load_encoder
from batchgen.prompts import load_tokenizer
from support.hub import cache_model
from support.models import build, load_folder
from support.progress import logged
from support.python_process import run_python
from support.vision import make as make_seeing
from support.wrappers import TEXTS, text_model


def load(folder, **options):
    config = ModelConfig(model=str(folder), device="cpu", **options)
    return load_model(config, load_tokenizer(config))


def test_float32_is_not_rounded_to_tf32(tiny_model_dir, monkeypatch):
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    load(tiny_model_dir)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("device", "device_map"), [("mps", None), ("cuda", "auto")])
def test_compile_on_is_refused_where_nothing_is_compiled(device, device_map):
    config = ModelConfig(model="m", device_map=device_map, compile="on")
    with pytest.raises(ModelError) as e:
        loader.KernelBuild(config, torch.device(device))
    assert str(e.value) == "--compile on is for the CPU and for one CUDA device; leave it out"


@pytest.mark.parametrize("accelerate", [True, False])
def test_on_cuda_weights_are_loaded_directly_to_the_device(tiny_model_dir, accelerate, monkeypatch):
    """Without accelerate, which transformers needs for that, they are moved afterwards."""
    asked = {}

    class Loads:
        @staticmethod
        def from_pretrained(name, **options):
            asked.update(options)
            module = AutoModelForCausalLM.from_pretrained(name)
            monkeypatch.setattr(module, "to", lambda device: asked.update(moved=device) or module)
            return module, {"missing_keys": []}

    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(multimodal, "AutoModelForCausalLM", Loads)
    monkeypatch.setattr(loader, "pick_device", lambda name: cuda)
    monkeypatch.setattr(loader, "check_room", lambda config, hf_config, device: asked.update(room_on=device))
    monkeypatch.setattr(loader, "find_spec", lambda name: accelerate or None)
    load(tiny_model_dir)
    assert asked["room_on"] == cuda
    assert asked["device_map"] == ({"": cuda} if accelerate else None)
    assert asked.get("moved") == (None if accelerate else cuda)


LOADED = """
import sys
from pathlib import Path
from pathlib import Path
from batchgen.engine.engine import keep_freed_memory
from batchgen.process.machine import memory_bytes
from support.models import load_folder
keep_freed_memory()
before = memory_bytes()
model = load_folder(Path(sys.argv[1]), dtype="float32")
assert memory_bytes() - before < model.weight_bytes + (120 << 20), (memory_bytes() - before, model.weight_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read as Linux shows it")
def test_memory_that_loading_has_freed_is_not_kept(tmp_path):
    """Weights of 260 MB are made float32 and packed as bfloat16, in tensors that the C library would keep for later."""
    build("llama", hidden_size=768, intermediate_size=2048, num_hidden_layers=9).bfloat16().save_pretrained(tmp_path)
    run_python(LOADED, tmp_path, check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_kind_of_device_that_is_missing_is_refused(tiny_model_dir):
    config = ModelConfig(model=str(tiny_model_dir), device="cuda")
    with pytest.raises(ModelError) as e:
        load_model(config, load_tokenizer(config))
    assert str(e.value) == "--device cuda: this machine has no CUDA device; use --device auto or cpu"


def test_a_device_number_that_does_not_exist_is_refused():
    count = torch.cuda.device_count()
    found = f"{count or 'no'} CUDA device{'s'[: count > 1]};"
    with pytest.raises(ModelError, match=rf"^--device cuda:{count}: this machine has {found}"):
        pick_device(f"cuda:{count}")


@pytest.mark.parametrize("name", ["bloom", "doge", "mpt", "gemma3"])
def test_transformers_does_not_warn_when_attention_is_replaced(name):
    made = text_model(name) if name in TEXTS else build(name)
    with logged("transformers", "WARNING") as said:
        logging.getLogger("transformers.modeling_utils").warning("a warning is shown before")
        model = prepare(made)
    assert (said, len(model.layers)) == (["a warning is shown before"], 2)


@pytest.fixture
def cached(tmp_path, tiny_model_dir, monkeypatch):
    """The files of the model org/name in the hub's cache; the hub cannot be reached."""
    return cache_model(monkeypatch, tmp_path / "hub", tiny_model_dir, offline=True)


def test_damaged_weights_in_the_cache_are_named(cached):
    weights = cached / "model.safetensors"
    whole = weights.stat().st_size
    os.truncate(weights, 5000)
    config = ModelConfig(model="org/name")
    with pytest.raises(ModelError) as caught:
        load_model(config, load_tokenizer(config))
    assert str(caught.value) == (
        f"{weights} is cut: it has 5,000 of {whole:,} bytes; the download was not completed: download it again"
    )


def test_weights_that_are_not_in_the_cache_are_not_taken_for_pickled_ones(cached):
    (cached / "model.safetensors").unlink()
    config = ModelConfig(model="org/name")
    with pytest.raises(ModelError) as caught:
        load_model(config, load_tokenizer(config))
    assert str(caught.value) == (
        "the weights of model 'org/name' are not in the local cache, and the hub cannot be reached; check the connection and HF_HUB_OFFLINE"
    )


def test_an_expert_that_lacks_a_matrix_is_an_error_that_says_so(tmp_path):
    """transformers' own error names a report that nobody sees."""
    build("qwen3_moe").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[next(name for name in weights if ".experts.3.up_proj" in name)]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="such as those of experts, are missing or do not fit one another"):
        load_folder(tmp_path)


@pytest.mark.parametrize("change", [lambda x: None, lambda x: x[:, 1:].contiguous()], ids=["missing", "another shape"])
def test_an_image_encoder_that_does_not_fit_is_an_error_of_the_model_not_of_its_images(change, tmp_path):
    make_seeing("llava", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "vision_tower" in name and name.endswith("fc1.weight"))
    changed = weights | {name: change(weights[name])}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(model=str(tmp_path), device="cpu")
    with pytest.raises(ModelError, match=r"lack 1 tensor of the image encoder, or have other shapes .*fc1\.weight"):
        load_encoder(config, load_tokenizer(config), torch.float32)


def test_running_a_part_that_was_left_out_is_an_error_that_says_so():
    with pytest.raises(
        ModelError, match="the model runs its vision_tower on text, and only the language model was loaded"
    ):
        multimodal.Absent("vision_tower")(torch.zeros(1))
