import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.kernels import isa
from batchgen.model import loader
from batchgen.model.loader import check_fits, check_room, cpu_dtype, dtype_of
from batchgen.model.multimodal import left_out
from batchgen.model.weights import weight_size
from batchgen.model.weights.int8 import quantize
from batchgen.model.weights.weight_size import (
    StoredTensor,
    sizes_of,
    step_numbers,
    stored_tensors,
    weight_files,
    weight_sizes,
)
from batchgen.prompts import load_tokenizer
from batchgen.prompts.tokenizer import load_config
from support.gguf import write_whole_model
from support.models import build, load_folder
from support.quantized import make
from support.vision import make as make_seeing

GIB = 2**30
BF16, F32 = torch.bfloat16, torch.float32


def config_of(folder, **options):
    return ModelConfig(model=str(folder), **options)


def test_the_tensors_of_a_model_are_not_known_if_the_hub_cannot_be_reached(monkeypatch):
    class ConnectError(Exception):
        """As that of httpx, which is no OSError."""

    def unreachable(*args, **options):
        raise ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", unreachable)
    assert stored_tensors(ModelConfig(model="org/name")) is None


def bytes_of(config, dtype):
    return weight_sizes(stored_tensors(config), None, dtype.itemsize, on_cpu=False).kept


def test_bytes_are_those_of_the_tensors_after_loading(tmp_path):
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=BF16), "c": torch.zeros(4, dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert weight_files(config_of(tmp_path)) == [tmp_path / "model.safetensors"]
    assert bytes_of(config_of(tmp_path), BF16) == 30 + 14 + 4
    assert bytes_of(config_of(tmp_path), F32) == 60 + 28 + 4


def test_only_files_that_the_index_names_count(tmp_path):
    for name in ("one", "two", "other"):
        save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "two.safetensors", "y": "one.safetensors", "z": "two.safetensors"}}')
    files = weight_files(config_of(tmp_path))
    assert files == [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    assert bytes_of(config_of(tmp_path), F32) == 16
    (tmp_path / "two.safetensors").unlink()
    assert weight_files(config_of(tmp_path)) is None
    save_file({"whole": torch.zeros(3)}, tmp_path / "model.safetensors")  # what transformers reads if both are there
    assert weight_files(config_of(tmp_path)) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize(
    ("name", "mlx"),
    [(name, None) for name in ("qwen3_moe", "gpt_oss", "granitemoe", "llama4_text", "longcat_flash")]
    + [("llama", "mlx"), ("qwen3_moe", "mlx experts")],
)
@pytest.mark.usefixtures("compiled")
def test_the_memory_in_8_bits_is_known_before(name, mlx, tmp_path):
    # The class of transformers has weights for experts that are identities, which published checkpoints have not.
    # And its small ranks fill no panel of 64 columns (AVX-512).
    plain = {"zero_expert_num": 0, "q_lora_rank": 128, "kv_lora_rank": 120} if name == "longcat_flash" else {}
    width = 512 if mlx else 128
    module = build(name, hidden_size=256, moe_intermediate_size=128, intermediate_size=width, **plain)
    if mlx:
        make(mlx, tmp_path, module.bfloat16())
    else:
        module.save_pretrained(tmp_path)
    config, dtype = config_of(tmp_path), BF16 if mlx else F32
    if name == "qwen3_moe" and not mlx:  # as in checkpoints: each expert has tensors of its own
        assert any(".experts.0." in tensor.name for tensor in stored_tensors(config))
    sizes = sizes_of(config, load_config(config), dtype.itemsize)
    loaded = load_folder(tmp_path, dtype=str(dtype).removeprefix("torch."))
    made = quantize(loaded, [np.arange(9, dtype=np.int32)], {}).quantization
    assert 0.9 < sizes.int8 / made["weight_bytes"] < 1.1


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
@pytest.mark.usefixtures("compiled")
def test_the_memory_of_a_gguf_file_in_8_bits_is_known_before(kind, tmp_path):
    """Nearly all of it is the embedding, which is the head too."""
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4200}
    file = write_whole_model(build("qwen2", **shape, tie_word_embeddings=True), tmp_path / "m.gguf", "qwen2", kind=kind)
    config = config_of(file, device="cpu", dtype="float32")
    tokenizer = load_tokenizer(config)
    sizes = sizes_of(config, tokenizer.hf_config, 4)
    made = quantize(loader.load_model(config, tokenizer, 1, ()), [np.arange(9, dtype=np.int32)], {}).quantization
    assert 0.9 < sizes.int8 / made["weight_bytes"] < 1.1
    assert sizes.int8 <= sizes.int8_load


