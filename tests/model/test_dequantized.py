"""Checkpoints that are dequantized while loading: the output is that of transformers, and a note tells the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.model.loader import load_model, loaded_bytes
from batchgen.model.weights.packed import unpacked_weights
from batchgen.model.weights.quantized import check_quantization, packed_bits, plain_layers, with_dequantization
from batchgen.stats import size_text
from support.models import engine_for, expect, make_requests, run, tiny_tokenizer
from support.quantized import CHECKPOINTS, PACKED, dequantized, make

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of each other
CORE = {"fp8", "W4A16", "awq", "gptq", "modelopt NVFP4", "bitsandbytes nf4"}
PROMPTS = [list(range(3, 60)), [*range(3, 50), 7, 8, 9], [11, 12], list(range(70, 120))]
LENGTHS = [12, 5, 20, 8]
WIDEST = {
    "fp8": 0.2,
    "fp8 experts": 0.3,
    "W8A8": 0.06,
    "W8A16": 0.06,
    "FP8_DYNAMIC": 0.25,
    "W4A16": 0.8,
    "NVFP4A16": 0.8,
    "mxfp4": 0.8,
    "awq": 0.5,
    "awq experts": 0.5,
    "gptq": 0.5,
    "gptq in order": 0.5,
    "gptq 8 bits": 0.06,
    "gptq_v2": 0.5,
    "modelopt FP8": 0.25,
    "modelopt NVFP4": 0.8,
    "bitsandbytes nf4": 0.8,
    "bitsandbytes fp4": 0.8,
    "bitsandbytes int8": 0.06,
}
"""The largest difference of a logit from the original model, relative to the largest logit. The models are random and tiny."""


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


def load(folder: Path, dtype: str) -> Any:
    tokenizer = replace(tiny_tokenizer(), hf_config=AutoConfig.from_pretrained(folder))
    return load_model(ModelConfig(model=str(folder), device="cpu", dtype=dtype, compile="off"), tokenizer)


@torch.inference_mode()
def test_the_output_is_that_of_transformers_on_the_dequantized_weights(checkpoint: tuple[str, Path, Any]) -> None:
    name, folder, original = checkpoint
    if name in PACKED:
        reference = dequantized(name, folder)
    else:
        asked = with_dequantization(AutoConfig.from_pretrained(folder))
        reference = AutoModelForCausalLM.from_pretrained(folder, config=asked, dtype=torch.float32).float().eval()
        plain_layers(reference)  # transformers 5.17 rounds activations
    model = load(folder, "float32")
    expected = [expect(reference, p, n).tokens for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    results = run(engine_for(model), make_requests(PROMPTS, LENGTHS))
    assert [list(r.token_ids) for r in results] == expected
    ids = torch.tensor(PROMPTS[:1])
    got, plain = reference(ids).logits, original(ids).logits.float()
    apart = float((got - plain).abs().max() / plain.abs().max())
    assert 1e-3 < apart < WIDEST[name]  # the checkpoint is quantized, and read correctly


def test_a_note_tells_the_memory_of_the_dequantized_weights(checkpoint: tuple[str, Path, Any]) -> None:
    name, folder, _ = checkpoint
    model = load(folder, "bfloat16")
    kinds = {"awq": "AWQ", "gptq": "GPTQ", "gptq_v2": "GPTQ", "fp8": "FP8", "mxfp4": "MXFP4"}
    first = name.split()[0]
    kind = kinds.get(first, {"modelopt": "ModelOpt"}.get(first, first if name in PACKED else "compressed-tensors"))
    size = size_text(sum(p.numel() * p.element_size() for p in model.module.parameters()))
    assert model.notes[0] == (
        f"the {kind} weights were dequantized to bfloat16 and take {size}; activations are not quantized"
    )
    assert {p.dtype for p in model.module.parameters() if p.dim() > 1} == {torch.bfloat16}


def test_the_loaded_model_has_no_trace_of_the_quantization(checkpoint: tuple[str, Path, Any]) -> None:
    _, folder, original = checkpoint
    module = load(folder, "bfloat16").module
    assert getattr(module, "is_quantized", False) is False
    assert {type(part) for part in module.modules()} == {type(part) for part in original.modules()}
    assert {type(p) for p in module.parameters()} == {torch.nn.Parameter}
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in original.named_parameters()]
    assert not any("forward" in part.__dict__ for part in module.modules())


def test_a_forward_that_rounds_activations_is_removed() -> None:
    """transformers 5.17 leaves such forwards on layers of compressed-tensors."""
    layer: Any = torch.nn.Linear(3, 2)
    x = torch.ones(1, 3)
    expected = layer(x)
    layer.forward = lambda x: torch.nn.functional.linear(x.round(), layer.weight) / 0
    layer.quantization_status = SimpleNamespace(value="decompressed")
    layer.weight_scale = torch.nn.Parameter(torch.ones(2, 1))
    norm: Any = torch.nn.LayerNorm(2)
    norm.forward = norm.forward
    plain_layers(torch.nn.Sequential(layer, norm))
    assert torch.equal(layer(x), expected)
    assert "forward" not in norm.__dict__
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def test_the_memory_needed_is_that_of_the_dequantized_weights(checkpoint: tuple[str, Path, Any]) -> None:
    name, folder, original = checkpoint
    needed = loaded_bytes(
        [folder / "model.safetensors"], torch.bfloat16, unpacked=packed_bits(AutoConfig.from_pretrained(folder))
    )
    real = sum(2 * p.numel() for p in original.parameters())
    assert (
        real <= needed < (2 if name == "W8A16" else 1.2) * real
    )  # and the scales; four numbers of 8 bits are taken for eight of 4


@pytest.mark.parametrize("method", ["aqlm", "hqq", "quark"])
def test_an_unsupported_method_is_refused_by_name_for_hub_models_too(method: str) -> None:
    config = AutoConfig.for_model("llama")
    config.quantization_config = {"quant_method": method}
    with pytest.raises(ModelError, match="which batchgen does not read") as e:
        check_quantization("org/name", config)
    assert e.value.hint == "give the original model, or one quantized in a way that docs/quantized.md lists"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.model.weights.quantized.find_spec", lambda name: None)
    config = AutoConfig.for_model("llama")
    config.quantization_config = {"quant_method": "compressed-tensors"}
    with pytest.raises(ModelError) as e:
        check_quantization("org/name", config)
    assert str(e.value) == (
        "the model 'org/name' is quantized with compressed-tensors, which needs the package compressed-tensors; pip install 'batchgen-llm[quantized]'"
    )


@pytest.mark.parametrize(
    ("settings", "tensor", "problem"),
    [
        ({"quant_method": "awq", "version": "gemv", "bits": 4}, "a.qweight", "AWQ of version 'gemv' with 4 bits"),
        ({"quant_method": "awq", "bits": 8}, "a.qweight", "AWQ of version 'gemm' with 8 bits"),
        ({"quant_method": "gptq", "bits": 3}, "a.qweight", "GPTQ with 3 bits"),
        ({"quant_method": "awq"}, "a.pre_quant_scale", "its activations are scaled (pre_quant_scale)"),
    ],
)
def test_an_unsupported_variant_of_a_format_is_refused(
    settings: dict[str, Any], tensor: str, problem: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file({tensor: torch.zeros(1)}, file)
    with pytest.raises(ModelError) as e:
        unpacked_weights("org/name", [file], settings)
    assert str(e.value) == (
        f"the model 'org/name' is quantized in a way that batchgen does not read: {problem}; "
        "give the original model, or one quantized in a way that docs/quantized.md lists"
    )
