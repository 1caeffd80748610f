"""Tiny random models that see, each with its family's own processor: on disk for batchgen, and as transformers' reference."""

import importlib
import json
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import processors
from transformers import AutoImageProcessor, BatchFeature, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from support.models import randomize
from support.shapes import SHAPES, family_config
from support.tiny_model import byte_tokenizer
from support.wrappers import TEXTS

SPECIAL = (
    "<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<image>", "<video>", "<fake_token_around_image>",
    "<end_of_utterance>", "<global-img>", "<img>", "</img>", "<IMG_CONTEXT>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|vision_start|>",
    "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>",
    "<|begin_of_video|>", "<|end_of_video|>", "<boi>", "<eoi>", "<soft>", "<boa>", "<eoa>", "<sound>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE", "TILE_GLOBAL",
    "<imgpad>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>",
    "<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)),
    "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
    "]<]image[>[", "]<]start of image[>[", "]<]end of image[>[",  # MiniMax M3 VL
    "<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>",  # Step 3.7
    "<|imgpad|>", "<|VISION_START|>", "<|IMAGE_PAD|>", "<|VISION_END|>",  # dots3 Note, Cohere Compass
    "<n_eoi>", "<n_soft>", "<n_0>", "<n_1>", "<n_eoa>", "<n_sound>", "<n_2>", "<n_3>",  # Gemma 3n: of images, and of sound
)  # fmt: skip
VOCAB = 256 + len(SPECIAL)
ID = {token: 256 + i for i, token in enumerate(SPECIAL)}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}PLACE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IMAGES_FIRST = (
    "{% for m in messages %}{% if m.content is not string %}{% for part in m.content if part.type == 'image' %}PLACE{% endfor %}{% endif %}{% endfor %}"
    + TEMPLATE.replace("PLACE", "")
)
"""For PaliGemma."""
LLAMA = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "bos_token_id": 256,
    "eos_token_id": None, "pad_token_id": 258,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 56, "patch_size": 14, "projection_dim": 32,
}  # fmt: skip
SIGLIP = {k: v for k, v in CLIP.items() if k != "projection_dim"} | {"model_type": "siglip_vision_model"}


@dataclass(frozen=True)
class Seen:
    """A family of models that see."""

    config: dict[str, Any]
    images: tuple[str, dict[str, Any]]
    """The class of the image processor, and its settings."""
    processor: tuple[str, dict[str, Any]]
    """The class of the processor (in its own module of transformers), and its settings."""
    place: str = "<image>"
    """What the chat template writes for an image."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer: names of special tokens."""
    template: str = TEMPLATE
    told: dict[str, Any] = field(default_factory=dict)
    """Attributes of the processor's class: what its caller must ask for."""
    inside: str | None = None
    """The type of the model that also speaks, of which it is a part."""
    needs: str | None = None
    """A package that its encoder needs, which the tests do without."""
    ragged: bool = False
    """Whether its processor refuses images with different numbers of tiles in one prompt, for which nothing else speaks: the model wants all tiles in a row."""


PINPOINTS = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}
SQUARE = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
PATCHES = {"size": {"height": 56, "width": 56}, "max_patches": 4}
EYE = {k: v for k, v in SIGLIP.items() if k != "model_type"}
SAM = {
    "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 1, "patch_size": 2, "global_attn_indexes": [1],
    "mlp_dim": 24,
}  # fmt: skip
PIXTRAL = SIGLIP | {"model_type": "pixtral", "image_size": 112}
QWEN_EYE = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 14,
    "out_hidden_size": 64,
}
QWEN3_EYE = QWEN_EYE | {"num_position_embeddings": 16}
DEEP = {"deepstack_visual_indexes": [0, 1]}
OMNI = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "audio_token": "<sound>", "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>", "audio_bos_token": "<boa>", "audio_eos_token": "<eoa>",
}  # fmt: skip


def _text(model_type: str, **settings: Any) -> dict[str, Any]:
    return LLAMA | {"model_type": model_type} | settings


def _shape(model_type: str, **settings: Any) -> dict[str, Any]:
    """A text model of a type that needs more than Llama."""
    return LLAMA | SHAPES[model_type] | {"model_type": model_type} | settings


def _inner(name: str, **settings: Any) -> dict[str, Any]:
    """The language model of a wrapper in the tests of text."""
    model_type, shape = TEXTS[name]
    return LLAMA | shape | {"model_type": model_type, "vocab_size": VOCAB} | settings


