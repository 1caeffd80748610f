"""`--quantize int8`: the output is that of plain torch with the same rounding, and a note tells what the rounding costs."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.kernels import int8, quantization
from batchgen.kernels.int8 import Int8Linear, Rounding, quantize_weight
from batchgen.kernels.ops import PackedLinear
from batchgen.model import loader
from batchgen.model.weights.int8 import check_int8, checkpoint_scales
from support.int8 import rotated, rounded_inputs
from support.models import (
    build,
    engine_for,
    kernels,
    load_folder,
    make_requests,
    run,
    tokens_of,
)
from support.params import slow_but
from support.quantized import make
from support.shapes import prompts_and_lengths

PROMPTS, LENGTHS = prompts_and_lengths()
TEXTS = [np.array(prompt, dtype=np.int32) for prompt in PROMPTS[:3]]
MODELS = ["llama", "gemma2", "qwen3_moe", "qwen3_5_text", "granitemoehybrid/recurrent", "gpt2", "falcon"]
"""Models with gated MLPs, norms with an offset, experts, recurrent layers, and linear layers of their own."""


ERROR = 3e-7
"""How far float32 sums in another order are apart, relative to an input of a layer."""


class Rounded(torch.nn.Module):
    """An int8 linear layer in plain torch, with inputs that are wrong by about `error`, relative to each."""

    error = 0.0

    def __init__(self, layer: Any) -> None:
        super().__init__()
        values, scales = quantize_weight(layer.weight)[:2]
        self.values, self.bias = values.double() * scales.double()[:, None], layer.bias
        self.weight = layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + self.error * torch.randn_like(x))
        y = torch.nn.functional.linear(rounded_inputs(x), self.values).float()
        return y if self.bias is None else y + self.bias


class RoundedExperts(torch.nn.Module):
    """The experts of a mixture, with `Rounded` layers."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        layers = (
            (SimpleNamespace(weight=w, bias=None) for w in part) for part in (experts.gate_up_proj, experts.down_proj)
        )
        self.up, self.down = ([Rounded(layer) for layer in each] for each in layers)
        self.act = experts.act_fn

    def forward(self, x: torch.Tensor, index: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for token, (experts, weights) in enumerate(zip(index.tolist(), by, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                gate, up = self.up[expert](x[token : token + 1]).chunk(2, -1)
                y[token] += self.down[expert](self.act(gate) * up)[0] * weight
        return y


def rounded(model: Any) -> Any:
    """Copies a float32 model, with `Rounded` in place of the layers that `--quantize int8` packs."""
    made = copy.deepcopy(model)
    for module in list(made.modules()):
        if "experts" in module._modules and hasattr(module.experts, "gate_up_proj"):
            module.experts = RoundedExperts(module.experts)
    for name, module in list(made.named_modules()):
        parent, _, child = name.rpartition(".")
        is_layer = any(part.isdigit() for part in name.split("."))
        layer = SimpleNamespace(weight=module.weight.t(), bias=module.bias) if isinstance(module, Conv1D) else module
        is_linear = isinstance(module, torch.nn.Linear | Conv1D)
        if is_linear and is_layer and 16 * layer.weight.shape[0] > layer.weight.shape[1]:
            setattr(made.get_submodule(parent), child, Rounded(layer))
    return made


def load(folder: Path, texts: Any = TEXTS, **options: Any) -> Any:
    if kernels() is None:
        pytest.skip("the kernels cannot be compiled here")
    return load_folder(folder, **{"texts": texts, "dtype": "float32", "quantize": "int8"} | options)


def tokens(model: Any, **options: Any) -> list[list[int]]:
    return tokens_of(engine_for(model, **options), PROMPTS, LENGTHS)


@pytest.mark.parametrize("name", slow_but({"llama", "gpt2"}, MODELS))
def test_tokens_are_the_likeliest_of_the_model_rounded_in_plain_torch(name, tmp_path, monkeypatch):
    written = build(name)
    written.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert any(isinstance(m, Int8Linear) for m in model.module.modules())
    found = tokens(model)
    assert tokens(model, batch_size=2, max_batch_tokens=24) == found
    check_likeliest(rounded(written), found, monkeypatch)
    if name == "llama":
        check_batches(model)


@torch.inference_mode()
def check_likeliest(reference, found, monkeypatch):
    """No token has a lower logit than the likeliest, but for what errors of float32 make of two logits.

    Where inputs become whole numbers up to 127, an error of one part in three million moves some of them to the next, and logits of
    qwen3_5_text by up to 3 % of the largest; four of its 158 tokens are nearer than 0.2 % to the second likeliest.
    """
    rows = [
        (torch.tensor([prompt + tokens[:-1]]), torch.tensor(tokens))
        for prompt, tokens in zip(PROMPTS, found, strict=True)
    ]

    def logits():
        return [reference(ids).logits[0, -len(tokens) :] for ids, tokens in rows]

    exact = logits()
    monkeypatch.setattr(Rounded, "error", ERROR)
    moved = max(float((a - b).abs().max()) for a, b in zip(logits(), exact, strict=True))
    short = max(
        float((e.amax(-1) - e.gather(-1, tokens[:, None])[:, 0]).max())
        for e, (_, tokens) in zip(exact, rows, strict=True)
    )
    assert short <= 2 * moved


def check_batches(model):
    """A row has bitwise the same log-probabilities in every batch."""
    requests = make_requests(PROMPTS, [min(length, 9) for length in LENGTHS], logprobs=3)
    whole = run(engine_for(model), requests)
    for options in ({"batch_size": 1}, {"batch_size": 3, "max_batch_tokens": 17}):
        for alone, beside in zip(run(engine_for(model, **options), requests), whole, strict=True):
            assert alone.completions == beside.completions


@pytest.mark.parametrize("name", ["awq", "awq experts", "mxfp4"])
def test_a_checkpoint_of_4_bits_keeps_them_and_a_row_has_the_same_logits_in_every_batch(name, tmp_path, monkeypatch):
    monkeypatch.setattr(int8, "least_coded_group", lambda: 0)
    make(name, tmp_path)
    model, unquantized = load(tmp_path), load(tmp_path, quantize="none")
    packed = [m for m in model.module.modules() if isinstance(m, Int8Linear)]
    in_codes = [m for m in packed if m.codes is not None]
    assert len(in_codes) == sum(
        m.codes is not None for m in unquantized.module.modules() if isinstance(m, PackedLinear)
    )
    assert model.weight_bytes < 1.05 * unquantized.weight_bytes
    assert model.quantization["mean_kl"] < 0.1
    check_batches(model)


@torch.inference_mode()
def test_the_cost_is_the_divergence_from_the_unquantized_model(tmp_path):
    written = build("llama")
    written.save_pretrained(tmp_path)
    model = load(tmp_path)
    kl, equal, count = 0.0, 0, 0
    reference = rounded(written)
    for prompt in PROMPTS[:3]:
        text = prompt[-64:]
        first = max(0, len(text) - 16)
        for _ in range(16):
            text = [*text, int(written(torch.tensor([text])).logits[0, -1].argmax())]
        p, q = (m(torch.tensor([text])).logits[0, first:].log_softmax(-1) for m in (written, reference))
        kl += float((p.exp() * (p - q)).sum())
        equal += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(p)
    found = model.quantization
    assert found["tokens"] == count
    assert found["rows"] == 3
    assert found["mean_kl"] == pytest.approx(kl / count, rel=1e-3, abs=2e-6)
    assert found["equal_tokens"] == pytest.approx(equal / count, abs=1e-6)
    assert found["layers"] == 14
    assert model.notes[-1].startswith(
        f"int8: 14 linear layers; against the unquantized model, on {count} tokens of 3 rows: "
    )


def test_without_texts_a_note_says_that_the_cost_was_not_measured(tmp_path):
    build("llama").save_pretrained(tmp_path)
    model = load(tmp_path, texts=())
    assert (model.quantization["rows"], model.quantization["mean_kl"], model.quantization["equal_tokens"]) == (
        0,
        None,
        None,
    )
    assert "was not measured" in model.notes[-1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_w8a8_checkpoint_keeps_its_own_integer_weights(dtype, tmp_path):
    pytest.importorskip("compressed_tensors")
    make("W8A8", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    scales = checkpoint_scales(config, [tmp_path / "model.safetensors"])
    model = load(tmp_path, dtype=dtype)
    packed = {n: m for n, m in model.module.named_modules() if isinstance(m, Int8Linear)}
    assert len(scales) == 14
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn.o_proj"
            made, values = packed[name], file.get_tensor(f"{name}.weight")
            assert torch.equal(
                made.scales.flatten()[: len(values)], scales[f"{layer}.self_attn.o_proj"].float().flatten()
            )
            x = torch.randn(3, values.shape[1], generator=torch.Generator().manual_seed(0)).to(made.dtype)
            made.scales = torch.ones_like(made.scales)
            torch.testing.assert_close(made(x), (rounded_inputs(x, Rounding.ROW) @ values.double().T).to(made.dtype))


@pytest.mark.filterwarnings("ignore")
def test_a_w8a8_checkpoint_with_an_adapter_gets_new_scales_from_its_merged_weights(tmp_path):
    """The checkpoint's own scales would clip what the adapter adds to the largest weights."""
    pytest.importorskip("compressed_tensors")
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make("W8A8", tmp_path), peft.LoraConfig(r=4, target_modules=["o_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    adapted.save_pretrained(tmp_path / "adapter")
    merged = load(tmp_path, lora=str(tmp_path / "adapter"), quantize="none", compile="off").module
    packed = load(tmp_path, lora=str(tmp_path / "adapter")).module
    name = "model.layers.0.self_attn.o_proj"
    made = packed.get_submodule(name)
    assert isinstance(made, Int8Linear)
    want, got = rotated(merged.get_submodule(name).weight), rotated(made.weight)
    step = want.abs().amax(1, keepdim=True) / 127
    assert bool(((got - want).abs() <= 0.51 * step).all())


ON_A_CPU = "--quantize int8 is for the CPU so far; leave it out, or use --device cpu"


@pytest.mark.parametrize(
    ("options", "quantizer", "said"),
    [
        ({"device": "cuda"}, None, ON_A_CPU),
        ({"device_map": "auto"}, None, ON_A_CPU),
        ({}, {"quant_method": "torchao"}, "the model 'm' is quantized already (torchao); leave --quantize out"),
    ],
)
def test_options_and_models_that_int8_does_not_support_are_refused(options, quantizer, said):
    config = ModelConfig(model="m", quantize="int8", **options)
    with pytest.raises(ModelError) as refused:
        check_int8(
            config,
            AutoConfig.for_model("llama", quantization_config=quantizer),
            torch.device(options.get("device", "cpu")),
        )
    assert str(refused.value) == said


def test_a_model_without_layers_to_quantize_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "INT8_SMALL", 0)  # no layer has columns enough
    build("llama").save_pretrained(tmp_path)
    said = r"^--quantize int8: none of the model's linear layers can be packed in 8 bits; leave it out$"
    with pytest.raises(ModelError, match=said):
        load(tmp_path)


def test_without_kernels_int8_is_refused(tmp_path, monkeypatch):
    build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(
        loader.KernelBuild, "wait", lambda _: (None, ("no C++ compiler (g++) was found; plain torch runs",))
    )
    with pytest.raises(ModelError) as refused:
        load(tmp_path)
    assert str(refused.value) == (
        "--quantize int8 needs batchgen's own kernels: no C++ compiler (g++) was found; leave --quantize out"
    )
