"""Layers of image encoders in one call of the kernels."""

import inspect
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from batchgen.attention import encoder_layers
from batchgen.attention.base import LayerOptions
from batchgen.attention.cpu_backend import SegmentAttention, segment_blocks, segment_cache
from batchgen.attention.encoder_layers import fuse_encoder_layers
from batchgen.attention.kv_cache import LayerShape
from batchgen.kernels.fusion import fuse_linear, fuse_small_parts
from batchgen.kernels.ops import Heads
from batchgen.kernels.recognition import Code, code_of
from batchgen.kernels.replacing import Packing
from support.models import randomize
from support.params import slow_but
from support.shapes import family_config
from support.vision import FAMILIES

IN_SEGMENTS = [
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm_ocr", "exaone4_5", "qwen2_5_omni_thinker", "paddleocr_vl", "minicpmv4_6", "hunyuan_vl",
]  # fmt: skip
OF_IMAGES = ["llava", "gemma3", "idefics3", "ovis2", "mistral3/silu", "internvl", "janus"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
pytestmark = pytest.mark.usefixtures("compiled")


def layers_of(family, dtype=torch.float32, prepare=lambda _: None):
    """The layers of a family's encoder, with packed linear layers and fused, in a context without gradients."""
    config = family_config(family, **{"tie_word_embeddings": False} | FAMILIES[family].config)
    torch.manual_seed(0)
    model = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]._from_config(config, dtype=torch.float32)
    model = randomize(model.eval()).to(dtype)
    found = [part for part in model.modules() if code_of(type(part).forward, type(part)) is Code.ENCODER_LAYER]
    prepare(found)
    fuse_small_parts(model)
    fuse_linear(model, Packing())
    fuse_encoder_layers(model)
    return found


