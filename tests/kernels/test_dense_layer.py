"""A decoder layer in one call of the library gives the same bits as its kernels called one by one."""

from dataclasses import replace

import pytest
import torch

from batchgen.kernels.dense_layer import DenseStack
from batchgen.kernels.int8 import Int8Linear, Rounding
from batchgen.kernels.quantization import Int8Packing, quantize_linear
from batchgen.model.adapter import prepare
from batchgen.model.weights.int8 import quantize
from support.fusing import adapted, with_adapters
from support.models import build, engine_for, kernels, make_requests, run
from support.params import in_turn, slow_but

SHAPE = {
    "hidden_size": 128, "intermediate_size": 200, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("compiled")


def prepared(dtype=torch.float32, kind="llama", **changes):
    return prepare(build(kind, **(SHAPE | changes)).to(dtype), kernels=kernels())


def in_8_bits(kind):
    model = prepare(build(kind, **SHAPE), kernels=kernels(), int8=True)
    return quantize(model, [], {})


def recorded_layers(monkeypatch):
    """Returns a list to which every later call of a stack adds the indices of its layers."""
    found = []

    def note(name):
        whole = getattr(DenseStack, name)

        def noted(self, *given):
            found.append(tuple(layer.index for layer in self.layers))
            return whole(self, *given)

        monkeypatch.setattr(DenseStack, name, noted)

    note("__call__")
    note("before_mlp")
    return found


def logprobs(model):
    """Returns the log-probabilities of prompts of which some are prefixes of others."""
    prompts = [[5, 6, 7], [*range(20, 60)], [*range(20, 60), 3, 4], [*range(20, 60), 9], [8]]
    requests = make_requests(prompts, [4] * len(prompts), logprobs=2, ignore_eos=True, temperature=0)
    return [result.completions[0].logprobs for result in run(engine_for(model), requests)]


WIDTHS = [
    {}, {"num_key_value_heads": 1}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 40, "num_key_value_heads": 4},
]  # fmt: skip
EXPERTS = {"mlp_only_layers": []}
HEADS, DENSE = {"mamba_d_head": 32}, {"num_local_experts": 0}
BLOCKS = {"layers_block_type": ["mamba", "attention", "mamba", "mamba"], "num_hidden_layers": 4, "time_step_min": 0.7}
SCALED_FROM_64 = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
KINDS = [
    *(("llama", changes) for changes in WIDTHS), ("qwen2", {}), ("qwen3", {}), ("mistral", {"sliding_window": 24}),
    ("phi3", {}), ("phi3", {"partial_rotary_factor": 0.5}), ("gemma2", {}), ("gemma3_text", {}), ("olmo2", {}),
    ("granite", {"residual_multiplier": 0.22}), ("ministral3", {"rope_parameters": SCALED_FROM_64}), ("smollm3", {}), ("exaone4", {}), ("arcee", {}), ("mixtral", {}),
    ("qwen3_moe", EXPERTS), ("glm4_moe", {"first_k_dense_replace": 0}), ("gpt_oss", {}), ("qwen3_5_text", {}), ("qwen3_5_moe_text", {}),
    ("gemma4_text", {}), ("gemma4_text", {"attention_k_eq_v": True, "num_kv_shared_layers": 0}), ("gemma4_unified_text", {}),
    ("granitemoehybrid/recurrent", HEADS), ("granitemoehybrid/recurrent", HEADS | DENSE), ("nemotron_h", BLOCKS),
    ("lfm2", {}), ("lfm2_moe", {"num_dense_layers": 1}), ("glm4", {}), ("ernie4_5", {}), ("helium", {}),
    ("hunyuan_v1_dense", {}), ("seed_oss", {}), ("hyperclovax", {}), ("hyperclovax", {"use_post_norm": True}), ("granitemoe", {}),
    ("granitemoeshared", {}), ("olmoe", {}),
]  # fmt: skip
WITHOUT_OWN_KV = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
"""Those whose last two of six layers read the keys and values of others."""
BY_LAYERS = {
    "gemma3_text", "exaone4", "arcee", "mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text",
    "gemma4_unified_text", "nemotron_h", "lfm2_moe", "granitemoe", "granitemoeshared", "olmoe",
}  # fmt: skip
"""Those whose layers do not all run in one call."""
NEAR = {
    "qwen3_5_text": 1e-5, "qwen3_5_moe_text": 1e-5, "gemma4_text": 1e-4, "gemma4_unified_text": 1e-4, "granitemoehybrid/recurrent": 1e-5,
    "nemotron_h": 1e-5,
}  # fmt: skip
"""Those whose separate parts are not all kernels: how near log-probabilities of float32 are."""
IN_8_BITS = [
    ("llama", WIDTHS[2]), ("llama", WIDTHS[3]), ("qwen3", {}), ("phi3", {}), ("gemma2", {}), ("olmo2", {}), ("granite", {}), ("qwen3_moe", EXPERTS),
    ("qwen3_5_text", {}), ("gemma4_text", {}), ("granitemoehybrid/recurrent", HEADS | DENSE), ("nemotron_h", BLOCKS),
    ("lfm2", {}),
]  # fmt: skip
LAYERS_IN_8_BITS = {
    "phi3": 2 * 4,
    "qwen3_moe": 2 * (4 + 3 * 4),
    "qwen3_5_text": 3 * 6 + 7,
    "gemma4_text": 4 * 9 + 2 * 7,
    "granitemoehybrid/recurrent": 2 * 6 + 2 * 4,
    "nemotron_h": 3 * 2 + 4,
    "lfm2": 2 * 5 + 2 * 7,
}
"""Linear layers, where there are not seven in each decoder layer."""


