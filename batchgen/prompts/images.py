"""The model's own image processor: which tokens stand for an image, and the pixels that the encoder reads. Imports no torch of its own.

How many tokens an image has, and which text stands around them, depends on nothing but its size. So a blank image of each size goes through the
processor of transformers when a prompt is made, and the image itself only shortly before it is encoded.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from threading import Lock
from typing import Any, Literal

import numpy as np

from batchgen.config import ModelConfig
from batchgen.errors import RowError, UsageError, first_line, in_one_line
from batchgen.model_files import MLX, find_file
from batchgen.prompts.hub import load_failure
from batchgen.prompts.tokenizer import LoadedTokenizer, language_config, quiet, text_config
from batchgen.records.images import KNOWN, ImageFile, ImageStore, check_pillow, decode_image, image_digest, open_file
from batchgen.request import IMAGE_IDS, Image, TokenArray
from batchgen.stats import counted


@dataclass(frozen=True, slots=True)
class Family:
    """How models of a type take images, where they differ."""

    axes: int = 0
    """Number of axes that positions have. Three are time, row and column; of four, the last are column, row and number of the image (HunYuan)."""
    canvas: bool = False
    """Whether an image and its slices lie over one another, on a canvas (MiniCPM-V 4.7)."""
    counted: bool = False
    """Whether an image is prepared otherwise if the prompt has several."""
    whole: bool = False
    """`Image.whole`"""
    beyond: bool = False
    """Whether tokens of a `whole` image see one another beyond a sliding window too, so that it may have no more tokens than the window."""
    prefix: bool = False
    """Whether all tokens of a prompt with images see one another: `Image.prompt`."""
    marks: bool = False
    """Whether marks stand around images, and one between two of them. The processor has no methods that prepare images apart from a prompt (Idefics 2)."""
    kinds: str = ""
    """The argument of the model's forward that says which tokens of a prompt are images' or stand around them: these have experts of their own."""
    stand_in: Literal["any", "padding", "image"] = "any"
    """The token whose id the layers see in the place of an image's, for those that use ids beside embeddings."""


FAMILIES = {
    **dict.fromkeys([
        "aria", "aya_vision", "cohere2_vision", "deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid",
        "dots3_note", "exaone4_5", "fast_vlm", "gemma3n", "glm5_next", "got_ocr2", "granite4_vision",
        "granite_docling", "hyperclovax_vision_v2", "idefics3", "internvl", "janus", "kimi_k25", "lfm2_vl",
        "lfm3_vl", "lighton_ocr", "llama4", "llava", "llava_next", "llava_next_video", "minicpm_ocr",
        "minicpmv4_6", "minimax_m3_vl", "mistral3", "mistral_large4", "muse_glimmer", "muse_spark",
        "nemotron_h_omni", "ovis2", "perception_lm", "qianfan_ocr", "smolvlm", "step3p7", "video_llama_3",
        "video_llava", "vipllava",
    ], Family()),
    **dict.fromkeys([
        "cohere_compass", "cosmos3_edge", "cosmos3_omni", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga",
        "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe",
        "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe",
    ], Family(axes=3)),
    "ernie4_5_vl_moe": Family(axes=3, kinds="moe_mm_token_type_ids"),
    "gemma3": Family(whole=True, beyond=True),
    "gemma4": Family(stand_in="padding"),
    "gemma4_unified": Family(beyond=True, stand_in="padding"),
    "hunyuan_vl": Family(axes=4),
    "idefics2": Family(marks=True),
    "llava_onevision": Family(counted=True),
    "minicpmv4_7": Family(axes=3, canvas=True),
    "paligemma": Family(prefix=True),
    "qwen4_exp": Family(axes=3, stand_in="image"),
}  # fmt: skip
"""By `model_type`: the models that are shown images."""
_SHOWN_OF_MLX = {
    "aya_vision", "gemma3", "gemma4", "glm4v", "glm4v_moe", "glm_ocr", "idefics2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision",
    "mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
}  # fmt: skip
"""Those whose encoders have been compared with what mlx-vlm makes of them."""
NOT_SHOWN = {
    "emu3": "they make an image as large as the largest one of its prompt, and its tokens depend on that",
    "fuyu": "they take one image, before all text, and their processor writes the rest of the prompt",
    "mllama": "they have layers of cross-attention for images",
    "molmo2": "the tokens of an image see those of all other images of the prompt, also those after them",
    "phi4_multimodal": "images need an adapter beside the weights, which text must not have",
    "pp_chart2table": "their chat template writes all tokens of an image, and their processor does not say how many there are",
}
"""By `model_type`: why models that see are not shown images."""
_ONLY_TEXT = "only text can be sent"
CANVAS_MARKS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
"""The settings that name the tokens of text around images on a canvas. The first stands once before each image."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What stands for an image of a size in a prompt."""

    text: str
    """The text that replaces the placeholder, with each run of image tokens as one of them."""
    runs: tuple[int, ...]
    """The lengths of these runs."""
    grid: tuple[int, ...]
    """`Image.grid`"""


