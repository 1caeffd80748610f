"""Quantized checkpoints: weights stay packed, every number is that of the dequantized weights, and a note tells the memory."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.kernels.codes import PackedTensor
from batchgen.kernels.ops import PackedLinear
from batchgen.model import loader
from batchgen.model.weights.packed import packed_weights
from batchgen.model.weights.quantized import bytes_of
from batchgen.model.weights.variants import check_quantization
from batchgen.model.weights.weight_size import sizes_of
from batchgen.prompts.tokenizer import load_config
from batchgen.stats import size_text
from support.models import engine_for, generate_all, load_folder, make_requests, run, tokens_of
from support.params import slow_but
from support.quantized import CHECKPOINTS, PACKED, dequantized, make

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of each other
CORE = {"fp8", "W4A16", "awq", "gptq", "modelopt NVFP4", "bitsandbytes nf4", "mlx"}
PROMPTS = [list(range(3, 60)), [*range(3, 50), 7, 8, 9], [11, 12], list(range(70, 120))]
LENGTHS = [12, 5, 20, 8]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in CORE else pytest.mark.slow) for name in (*CHECKPOINTS, *PACKED)],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    if request.param.isupper() or request.param.startswith(("W", "N")):
        pytest.importorskip("compressed_tensors")
    if request.param.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("quantized")
    return request.param, folder, make(request.param, folder)


@pytest.fixture(autouse=True)
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that no memory is free, so that all weights stay packed."""
    monkeypatch.setattr(loader, "free_memory", lambda _: 0)


def load(folder: Path, dtype: str, compile: str = "off") -> Any:
    return load_folder(folder, dtype=dtype, compile=compile)


@pytest.mark.parametrize("dtype", slow_but([torch.float32], [torch.float32, torch.bfloat16]))
def test_every_weight_is_that_of_the_dequantized_model_to_the_last_bit(checkpoint, dtype):
    name, folder, _ = checkpoint
    weights = dict(load(folder, str(dtype).removeprefix("torch.")).module.named_parameters())
    expected = dict(dequantized(name, folder, dtype).named_parameters())
    assert list(weights) == list(expected)
    for key, weight in weights.items():
        plain = weight.unpacked() if isinstance(weight, PackedTensor) else weight
        assert plain.dtype == dtype
        assert torch.equal(bits_of(plain), bits_of(expected[key])), key
    packed = {key.split(".")[-2] for key, weight in weights.items() if isinstance(weight, PackedTensor)}
    linear = set() if name == "mxfp4" else {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    others = {"experts"} if name == "mxfp4" or "experts" in name else set()
    if name.startswith("mlx"):
        others |= {"embed_tokens"} | ({"gate"} if others else set())
    assert packed == linear | others


@torch.inference_mode()
@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_every_logit_of_our_kernels_is_that_of_the_dequantized_model_to_the_last_bit(checkpoint, dtype, tmp_path):
    name, folder, original = checkpoint
    exact = copy.deepcopy(original).to(dtype)
    exact.load_state_dict(dequantized(name, folder, dtype).state_dict())
    exact.save_pretrained(tmp_path)
    ids = torch.tensor(PROMPTS[:1])
    got, plain = exact(ids).logits.float(), original(ids).logits.float()
    apart = float((got - plain).abs().max() / plain.abs().max())
    assert 1e-3 < apart < (0.3 if is_in_8_bits(name) else 0.8)  # quantized, and near the original
    found = []
    for place in (folder, tmp_path):
        model = load(place, str(dtype).removeprefix("torch."), compile="auto")
        for weight in model.module.parameters():
            if not isinstance(weight, PackedTensor):
                weight.data = weight.data.clone()  # torch's products depend on where a mapped weight begins in memory
        logits: list[torch.Tensor] = []
        model.module.register_forward_hook(lambda _, args, out, logits=logits: logits.append(out.logits[0].clone()))
        run(engine_for(model), make_requests(PROMPTS, LENGTHS))
        found.append(bits_of(torch.cat(logits)))
    assert torch.equal(*found)


def test_on_a_cpu_only_weights_that_our_kernels_read_stay_packed_if_memory_allows(checkpoint, monkeypatch):
    name, folder, _ = checkpoint
    monkeypatch.setattr(loader, "free_memory", lambda _: 1 << 30)
    for kernels in ("off", "auto"):
        module = load(folder, "bfloat16", compile=kernels).module
        packed = [key for key, weight in module.named_parameters() if isinstance(weight, PackedTensor)]
        is_table_packed = name.startswith("mlx") and kernels == "auto"  # of which rows are unpacked
        assert packed == ["model.embed_tokens.weight"] * is_table_packed
        layers = [part for part in module.modules() if isinstance(part, PackedLinear)]
        experts = [part for part in layers if part.experts]
        assert bool(experts) == ("expert" in name or name == "mxfp4") * (kernels == "auto")
        assert all(part.codes is not None for part in experts or layers[:-1])  # the last one is the head


def bits_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().contiguous().view(torch.int16)


def test_a_note_tells_the_memory_of_the_packed_weights_and_nothing_else_shows_them(
    checkpoint,
):
    name, folder, original = checkpoint
    model = load(folder, "bfloat16")
    kinds = {"awq": "AWQ", "gptq": "GPTQ", "gptq_v2": "GPTQ", "fp8": "FP8", "mxfp4": "MXFP4"}
    first = name.split()[0]
    kind = kinds.get(
        first, {"modelopt": "ModelOpt", "mlx": "MLX"}.get(first, first if name in PACKED else "compressed-tensors")
    )
    weights = list(model.module.parameters())
    size, whole = size_text(sum(map(bytes_of, weights))), size_text(sum(2 * p.numel() for p in original.parameters()))
    assert model.notes[0] == (
        f"the {kind} weights stay packed and take {size} ({whole} in bfloat16); activations are not quantized"
    )
    packed = [p for p in weights if isinstance(p, PackedTensor)]
    bits = 8 * sum(map(bytes_of, packed)) / sum(p.numel() for p in packed)
    assert bits < (10.1 if is_in_8_bits(name) else 6.1)  # groups are small here
    assert {type(part) for part in model.module.modules()} == {type(part) for part in original.modules()}
    assert not any("forward" in part.__dict__ for part in model.module.modules())


def is_in_8_bits(name: str) -> bool:
    return "8" in name.replace("A8", "").upper()


def test_the_memory_needed_is_that_of_the_packed_weights_and_of_the_largest_one_unpacked(
    checkpoint,
):
    name, folder, original = checkpoint
    config = ModelConfig(model=str(folder))
    sizes = sizes_of(config, load_config(config), 2, on_cpu=False)
    real = sum(2 * p.numel() for p in original.parameters())
    # and the scales; four numbers of 8 bits are taken for eight of 4
    assert real <= sizes.plain < (2 if name == "W8A16" else 1.2) * real
    largest = max(2 * p.numel() for n, p in original.named_parameters() if n.endswith("proj.weight") or "experts" in n)
    assert sizes.largest >= largest // (4 if "experts" in name else 1)  # the experts of a file are not stacked
    weights = sum(map(bytes_of, load(folder, "bfloat16").module.parameters()))
    assert weights <= 1.15 * sizes.kept


@torch.inference_mode()
@pytest.mark.parametrize("checkpoint", slow_but(["awq", "mlx"], (*CHECKPOINTS, *PACKED)), indirect=True)
def test_a_model_on_several_devices_unpacks_a_layer_when_it_runs(checkpoint):
    pytest.importorskip("accelerate")
    name, folder, _ = checkpoint
    model = load_folder(folder, dtype="float32", device="auto", device_map="auto")
    assert any(isinstance(weight, PackedTensor) for weight in model.module.parameters())
    reference = dequantized(name, folder)
    expected = generate_all(reference, PROMPTS, LENGTHS)
    assert tokens_of(engine_for(model), PROMPTS, LENGTHS) == expected


@pytest.mark.parametrize(("package", "extra"), [("compressed-tensors", "quantized"), ("torchao", "torchao")])
def test_a_missing_package_is_named(package, extra, monkeypatch):
    monkeypatch.setattr("batchgen.model.weights.variants.find_spec", lambda name: None)
    config = AutoConfig.for_model("llama")
    config.quantization_config = {"quant_method": package}
    with pytest.raises(ModelError) as e:
        check_quantization("org/name", config)
    assert str(e.value) == (
        f"the model 'org/name' is quantized with {package}, which needs the package {package}; pip install 'batchgen-llm[{extra}]'"
    )


BY_BLOCKS = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).repeat_interleave(40, 0)[:64].repeat_interleave(32, 1)
ONES = {"a.weight": torch.ones(64, 64).to(torch.float8_e4m3fn)}
SCALES = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
SHUFFLED = torch.arange(64).flip(0) // 32
WORDS = {"a.weight_packed": torch.full((8, 8), 0x11111111, dtype=torch.int32), "a.weight_shape": torch.tensor([8, 64])}
ROWS = torch.tensor([[1.0, 2.0]]).expand(8, 2).contiguous()


