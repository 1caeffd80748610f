"""A decoder layer in one call of the library gives the bits that its kernels give one by one."""

import copy

import pytest
import torch

from batchgen.kernels import fusion
from batchgen.kernels.dense_layer import DenseLayer
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


def prepared(dtype=torch.float32, **changes):
    return prepare(build("llama", **(SHAPE | changes)).to(dtype), kernels=kernels())


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
    "changes",
    [{}, {"num_key_value_heads": 1}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 40, "num_key_value_heads": 4}],
    ids=str,
)  # fmt: skip
def test_a_layer_in_one_call_gives_the_bits_of_its_kernels_one_by_one(monkeypatch, dtype, changes):
    model = prepared(dtype, **changes)
    found = runs(monkeypatch)
    together = logprobs(model)
    assert (len(found) > 0) == (dtype == torch.float32 or not model.module.model.layers[0].self_attn.q_proj.widens)
    for layer in model.module.model.layers:
        layer.__dict__.pop("dense", None)
    assert logprobs(model) == together


def test_weights_of_q_k_and_v_are_kept_once():
    layer = prepared().module.model.layers[0]
    parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    assert len({part.weights.untyped_storage().data_ptr() for part in parts}) == 1
    assert layer.dense._joined[0].untyped_storage().nbytes() == sum(part.weights.nbytes for part in parts)
    assert [part.weight.shape for part in parts] == [(128, 128), (64, 128), (64, 128)]


def test_a_copy_of_a_model_reads_its_own_weights():
    model = prepared()
    other = copy.deepcopy(model.module)
    layer = other.model.layers[0]
    assert layer.dense.q is layer.self_attn.q_proj
    assert layer.dense._joined[0].data_ptr() == layer.self_attn.q_proj.weights.data_ptr()
    assert layer.self_attn.q_proj.weights.data_ptr() != model.module.model.layers[0].self_attn.q_proj.weights.data_ptr()


def test_layers_with_something_of_their_own_run_part_by_part():
    qwen = prepare(build("qwen3", **SHAPE), kernels=kernels())  # norms of queries and keys
    assert not any("dense" in layer.__dict__ for layer in qwen.module.model.layers)