DTYPES = (torch.float32, torch.bfloat16)
CASES = [*((*kind, False) for kind in KINDS), *((*kind, True) for kind in IN_8_BITS)]
QUICK = [(*case, dtype) for case, dtype in in_turn(CASES, DTYPES)]


@pytest.mark.parametrize(
    ("kind", "changes", "int8", "dtype"),
    slow_but(QUICK, [(*case, dtype) for case in CASES for dtype in DTYPES]),
    ids=str,
)
def test_a_layer_in_one_call_gives_the_same_bits_as_its_separate_kernels(monkeypatch, dtype, kind, changes, int8):
    model = prepare(build(kind, **(SHAPE | changes)).to(dtype), kernels=kernels(), int8=int8)
    body = model.module.model
    if int8:
        assert quantize_linear(model.module).layers == LAYERS_IN_8_BITS.get(kind, 7 * len(body.layers))
    assert all("dense" in layer.__dict__ for layer in body.layers)
    whole = "stack" in body.__dict__
    assert whole == (kind not in BY_LAYERS and body.layers[0].dense.layers[0].mlp is not None)
    each = {(i,) for i in range(len(body.layers))}
    found = recorded_layers(monkeypatch)
    together = logprobs(model)
    assert set(found) == ({tuple(range(len(body.layers)))} if whole else each)
    if whole:
        found.clear()
        del body.forward
        assert logprobs(model) == together
        assert set(found) == each
    monkeypatch.setattr(DenseStack, "takes", lambda *_: False)
    if kind in NEAR:
        near = NEAR[kind] if dtype == torch.float32 and not int8 else 0.1
        assert numbers_of(logprobs(model)) == pytest.approx(numbers_of(together), abs=near)
    else:
        assert logprobs(model) == together


def numbers_of(rows):
    return [
        number for row in rows for token in row for number in [token.logprob, *(other.logprob for other in token.top)]
    ]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "without"), [("llama", ()), ("llama", ("gate_proj", "k_proj")), ("phi3", ()), ("gemma2", ("down_proj",))]
)
def test_layers_with_adapters_run_in_one_call_and_give_the_same_bits(monkeypatch, dtype, kind, without, int8):
    biased = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
    module = with_adapters(build(kind, **(SHAPE | biased)).to(dtype), without)
    plain = logprobs(prepare(module, kernels=None))
    model = prepare(module, kernels=kernels(), int8=int8)
    if int8:
        quantize_linear(model.module)
    assert "stack" in model.module.model.__dict__
    found = recorded_layers(monkeypatch)
    together = logprobs(model)
    assert set(found) == {(0, 1)}
    if not int8 and dtype == torch.float32:
        assert [[token.token for token in row] for row in together] == [[token.token for token in row] for row in plain]
    monkeypatch.setattr(DenseStack, "takes", lambda *_: False)
    assert logprobs(model) == together


def test_a_step_with_a_query_that_is_scaled_runs_part_by_part(monkeypatch):
    scaled = {"rope_parameters": SCALED_FROM_64}
    requests = make_requests([list(range(20, 76)), list(range(30, 95))], [10, 10], ignore_eos=True, temperature=0)
    found = recorded_layers(monkeypatch)
    engine = engine_for(prepared(kind="ministral3", **scaled))
    results = [*run(engine, requests[:1]), *run(engine, requests[1:])]
    assert found == [(0, 1)] * 9  # then the first one's last query is at 64, where the second one's prompt ends
    plain = engine_for(prepare(build("ministral3", **SHAPE, **scaled), kernels=None))
    expected = [*run(plain, requests[:1]), *run(plain, requests[1:])]
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]


def test_a_model_that_changes_the_outputs_of_its_modules_runs_layer_by_layer(monkeypatch):
    module = build("llama", **SHAPE)
    plain = type(module.model).forward

    class Scaled(type(module.model)):
        def forward(self, input_ids=None, inputs_embeds=None, **given):
            x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            return plain(self, inputs_embeds=x * 3, **given)

    module.model.__class__ = Scaled
    model = prepare(module, kernels=kernels())
    assert all("dense" in layer.__dict__ for layer in model.module.model.layers)
    assert "stack" not in model.module.model.__dict__
    found = recorded_layers(monkeypatch)
    together = logprobs(model)
    assert set(found) == {(i,) for i in range(len(model.module.model.layers))}
    monkeypatch.setattr(DenseStack, "takes", lambda *_: False)
    assert logprobs(model) == together


