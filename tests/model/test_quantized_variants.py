"""Settings and tensors of quantized checkpoints as the makers' packages write them: what changes what weights mean is read, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.kernels.codes import PackedTensor
from batchgen.model.architectures import is_multimodal
from batchgen.model.vision import load_encoder
from batchgen.model.weights.packed import packed_weights
from batchgen.model.weights.quantized import is_weight_only
from batchgen.model.weights.variants import check_quantization, check_stored
from batchgen.model.weights.weight_size import StoredTensor
from batchgen.model_files import MLX
from batchgen.prompts import load_tokenizer
from batchgen.prompts.images import unshown
from batchgen.prompts.tokenizer import load_config
from support.models import build, check_equal_to_generate, expect, load_folder
from support.params import slow_but
from support.quantized import dequantized, make, make_multimodal_of_mlx, save_falcon_h1_of_mlx
from support.vision import make as make_seeing

FLOAT8 = {"a.weight": torch.ones(64, 64).to(torch.float8_e4m3fn)}
GPTQ = {"a.qweight": torch.zeros(8, 8).int(), "a.qzeros": torch.zeros(2, 1).int(), "a.scales": torch.ones(2, 8).half()}
WORDS = {"a.weight_packed": torch.zeros(8, 8).int(), "a.weight_shape": torch.tensor([8, 64])}
INT8 = {"a.weight": torch.ones(8, 64).to(torch.int8)}
NVFP4 = {
    "a.weight": torch.full((8, 32), 0x22).to(torch.uint8),
    "a.weight_scale": torch.ones(8, 4).to(torch.float8_e4m3fn),
}
SCALE = {"a.weight_scale": torch.ones(8, 1)}


def weight_of(tensors: dict[str, torch.Tensor], settings: dict[str, Any], folder: Path) -> torch.Tensor:
    save_file(tensors, folder / "model.safetensors")
    found = packed_weights("org/name", [folder / "model.safetensors"], settings)["a.weight"][...]
    return found.unpacked() if isinstance(found, PackedTensor) else found


def test_settings_of_older_bitsandbytes_checkpoints_name_no_method():
    config = AutoConfig.for_model("llama")
    config.quantization_config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    check_quantization("org/name", config)
    assert is_weight_only(config)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("I8", "int8"), ("U8", "uint8"), ("U32", "uint32"), ("F8_E4M3", "FP8"), ("F8_E8M0", "FP8")]
)
def test_codes_of_a_model_that_does_not_say_how_it_is_quantized_are_refused(dtype, kind):
    config = AutoConfig.for_model("llama")
    check_stored("org/name", config, [StoredTensor("h.0.attn.bias", "U8", [1, 1, 8, 8], 64)])  # a mask
    with pytest.raises(ModelError) as e:
        check_stored("org/name", config, [StoredTensor("a.weight", dtype, [8, 64], 512)])
    assert (
        e.value.message
        == f"a.weight of the model 'org/name' is in {kind}, and its config.json does not say how it is quantized"
    )


@pytest.mark.parametrize("method", ["fp8", "mxfp8"])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
@pytest.mark.parametrize("scale", [torch.tensor(3.0), torch.arange(64.0)[:, None]], ids=["whole", "rows"])
def test_scales_of_float8_weights_have_several_names(method, name, scale, tmp_path):
    unused = {"a.input_scale": torch.tensor(2.0), "a.k_scale": torch.tensor(5.0)}
    found = weight_of(FLOAT8 | unused | {f"a.{name}": scale}, {"quant_method": method}, tmp_path)
    assert torch.equal(found, scale.expand(64, 64))


def test_exponents_are_the_scales_of_mxfp8(tmp_path):
    exponents = torch.tensor([126, 129]).expand(64, 2).to(torch.uint8).contiguous()
    found = weight_of(FLOAT8 | {"a.weight_scale_inv": exponents}, {"quant_method": "mxfp8"}, tmp_path)
    assert torch.equal(found, torch.tensor([0.5, 4.0]).repeat_interleave(32).expand(64, 64))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_zeros_of_gptq_are_those_before_one_was_subtracted_from_whole_words(bits, key, version, tmp_path):
    zeros = torch.tensor([0, 1, 3, 0, 0, 2, 1, 0] * 4)
    words = (zeros.view(-1, 32 // bits) << (bits * torch.arange(32 // bits))).sum(1)
    if version == "gptq":
        words = words - sum(1 << shift for shift in range(0, 32, bits))
    parts = {
        "a.qweight": torch.zeros(2 * bits, 32).int(),
        "a.qzeros": words.to(torch.int32)[None],
        "a.scales": torch.ones(1, 32).half(),
    }
    found = weight_of(parts, {"quant_method": "gptq", "bits": bits, key: version}, tmp_path)
    assert torch.equal(found, -zeros[:, None].float().expand(32, 64))


@pytest.mark.parametrize(
    ("packing", "same"),
    [
        ("auto_round", {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
        ("auto_round:gptqmodel", {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
        ("auto_round:auto_gptq", {"quant_method": "gptq"}),
        ("auto_round:auto_awq", {"quant_method": "awq"}),
    ],
)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_formats_of_autoround_are_those_of_gptq_and_awq(packing, same, bits, tmp_path):
    if same["quant_method"] == "awq":
        bits, rows, columns = 4, 64, 4
    else:
        rows, columns = 2 * bits, 32
    parts = {
        "a.qweight": torch.randint(-(2**31), 2**31, (rows, columns)).int(),
        "a.qzeros": torch.randint(-(2**31), 2**31, (2, bits)).int(),
        "a.scales": torch.rand(2, 32).half(),
    }
    # A layer may have other bits than the settings say.
    settings = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": 4,
        "extra_config": {"a": {"bits": bits}},
    }
    want = weight_of(parts, same | {"bits": bits}, tmp_path)
    assert want.unique().numel() > 1
    assert torch.equal(weight_of(parts, settings, tmp_path), want)


def autoround(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4} | settings


GROUPS = torch.arange(96) // 64
CUT = GPTQ | {
    "a.qweight": torch.full((12, 8), 0x11111111).int(),
    "a.scales": torch.tensor([[1.0], [2.0]]).expand(2, 8).half().contiguous(),
}


@pytest.mark.parametrize("parts", [CUT, CUT | {"a.g_idx": GROUPS.int()}], ids=["", "g_idx"])
def test_the_last_group_of_gptq_may_be_cut(parts, tmp_path):
    found = weight_of(parts, {"quant_method": "gptq", "bits": 4, "group_size": 64, "format": "gptq_v2"}, tmp_path)
    assert torch.equal(found, (1.0 + GROUPS).expand(8, 96))


@pytest.mark.parametrize(
    ("method", "tensors", "others"),
    [
        ("gptq", CUT, {"bits": 4, "group_size": 64, "desc_act": True}),  # whose g_idx is missing
        ("gptq", CUT | {"a.scales": torch.ones(5, 8).half()}, {"bits": 4, "group_size": 64}),
        (
            "bitsandbytes",
            INT8 | {"a.SCB": torch.ones(8), "a.weight_format": torch.tensor(2).to(torch.uint8)},
            {},
        ),  # a GPU's order
        ("fp8", FLOAT8 | {"a.weight_scale": torch.ones(2)}, {}),  # of parts of a fused layer, whose sizes are not known
    ],
)
def test_groups_and_orders_that_are_not_known_are_refused(method, tensors, others, tmp_path):
    with pytest.raises(ValueError, match=r"^a\.weight: .*(not known here|have scales for|not in the order of rows)"):
        weight_of(tensors, {"quant_method": method} | others, tmp_path)


def test_4_bit_weights_of_bitsandbytes_may_be_stored_as_another_type(tmp_path):
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [8, 64]}
    parts = {
        "a.weight": torch.arange(256).to(torch.uint8).view(torch.bfloat16)[:, None],
        "a.weight.absmax": torch.ones(8),
        "a.weight.quant_map": torch.arange(16.0),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    found = weight_of(parts, {"quant_method": "bitsandbytes"}, tmp_path)
    byte = torch.arange(256)
    assert torch.equal(found.flatten(), torch.stack([byte // 16, byte % 16], 1).flatten().float())


def compressed(*schemes: dict[str, Any], **others: Any) -> dict[str, Any]:
    groups = {str(i): {"targets": ["Linear"], "weights": scheme} for i, scheme in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "format": "pack-quantized"} | others


def of_mlx_llama(**settings: Any) -> dict[str, Any]:
    return {"quant_method": MLX, "model_type": "llama", "bits": 4, "group_size": 64} | settings


def transformed(location: str) -> dict[str, Any]:
    group = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": location}]}
    return compressed({"num_bits": 4}, transform_config={"config_groups": {"R4": group}})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"quant_method": "awq", "format": "gemv"}, "AWQ of version 'gemv' with None bits"),
        ({"quant_method": "awq", "version": "gemm", "backend": "llm-awq"}, "AWQ of version 'llm-awq' with None bits"),
        ({"quant_method": "awq", "bits": 8}, "AWQ of version 'gemm' with 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ in the format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "GPTQ in the format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "format": "gptq_p"}, "GPTQ in the format 'gptq_p'"),
        ({"quant_method": "gptq"}, "GPTQ with None bits"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "GPTQ in words of int16"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up.*": {"bits": 3}, "-:.*q.*": {}}}, "GPTQ with 3 bits"),
        (
            {"quant_method": "gptq", "bits": 4, "rotation": "hadamard"},
            "GPTQ with rotation 'hadamard', which rotates activations, too",
        ),
        (autoround(packing_format="auto_round:exllamav2"), "AutoRound in the format 'auto_round:exllamav2'"),
        (autoround(bits=3), "AutoRound with 3 bits"),
        (autoround(packing_format="auto_round:auto_awq", bits=8), "AutoRound with 8 bits"),
        (autoround(extra_config={"a": {"bits": 3}}), "AutoRound with 3 bits"),
        (autoround(act_bits=8), "AutoRound of None, with activations of 8 bits"),
        (autoround(data_type="mx_fp"), "AutoRound of mx_fp, with activations of None bits"),
        (autoround(rotation_config={"block_size": 32}), "AutoRound with rotation {'block_size': 32}, which rotates activations, too"),
        ({"quant_method": "modelopt", "quant_algo": "w4a8_awq"}, "ModelOpt's w4a8_awq"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "ModelOpt's W4A16_AWQ"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "MXFP8"}}},
            "ModelOpt's MXFP8",
        ),
        (transformed("input"), "its activations are transformed (hadamard, input)"),
        (
            compressed({"num_bits": 8, "block_structure": [128, 128]}, {"num_bits": 8, "block_structure": [64, 128]}),
            "weights have blocks of several sizes ([128, 128], [64, 128])",
        ),
        (compressed({"num_bits": 8}, sparsity_config={"format": "sparse-24-bitmask"}), "weights are sparse (sparse-24-bitmask)"),
        (compressed({"num_bits": 4}, format="marlin-24"), "weights are sparse (marlin-24)"),
        (compressed({"num_bits": 3}, {"num_bits": 4}), "layers have several schemes, of the formats pack-quantized"),
        (of_mlx_llama(model_type="ernie4_5_moe"), "MLX, for models of type 'ernie4_5_moe'"),
        (of_mlx_llama(model_type="gemma3n", lacks_encoder=False), "MLX, for models of type 'gemma3n' with their encoders"),
        (of_mlx_llama(gate_proj={"bits": 7, "group_size": 32}), "MLX with 7 bits"),
        (of_mlx_llama(gate_proj={"bits": 8}), "MLX with groups of None"),
        (of_mlx_llama(mode="ternary"), "MLX in the mode 'ternary'"),
    ],
)  # fmt: skip
def test_settings_that_change_what_weights_mean_are_refused_by_name(settings, problem):
    config = AutoConfig.for_model("llama")
    config.quantization_config = settings
    with pytest.raises(ModelError) as e:
        check_quantization("org/name", config)
    assert e.value.message == f"the model 'org/name' is quantized in a way that batchgen does not read: {problem}"


@pytest.mark.parametrize(
    "settings",
    [
        autoround(extra_config={"lm_head": {"bits": 16, "act_bits": 16, "data_type": "fp"}}),
        transformed("weight_output"),
    ],
    ids=["layers of 16 bits", "transforms that are in the weights"],
)
def test_settings_that_change_nothing_are_accepted(settings):
    config = AutoConfig.for_model("llama")
    config.quantization_config = settings
    check_quantization("org/name", config)


@pytest.mark.parametrize(
    ("method", "tensors", "problem"),
    [
        ("fp8", FLOAT8, "a.weight (F8_E4M3) has no weight_scale_inv"),
        ("fp8", FLOAT8 | {"a.input_scale": torch.ones(1)}, "a.weight (F8_E4M3) has no weight_scale_inv"),
        ("fp8", {"a.weight": torch.ones(8, 8).to(torch.float8_e5m2)}, "a.weight is of type F8_E5M2"),
        ("fp8", {"a.weight": torch.ones(8, 8).bfloat16(), "a.weight_scale_inv": torch.ones(1)},
         "a.weight is of type BF16 and has weight_scale_inv"),
        ("bitsandbytes", INT8, "a.weight (I8) has no SCB"),
        ("modelopt", NVFP4, "a.weight (U8) has no weight_scale_2"),
        ("modelopt", NVFP4 | {"a.weight_scale_2": torch.ones(1), "a.svdquant_lora_a": torch.ones(1)}, "a.svdquant_lora_a is not known here"),
        ("modelopt", INT8 | SCALE, "a.weight is of type I8 and has weight_scale"),
        ("compressed-tensors", INT8, "a.weight (I8) has no weight_scale"),
        ("compressed-tensors", WORDS, "a.weight_packed (I32) has no weight_scale"),
        ("awq", GPTQ | {"b.act.scales": torch.ones(8)}, "b.act.scales belongs to no weight"),
        ("awq", {"a.qweight": GPTQ["a.qweight"], "a.scales": GPTQ["a.scales"]}, "a.qweight (I32) has no qzeros"),
        ("awq", GPTQ | {"b.experts": torch.zeros(2, 8, 8).to(torch.int8)}, "b.experts is of type I8"),
        ("awq", {"a.pre_quant_scale": torch.ones(1)}, "its activations are scaled (a.pre_quant_scale)"),
        ("fp8", {"a.gate_up_proj": FLOAT8["a.weight"]}, "a.gate_up_proj is in FP8, without scales that are known here"),
        ("mxfp4", {"a_blocks": torch.zeros(2, 8, 2, 16).to(torch.uint8)}, "a_blocks (U8) has no _scales"),
    ],
)  # fmt: skip
def test_a_weight_without_its_scales_and_a_tensor_without_a_meaning_are_refused_by_name(
    method, tensors, problem, tmp_path
):
    with pytest.raises(ModelError) as e:
        weight_of(tensors, {"quant_method": method}, tmp_path)
    assert str(e.value) == (
        f"the model 'org/name' is quantized in a way that batchgen does not read: {problem}; "
        "give the original model, or one quantized in a way that docs/quantized.md lists"
    )


def test_norms_and_convolutions_that_mlx_stores_in_another_way_are_those_of_transformers(tmp_path):
    make("mlx hybrid", tmp_path)
    found = dict(load_folder(tmp_path, dtype="float32", compile="off").module.named_parameters())
    for name, expected in dequantized("mlx hybrid", tmp_path).named_parameters():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize(
    ("scales", "missing"),
    [
        ({}, "scales"),
        ({"a.scales": torch.ones(8, 1).bfloat16()}, "biases"),
        ({"a.scales": torch.full((8, 2), 128, dtype=torch.uint8)}, None),
    ],
)
def test_only_scales_of_mlx_that_are_bytes_need_no_biases(scales, missing, tmp_path):
    settings = {"quant_method": MLX, "model_type": "llama", "bits": 4, "group_size": 32}
    tensors = {"a.weight": torch.full((8, 8), 0x22222222, dtype=torch.uint32)} | scales
    if missing is None:
        assert torch.equal(weight_of(tensors, settings, tmp_path), torch.full((8, 64), 2.0))
        return
    with pytest.raises(ModelError) as e:
        weight_of(tensors, settings, tmp_path)
    assert e.value.message.endswith(f"does not read: a.weight (U32) has no {missing}")


def test_names_of_a_language_model_in_a_multimodal_one_of_mlx_are_those_of_transformers(tmp_path):
    words, scales = torch.zeros(3, 8, 4, dtype=torch.uint32), torch.ones(3, 8, 1).bfloat16()
    layer = "language_model.model.layers.0.mlp.switch_mlp.up_proj"
    tensors = {f"{layer}.weight": words, f"{layer}.scales": scales, f"{layer}.biases": 2 * scales}
    save_file(tensors | {"language_model.lm_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    settings = {
        "quant_method": MLX,
        "model_type": "qwen3_5_moe",
        "is_multimodal": True,
        "bits": 2,
        "group_size": 64,
        layer: {"bits": 4, "group_size": 32},
    }
    found = packed_weights("org/name", [tmp_path / "model.safetensors"], settings)
    experts = [f"model.language_model.layers.0.mlp.experts.{i}.up_proj.weight" for i in range(3)]
    assert sorted(found) == ["lm_head.weight", *experts]
    assert torch.equal(found[experts[2]][...].unpacked(), torch.full((8, 32), 2.0))


def of_mlx(model_type: str, tensors: dict[str, torch.Tensor], folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """What stands in the file of a checkpoint, unpacked, by the names in transformers."""
    save_file(tensors, folder / "model.safetensors")
    whole = {"quant_method": MLX, "model_type": model_type, "bits": 4, "group_size": 32, **settings}
    found = packed_weights("org/name", [folder / "model.safetensors"], whole)
    read = {name: part[...] for name, part in found.items()}
    return {name: part.unpacked() if isinstance(part, PackedTensor) else part for name, part in read.items()}


def constant(layer: str, *shape: int) -> dict[str, torch.Tensor]:
    """A weight [experts, rows, inputs] of MLX whose rows are all number of the expert + number of the row / 8."""
    count, rows, inputs = shape
    words = torch.zeros(count, rows, inputs // 8, dtype=torch.uint32)
    biases = (torch.arange(count)[:, None, None] + torch.arange(rows)[:, None] / 8).expand(-1, -1, inputs // 32)
    scales = torch.ones_like(biases).bfloat16()
    return {f"{layer}.weight": words, f"{layer}.scales": scales, f"{layer}.biases": biases.bfloat16().contiguous()}


@pytest.mark.parametrize(
    ("model_type", "mixture", "rows"),
    [
        ("gpt_oss", "mlp.experts", [0, 0, 1, 1, 2, 2]),
        ("qwen3_vl_moe", "mlp.switch_mlp", [0, 1, 2, 0, 1, 2]),
        ("gemma4", "experts.switch_glu", [0, 1, 2, 0, 1, 2]),
    ],
)
def test_projections_before_the_activation_become_one_as_the_family_has_it(model_type, mixture, rows, tmp_path):
    layer = f"model.layers.0.{mixture}"
    tensors = constant(f"{layer}.gate_proj", 2, 3, 32) | constant(f"{layer}.up_proj", 2, 3, 32)
    tensors |= constant(f"{layer}.down_proj", 2, 4, 32) | {f"{layer}.down_proj.bias": torch.ones(2, 4)}
    tensors |= {f"{layer}.{part}_proj.bias": torch.arange(6.0).view(2, 3) for part in ("gate", "up")}
    found = of_mlx(model_type, tensors, tmp_path)
    before = f"model.layers.0.{mixture.partition('switch')[0].removesuffix('.').removesuffix('.experts')}"
    before = before if before.endswith("experts") else f"{before}.experts"
    both, down = found[f"{before}.gate_up_proj"], found[f"{before}.down_proj"]
    if model_type == "gpt_oss":  # the other way round
        both, down = both.transpose(1, 2), down.transpose(1, 2)
    assert both.shape == (2, 6, 32)
    assert down.shape == (2, 4, 32)
    assert both[1, :, 5].tolist() == [1 + row / 8 for row in rows]
    assert down[1, :, 5].tolist() == [1, 1.125, 1.25, 1.375]
    assert found[f"{before}.gate_up_proj_bias"][1].tolist() == [3.0 + row for row in rows]
    assert sorted(name.rpartition(".")[2] for name in found) == [
        "down_proj", "down_proj_bias", "gate_up_proj", "gate_up_proj_bias",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "layer", "parts", "others"),
    [
        ("mixtral", "block_sparse_moe", ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")),
        ("lfm2_moe", "feed_forward", ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")),
        ("nemotron_h", "mixer", ("fc1", "fc2"), ("up_proj", "down_proj")),
        ("jamba", "feed_forward", ("gate_proj", "down_proj"), ("gate_proj", "down_proj")),
    ],
)
def test_parts_of_experts_have_the_names_of_their_family(model_type, layer, parts, others, tmp_path):
    layer = f"model.layers.0.{layer}"
    tensors = {f"{layer}.switch_mlp.{part}.weight": torch.full((2, 4, 8), i) for i, part in enumerate(parts)}
    tensors |= {f"{layer}.{part}.weight": torch.full((4, 8), i) for i, part in enumerate(parts)}  # without experts
    found = of_mlx(model_type, {name: weight.float() for name, weight in tensors.items()}, tmp_path)
    places = (f"{layer}.experts.0", f"{layer}.experts.1", layer)
    expected = {f"{place}.{other}.weight": i for place in places for i, other in enumerate(others)}
    assert {name: int(weight[0, 0]) for name, weight in found.items()} == expected


def test_gates_of_granite_become_one_with_the_up_projections_with_experts_and_without(tmp_path):
    experts, dense = "model.layers.0.block_sparse_moe.switch_mlp", "model.layers.1.mlp"
    tensors = {}
    for part in ("gate_proj", "up_proj", "down_proj"):
        tensors |= constant(f"{experts}.{part}", 2, 3, 32)
        tensors |= {name: tensor[1] for name, tensor in constant(f"{dense}.{part}", 2, 3, 32).items()}
    found = of_mlx("granitemoehybrid", tensors, tmp_path)
    rows = {name: weight.reshape(-1, 32)[-6:, 0].tolist() for name, weight in found.items()}
    both, down = [1, 1.125, 1.25] * 2, [1, 1.125, 1.25]
    assert rows == {
        "model.layers.0.block_sparse_moe.input_linear.weight": both,
        "model.layers.0.block_sparse_moe.output_linear.weight": [0, 0.125, 0.25, *down],
        "model.layers.1.shared_mlp.input_linear.weight": both,
        "model.layers.1.shared_mlp.output_linear.weight": down,
    }


def test_settings_of_apertus_activation_have_their_dimension_again(tmp_path):
    activation = "model.layers.0.mlp.act_fn"
    tensors = {f"{activation}.{name}": torch.tensor(0.5) for name in ("alpha_p", "alpha_n", "beta")}
    found = of_mlx("apertus", tensors, tmp_path)
    assert {name.rpartition(".")[2]: weight.dim() for name, weight in found.items()} == {
        "alpha_p": 1,
        "alpha_n": 1,
        "beta": 0,
    }


def test_the_two_projections_for_keys_and_values_of_each_head_become_one(tmp_path):
    keys, values = torch.randn(2, 3, 4), torch.randn(2, 5, 3)  # of two heads, and of rank 3
    layer = "model.layers.0.self_attn"
    tensors = {f"{layer}.embed_q.weight": keys, f"{layer}.unembed_out.weight": values}
    found = of_mlx("deepseek_v3", tensors, tmp_path)
    assert found.keys() == {f"{layer}.kv_b_proj.weight"}
    heads = found[f"{layer}.kv_b_proj.weight"].view(2, 9, 3)
    assert torch.equal(heads[1, :4], keys[1].T)
    assert torch.equal(heads[1, 4:], values[1])


@pytest.mark.parametrize("tied", [False, True])
def test_the_multipliers_of_falcon_h1_are_applied_once_whether_mlx_puts_them_into_weights_or_not(tied, tmp_path):
    multipliers = {
        "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.8, "mlp_multipliers": [0.9, 0.6],
        "ssm_out_multiplier": 0.7,
    }  # fmt: skip
    model = build("falcon_h1", tie_word_embeddings=tied, **multipliers)
    save_falcon_h1_of_mlx(model, tmp_path)
    prompt = list(range(7, 30))
    check_equal_to_generate(load_folder(tmp_path, dtype="float32"), [prompt], [8], [expect(model, prompt, 8)])


def test_gemma_3n_of_mlx_without_its_encoders_is_the_model_of_its_text(tmp_path):
    model = build("gemma3n_text")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): weight for name, weight in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = AutoConfig.for_model("gemma3n", text_config=model.config.to_dict(), dtype="float32").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 4, "group_size": 64}}))
    prompt = list(range(7, 30))
    check_equal_to_generate(load_folder(tmp_path, dtype="float32"), [prompt], [8], [expect(model, prompt, 8)])


def test_a_model_of_text_that_mlx_has_wrapped_has_its_own_names(tmp_path):
    tensors = {"language_model.model.norm.weight": torch.ones(2), "language_model.lm_head.weight": torch.ones(2, 2)}
    assert of_mlx("llama", tensors, tmp_path).keys() == {"model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("name", slow_but(["qwen2_vl"], ["qwen2_vl", "mistral3", "smolvlm"]))
def test_the_encoder_of_a_multimodal_model_of_mlx_is_the_original(name, tmp_path):
    exact = make_multimodal_of_mlx(make_seeing(name, tmp_path).model, tmp_path)
    config = ModelConfig(model=str(tmp_path))
    tokenizer = load_tokenizer(config)
    assert unshown(tokenizer.hf_config) is None
    encoder = dict(load_encoder(config, tokenizer, torch.float32).named_parameters())
    text = dict(load_folder(tmp_path, dtype="float32", compile="off").module.named_parameters())
    assert encoder
    assert not encoder.keys() & text.keys()
    for key, weight in (encoder | text).items():
        assert type(weight) is torch.nn.Parameter, key
        assert torch.equal(weight, exact.pop(key)), key
    assert not exact


def test_the_encoder_of_a_packed_checkpoint_needs_no_package_of_its_maker(tmp_path):
    make("awq", tmp_path, make_seeing("qwen2_vl", tmp_path).model.bfloat16())
    config = ModelConfig(model=str(tmp_path))
    encoder = dict(load_encoder(config, load_tokenizer(config), torch.float32).named_parameters())
    exact = load_file(tmp_path / "exact" / "model.safetensors")
    assert encoder
    for name, weight in encoder.items():
        assert torch.equal(weight, exact[name.removeprefix("model.")].float()), name


def test_a_multimodal_model_of_mlx_is_shown_images_if_its_type_has_been_compared_and_its_encoder_is_there():
    config = AutoConfig.for_model("gemma3")
    config.quantization_config = {"quant_method": MLX, "model_type": "gemma3", "bits": 4, "group_size": 64}
    assert unshown(config) is None
    config.quantization_config["lacks_encoder"] = True
    assert unshown(config) == "the files of the model have no image encoder"
    config = AutoConfig.for_model("gemma3n")
    config.quantization_config = {"quant_method": MLX, "model_type": "gemma3n", "bits": 4, "group_size": 64}
    assert unshown(config) == "models of type 'gemma3n' that are quantized for MLX are not shown images"


@pytest.mark.parametrize(("stored", "lacks"), [("vision_tower.blocks.0.norm1.weight", False), ("lm_head.weight", True)])
def test_whether_a_checkpoint_of_mlx_has_an_encoder_is_known_from_its_index(stored, lacks, tmp_path):
    config = AutoConfig.for_model("gemma3").to_dict() | {"quantization": {"bits": 4, "group_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {stored: "model.safetensors"}}))
    found = load_config(ModelConfig(model=str(tmp_path))).quantization_config
    assert (found["is_multimodal"], found["lacks_encoder"]) == (True, lacks)


def test_an_empty_vision_config_which_mlx_gives_to_every_model_does_not_make_it_multimodal(tmp_path):
    config = AutoConfig.for_model("llama").to_dict() | {"vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 4, "group_size": 64}}))
    found = load_config(ModelConfig(model=str(tmp_path)))
    assert not is_multimodal(found)
    assert not found.quantization_config["is_multimodal"]
