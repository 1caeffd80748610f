"""Tiny random models that see, each with its family's own processor: on disk for batchgen, and as transformers' reference."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from support.models import randomize
from support.shapes import SHAPES

SPECIAL = (
    "<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<image>", "<video>", "<fake_token_around_image>",
    "<end_of_utterance>", "<global-img>", "<img>", "</img>", "<IMG_CONTEXT>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|vision_start|>",
    "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>",
    "<|begin_of_video|>", "<|end_of_video|>", "<boi>", "<eoi>", "<soft>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)),
)  # fmt: skip
VOCAB = 256 + len(SPECIAL)
ID = {token: 256 + i for i, token in enumerate(SPECIAL)}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}PLACE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
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


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}
QWEN_IDS = {
    "image_token_id": ID["<|image_pad|>"], "video_token_id": ID["<|video_pad|>"], "vision_start_token_id": ID["<|vision_start|>"],
    "vision_end_token_id": ID["<|vision_end|>"],
}  # fmt: skip
QWEN_EYE = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 14,
    "out_hidden_size": 64,
}
QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_IMAGES = (
    "qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
    {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 12}},
)
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
PINPOINTS = [[56, 112], [112, 56], [112, 112]]
SQUARE = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
TILED = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
MARKS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def _text(model_type: str, **settings: Any) -> dict[str, Any]:
    return LLAMA | {"model_type": model_type} | settings


FAMILIES = {
    "gemma3": Seen(
        {
            "text_config": LLAMA | SHAPES["gemma3_text"] | {"model_type": "gemma3_text", "vocab_size": VOCAB, "sliding_window": 24},
            "vision_config": SIGLIP, "image_token_id": ID["<soft>"], "boi_token_index": ID["<boi>"], "eoi_token_index": ID["<eoi>"],
            "mm_tokens_per_image": 16,
        },
        ("gemma3.image_processing_pil_gemma3:Gemma3ImageProcessorPil", {"size": {"height": 56, "width": 56}}),
        ("gemma3.processing_gemma3:Gemma3Processor", {"image_seq_length": 16}),
        "<boi>",
        {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"},
    ),
    "glm4v": Seen(
        {
            "text_config": _text("glm4v_text", rope_parameters=ROPE | {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}),
            "vision_config": QWEN_EYE | {"image_size": 56}, "image_token_id": ID["<|image|>"], "video_token_id": ID["<|video|>"],
            "image_start_token_id": ID["<|begin_of_image|>"], "image_end_token_id": ID["<|end_of_image|>"],
            "video_start_token_id": ID["<|begin_of_video|>"], "video_end_token_id": ID["<|end_of_video|>"],
        },
        ("glm4v.image_processing_pil_glm4v:Glm4vImageProcessorPil", {"size": {"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 24}}),
        ("glm4v.processing_glm4v:Glm4vProcessor", {}),
        "<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "idefics3": Seen(
        {
            "text_config": LLAMA, "vision_config": SIGLIP | {"model_type": "idefics3_vision"}, "image_token_id": ID["<image>"],
            "scale_factor": 2,
        },
        ("idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil", TILED),
        ("idefics3.processing_idefics3:Idefics3Processor", {"image_seq_len": 4}),
    ),
    "internvl": Seen(
        {
            "text_config": _text("qwen2"), "image_token_id": ID["<IMG_CONTEXT>"], "image_seq_length": 4, "downsample_ratio": 0.5,
            "vision_config": {k: v for k, v in SIGLIP.items() if k != "model_type"} | {"image_size": [56, 56], "patch_size": [14, 14]},
        },
        ("got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil", {"size": {"height": 56, "width": 56}, "max_patches": 4}),
        ("internvl.processing_internvl:InternVLProcessor", {"image_seq_length": 4}),
        "<IMG_CONTEXT>",
        MARKS,
    ),
    "llava": Seen(
        {"text_config": LLAMA, "vision_config": CLIP, "image_token_id": ID["<image>"]},
        ("clip.image_processing_pil_clip:CLIPImageProcessorPil", SQUARE),
        ("llava.processing_llava:LlavaProcessor", LLAVA),
    ),
    "llava_next": Seen(
        {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": ID["<image>"], "image_grid_pinpoints": PINPOINTS},
        ("llava_next.image_processing_pil_llava_next:LlavaNextImageProcessorPil", SQUARE | {"image_grid_pinpoints": PINPOINTS}),
        ("llava_next.processing_llava_next:LlavaNextProcessor", LLAVA),
    ),
    "llava_onevision": Seen(
        {
            "text_config": _text("qwen2"), "vision_config": SIGLIP, "image_token_index": ID["<image>"], "video_token_index": ID["<video>"],
            "image_grid_pinpoints": PINPOINTS,
        },
        (
            "llava_onevision.image_processing_pil_llava_onevision:LlavaOnevisionImageProcessorPil",
            {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": PINPOINTS},
        ),
        ("llava_onevision.processing_llava_onevision:LlavaOnevisionProcessor", {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}),
    ),
    "mistral3": Seen(
        {
            "text_config": _text("mistral"), "image_token_index": ID["[IMG]"], "spatial_merge_size": 2,
            "vision_config": SIGLIP | {"model_type": "pixtral", "image_size": 112},
        },
        ("pixtral.image_processing_pil_pixtral:PixtralImageProcessorPil", {"size": {"longest_edge": 84}, "patch_size": 28}),
        ("pixtral.processing_pixtral:PixtralProcessor", {"patch_size": 14, "spatial_merge_size": 2}),
        "[IMG]",
    ),
    "qwen2_vl": Seen(
        {
            "text_config": _text("qwen2_vl_text", **SECTIONS), **QWEN_IDS,
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 14},
        },
        QWEN_IMAGES, ("qwen2_vl.processing_qwen2_vl:Qwen2VLProcessor", {}), QWEN_PLACE,
    ),
    "qwen2_5_vl": Seen(
        {
            "text_config": _text("qwen2_5_vl_text", **SECTIONS), **QWEN_IDS,
            "vision_config": QWEN_EYE | {"fullatt_block_indexes": [1], "window_size": 56},
        },
        QWEN_IMAGES, ("qwen2_5_vl.processing_qwen2_5_vl:Qwen2_5_VLProcessor", {}), QWEN_PLACE,
    ),
    "qwen3_5": Seen(
        {"text_config": LLAMA | SHAPES["qwen3_5_text"] | {"model_type": "qwen3_5_text", "vocab_size": VOCAB}, **QWEN_IDS, "vision_config": QWEN_EYE | {"num_position_embeddings": 16}},
        QWEN_IMAGES, ("qwen3_vl.processing_qwen3_vl:Qwen3VLProcessor", {}), QWEN_PLACE,
    ),
    "qwen3_vl": Seen(
        {
            "text_config": _text("qwen3_vl_text", num_hidden_layers=3, **SECTIONS), **QWEN_IDS,
            "vision_config": QWEN_EYE | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        },
        QWEN_IMAGES, ("qwen3_vl.processing_qwen3_vl:Qwen3VLProcessor", {}), QWEN_PLACE,
    ),
    "smolvlm": Seen(
        {
            "text_config": LLAMA, "vision_config": SIGLIP | {"model_type": "smolvlm_vision"}, "image_token_id": ID["<image>"],
            "scale_factor": 2,
        },
        ("smolvlm.image_processing_pil_smolvlm:SmolVLMImageProcessorPil", TILED),
        ("smolvlm.processing_smolvlm:SmolVLMProcessor", {"image_seq_len": 4}),
    ),
}  # fmt: skip


def tokenizer_of(seen: Seen) -> Any:
    """One token for each byte. Puts a begin token before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 256)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>",
        clean_up_tokenization_spaces=False, chat_template=TEMPLATE.replace("PLACE", seen.place), extra_special_tokens=seen.tokens,
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

    @torch.inference_mode()
    def generate(
        self, messages: list[dict[str, Any]], images: list[Image.Image], tokens: int
    ) -> tuple[list[int], list[int]]:
        """Returns the prompt's token ids and the generated ones, greedily."""
        tokenizer = self.processor.tokenizer
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if images:
            inputs = self.processor(images=images, text=[text], return_tensors="pt")
        else:  # as batchgen and every tokenizer: a chat template has written all special tokens
            inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        out = self.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        prompt = inputs["input_ids"][0].tolist()
        return prompt, out[0, len(prompt) :].tolist()