def _images(folder: str, prefix: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    """The image processor that needs no torchvision."""
    return f"{folder}.image_processing_pil_{folder}:{prefix}ImageProcessorPil", settings


def _processor(folder: str, prefix: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    return f"{folder}.processing_{folder}:{prefix}Processor", settings


def _qwen(text: dict[str, Any], eye: dict[str, Any], *processor: str, **fields: Any) -> Seen:
    size = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 12}
    ids = {
        "image_token_id": ID["<|image_pad|>"], "video_token_id": ID["<|video_pad|>"], "vision_start_token_id": ID["<|vision_start|>"],
        "vision_end_token_id": ID["<|vision_end|>"],
    }  # fmt: skip
    given = {"images": _images("qwen2_vl", "Qwen2VL", size=size)} | fields
    return Seen(
        {"text_config": text, "vision_config": eye, **ids},
        processor=_processor(*processor), place="<|vision_start|><|image_pad|><|vision_end|>", **given,
    )  # fmt: skip


QWEN_SIZE = _qwen({}, {}, "", "").images[1]


def _omni(text: dict[str, Any], eye: dict[str, Any], ear: dict[str, Any], *processor: str, **fields: Any) -> Seen:
    """The part of a model that also hears and speaks which writes text."""
    seen = _qwen(text, eye, *processor, tokens=OMNI, **fields)
    ids = {
        "audio_config": ear, "audio_token_id": ID["<sound>"], "audio_start_token_id": ID["<boa>"], "audio_end_token_id": ID["<eoa>"],
        "user_token_id": ID["<|user|>"],
    }  # fmt: skip
    return replace(seen, config=seen.config | ids)


def _glm(
    text: dict[str, Any], eye: dict[str, Any], folder: str, prefix: str, processor: tuple[str, str] | None = None
) -> Seen:
    ids = {
        "image_token_id": ID["<|image|>"], "video_token_id": ID["<|video|>"], "image_start_token_id": ID["<|begin_of_image|>"],
        "image_end_token_id": ID["<|end_of_image|>"], "video_start_token_id": ID["<|begin_of_video|>"],
        "video_end_token_id": ID["<|end_of_video|>"],
    }  # fmt: skip
    size = {"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 24}
    return Seen(
        {"text_config": text, "vision_config": QWEN_EYE | {"image_size": 56} | eye, **ids},
        _images(folder, prefix, size=size), _processor(*processor or (folder, prefix)), "<|begin_of_image|><|image|><|end_of_image|>",
    )  # fmt: skip


def _llava(folder: str, prefix: str, images: str = "CLIP", **config: Any) -> Seen:
    pinpoints = {k: v for k, v in config.items() if k in PINPOINTS}
    return Seen(
        {"text_config": LLAMA, "vision_config": CLIP, **config},
        _images("clip" if images == "CLIP" else "llava_next", images, **SQUARE, **pinpoints),
        _processor(folder, prefix, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    )  # fmt: skip


def _idefics3(folder: str, prefix: str) -> Seen:
    tiled = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    eye = SIGLIP | {"model_type": f"{folder}_vision"}
    return Seen(
        {"text_config": LLAMA, "vision_config": eye, "image_token_id": ID["<image>"], "scale_factor": 2},
        _images(folder, prefix, **tiled), _processor(folder, prefix, image_seq_len=4),
    )  # fmt: skip


def _internvl(text: str, place: str, *processor: str) -> Seen:
    return Seen(
        {
            "text_config": _text(text), "image_token_id": ID["<IMG_CONTEXT>"], "image_seq_length": 4, "downsample_ratio": 0.5,
            "vision_config": EYE | {"image_size": [56, 56], "patch_size": [14, 14]},
        },
        _images("got_ocr2", "GotOcr2", **PATCHES), _processor(*processor, image_seq_length=4), place,
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
    )  # fmt: skip


def _pixtral(text: dict[str, Any], ids: dict[str, Any], *processor: str, **fields: Any) -> Seen:
    return Seen(
        {"text_config": text, "vision_config": PIXTRAL, **ids},
        _images("pixtral", "Pixtral", size={"longest_edge": 84}, patch_size=28),
        _processor(*processor, patch_size=14, spatial_merge_size=2), "[IMG]", **fields,
    )  # fmt: skip


def _gemma4(**settings: Any) -> Seen:
    eye = {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 3, "position_embedding_size": 64,
    }  # fmt: skip
    text = {"vocab_size_per_layer_input": VOCAB, "sliding_window": 24, "pad_token_id": 258, "vocab_size": VOCAB}
    return Seen(
        {
            "text_config": _shape("gemma4_text", **text | settings), "vision_config": eye,
            "audio_config": {"model_type": "gemma4_audio", "num_hidden_layers": 1, "output_proj_dims": 32, "hidden_size": 32},
            "image_token_id": ID["<soft>"], "boi_token_id": ID["<boi>"], "eoi_token_id": ID["<eoi>"], "audio_token_id": ID["<sound>"],
            "boa_token_id": ID["<boa>"], "eoa_token_index": ID["<eoa>"], "video_token_id": ID["<|video|>"],
        },
        _images("gemma4", "Gemma4", patch_size=4, max_soft_tokens=70), _processor("gemma4", "Gemma4"), "<soft>",
        {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>", "boa_token": "<boa>", "eoa_token": "<eoa>", "audio_token": "<sound>"},
    )  # fmt: skip


def _muse(folder: str, text: dict[str, Any], **more: Any) -> Seen:
    eye = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "pos_emb_height": 2, "pos_emb_width": 2,
        "max_position_embeddings": 4,
    }  # fmt: skip
    ids = {"image_token_id": ID["<|patch|>"], "video_token_id": ID["<|video|>"]}
    prefix = "".join(part.capitalize() for part in folder.split("_"))
    return Seen(
        {"text_config": text, "vision_config": eye, "projector_hidden_size": 48, "out_hidden_size": 128, **ids, **more},
        ("muse_glimmer.image_processing_muse_glimmer:MuseGlimmerImageProcessor", {"max_image_tokens": 6}),
        _processor(folder, prefix), "<|patch|>", needs="torchvision",
    )  # fmt: skip


def _janus(**settings: Any) -> Seen:
    return Seen(
        {
            "text_config": LLAMA, "vision_config": EYE | {"projection_dim": 64, "num_image_tokens": 16, "mlp_ratio": 1.5},
            "vq_config": {
                "base_channels": 32, "latent_channels": 32, "embed_dim": 4, "num_embeddings": 16, "num_res_blocks": 1, "projection_dim": 16,
                "image_token_embed_dim": 16, "channel_multiplier": [1, 1, 1, 1, 1],
            },
            "image_token_id": ID["<image>"],
        },
        _images("janus", "Janus", size={"height": 56, "width": 56}), _processor("janus", "Janus", num_image_tokens=16, **settings),
        tokens={"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    )  # fmt: skip


def _paligemma(inner: str, **settings: Any) -> Seen:
    return Seen(
        {
            "text_config": _shape(inner, vocab_size=VOCAB, **settings), "vision_config": SIGLIP, "image_token_index": ID["<image>"],
            "projection_dim": 64, "hidden_size": 64,
        },
        _images("siglip", "Siglip", size={"height": 56, "width": 56}, image_seq_length=16), _processor("paligemma", "PaliGemma"),
        tokens={"image_token": "<image>"}, template=IMAGES_FIRST,
    )  # fmt: skip


SLICES = {"scale_resolution": 28, "max_slice_nums": 9}
"""Several rows and columns of them."""


def _minicpm(folder: str, images: tuple[str, dict[str, Any]], prefix: str, mode: str, **fields: Any) -> Seen:
    eye = EYE | {"patch_size": 4, "num_hidden_layers": 2}
    canvas = {} if folder != "minicpmv4_7" else {
        "image_start_id": ID["<image>"], "image_end_id": ID["</image>"], "slice_start_id": ID["<slice>"], "slice_end_id": ID["</slice>"],
        "newline_id": 198,
    }  # fmt: skip
    return Seen(
        {
            "text_config": _shape("qwen3_5_text", vocab_size=VOCAB), "vision_config": eye, "insert_layer_id": 0, "downsample_mode": mode,
            "image_token_id": ID["<|image_pad|>"], "video_token_id": ID["<|video_pad|>"], **canvas,
        },
        (images[0], {"scale_resolution": 56, "patch_size": 4, "max_slice_nums": 3, "downsample_mode": mode} | images[1]),
        _processor(folder, prefix), "<|image_pad|>",
        {
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>", "image_end_token": "</image>",
            "slice_start_token": "<slice>", "slice_end_token": "</slice>", "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
        },
        **fields,
    )  # fmt: skip


FAMILIES = {
    "aria": Seen(
        {
            "text_config": _shape("aria_text"), "vision_config": SIGLIP | {"model_type": "idefics3_vision", "image_size": 980, "patch_size": 98},
            "image_token_index": ID["<image>"], "projector_patch_to_query_dict": {"100": 16},
        },
        _images("aria", "Aria"), _processor("aria", "Aria", size_conversion={"980": 16}), tokens={"image_token": "<image>"},
    ),
    "aya_vision": Seen(
        {
            "text_config": _shape("cohere2", sliding_window=24), "vision_config": SIGLIP, "image_token_index": ID["<|IMG_PATCH|>"],
            "downsample_factor": 2, "alignment_intermediate_size": 64,
        },
        _images("got_ocr2", "GotOcr2", **PATCHES), _processor("aya_vision", "AyaVision", patch_size=14, img_size=56, downsample_factor=2),
    ),
    "cohere_compass": Seen(
        {
            "text_config": _inner("cohere_compass"), "vision_config": QWEN3_EYE | DEEP, "image_token_id": ID["<|IMAGE_PAD|>"],
            "video_token_id": ID["<|video_pad|>"], "vision_start_token_id": ID["<|VISION_START|>"], "vision_end_token_id": ID["<|VISION_END|>"],
        },
        _images("cohere_compass", "CohereCompass", patch_size=14, **QWEN_SIZE), _processor("cohere_compass", "CohereCompass"),
        "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
    ),
    "cohere2_vision": Seen(
        {
            "text_config": _shape("cohere2", sliding_window=24), "vision_config": SIGLIP, "image_token_id": ID["<|IMG_PATCH|>"],
            "downsample_factor": 2, "alignment_intermediate_size": 64,
        },
        ("cohere2_vision.image_processing_cohere2_vision:Cohere2VisionImageProcessor", PATCHES | {"patch_size": 2}),
        _processor("cohere2_vision", "Cohere2Vision"), "<|IMG_PATCH|>",
        {"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>", "image_token": "<|IMG_PATCH|>", "img_line_break_token": "[IMG_BREAK]"},
        needs="torchvision",
    ),
    "cosmos3_edge": _qwen(
        _inner("cosmos3_edge"), {k: v for k, v in EYE.items() if k != "image_size"} | {"num_patches": 16, "spatial_merge_size": 2},
        "cosmos3_edge", "Cosmos3Edge", images=_images("cosmos3_edge", "Cosmos3Edge", patch_size=14, **QWEN_SIZE),
        told={"return_mm_token_type_ids": True},
    ),
    "cosmos3_omni": _qwen(_inner("cosmos3_omni", num_hidden_layers=3), QWEN3_EYE | DEEP, "qwen3_vl", "Qwen3VL"),
    "deepseek_ocr2": Seen(
        {
            "text_config": _inner("deepseek_ocr2"),
            "vision_config": {
                "sam_config": SAM | {"image_size": 128, "downsample_channels": [16, 32]},
                "encoder_config": {
                    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8,
                },
            },
            "image_token_id": ID["<image>"],
        },
        _images("deepseek_ocr2", "DeepseekOcr2", size={"height": 128, "width": 128}, tile_size=96),
        _processor("deepseek_ocr2", "DeepseekOcr2", patch_size=2, downsample_ratio=4),
    ),
    "deepseek_vl": Seen(
        {"text_config": LLAMA, "vision_config": SIGLIP, "image_token_id": ID["<image>"]},
        _images("deepseek_vl", "DeepseekVL", size={"height": 56, "width": 56}), _processor("deepseek_vl", "DeepseekVL", num_image_tokens=16),
        tokens={"image_token": "<image>"},
    ),
    "deepseek_vl_hybrid": Seen(
        {
            "text_config": LLAMA, "vision_config": SIGLIP, "image_token_id": ID["<image>"],
            "high_res_vision_config": SAM | {"model_type": "sam_vision_model", "image_size": 64, "patch_size": 8, "window_size": 3},
        },
        _images("deepseek_vl_hybrid", "DeepseekVLHybrid", size={"height": 56, "width": 56}, high_res_size={"height": 64, "width": 64}),
        _processor("deepseek_vl_hybrid", "DeepseekVLHybrid", num_image_tokens=16), tokens={"image_token": "<image>"},
    ),
    "dots3_note": Seen(
        {
            "text_config": _inner("dots3_note"), "image_token_id": ID["<|imgpad|>"], "video_token_id": ID["<|video_pad|>"], "audio_token_id": ID["<sound>"],
            "vision_config": EYE | {
                "adapter_in_dim": 32, "adapter_out_dim": 64, "mlp_layer_types": ["dense", "sparse", "sparse"], "num_local_experts": 4,
                "moe_intermediate_size": 24,
            },
            "audio_config": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "adapter_input_size": 32, "adapter_out_dim": 64},
        },
        _images("qwen2_vl", "Qwen2VL", temporal_patch_size=1, **QWEN_SIZE), _processor("dots3_note", "Dots3Note"), "<|imgpad|>",
    ),
    "ernie4_5_vl_moe": Seen(
        {
            "text_config": _inner("ernie4_5_vl_moe"), "vision_config": QWEN_EYE | {"temporal_merge_size": 2}, "image_token_id": ID["<|image_pad|>"],
            "video_token_id": ID["<|video_pad|>"], "image_start_token_id": ID["<|vision_start|>"], "image_end_token_id": ID["<|vision_end|>"],
            "video_start_token_id": ID["<|begin_of_video|>"], "video_end_token_id": ID["<|end_of_video|>"],
        },
        _images("ernie4_5_vl_moe", "Ernie4_5_VLMoe", **QWEN_SIZE), _processor("ernie4_5_vl_moe", "Ernie4_5_VLMoe"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_token": "<|image_pad|>", "image_start_token": "<|vision_start|>", "image_end_token": "<|vision_end|>",
            "video_token": "<|video_pad|>", "video_start_token": "<|begin_of_video|>", "video_end_token": "<|end_of_video|>",
        },
    ),
    "exaone4_5": _qwen(
        _shape("exaone4", sliding_window=24), QWEN_EYE | {"fullatt_block_indexes": [1], "window_size": 56, "num_key_value_heads": 2},
        "exaone4_5", "Exaone4_5_",
    ),
    "fast_vlm": Seen(
        {
            "text_config": _text("qwen2"), "image_token_index": ID["<image>"],
            "vision_config": {"model_type": "timm_wrapper", "architecture": "fastvit_t8", "hidden_size": 768, "model_args": {"inference_mode": True}},
        },
        _images("clip", "CLIP", size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}),
        _processor("llava", "Llava", patch_size=32, vision_feature_select_strategy="full"), needs="timm",
    ),
    "gemma3": Seen(
        {
            "text_config": _shape("gemma3_text", vocab_size=VOCAB, sliding_window=24), "vision_config": SIGLIP, "image_token_id": ID["<soft>"],
            "boi_token_index": ID["<boi>"], "eoi_token_index": ID["<eoi>"], "mm_tokens_per_image": 16,
        },
        _images("gemma3", "Gemma3", size={"height": 56, "width": 56}), _processor("gemma3", "Gemma3", image_seq_length=16), "<boi>",
        {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"},
    ),
    "gemma3n": Seen(
        {
            "text_config": _shape("gemma3n_text", vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB - 8, sliding_window=24),
            "vision_config": {"model_type": "gemma3n_vision", "architecture": "resnet10t", "hidden_size": 512, "vocab_offset": VOCAB - 8, "vocab_size": 4},
            "audio_config": {"model_type": "gemma3n_audio", "conf_num_hidden_layers": 1, "hidden_size": 64, "vocab_offset": VOCAB - 4, "vocab_size": 4},
            "image_token_id": VOCAB - 7, "boi_token_id": ID["<boi>"], "eoi_token_id": VOCAB - 8, "audio_token_id": VOCAB - 3,
            "boa_token_id": ID["<boa>"], "eoa_token_id": VOCAB - 4, "vision_soft_tokens_per_image": 16,
        },
        _images("siglip", "Siglip", size={"height": 128, "width": 128}), _processor("gemma3n", "Gemma3n", image_seq_length=16), "<n_soft>",
        {"boi_token": "<boi>", "eoi_token": "<n_eoi>", "image_token": "<n_soft>", "boa_token": "<boa>", "eoa_token": "<n_eoa>", "audio_token": "<n_sound>"},
        needs="timm",
    ),
    "gemma4": _gemma4(),
    "gemma4/whole": _gemma4(use_bidirectional_attention="vision", hidden_size_per_layer_input=0, num_kv_shared_layers=0),
    "gemma4_unified": Seen(
        {
            "text_config": _shape("gemma4_unified_text", vocab_size=VOCAB, sliding_window=72, pad_token_id=258, num_kv_shared_layers=0),
            "vision_config": {
                "model_type": "gemma4_unified_vision", "patch_size": 4, "mm_embed_dim": 48, "mm_posemb_size": 64, "output_proj_dims": 48,
            },
            "audio_config": {"model_type": "gemma4_unified_audio"}, "image_token_id": ID["<soft>"], "boi_token_id": ID["<boi>"],
            "eoi_token_id": ID["<eoi>"], "audio_token_id": ID["<sound>"], "boa_token_id": ID["<boa>"], "eoa_token_index": ID["<eoa>"],
            "video_token_id": ID["<|video|>"],
        },
        (
            "gemma4_unified.image_processing_gemma4_unified:Gemma4UnifiedImageProcessor",
            {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        ),
        _processor("gemma4_unified", "Gemma4Unified"), "<soft>",
        {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>", "boa_token": "<boa>", "eoa_token": "<eoa>", "audio_token": "<sound>"},
        needs="torchvision",
    ),
    "glm46v": _glm(_inner("glm46v"), {"model_type": "glm4v_vision"}, "glm46v", "Glm46V"),
    "glm4v": _glm(_inner("glm4v"), {}, "glm4v", "Glm4v"),
    "glm4v_moe": _glm(_inner("glm4v_moe"), {}, "glm4v", "Glm4v"),
    "glm5_next": Seen(
        {
            "text_config": _inner("glm5_next"), "image_token_id": ID["<|image|>"], "video_token_id": ID["<|video|>"],
            "image_start_token_id": ID["<|begin_of_image|>"], "image_end_token_id": ID["<|end_of_image|>"],
            "video_start_token_id": ID["<|begin_of_video|>"], "video_end_token_id": ID["<|end_of_video|>"],
            "vision_config": QWEN_EYE | {"image_size": 56, "projection_intermediate_size": 48},
        },
        _images("glm5_next", "Glm5Next", min_image_tokens=4, max_image_tokens=6), _processor("glm5_next", "Glm5Next"),
        "<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "glm_ocr": _glm(_inner("glm_ocr"), {}, "glm46v", "Glm46V"),
    "glmga": _glm(_inner("glmga"), {"model_type": "glm4v_vision"}, "glmga", "Glmga", processor=("glm46v", "Glm46V")),
    "got_ocr2": Seen(
        {"text_config": _text("qwen2"), "vision_config": SAM | {"image_size": 128}, "image_token_index": ID["<imgpad>"]},
        _images("got_ocr2", "GotOcr2", size={"height": 128, "width": 128}), _processor("got_ocr2", "GotOcr2"), "<imgpad>",
    ),
    "granite4_vision": Seen(
        {
            "text_config": _shape("granite", num_hidden_layers=6) | {"model_type": "granite4_vision_text"}, "image_token_index": ID["<image>"],
            "vision_config": SIGLIP | {"hidden_size": 64}, "vision_feature_select_strategy": "full", "downsample_rate": "1/2",
            "deepstack_layer_map": [[-2, 0], [1, 3]], "spatial_target_layers": [1, 2, 4, 5],
            "qformer_config": {
                "model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 48, "cross_attention_frequency": 1, "use_qformer_text_input": False,
            },
            **PINPOINTS,
        },
        _images("llava_next", "LlavaNext", **SQUARE, **PINPOINTS),
        _processor("granite4_vision", "Granite4Vision", patch_size=14, vision_feature_select_strategy="full", downsample_rate="1/2"),
    ),
    "granite_docling": Seen(
        {
            "text_config": _text("granite_docling_text", attention_multiplier=0.25, residual_multiplier=1.0), "image_token_id": ID["<image>"],
            "vision_config": EYE | DEEP | {"out_hidden_size": 64, "scale_factor": 2, "use_fine_route": False},
        },
        _images("granite_docling", "GraniteDocling", **PATCHES), _processor("granite_docling", "GraniteDocling", image_seq_len=4),
    ),
    "hunyuan_vl": Seen(
        {
            "text_config": _inner("hunyuan_vl"), "image_token_id": ID["<image>"],
            "im_start_id": ID["<img>"], "im_end_id": ID["</img>"], "im_newline_id": ID["[IMG_BREAK]"],
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 14, "out_hidden_size": 64,
                "max_image_size": 112,
            },
        },
        _images("hunyuan_vl", "HunYuanVL", patch_size=14, **QWEN_SIZE), _processor("hunyuan_vl", "HunYuanVL"), "<img><image></img>",
        {"image_token": "<image>", "image_start_token": "<img>", "image_end_token": "</img>"},
    ),
    "hyperclovax_vision_v2": _qwen(
        _inner("hyperclovax_vision_v2"), QWEN_EYE | {"model_type": "qwen2_5_vl_vision", "fullatt_block_indexes": [1], "window_size": 56},
        "hyperclovax_vision_v2", "HyperCLOVAXVisionV2",
    ),
    "idefics2": Seen(
        {
            "text_config": _text("mistral", rms_norm_eps=1e-5), "image_token_id": ID["<image>"], "vision_config": EYE,
            "perceiver_config": {"hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 16, "num_key_value_heads": 2},
        },
        _images("idefics2", "Idefics2", size={"shortest_edge": 28, "longest_edge": 56}, do_image_splitting=False),
        _processor("idefics2", "Idefics2", image_seq_len=4),
    ),
    "idefics3": _idefics3("idefics3", "Idefics3"),
    "internvl": _internvl("qwen2", "<IMG_CONTEXT>", "internvl", "InternVL"),
    "janus": _janus(),
    "janus/system prompt": _janus(use_default_system_prompt=True),
    "kimi_k25": Seen(
        {
            "text_config": _inner("kimi_k25"), "projection_hidden_size": 32, "image_token_id": ID["<|image_pad|>"],
            "video_token_id": ID["<|video_pad|>"], "vision_start_token_id": ID["<|vision_start|>"], "vision_end_token_id": ID["<|vision_end|>"],
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "pos_emb_height": 8, "pos_emb_width": 8,
            },
        },
        ("kimi_k25.image_processing_kimi_k25:Kimi_K25ImageProcessor", {"max_patches": 24}),
        _processor("kimi_k25", "Kimi_K25"), "<|vision_start|><|image_pad|><|vision_end|>", {"image_token": "<|image_pad|>"}, needs="torchvision",
    ),
    "lfm2_vl": Seen(
        {
            "text_config": _shape("lfm2"), "image_token_id": ID["<image>"], "projector_hidden_size": 48,
            "vision_config": {k: v for k, v in EYE.items() if k != "image_size"} | {"model_type": "siglip2_vision_model", "num_patches": 16},
        },
        (
            "lfm2_vl.image_processing_lfm2_vl:Lfm2VlImageProcessor",
            {"size": {"height": 56, "width": 56}, "tile_size": 56, "encoder_patch_size": 14, "min_image_tokens": 4, "max_image_tokens": 9, "max_tiles": 4},
        ),
        _processor("lfm2_vl", "Lfm2Vl"),
        needs="torchvision",
    ),
    "lfm3_vl": _qwen(_inner("lfm3_vl"), EYE | {"num_key_value_heads": 2, "patch_size": 14}, "lfm3_vl", "Lfm3Vl"),
    "lighton_ocr": _pixtral(
        _text("qwen3"), {"image_token_id": ID["[IMG]"]}, "lighton_ocr", "LightOnOcr",
        tokens={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    ),
    "llama4": Seen(
        {
            "text_config": _shape("llama4_text"), "image_token_index": ID["<|patch|>"], "boi_token_index": ID["<|image_start|>"],
            "eoi_token_index": ID["<|image_end|>"],
            "vision_config": {
                "model_type": "llama4_vision_model", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                "image_size": 56, "patch_size": 14, "vision_output_dim": 48, "projector_input_dim": 48, "projector_output_dim": 48,
            },
        },
        ("llama4.image_processing_llama4:Llama4ImageProcessor", {"size": {"height": 56, "width": 56}, "max_patches": 4}),
        _processor("llama4", "Llama4", patch_size=14), "<|image|>", needs="torchvision",
    ),
    "llava": _llava("llava", "Llava", image_token_id=ID["<image>"]),
    "llava_next": _llava("llava_next", "LlavaNext", "LlavaNext", image_token_index=ID["<image>"], **PINPOINTS),
    "llava_next_video": _llava(
        "llava_next_video", "LlavaNextVideo", "LlavaNext", image_token_index=ID["<image>"], video_token_index=ID["<video>"], **PINPOINTS
    ),
    "llava_onevision": Seen(
        {"text_config": _text("qwen2"), "vision_config": SIGLIP, "image_token_index": ID["<image>"], "video_token_index": ID["<video>"], **PINPOINTS},
        _images("llava_onevision", "LlavaOnevision", size={"height": 56, "width": 56}, **PINPOINTS),
        _processor("llava_onevision", "LlavaOnevision", num_image_tokens=16, vision_feature_select_strategy="full"),
    ),
    "minicpm_ocr": _minicpm(
        "minicpm_ocr", ("minicpm_ocr.image_processing_minicpm_ocr:MiniCPMOcrImageProcessor", {}), "MiniCPMOcr", "4x", needs="torchvision"
    ),
    "minicpmv4_6": _minicpm("minicpmv4_6", _images("minicpmv4_6", "MiniCPMV4_6"), "MiniCPMV4_6", "16x"),
    "minicpmv4_6/4x": _minicpm("minicpmv4_6", _images("minicpmv4_6", "MiniCPMV4_6"), "MiniCPMV4_6", "4x"),
    "minicpmv4_7": _minicpm("minicpmv4_7", _images("minicpmv4_6", "MiniCPMV4_6", **SLICES), "MiniCPMV4_7", "16x"),
    "minicpmv4_7/4x": _minicpm("minicpmv4_7", _images("minicpmv4_6", "MiniCPMV4_6", **SLICES), "MiniCPMV4_7", "4x"),
    "minimax_m3_vl": Seen(
        {
            "text_config": _inner("minimax_m3_vl"), "vision_config": EYE, "projector_hidden_size": 48, "image_token_index": ID["]<]image[>["],
            "video_token_index": ID["<|video|>"],
        },
        ("minimax_m3_vl.image_processing_minimax_m3_vl:MiniMaxM3VLImageProcessor", QWEN_SIZE), _processor("minimax_m3_vl", "MiniMaxM3VL"),
        "]<]image[>[", needs="torchvision",
    ),
    "mistral3": _pixtral(_text("mistral"), {"image_token_index": ID["[IMG]"], "spatial_merge_size": 2}, "pixtral", "Pixtral"),
    "mistral3/silu": _pixtral(  # as in its checkpoints
        _text("mistral"), {"image_token_index": ID["[IMG]"], "spatial_merge_size": 2, "vision_config": PIXTRAL | {"hidden_act": "silu"}},
        "pixtral", "Pixtral",
    ),
    "mistral_large4": _pixtral(
        _inner("mistral_large4"), {"image_token_index": ID["[IMG]"], "spatial_merge_size": 2}, "pixtral", "Pixtral",
    ),
    "muse_glimmer": _muse("muse_glimmer", _inner("muse_glimmer")),
    "muse_spark": _muse(
        "muse_spark", _inner("muse_spark"), audio_token_id=ID["<sound>"],
        audio_config={"out_hidden_size": 64, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    ),
    "nemotron_h_omni": Seen(
        {
            "text_config": _shape("nemotron_h"), "image_token_id": ID["<image>"], "vision_hidden_size": 32, "projector_hidden_size": 48,
            "vision_config": {
                "model_type": "radio", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8, "image_size": 56,
                "max_img_size": 128, "video_temporal_patch_size": 2,
            },
        },
        (
            "nemotron_h_omni.image_processing_nemotron_h_omni:NemotronH_Omni_Reasoning_V3ImageProcessor",
            {"patch_size": 8, "min_num_patches": 16, "max_num_patches": 64},
        ),
        _processor("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3"), needs="torchvision",
    ),
    "ovis2": Seen(
        {
            "text_config": _text("qwen2"), "vision_config": EYE | {"vocab_size": 40, "hidden_stride": 2}, "hidden_size": 64, "vocab_size": VOCAB,
            "image_token_id": ID["<IMG_ATOM>"],
            "visual_indicator_token_ids": [ID[f"<IMG_{mark}>"] for mark in ("START", "GRID", "COL", "ROW", "END")],
        },
        _images("ovis2", "Ovis2", size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4),
        _processor("ovis2", "Ovis2", image_seq_length=4),
    ),
    "paddleocr_vl": _qwen(
        _inner("paddleocr_vl"), EYE | {"spatial_merge_size": 2}, "paddleocr_vl", "PaddleOCRVL",
        images=_images("paddleocr_vl", "PaddleOCRVL", **QWEN_SIZE), tokens={"image_token": "<|image_pad|>"},
    ),
    "paligemma": _paligemma("gemma"),
    "paligemma/2": _paligemma("gemma2", sliding_window=104),
    "perception_lm": Seen(
        {
            "text_config": LLAMA, "image_token_id": ID["<image>"], "video_token_id": ID["<video>"], "projector_pooling_ratio": 2,
            "vision_config": {
                "model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336",
                "model_args": {
                    "embed_dim": 64, "img_size": [56, 56], "depth": 2, "global_pool": "", "use_post_transformer_norm": False, "init_values": 0.1,
                    "ref_feat_shape": [4, 4],
                },
            },
        },
        ("perception_lm.image_processing_perception_lm:PerceptionLMImageProcessor", {"tile_size": 56, "max_num_tiles": 4}),
        _processor("perception_lm", "PerceptionLM", patch_size=14, pooling_ratio=2),
        tokens={"image_token": "<image>", "video_token": "<video>"}, needs="timm", ragged=True,
    ),
    "qianfan_ocr": _internvl("qwen3", "<image>", "qianfan_ocr", "QianfanOCR"),
    "qwen2_5_omni_thinker": _omni(
        _inner("qwen2_5_omni_thinker"), QWEN_EYE | {"fullatt_block_indexes": [1], "window_size": 56},
        {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "output_dim": 64}, "qwen2_5_omni", "Qwen2_5Omni",
        inside="qwen2_5_omni",
    ),
    "qwen2_vl": _qwen(
        _inner("qwen2_vl"), {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 14}, "qwen2_vl", "Qwen2VL"
    ),
    "qwen2_5_vl": _qwen(_inner("qwen2_5_vl"), QWEN_EYE | {"fullatt_block_indexes": [1], "window_size": 56}, "qwen2_5_vl", "Qwen2_5_VL"),
    "qwen3_5": _qwen(_inner("qwen3_5"), QWEN3_EYE, "qwen3_vl", "Qwen3VL"),
    "qwen3_5_moe": _qwen(_inner("qwen3_5_moe"), QWEN3_EYE, "qwen3_vl", "Qwen3VL"),
    "qwen3_omni_moe_thinker": _omni(
        _inner("qwen3_omni_moe_thinker", num_hidden_layers=3), QWEN3_EYE | DEEP,
        {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "output_dim": 64, "downsample_hidden_size": 32},
        "qwen3_omni_moe", "Qwen3OmniMoe",
    ),
    "qwen3_vl": _qwen(_inner("qwen3_vl", num_hidden_layers=3), QWEN3_EYE | DEEP, "qwen3_vl", "Qwen3VL"),
    "qwen3_vl_moe": _qwen(_inner("qwen3_vl_moe", num_hidden_layers=3), QWEN3_EYE | DEEP, "qwen3_vl", "Qwen3VL"),
    "qwen4_exp": _qwen(_shape("qwen4_exp_text/n-grams", vocab_size=VOCAB, eos_token_id=257), QWEN3_EYE, "qwen3_vl", "Qwen3VL"),
    "smolvlm": _idefics3("smolvlm", "SmolVLM"),
    "step3p7": Seen(
        {
            "text_config": _inner("step3p7"), "image_token_id": ID["<im_patch>"],
            "vision_config": EYE | {"patch_size": 4, "image_size": 64, "mlp_ratio": 1.5, "max_position_embeddings": 256},
        },
        (
            "step3p7.image_processing_step3p7:Step3p7ImageProcessor",
            {"size": {"height": 64, "width": 64}, "patch_size": 32, "vision_patch_size": 4},
        ),
        _processor("step3p7", "Step3p7"), "<im_patch>", needs="torchvision",
    ),
    "video_llama_3": Seen(
        {
            "text_config": _text("qwen2"), "image_token_id": ID["<|image_pad|>"], "video_token_id": ID["<|video_pad|>"],
            "vision_config": {k: v for k, v in EYE.items() if k != "image_size"},
        },
        _images("video_llama_3", "VideoLlama3", merge_size=2, **QWEN_SIZE), _processor("video_llama_3", "VideoLlama3"),
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "video_llava": Seen(
        {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": ID["<image>"], "video_token_index": ID["<video>"]},
        ("video_llava.image_processing_video_llava:VideoLlavaImageProcessor", SQUARE), _processor("video_llava", "VideoLlava", patch_size=14),
    ),
    "vipllava": _llava("llava", "Llava", image_token_index=ID["<image>"], vision_feature_layer=[-1, -2, 1]),
}  # fmt: skip


def tokenizer_of(seen: Seen) -> Any:
    """One token for each byte. Puts a begin token before a text."""
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 256)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>",
        clean_up_tokenization_spaces=False, chat_template=seen.template.replace("PLACE", seen.place), extra_special_tokens=seen.tokens,
    )  # fmt: skip


def _class(name: str) -> Any:
    module, _, kind = name.partition(":")
    if find_spec("torchvision") is None:  # PixtralProcessor imports one function from the module that needs it
        pixtral = "transformers.models.pixtral.image_processing"
        sys.modules.setdefault(f"{pixtral}_pixtral", importlib.import_module(f"{pixtral}_pil_pixtral"))
    return getattr(importlib.import_module(f"transformers.models.{module}"), kind)


@dataclass(frozen=True, eq=False)
class Reference:
    """transformers' own model and processor."""

    model: Any
    processor: Any
    ragged: bool
    """`Seen.ragged`"""

    @torch.inference_mode()
    def generate(
        self, messages: list[dict[str, Any]], images: list[Image.Image], tokens: int, **options: Any
    ) -> tuple[list[int], list[int]]:
        """Returns the prompt's token ids and the generated ones, greedily. `options` are the processor's."""
        tokenizer = self.processor.tokenizer
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if images:
            inputs = self.processor(images=images, text=[text], return_tensors=None if self.ragged else "pt", **options)
            if self.ragged:
                tiles = torch.cat(inputs["pixel_values"])
                inputs = BatchFeature({"input_ids": torch.tensor(inputs["input_ids"]), "pixel_values": tiles[None]})
        else:  # as batchgen and every tokenizer: a chat template has written all special tokens
            inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        out = self.model.generate(
            **inputs.to(self.model.dtype), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        prompt = inputs["input_ids"][0].tolist()
        return prompt, out[0, len(prompt) :].tolist()


def make(name: str, folder: Path) -> Reference:
    """Writes a model to `folder`. Returns its reference."""
    seen = FAMILIES[name]
    config = family_config(name, **{"tie_word_embeddings": False} | seen.config)
    if seen.needs is not None:
        pytest.importorskip(seen.needs)
    torch.manual_seed(0)
    kind = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    model = randomize(kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval())
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 258
    model.save_pretrained(folder)
    if seen.inside is not None:
        family_config(seen.inside, thinker_config=config.to_dict()).save_pretrained(folder)
        state = {f"thinker.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = tokenizer_of(seen)
    tokenizer.save_pretrained(folder)
    _class(seen.images[0])(**seen.images[1]).save_pretrained(folder)
    image_processor = AutoImageProcessor.from_pretrained(folder)  # where torchvision is installed, it is another class
    kind_of, settings = seen.processor
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": kind_of.partition(":")[2], **settings})
    )
    module = sys.modules[_class(kind_of).__module__]
    if getattr(module, "num2words", str) is None:
        module.num2words = str
    loose = type("Processor", (_class(kind_of),), {"check_argument_for_proper_class": lambda *_: None, **seen.told})
    given = {"image_processor": image_processor, "video_processor": image_processor, "tokenizer": tokenizer}
    processor = loose(**{n: given.get(n) for n in loose.get_attributes()}, **settings)
    return Reference(model, processor, seen.ragged)


@cache
def picture(seed: int, width: int = 60, height: int = 60) -> Image.Image:
    """A picture with large coloured areas, so that different ones have clearly different features."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