def compressed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group": {"weights": weights}}}


IN_GROUPS = compressed(num_bits=4, strategy="group", group_size=32)
ZEROS = {"a.weight_scale": ROWS, "a.weight_zero_point": torch.zeros(1, 2, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("settings", "tensors", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [40, 32]}, ONES | {"a.weight_scale_inv": SCALES}, BY_BLOCKS),
        (compressed(block_structure=[40, 32]), ONES | {"a.weight_scale": SCALES}, BY_BLOCKS),
        (IN_GROUPS, WORDS | {"a.weight_scale": ROWS, "a.weight_g_idx": SHUFFLED.int()}, -7 * ROWS[:, SHUFFLED]),
        (IN_GROUPS, WORDS | ZEROS, ROWS.repeat_interleave(32, 1)),
    ],
    ids=["cut blocks of fp8", "cut blocks", "groups of inputs in any order", "zeros that are stored as 0"],
)
def test_a_weight_has_the_scales_and_zeros_of_its_blocks(settings, tensors, expected, tmp_path):
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    weight = packed_weights("org/name", [file], settings)["a.weight"][...]
    assert torch.equal(weight.unpacked(), expected)


def test_a_checkpoint_of_modelopt_may_be_described_in_a_file_of_its_own(tmp_path):
    make("modelopt FP8", tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    settings = written.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ModelError) as e:
        load(tmp_path, "float32")
    assert str(e.value) == (
        f"model.layers.0.mlp.down_proj.weight of the model {str(tmp_path)!r} is in FP8, and its config.json does not say how it is "
        "quantized; copy the model's own config.json, or put its quantization_config into this one"
    )
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    found = load_config(ModelConfig(model=tmp_path))
    assert found.quantization_config == settings | {"exclude_modules": ["lm_head"]}