def make(name: str, folder: Path) -> Reference:
    """Writes a model to `folder`. Returns its reference."""
    seen = FAMILIES[name]
    model_type = name.partition("/")[0]
    config = AutoConfig.for_model(model_type, **copy.deepcopy({"tie_word_embeddings": False} | seen.config))
    torch.manual_seed(0)
    kind = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    model = randomize(kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval())
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 258
    model.save_pretrained(folder)
    tokenizer = tokenizer_of(seen)
    tokenizer.save_pretrained(folder)
    image_processor = _class(seen.images[0])(**seen.images[1])
    image_processor.save_pretrained(folder)
    kind_of, settings = seen.processor
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": kind_of.partition(":")[2], **settings})
    )
    module = sys.modules[_class(kind_of).__module__]
    if getattr(module, "num2words", str) is None:
        module.num2words = str
    loose = type("Processor", (_class(kind_of),), {"check_argument_for_proper_class": lambda *_: None})
    given = {"image_processor": image_processor, "tokenizer": tokenizer}
    processor = loose(**{n: given.get(n) for n in loose.get_attributes()}, **settings)
    return Reference(model, processor)


@cache
def picture(seed: int, width: int = 60, height: int = 60) -> Image.Image:
    """A picture with large coloured areas, so that different ones have clearly different features."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