def test_the_router_and_the_encoder_of_a_multimodal_mixture_of_mlx_are_counted_as_they_will_be():
    settings = {"quant_method": "mlx", "model_type": "qwen3_vl_moe", "is_multimodal": True, "bits": 4, "group_size": 64}
    before = "language_model.model.layers.0.mlp"
    router = StoredTensor(f"{before}.gate.weight", "U32", [8, 256], 8192)  # 2,048 inputs: it stays, in 16 bits
    experts = StoredTensor(f"{before}.switch_mlp.up_proj.weight", "U32", [8, 64, 256], 524288)
    scales = StoredTensor(f"{before}.switch_mlp.up_proj.scales", "BF16", [8, 64, 32], 32768)
    encoder = StoredTensor("vision_tower.blocks.0.attn.proj.weight", "BF16", [64, 64], 8192)
    assert weight_sizes([router], settings, 2).int8 == 2 * 8 * 2048
    assert weight_sizes([experts, scales], settings, 2).int8 == 8 * 64 * 2048 + 8 * 8 * 64
    assert weight_sizes([encoder], settings, 2, frozenset({"visual"})).kept == 0


def stored_bytes(folder):
    found = {"text": 0, "vision": 0}
    with safe_open(folder / "model.safetensors", "pt") as f:
        for name in f.keys():  # noqa: SIM118
            found["vision" if "vision" in name else "text"] += 4 * f.get_tensor(name).numel()
    return found


def test_the_gpu_memory_needed_is_that_of_the_text_part(tmp_path):
    make_seeing("gemma3", tmp_path)
    without = left_out(AutoConfig.from_pretrained(tmp_path))
    assert without == {"vision_tower", "multi_modal_projector"}
    tensors = stored_tensors(ModelConfig(model=str(tmp_path)))
    whole, needed = (weight_sizes(tensors, None, 4, names, on_cpu=False).kept for names in (frozenset(), without))
    assert whole - needed >= stored_bytes(tmp_path)["vision"]
    assert needed <= stored_bytes(tmp_path)["text"]


def test_scales_of_packed_experts_take_what_they_take_in_the_file():
    scales = StoredTensor("model.layers.0.mlp.experts.gate_up_proj_scales", "U8", [4, 5760, 90], 4 * 5760 * 90)
    sizes = weight_sizes([scales], {"quant_method": "mxfp4"}, 2)
    assert sizes.int8 == scales.nbytes


@pytest.mark.parametrize(
    ("settings", "name", "dtype", "shape", "rows"),  # about so many rows, where the file does not tell
    [
        ({"quant_method": "bitsandbytes"}, "weight", "U8", [64 * 320, 1], 202),  # of NF4, in one column
        (
            {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 8}}}},
            "weight_packed",
            "I32",
            [64, 160],
            160,
        ),
    ],
)
@pytest.mark.parametrize("instructions", ["avx2", "none"])
def test_a_packed_weight_takes_its_numbers_when_it_is_plain_or_in_8_bits(
    settings, name, dtype, shape, rows, instructions, monkeypatch
):
    monkeypatch.setattr(isa, "instruction_set", lambda: instructions)
    sizes = weight_sizes([StoredTensor(f"layers.0.up.{name}", dtype, shape, 20480 * 2)], settings, 2)
    assert (sizes.plain, sizes.int8) == (2 * 64 * 640, 64 * 640 + 8 * rows)


@pytest.mark.parametrize(
    ("option", "own", "dtype"),
    [("auto", BF16, BF16), ("auto", "float16", torch.float16), ("auto", None, F32), ("float32", BF16, F32)],
)
def test_the_dtype_is_the_requested_one_or_that_of_the_checkpoint(option, own, dtype):
    assert dtype_of(config_of("m", dtype=option), SimpleNamespace(dtype=own)) == dtype


@pytest.fixture
def machine(monkeypatch):
    """Pretends that the machine has another processor and so many bytes of memory."""

    loader.isa.instruction_set()  # is remembered, so it must not be that of the processor below

    def pretend(*, memory=GIB, bfloat16=False, features=frozenset({"avx2"})):
        monkeypatch.setattr(loader, "host_memory", lambda: memory)
        monkeypatch.setattr(loader.isa, "has_bfloat16", lambda: bfloat16)
        monkeypatch.setattr(loader.isa, "has_float16", lambda: False)
        monkeypatch.setattr(loader.isa, "features", lambda: features)

    return pretend