@pytest.mark.parametrize("plain", [0, 1])
def test_a_model_with_int8_and_other_layers_runs_in_one_call(monkeypatch, plain):
    can_pack = Int8Packing.can_pack
    module = build("llama", **SHAPE)
    whole = {id(part) for part in module.model.layers[plain].modules()}
    monkeypatch.setattr(Int8Packing, "can_pack", lambda self, part: id(part) not in whole and can_pack(self, part))
    model = prepare(module, kernels=kernels(), int8=True)
    assert quantize_linear(model.module).layers == 7
    assert [isinstance(layer.self_attn.o_proj, Int8Linear) for layer in module.model.layers] == [plain == 1, plain == 0]
    found = recorded_layers(monkeypatch)
    together = logprobs(model)
    assert set(found) == {(0, 1)}
    monkeypatch.setattr(DenseStack, "takes", lambda *_: False)
    assert logprobs(model) == together


@pytest.mark.parametrize("own", ["q_proj", "v_proj"])
def test_layers_whose_weights_a_checkpoint_has_in_8_bits_run_beside_others_that_are_rotated(own, monkeypatch):
    module = build("llama", **SHAPE)
    made = prepare(module, kernels=kernels(), int8=True)
    names = [f"{i}.self_attn.{own}" for i in range(len(module.model.layers))]
    scales = {name: module.model.layers.get_submodule(name).weight.abs().amax(1) / 127 for name in names}
    quantize_linear(made.module, scales)
    parts = module.model.layers[0].self_attn
    kinds = {name: getattr(parts, name).rounding for name in ("q_proj", "k_proj", "v_proj")}
    assert [name for name, kind in kinds.items() if kind is Rounding.ROW] == [own]
    found = recorded_layers(monkeypatch)
    together = logprobs(made)
    assert set(found) == {(0, 1)}
    monkeypatch.setattr(DenseStack, "takes", lambda *_: False)
    assert logprobs(made) == together


@pytest.mark.parametrize(
    ("kind", "int8"),
    [(kind, False) for kind in (*WITHOUT_OWN_KV, "llama", "gemma2", "qwen3_5_text", "granite", "qwen3_moe", "cohere")]
    + [(kind, True) for kind in ("llama", "gemma2")],
)
def test_the_narrowed_from_skips_tokens_whose_logits_are_not_needed(kind, int8):
    model = in_8_bits(kind) if int8 else prepared(kind=kind)
    body = model.module.model
    given = []
    body.norm.register_forward_pre_hook(lambda _, args: given.append(args[0][0]))
    whole = logprobs(replace(model, narrowed_from=None))
    rows = torch.cat(given)
    assert rows.any(1).all()
    given.clear()
    assert logprobs(model) == whole
    some = torch.cat(given)
    left_out = ~some.any(1)
    # Layers with their own forward, such as Cohere's, skip nothing.
    last = len(body.layers) - 1
    assert model.narrowed_from == {"cohere": None}.get(kind, last - (kind in WITHOUT_OWN_KV))
    assert left_out.any() == (model.narrowed_from is not None)
    assert torch.equal(some[~left_out], rows[~left_out])


@pytest.mark.parametrize("shared", ["keys and values", "queries of two layers", "weights of two layers"])
def test_a_linear_layer_that_is_used_twice_keeps_its_weights(monkeypatch, shared):
    module = build("llama", **SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 4})
    first, second = (layer.self_attn for layer in module.model.layers)
    if shared == "keys and values":
        first.v_proj = first.k_proj
    elif shared == "weights of two layers":
        second.q_proj.weight = first.q_proj.weight
        first.q_proj = adapted(first.q_proj)
    else:
        second.q_proj = first.q_proj
    expected = [x.clone() for x in (first.q_proj.weight, first.k_proj.weight)]
    model = prepare(module, kernels=kernels())
    assert torch.equal(first.q_proj.weight, expected[0])
    assert torch.equal(first.k_proj.weight, expected[1])
    together = logprobs(model)
    monkeypatch.setattr(DenseStack, "takes", lambda *_: False)
    assert logprobs(model) == together


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("cohere", {}), ("gemma3n_text", {}), ("gemma4_text/experts", {}), ("olmoe", {"clip_qkv": 1.0})],
)
def test_layers_of_another_structure_run_part_by_part(kind, changes):
    assert not any("dense" in layer.__dict__ for layer in prepared(kind=kind, **changes).module.model.layers)


def test_layers_that_share_keys_and_values_run_part_by_part_if_one_of_them_has_to():
    module = build("gemma4_text", **SHAPE)
    plain = prepare(build("gemma4_text", **SHAPE), kernels=kernels())
    module.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *_: None)
    model = prepare(module, kernels=kernels())
    assert not any("dense" in layer.__dict__ for layer in module.model.layers)
    assert model.narrowed_from == plain.narrowed_from
    assert numbers_of(logprobs(model)) == pytest.approx(numbers_of(logprobs(plain)), abs=1e-4)
