"""Which parts of a model the kernels replace and which they leave, and that the model's output stays the same."""

import gc
import weakref

import pytest
import torch
from transformers.models.llama import modeling_llama

from batchgen.kernels import decoder_layers, fusion
from batchgen.kernels.ops import PackedLinear
from support.fusing import adapted, fuse
from support.models import build
from support.shapes import VOCAB

FORWARDS = {"embeddings": 1, "rotary embeddings": 2, "decoder layers": 2, "tables of cos and sin": 1}
ALL = {**FORWARDS, "norms": 5, "gated MLPs": 2, "linear layers": 9}
IDS = torch.arange(7)[None]


pytestmark = pytest.mark.usefixtures("compiled")


@torch.inference_mode()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def same(model, plain):
    torch.testing.assert_close(logits(model), plain, atol=1e-5, rtol=1e-5)


def test_a_packed_weight_replaces_the_original():
    model = build("llama")
    gone = [weakref.ref(model.lm_head.weight), weakref.ref(model.model.layers[1].mlp.gate_proj.weight)]
    fuse(model)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert [name for name, p in model.named_parameters() if p.dim() > 1] == ["model.embed_tokens.weight"]


def test_a_weight_that_modules_share_is_packed_once_beside_the_embedding():
    model = build("llama", tie_word_embeddings=True)
    first, second = (layer.self_attn for layer in model.model.layers)
    second.o_proj.weight = first.o_proj.weight
    plain = logits(model)
    assert fuse(model) == ALL | {"linear layers": 8}
    assert isinstance(model.lm_head, PackedLinear)
    assert second.o_proj is first.o_proj
    assert [name for name, p in model.named_parameters() if p.dim() > 1] == ["model.embed_tokens.weight"]
    same(model, plain)


def test_adapters_beside_a_weight_that_modules_share_stay_with_their_modules():
    model = build("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.o_proj.weight = first.o_proj.weight
    first.o_proj, second.o_proj = adapted(first.o_proj, seed=1), adapted(second.o_proj, seed=2)
    plain = logits(model)
    assert fuse(model) == ALL | {"linear layers": 9 + 2}  # with the adapters' own
    same(model, plain)


def test_other_models_in_the_process_are_not_changed():
    before = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    other = build("llama")
    fuse(build("llama"))
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward) == before
    assert "forward" not in vars(other.model.layers[0].self_attn)


def test_a_module_that_is_used_twice_is_replaced_in_both_places():
    model = build("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    plain = logits(model)
    assert fuse(model) == ALL | {"gated MLPs": 1, "linear layers": 8}
    assert model.model.layers[1].mlp is model.model.layers[0].mlp
    assert model.model.layers[1].self_attn.q_proj is model.model.layers[0].self_attn.q_proj
    same(model, plain)


def test_a_part_with_hooks_is_not_replaced():
    model = build("llama")
    seen = []
    for part in (model.lm_head, model.model.norm, model.model.layers[0].mlp, model.model.layers[1].mlp.down_proj):
        part.register_forward_hook(lambda *_: seen.append(1))
    assert fuse(model) == {**FORWARDS, "norms": 4, "linear layers": 8 + 5}
    logits(model)
    assert len(seen) == 4


class Wide(torch.nn.Linear):
    pass


def test_other_layers_dtypes_and_devices_are_not_replaced():
    model = build("llama")
    model.lm_head = Wide(64, VOCAB, bias=False)
    assert fuse(model) == ALL | {"linear layers": 8}
    assert type(model.lm_head) is Wide
    assert fuse(build("llama").half()) == FORWARDS
    assert fuse(build("llama").to("meta")) == {}


def test_a_part_with_the_same_code_but_other_results_is_not_replaced(monkeypatch):
    model = build("llama")
    plain = logits(model)
    monkeypatch.setattr(fusion, "norm_after_sum", lambda x, *_: (x, x * 1.01))
    monkeypatch.setattr(fusion, "rotate", lambda q, k, *_: (q * 1.2, k))
    assert fuse(model) == {
        "embeddings": 1, "decoder layers": 2, "tables of cos and sin": 1, "gated MLPs": 2, "linear layers": 9,
    }  # fmt: skip
    same(model, plain)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("changes", "linear"), [({"intermediate_size": 0}, 9), ({"hidden_act": "gelu"}, 9 + 6)])
def test_an_mlp_of_no_width_or_with_another_activation_stays_and_its_linear_layers_are_packed(changes, linear):
    model = build("llama", **changes)
    plain = logits(model)
    assert fuse(model) == {**FORWARDS, "norms": 5, "linear layers": linear}
    same(model, plain)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
@torch.inference_mode()
def test_the_gate_after_attention_runs_our_kernel_with_the_same_result(name, monkeypatch):
    model = build(name)
    model.set_attn_implementation("sdpa")
    attention = next(layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn"))
    x, cos, sin = torch.randn(1, 5, attention.config.hidden_size), *torch.randn(2, 1, 5, attention.head_dim // 2)
    plain, _ = attention(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)
    fuse(model)
    gated = []
    kernel = decoder_layers.sigmoid_gate
    monkeypatch.setattr(decoder_layers, "sigmoid_gate", lambda *given: gated.append(kernel(*given)) or gated[-1])
    got, _ = attention(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)
    assert len(gated) == 1
    torch.testing.assert_close(got, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "size", "padding", "image"),
    [(torch.nn.Conv2d, (4, 2), "valid", (13, 7)), (torch.nn.Conv3d, (2, 3, 4), 0, (2, 9, 15))],
)
@torch.inference_mode()
def test_a_convolution_over_patches_is_a_linear_layer_of_each(kind, size, padding, image, dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(kind(2, 5, size, size, padding), kind(5, 3, 1, 1, padding=1)).to(dtype)
    x = torch.randn(3, 2, *image).to(dtype)
    plain = model[0](x)
    assert fuse(model) == {"patches": 1}
    torch.testing.assert_close(model[0](x), plain, atol=fusion.NEAR[dtype], rtol=fusion.NEAR[dtype])
    assert model[0](x).is_contiguous()
