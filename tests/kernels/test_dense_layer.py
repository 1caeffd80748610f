"""A decoder layer in one call of the library gives the bits that its kernels give one by one."""

import copy
from dataclasses import replace

import pytest
import torch

from batchgen.kernels import fusion
from batchgen.kernels.dense_layer import DenseLayer
from batchgen.kernels.quantization import quantize_linear
from batchgen.model.adapter import prepare
from support.models import build, engine_for, kernels, make_requests, run

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 200,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    if kernels() is None:
        pytest.skip("the kernels cannot be compiled here")
    monkeypatch.setattr(fusion, "is_fast", lambda dtype: True)  # also where torch's own layers are faster


def prepared(dtype=torch.float32, kind="llama", **changes):
    return prepare(build(kind, **(SHAPE | changes)).to(dtype), kernels=kernels())


def runs(monkeypatch):
    """How often layers run in one call, from now on."""
    found = []
    whole = DenseLayer.__call__
    monkeypatch.setattr(DenseLayer, "__call__", lambda self, *given: (found.append(self.index), whole(self, *given))[1])
    return found


def logprobs(model):
    """Of some prompts, one of which is the beginning of others."""
    prompts = [[5, 6, 7], [*range(20, 60)], [*range(20, 60), 3, 4], [*range(20, 60), 9], [8]]
    requests = make_requests(prompts, [7] * len(prompts), logprobs=2, ignore_eos=True, temperature=0)
    return [result.completions[0].logprobs for result in run(engine_for(model), requests)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 40, "num_key_value_heads": 4}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 24}),
        ("mistral", {"sliding_window": None}),
        ("phi3", {}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("olmo2", {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_layer_in_one_call_gives_the_bits_of_its_kernels_one_by_one(monkeypatch, dtype, kind, changes):
    model = prepared(dtype, kind, **changes)
    layers = model.module.model.layers
    assert all("dense" in layer.__dict__ for layer in layers)
    found = runs(monkeypatch)
    together = logprobs(model)
    assert set(found) == set(range(len(layers)))
    monkeypatch.setattr(DenseLayer, "takes", lambda *_: False)
    assert logprobs(model) == together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 40, "num_key_value_heads": 4}),
        ("qwen3", {}),
        ("phi3", {}),
        ("gemma2", {}),
        ("olmo2", {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_layer_of_8_bits_in_one_call_gives_the_bits_of_its_kernels_one_by_one(monkeypatch, dtype, kind, changes):
    module = build(kind, **(SHAPE | changes)).to(dtype)
    model = prepare(module, kernels=kernels(), pack_linear=False)
    assert quantize_linear(model.module).layers == (4 if kind == "phi3" else 7) * len(module.model.layers)
    found = runs(monkeypatch)
    together = logprobs(model)
    assert set(found) == set(range(len(module.model.layers)))
    monkeypatch.setattr(DenseLayer, "takes", lambda *_: False)
    assert logprobs(model) == together


def test_joined_weights_of_8_bits_are_those_of_the_parts():
    model = prepare(build("llama", **SHAPE | {"attention_bias": True}), kernels=kernels(), pack_linear=False)
    quantize_linear(model.module)
    layer = model.module.model.layers[0]
    parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    (joined,) = layer.dense.qkv
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(joined(x), torch.cat([part(x) for part in parts], 1))
    assert torch.equal(joined.weight, torch.cat([part.weight for part in parts]))
    assert {part.weights.untyped_storage().data_ptr() for part in parts} == {joined.weights.data_ptr()}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_5_text", "granite"])
def test_the_last_layer_leaves_out_tokens_whose_logits_are_not_wanted(kind):
    model = prepared(kind=kind)
    body = model.module.model
    given = []
    body.norm.register_forward_pre_hook(lambda _, args: given.append(args[0][0]))
    whole = logprobs(replace(model, last_layer=None))
    rows = torch.cat(given)
    assert rows.any(1).all()
    given.clear()
    assert logprobs(model) == whole
    some = torch.cat(given)
    left_out = ~some.any(1)
    # Granite's layers, for one, have a forward of their own.
    assert (model.last_layer is None) == (kind == "granite")
    assert left_out.any() == (model.last_layer is not None)
    assert torch.equal(some[~left_out], rows[~left_out])


def test_weights_of_q_k_and_v_are_kept_once():
    layer = prepared().module.model.layers[0]
    parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    (joined,) = layer.dense.qkv
    assert {part.weights.untyped_storage().data_ptr() for part in parts} == {joined.weights.data_ptr()}
    assert joined.weights.untyped_storage().nbytes() == sum(part.weights.nbytes for part in parts)
    assert [part.weight.shape for part in parts] == [(128, 128), (64, 128), (64, 128)]


@pytest.mark.parametrize("shared", ["keys and values", "queries of two layers"])
def test_a_linear_layer_in_two_places_keeps_its_weights(monkeypatch, shared):
    module = build("llama", **SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 4})
    first, second = (layer.self_attn for layer in module.model.layers)
    if shared == "keys and values":
        first.v_proj = first.k_proj
    else:
        second.q_proj = first.q_proj
    expected = [x.clone() for x in (first.q_proj.weight, first.k_proj.weight)]
    model = prepare(module, kernels=kernels())
    assert torch.equal(first.q_proj.weight, expected[0])
    assert torch.equal(first.k_proj.weight, expected[1])
    together = logprobs(model)
    monkeypatch.setattr(DenseLayer, "takes", lambda *_: False)
    assert logprobs(model) == together


def test_a_copy_of_a_model_reads_its_own_weights():
    model = prepared()
    other = copy.deepcopy(model.module)
    layer = other.model.layers[0]
    assert layer.dense.o is layer.self_attn.o_proj
    assert layer.dense.qkv[0].weights.data_ptr() == layer.self_attn.q_proj.weights.data_ptr()
    assert layer.self_attn.q_proj.weights.data_ptr() != model.module.model.layers[0].self_attn.q_proj.weights.data_ptr()


def test_a_layer_asks_attention_for_what_its_module_asks_for():
    layers = prepared(kind="gemma2", sliding_window=24).module.model.layers
    options = [layer.dense.options for layer in layers]
    assert [(of.sliding_window, of.softcap, of.scale) for of in options] == [(24, 1.0, 0.0625), (None, 1.0, 0.0625)]


@pytest.mark.parametrize("kind", ["granite", "smollm3", "mixtral"])
def test_layers_with_something_of_their_own_run_part_by_part(kind):
    assert not any("dense" in layer.__dict__ for layer in prepared(kind=kind).module.model.layers)