def test_a_cpu_without_bfloat16_loads_16_bit_weights_as_float32_if_memory_allows(tmp_path, machine):
    save_file({"a": torch.zeros(1 << 18, dtype=BF16)}, tmp_path / "model.safetensors")  # 1 MiB of float32
    auto = config_of(tmp_path)
    machine()
    assert cpu_dtype(auto, SimpleNamespace(dtype=BF16)) == F32
    assert cpu_dtype(auto, SimpleNamespace(dtype="float16")) == F32
    assert cpu_dtype(config_of(tmp_path, dtype="bfloat16"), SimpleNamespace(dtype=BF16)) == BF16
    assert cpu_dtype(auto, SimpleNamespace(dtype=BF16, quantization_config={})) == BF16
    machine(memory=2 << 20)
    assert cpu_dtype(auto, SimpleNamespace(dtype=BF16)) == F32
    assert cpu_dtype(auto, SimpleNamespace(dtype=BF16), processes=2) == BF16
    machine(bfloat16=True)
    assert cpu_dtype(auto, SimpleNamespace(dtype=BF16)) == BF16
    assert cpu_dtype(auto, SimpleNamespace(dtype="float16")) == F32
    machine(features=frozenset())  # not Linux, for example
    assert cpu_dtype(auto, SimpleNamespace(dtype=BF16)) == BF16


def test_the_hub_tells_the_size_of_weights_that_are_not_on_disk(machine, monkeypatch):
    machine(memory=2 << 20)
    for count, dtype in ((1 << 18, F32), ((1 << 18) + 1024, BF16)):
        tensor = SimpleNamespace(dtype="BF16", shape=[count], data_offsets=(0, 2 * count))
        found = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors={"x": tensor})})
        monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda *_, found=found, **__: found)
        assert cpu_dtype(config_of("nobody/has-this-model"), SimpleNamespace(dtype=BF16)) == dtype
    monkeypatch.undo()  # the hub is not asked, so the size is unknown
    assert cpu_dtype(config_of("nobody/has-this-model"), SimpleNamespace(dtype=BF16)) == BF16


@pytest.mark.parametrize(
    ("needed", "dtype", "free", "way_out"),
    [
        (
            140,
            BF16,
            [79, 78],
            "--device-map auto, without --device, spreads it over 2 GPUs, of which 157.0 GiB are free",
        ),
        (30, F32, [23], "--dtype bfloat16 needs 15.0 GiB"),
        (30, BF16, [23, 2], "use a quantized checkpoint, or larger or more GPUs"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_what_would_fit(needed, dtype, free, way_out):
    with pytest.raises(ModelError) as e:
        check_fits(needed * GIB, dtype, 0, [each * GIB for each in free])
    name = str(dtype).removeprefix("torch.")
    assert str(e.value) == (
        f"the model's weights take {needed}.0 GiB in {name}, and cuda:0 has {free[0]}.0 GiB free; {way_out}"
    )


def test_a_model_too_large_for_the_device_is_refused_before_it_is_loaded(tiny_model_dir, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    free = bytes_of(config_of(folder), F32)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    cuda = torch.device("cuda")
    check_room(config_of(folder), SimpleNamespace(dtype=F32), cuda)
    free -= 1
    with pytest.raises(
        ModelError, match=r"^the model's weights take 420.2 KiB in float32, and cuda:0 has 420.2 KiB free"
    ):
        check_room(config_of(folder), SimpleNamespace(dtype=F32), cuda)
    check_room(config_of(folder), SimpleNamespace(dtype=BF16), cuda)
    quantized = SimpleNamespace(dtype=BF16, quantization_config={})
    with pytest.raises(ModelError):
        check_room(config_of(folder), quantized, cuda)
    monkeypatch.setattr(weight_size, "weight_files", lambda config: None)
    check_room(config_of(folder), quantized, cuda)


def test_what_a_step_holds_is_known_of_configurations_with_lists_and_without_sizes():
    """Some have a size for each layer, or one for text and one for images."""
    config = SimpleNamespace(
        hidden_size=8, intermediate_size=[4, 16], num_experts_per_tok=2, moe_intermediate_size=[3, 5]
    )
    assert step_numbers(config) == 8 * 8 + 2 * 16 + 2 * (2 * 8 + 5)
    assert step_numbers(SimpleNamespace()) == 0