def inputs_of(layer, tokens, dtype, images=1):
    """Tokens of a layer, and its other arguments. In segments: three of different lengths."""
    attention = next(part for name, part in layer.named_children() if name in ("attn", "self_attn", "attention"))
    numbers = torch.Generator().manual_seed(tokens)
    hidden = next(p for p in layer.parameters() if p.dim() == 1).shape[0]
    x = torch.randn((images, tokens, hidden), generator=numbers).to(dtype)
    angle = torch.rand((tokens, hidden // attention.num_heads // 2), generator=numbers)
    turns = tuple(torch.cat((of, of), -1) for of in (angle.cos(), angle.sin()))
    code = code_of(type(attention).forward, type(attention))
    masked = "attention_mask" in inspect.signature(inspect.unwrap(type(layer).forward)).parameters
    more = {"attention_mask": None} if masked else {}
    if code in (Code.ATTENTION_IN_SEGMENTS, Code.TURNED_ATTENTION_IN_SEGMENTS):
        ends = [0, tokens // 3, tokens // 3 + tokens // 7, tokens]
        more |= {"cu_seqlens": torch.tensor(ends, dtype=torch.int32), "max_seqlen": tokens}
    if code is Code.TURNED_ATTENTION_IN_SEGMENTS:
        return x[0], more | {"position_embeddings": turns}
    turned = (
        {"position_embeddings": tuple(of.to(dtype) for of in turns)} if code is Code.TURNED_ENCODER_ATTENTION else {}
    )
    return x, more | turned


def by_parts(layer, x, **more):
    return type(layer).forward(layer, x, **more)


@pytest.fixture
def calls(monkeypatch):
    """The number of tokens of each call of a layer as a whole."""
    found = []
    ours = encoder_layers.DenseStack.__call__

    def noted(self, x, *rest):
        found.append(x.shape[1])
        return ours(self, x, *rest)

    monkeypatch.setattr(encoder_layers.DenseStack, "__call__", noted)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl", "gemma3"], IN_SEGMENTS + OF_IMAGES))
@torch.inference_mode()
def test_a_layer_in_one_call_gives_what_its_parts_give(family, dtype, calls):
    layers = layers_of(family, dtype)
    assert layers
    for layer in layers:
        for tokens, images in ((7, 1), (150, 1), (64, 1 if family in (*IN_SEGMENTS, "mistral3/silu") else 3)):
            x, more = inputs_of(layer, tokens, dtype, images)
            expected = by_parts(layer, x, **more)
            calls.clear()
            got = layer(x, **more)
            assert calls == [tokens * images]
            assert got.shape == expected.shape
            near = TOLERANCE[dtype] * expected.abs().max().item()
            torch.testing.assert_close(got, expected, atol=near, rtol=0)


@torch.inference_mode()
def test_a_segment_has_the_bits_that_it_has_alone():
    layer = layers_of("qwen2_5_vl")[0]
    x, more = inputs_of(layer, 150, torch.float32)
    whole, turns = layer(x, **more), more["position_embeddings"]
    ends = more["cu_seqlens"].tolist()
    for begin, end in pairwise(ends):
        alone = layer(
            x[begin:end],
            cu_seqlens=torch.tensor([0, end - begin], dtype=torch.int32),
            position_embeddings=tuple(of[begin:end] for of in turns),
        )
        assert torch.equal(whole[begin:end], alone)


@torch.inference_mode()
def test_a_segment_of_no_tokens_changes_nothing(calls):
    layer = layers_of("qwen2_5_vl")[0]
    x, more = inputs_of(layer, 30, torch.float32)
    expected = layer(x, **more)
    begin, *ends = more["cu_seqlens"].tolist()
    more["cu_seqlens"] = torch.tensor([begin, begin, *ends, ends[-1]], dtype=torch.int32)
    calls.clear()
    assert torch.equal(layer(x, **more), expected)
    assert calls == [30]


@torch.inference_mode()
def test_images_side_by_side_have_the_bits_that_they_have_alone():
    layer = layers_of("gemma3")[0]
    x, more = inputs_of(layer, 50, torch.float32, images=3)
    whole = layer(x, **more)
    for i in range(3):
        assert torch.equal(whole[i : i + 1], layer(x[i : i + 1], **more))


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("kind", ["bool", "numbers"])
@torch.inference_mode()
def test_a_mask_that_shows_all_is_none_and_with_another_one_the_parts_run(shows, kind, calls):
    layer = layers_of("gemma3")[0]
    x, more = inputs_of(layer, 30, torch.float32)
    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool)
    mask[..., 20:] = shows
    more["attention_mask"] = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    calls.clear()
    torch.testing.assert_close(layer(x, **more), by_parts(layer, x, **more), atol=1e-5, rtol=0)
    assert calls == [30] * shows


@torch.inference_mode()
def test_more_tokens_than_memory_is_set_aside_for_run_part_by_part(calls, monkeypatch):
    layer = layers_of("qwen2_vl")[0]
    x, more = inputs_of(layer, 60, torch.float32)
    monkeypatch.setattr(encoder_layers, "MOST_BYTES", 60_000)
    calls.clear()
    assert torch.equal(layer(x, **more), by_parts(layer, x, **more))
    assert calls == []


@pytest.mark.parametrize("part", ["self_attn", "layer_norm1", ""])
@torch.inference_mode()
def test_a_layer_with_a_hook_runs_part_by_part(part, calls):
    seen = []
    layers = layers_of(
        "gemma3", prepare=lambda found: found[0].get_submodule(part).register_forward_hook(lambda *_: seen.append(part))
    )
    x, more = inputs_of(layers[0], 20, torch.float32)
    calls.clear()
    layers[0](x, **more)
    assert seen
    assert calls == []
    layers[1](x, **more)
    assert calls == [20]


def test_a_layer_whose_results_differ_is_not_replaced(monkeypatch):
    monkeypatch.setattr(encoder_layers, "LayerOptions", lambda scale: LayerOptions(scale * 1.5))
    assert not any("forward" in vars(layer) for layer in layers_of("gemma3"))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", [(1,), (64, 64), (5, 70, 1, 64, 63), (700, 3)])
def test_tokens_attend_to_their_own_segment(lengths, dtype):
    heads, size, tokens = 3, 24, sum(lengths)
    q, k, v = torch.randn((3, heads, tokens, size), generator=torch.Generator().manual_seed(tokens)).to(dtype)
    cache = segment_cache(LayerShape(heads, size, size), segment_blocks(lengths) + 1, dtype)
    cache.values[0].fill_(7)  # of other images
    attention = SegmentAttention(lengths, cache)
    out = torch.empty((tokens, heads, size), dtype=dtype)
    prepared = attention.prepared(
        0, (Heads.of(q), Heads.of(k), Heads.of(v)), out.data_ptr(), dtype, LayerOptions(size**-0.5)
    )
    attention.take_over(prepared)
    prepared.call.run()
    parts = (of.split(lengths, dim=1) for of in (q, k, v))
    expected = torch.cat([attend(*of) for of in zip(*parts, strict=True)], dim=1)
    torch.testing.assert_close(out.transpose(0, 1), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