class ImageProcessor:
    """The processor of one model. Its methods may be called by several threads."""

    def __init__(self, config: ModelConfig, tokenizer: LoadedTokenizer) -> None:
        """Raises `UsageError` if Pillow is not installed, and `ModelError` if the model's files have no processor that can be loaded."""
        check_pillow()
        writer = language_config(tokenizer.hf_config)
        self._family = FAMILIES[writer.model_type]
        # In Gemma 4 it depends on the size of the model.
        self._whole = (
            self._family.whole or getattr(text_config(writer), "use_bidirectional_attention", None) == "vision"
        )
        with quiet():
            try:
                self._hf = _load(config, tokenizer)
                options = self._hf._merge_kwargs(self._hf.valid_processor_kwargs, {}, return_tensors="pt")
            except Exception as e:
                raise load_failure(config, "image processor", e) from e
        self._all_options: dict[str, Any] = options
        taken = inspect.signature(self._hf._process_images).parameters.values()
        own = [
            p.name for p in taken if p.kind is not p.VAR_KEYWORD
        ]  # GOT-OCR 2 and LFM2-VL have some beside those of images
        self._options: dict[str, Any] = options["images_kwargs"] | {k: options[k] for k in own if k in options}
        self._before = _system_prompt(self._hf)
        self.adds_special_tokens: bool = options["text_kwargs"].get("add_special_tokens", True)
        """Whether it adds special tokens to a chat whose template has written none."""
        self.writes_bos = self._family.prefix
        """Whether `prompt_text` has all special tokens."""
        if config.image_max_pixels is not None:
            self._options |= _limit(self._hf.image_processor, config.image_max_pixels)
        self._numbered: bool = getattr(self._hf, "default_use_image_id", False)
        """Whether the number of an image in its prompt stands before it (MiniCPM-V)."""
        self.placeholder: str = getattr(self._hf, "image_placeholder_token", self._hf.image_token)
        """What a chat template writes for an image."""
        self._bos = tokenizer.hf_tokenizer.bos_token
        window: int | None = getattr(text_config(writer), "sliding_window", None)
        self._longest = window if self._whole and self._family.beyond else None
        self.max_tokens: int | None = window if self._family.prefix else None
        """Maximum number of tokens of a prompt with images: all of them see one another, also in layers with a sliding window."""
        soft = getattr(writer, "image_token_id", None)
        self.token: int = writer.image_token_index if soft is None else soft
        """The id of an image's tokens in the model's configuration."""
        self.start: int | None = canvas_marks(writer)[0] if self._family.canvas else None
        """The id of a token that stands once before each image, and nowhere else."""
        self._refusal: str | None = None
        if getattr(self._hf.image_processor, "small_image_upsize", None) == "adaptive":  # MiniCPM-OCR
            what = "small_image_upsize is 'adaptive'"
            self._refusal = f"how many tokens an image of this model has depends on its contents ({what})"
        if self._family.canvas and None in canvas_marks(writer):
            self._refusal = f"the model's config.json lacks ids of the tokens around images ({', '.join(CANVAS_MARKS)})"
        self._soft: str = tokenizer.hf_tokenizer.convert_ids_to_tokens(self.token)
        self.indicators: tuple[int, ...] = tuple(getattr(writer, "visual_indicator_token_ids", ()))
        """The ids of tokens around and between an image's tiles that the encoder has vectors for. They are tokens of the image, too (Ovis 2)."""
        tokens = [self._soft, *tokenizer.hf_tokenizer.convert_ids_to_tokens(self.indicators)]
        one = "|".join(map(re.escape, tokens))
        self._one, self._runs = re.compile(one), re.compile(f"(?:{one})+")
        settings = [type(self._hf.image_processor).__name__, self._hf.image_processor.to_dict(), self._options]
        self._settings = json.dumps(settings, sort_keys=True, default=str).encode()
        self._layouts: dict[tuple[int, int, bool], ImageLayout] = {}
        self._lock = Lock()

    def image(self, file: ImageFile, *, alone: bool) -> tuple[Image, ImageLayout]:
        """Returns an image of a prompt, and what stands for it. `alone`: the prompt has no other. Raises `RowError("invalid_image")`, and
        `RowError("unsupported_content")` for all images of a model whose settings do not allow them."""
        if self._refusal is not None:
            raise RowError("unsupported_content", self._refusal)
        alone = alone or not self._family.counted
        layout = self._layout(file, alone)
        count = sum(layout.runs)
        if self._longest is not None and count > self._longest:
            why = f"{file.named} has {count} tokens, and the model takes at most {self._longest}, the length of its sliding window"
            raise RowError("invalid_image", why)
        token = self._token(file.digest, alone)
        return Image(token, count, file.path, layout.grid, alone, self._whole, named=file.named), layout

    def _token(self, digest: bytes, alone: bool) -> int:
        """Returns `Image.token`. `digest`: of the file's bytes."""
        h = hashlib.blake2b(self._settings + digest + bytes([alone]), digest_size=8)
        return IMAGE_IDS | int.from_bytes(h.digest(), "little") >> 2

    def prompt_text(self, before: str, parts: Sequence[tuple[ImageLayout, str]]) -> str:
        """Returns a prompt's text: `before`, and then each image with the text after it. Raises `RowError("unsupported_content")`."""
        texts = [self._before + before]
        for number, (layout, rest) in enumerate(parts):
            name = f"{self._hf.image_id_start_token}{number}{self._hf.image_id_end_token}" if self._numbered else ""
            texts += [name + layout.text, rest]
        if self._family.prefix:
            if before:
                raise RowError(
                    "unsupported_content", "the model takes images before all text, and this prompt begins with text"
                )
            return "".join([*texts[:-1], self._bos, texts[-1], "\n"])
        text = "".join(texts)
        if not self._family.marks:
            return text
        mark = self._hf.fake_image_token  # with a space before a word
        return re.sub(rf"{re.escape(mark)}(?=[^\s<])", f"{mark} ", text.replace(mark * 2, mark))

    def pixels(self, image: Image) -> dict[str, Any]:
        """Returns what the encoder takes for an image: tensors by the names of its arguments. If its tokens have several ids, these are `input_ids`
        (a list). Raises `RowError("invalid_image")`, whose message does not name the image."""
        try:
            with open_file(image.path) as opened:
                decoded = decode_image(opened)
                token = self._token(image_digest(opened), image.alone)
        except Exception as e:  # noqa: BLE001 - Pillow's readers raise errors of many kinds for damaged files
            raise RowError("invalid_image", f"cannot be read: {first_line(e)}") from None
        if token != image.token:
            raise RowError("invalid_image", "has changed since the job read it")
        inputs, text = self._processed(decoded, image.alone)
        if self.indicators:
            inputs["input_ids"] = self._hf.tokenizer.convert_tokens_to_ids(self._one.findall(text))
        return inputs

    def _layout(self, file: ImageFile, alone: bool) -> ImageLayout:
        from PIL import Image as Pillow

        key = (file.width, file.height, alone)
        with self._lock:
            if len(self._layouts) >= KNOWN:
                self._layouts.clear()
            if key not in self._layouts:
                try:
                    blank = Pillow.new("RGB", (file.width, file.height))
                    inputs, text = self._processed(blank, alone)
                except (ValueError, MemoryError) as e:  # such as an aspect ratio that the processor refuses
                    size = f"{file.width} x {file.height} pixels"
                    why = f"{file.named} has {size}, which the model does not take: {in_one_line(e)}"
                    raise RowError("invalid_image", why) from None
                self._layouts[key] = ImageLayout(
                    text=self._runs.sub(lambda _: self._soft, text),
                    runs=tuple(len(self._one.findall(run[0])) for run in self._runs.finditer(text)),
                    grid=self._grid(inputs),
                )
            return self._layouts[key]

    def _grid(self, inputs: dict[str, Any]) -> tuple[int, ...]:
        if self._family.canvas:
            merge = 2 if self._hf.image_processor.downsample_mode == "4x" else 4
            own, *slices = (inputs["target_sizes"] // merge).tolist()
            return *inputs["grids"][0], *(slices[0] if slices else (0, 0)), *own
        grid = inputs.get("image_grid_thw")
        merge = getattr(self._hf.image_processor, "merge_size", 1)
        return (0, 0) if grid is None else (int(grid[0, 1]) // merge, int(grid[0, 2]) // merge)

    def _processed(self, image: Any, alone: bool) -> tuple[dict[str, Any], str]:
        """Returns the processor's tensors for a PIL image, and the text that stands for it."""
        count = 1 if alone else 2
        if self._family.marks:
            mark, tiles = self._hf.fake_image_token, 5 if self._hf.image_processor.do_image_splitting else 1
            text = f"{mark}{self._hf.image_token * self._hf.image_seq_len}{mark}" * tiles
            return dict(self._hf.image_processor([[image]], **self._options)), text
        with quiet():
            placeholders = [self.placeholder * count]
            images, *_ = self._hf.prepare_inputs_layout(images=[image] * count, text=placeholders, **self._all_options)
            inputs, texts = self._hf._process_images(images, **self._options)
        return {name: value if alone else value[:1] for name, value in inputs.items()}, texts[0]


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt's text, and the images in it."""

    text: str
    """With one image token for each run of them."""
    images: tuple[Image, ...]
    runs: tuple[int, ...]
    """The lengths of the runs of image tokens, in order."""
    token: int
    """`ImageProcessor.token`"""
    counts: Mapping[int, int]
    """How often the text has `token` and other tokens that only images have."""
    max_tokens: int | None
    """`ImageProcessor.max_tokens`"""

    def tokens(self, ids: TokenArray) -> TokenArray:
        """Returns the prompt's tokens, int64, from those of its text. Raises `RowError("invalid_row")` if the text has more image tokens than the images,
        and `RowError("prompt_too_long")`."""
        if any(np.count_nonzero(ids == token) != count for token, count in self.counts.items()):
            raise RowError("invalid_row", "the prompt's text has tokens that stand for images")
        lengths = np.ones(len(ids), dtype=np.int64)
        lengths[ids == self.token] = self.runs
        tokens = np.repeat(ids.astype(np.int64), lengths)
        if self.max_tokens is not None and len(tokens) > self.max_tokens:
            why = f"the prompt has {len(tokens)} tokens, and with images this model takes at most {self.max_tokens}, the length of its sliding window"
            raise RowError("prompt_too_long", why)
        ids_of_images = np.repeat([image.id for image in self.images], [image.count for image in self.images])
        tokens[tokens == self.token] = ids_of_images
        return tokens


class PromptImages:
    """Puts the images of rows into their prompts. The processor is loaded with the first image."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._processor: ImageProcessor | None = None
        self.store = ImageStore()
        self.refusal = no_images(tokenizer)
        """Why the model is not shown images; None if it is."""

    @property
    def processor(self) -> ImageProcessor:
        if self._processor is None:
            assert self._tokenizer.source is not None
            self._processor = ImageProcessor(self._tokenizer.source, self._tokenizer)
        return self._processor

    def shown(self, text: str, files: Sequence[ImageFile | RowError]) -> ShownPrompt:
        """Returns a prompt with its images. Raises `RowError`: that of the first image without a file, and for a text with another number of placeholders."""
        found: list[ImageFile] = []
        for file in files:
            if isinstance(file, RowError):
                raise file
            found.append(file)
        before, *after = text.split(self.processor.placeholder)
        if len(after) != len(files):
            there = f"the prompt has {counted(len(files), 'image')}, and its text has {counted(len(after), 'place')} for images"
            raise RowError("template_error", f"{there} ({self.processor.placeholder})")
        made = [self.processor.image(file, alone=len(files) == 1) for file in found]
        prompt = self.processor.prompt_text(
            before, [(layout, rest) for (_, layout), rest in zip(made, after, strict=True)]
        )
        runs = tuple(length for _, layout in made for length in layout.runs)
        images = tuple(image for image, _ in made)
        if self.processor.writes_bos:
            h = hashlib.blake2b(str([image.token for image in images]).encode() + prompt.encode(), digest_size=8)
            images = tuple(replace(image, prompt=int.from_bytes(h.digest(), "little") >> 2 or 1) for image in images)
        token = self.processor.token
        counts = {token: len(runs), **dict.fromkeys(self.processor.indicators, 0)}
        if self.processor.start is not None:
            counts[self.processor.start] = len(images)
        return ShownPrompt(prompt, images, runs, token, counts, self.processor.max_tokens)


def canvas_marks(config: Any) -> tuple[int, ...]:
    """Returns the ids of `CANVAS_MARKS`."""
    return tuple(getattr(config, name) for name in CANVAS_MARKS)


def no_images(tokenizer: LoadedTokenizer) -> str | None:
    """Why a model is not shown images; None if it is."""
    why = _ONLY_TEXT if tokenizer.source is None else unshown(tokenizer.hf_config)
    return "only text can be embedded or classified" if tokenizer.head is not None and why != _ONLY_TEXT else why


def unshown(hf_config: Any) -> str | None:
    """Why models of a configuration are not shown images, as models that write text; None if they are."""
    language = language_config(hf_config)
    kind = getattr(language, "model_type", "")
    if kind not in FAMILIES and kind not in NOT_SHOWN and getattr(language, "vision_config", None) is None:
        return _ONLY_TEXT
    settings = getattr(hf_config, "quantization_config", None) or {}
    if settings.get("quant_method") == MLX and kind in FAMILIES:
        if kind not in _SHOWN_OF_MLX:
            return f"models of type {kind!r} that are quantized for MLX are not shown images"
        if settings.get("lacks_encoder"):
            return "the files of the model have no image encoder"
    why = NOT_SHOWN.get(kind, "that has not been compared with transformers")
    return None if kind in FAMILIES else f"models of type {kind!r} are not shown images yet: {why}"


def _limit(image_processor: Any, max_pixels: int) -> dict[str, Any]:
    """Returns the options for at most so many pixels. Raises `UsageError` for a processor without such a limit."""
    if "max_pixels" not in image_processor.valid_kwargs.__annotations__:
        raise UsageError("--image-max-pixels: the model's image processor has no such limit", "leave it out")
    smallest = min(max_pixels, getattr(image_processor, "min_pixels", None) or image_processor.size["shortest_edge"])
    return {"size": {"shortest_edge": smallest, "longest_edge": max_pixels}}


def _system_prompt(processor: Any) -> str:
    """Returns what a processor writes before every prompt with images (Janus); an empty text for most."""
    if not getattr(processor, "use_default_system_prompt", False):
        return ""
    text: str = sys.modules[type(processor).__base__.__module__].DEFAULT_SYSTEM_PROMPT
    return text


def _load(config: ModelConfig, tokenizer: LoadedTokenizer) -> Any:
    """Returns the model's processor without those of video and sound, which may need packages that images do not need."""
    from transformers import AutoImageProcessor

    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    kind = _processor_class(config, language_config(tokenizer.hf_config).model_type)
    if not hasattr(kind, "_process_images"):
        raise ValueError(f"{kind.__name__} of this version of transformers is not supported: install 5.23 or newer")
    module: Any = sys.modules[kind.__module__]
    if getattr(module, "num2words", str) is None:
        module.num2words = str  # SmolVLM spells numbers with it, for videos
    images_only: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    image_processor = AutoImageProcessor.from_pretrained(config.model, **options)
    parts = {
        "image_processor": image_processor,
        "video_processor": image_processor,  # MiniCPM-V reads settings of the latter that both have
        "tokenizer": copy.deepcopy(tokenizer.hf_tokenizer),  # some processors add tokens
    }
    settings, _ = images_only.get_processor_dict(config.model, revision=config.revision)
    return images_only.from_args_and_dict([parts.get(name) for name in images_only.get_attributes()], settings)


def _processor_class(config: ModelConfig, model_type: str) -> Any:
    """Returns the class that the model's files name. If they name none, or one that transformers does not know, returns that of the model's type."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    names = dict(PROCESSOR_MAPPING_NAMES)
    name = names.get(model_type)
    for file in ("processor_config.json", "preprocessor_config.json"):
        path = find_file(config, file)
        if path is not None:
            named = json.loads(path.read_text(encoding="utf-8")).get("processor_class")
            name = named if named in names.values() else name
            break
    if (
        find_spec("torchvision") is None
    ):  # PixtralProcessor imports a function from the module that needs it, and the other one has it too
        pixtral = "transformers.models.pixtral.image_processing"
        sys.modules.setdefault(f"{pixtral}_pixtral", importlib.import_module(f"{pixtral}_pil_pixtral"))
    # From its own module: transformers replaces classes that need torchvision, which they need for videos.
    for folder in (known.replace("-", "_") for known, of in names.items() if of == name):
        try:
            return getattr(importlib.import_module(f"transformers.models.{folder}.processing_{folder}"), str(name))
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ValueError(f"transformers has no processor {name!r}")
