"""Shows images to a model: runs its encoder once for each image, and puts the features in the places of the image tokens' embeddings.

The encoder is loaded for the first image of a job. Pixels are prepared in other threads, some images ahead. An image is encoded in a forward of its
own, so that its features do not depend on what else is encoded.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.utils import is_timm_available

from batchgen.attention.encoder import EncoderAttention
from batchgen.attention.encoder_layers import fuse_encoder_layers
from batchgen.config import ModelConfig
from batchgen.errors import ModelError, RowError, in_one_line, is_out_of_memory
from batchgen.kernels.fusion import fuse_linear, fuse_small_parts
from batchgen.kernels.replacing import Packing
from batchgen.kernels.transfer import put
from batchgen.kernels.whole_vectors import fill_activations
from batchgen.model.image_positions import canvas_positions, column_row_number, time_row_column
from batchgen.model.multimodal import Absent, without_timm
from batchgen.model.weights.lora import add_adapter, tensors_for
from batchgen.model.weights.packed import read_checkpoint
from batchgen.model.weights.quantized import as_unquantized, is_weight_only, one_weight_at_a_time, packed_in, unpack
from batchgen.model_files import adapter_folder
from batchgen.prompts.images import FAMILIES, ImageProcessor, canvas_marks
from batchgen.prompts.tokenizer import LoadedTokenizer, language_config, quiet, text_config
from batchgen.request import IMAGE_IDS, Image, image_ends
from batchgen.scheduling.batch import PackedSpans, ScheduledSpan
from batchgen.scheduling.sequence import GenerationSequence, Span
from batchgen.stats import counted

AHEAD = 4
"""Number of images whose pixels are prepared before they are needed."""
FEATURE_BYTES = 1 << 29
FEATURE_SHARE = 1 / 8
"""Features that other spans still wait for are kept up to this size, and this share of the KV's."""


class Features(NamedTuple):
    """What the encoder gives for an image, or for all of a batch."""

    embeddings: torch.Tensor
    """[tokens, hidden size]"""
    deep: Mapping[int, torch.Tensor] = MappingProxyType({})
    """[tokens, hidden size] each, by the decoder layer to whose output they are added; -1 is the first layer's input."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.deep.values()))


class Vision:
    """The eyes of a loaded model."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: LoadedTokenizer,
        module: Any,
        dtype: torch.dtype,
        *,
        weight_bytes: int = 0,
        fuse: bool = False,
    ) -> None:
        """`module` is the language model, which runs on one device. Nothing is loaded yet.

        `weight_bytes`: what the encoder will take. `fuse`: kernels for the CPU replace parts of the encoder.
        """
        self._config, self._tokenizer = config, tokenizer
        self._module, self._dtype, self._fuse = module, dtype, fuse
        hf_config = language_config(tokenizer.hf_config)
        self._family = FAMILIES[hf_config.model_type]
        stand_in = {"padding": text_config(hf_config).pad_token_id, "image": getattr(hf_config, "image_token_id", None)}
        self._filler: int = stand_in.get(self._family.stand_in) or 0
        self._canvas = canvas_marks(hf_config) if self._family.canvas else None
        self._marks: list[int] = [
            getattr(hf_config, f"{kind}_{end}_token_id")
            for kind, end in product(("image", "video"), ("start", "end"))
            if self._family.kinds
        ]
        """The tokens around images, where they matter."""
        self._hidden_size: int = text_config(hf_config).hidden_size
        self.weight_bytes = weight_bytes
        self._room = FEATURE_BYTES
        self._features: OrderedDict[int, Features] = OrderedDict()  # the least recently used first
        self._waiting: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        """By `Image.token`: the spans (`Span.key`) in which the image ends, and where, if they have not run that far."""
        self._paths: defaultdict[int, dict[str, None]] = defaultdict(dict)
        """By `Image.token`: the files that have its bytes, of those that are waited for."""
        self._expected: deque[Image] = deque()
        self._prepared: dict[int, Future[dict[str, Any]]] = {}
        self._shown: tuple[torch.Tensor, Features] | None = None
        """Of the forward that is running: the places [M] of the images' tokens in the packed batch, and their features."""
        self.failed: dict[int, str] = {}
        """By `Image.token`: the images that cannot be shown, and why: what a message says after the name of the image."""
        self._deep_layers: set[int] = set()
        self.encoded = 0
        """Number of images that the encoder has run on."""
        module.get_input_embeddings().register_forward_hook(self._replace_embeddings)

    @property
    def reserved_bytes(self) -> int:
        """The device memory that is left free for the encoder and the features."""
        return self.weight_bytes + FEATURE_BYTES

    def limit(self, kv_bytes: int) -> None:
        """Limits the features to a share of what the KV takes."""
        self._room = min(FEATURE_BYTES, int(FEATURE_SHARE * kv_bytes))

    def expect(self, images: Iterable[tuple[Image, tuple[int, ...]]]) -> None:
        """Says which images come next, in order, each with the span (`Span.key`) in which it ends, and where.

        Their pixels are prepared in time, and features are kept for all spans that need them.
        """
        for image, end in images:
            self._paths[image.token][image.path] = None
            if end not in self._waiting[image.token]:
                self._waiting[image.token].add(end)
                self._expected.append(image)
        self._prepare_ahead()

    def error_of(self, images: Sequence[Image]) -> RowError | None:
        """Returns the error of a row with these images: that of the first one that cannot be shown; None if all can."""
        for image in images if self.failed else ():
            if image.token in self.failed:
                return RowError("invalid_image", f"{image.named} {self.failed[image.token]}")
        return None

    def clear(self) -> None:
        """Forgets all that was expected, and what was made for it."""
        for kept in (self._expected, self._prepared, self._waiting, self._paths, self._features):
            kept.clear()

    def concerns(self, packed: PackedSpans) -> bool:
        """Whether a batch has tokens of images or, where that matters, marks around them or (with positions that have axes) tokens after an image."""
        if self._family.axes and any(scheduled.span.images for scheduled in packed.spans):
            return True
        return bool(self._of_images(packed.tokens).any())

    def _of_images(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens are images', or marks around images (`Family.kinds`)."""
        found: NDArray[np.bool_] = tokens >= IMAGE_IDS
        return found | np.isin(tokens, self._marks) if self._marks else found

    def arguments(self, packed: PackedSpans) -> dict[str, torch.Tensor]:
        """Returns what the forward of a batch with images gets beside tokens and positions. A generated mark is a token of text."""
        if not self._family.kinds:
            return {}
        kinds = self._of_images(packed.tokens)
        end = 0
        for span, start, stop, *_ in packed.spans:
            end += stop - start
            if isinstance(span, GenerationSequence):
                kinds[end - max(0, stop - max(start, span.prompt_end)) : end] = False
        return {
            self._family.kinds: put(kinds.astype(np.int64), self._module.get_input_embeddings().weight.device)[None]
        }

    def without_images(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns a batch's tokens with an id of the vocabulary in place of each image token."""
        return np.where(tokens < IMAGE_IDS, tokens, self._filler)

    def positions(self, spans: Sequence[ScheduledSpan], plain: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions of a batch's tokens: `plain` [T], or [axes, T] for models that have axes (`Family.axes`)."""
        if not self._family.axes:
            return plain
        if self._canvas is not None:
            return np.concatenate([self._on_canvas(self._canvas, *scheduled[:3]) for scheduled in spans], axis=1)
        found = np.tile(plain, (self._family.axes, 1))
        set_positions = time_row_column if self._family.axes == 3 else column_row_number
        end = 0
        for scheduled in spans:
            begin, end = end, end + scheduled.stop - scheduled.start
            if scheduled.span.images:
                set_positions(scheduled, found[:, begin:end])
        return found

    def _on_canvas(self, marks: Sequence[int], span: Span, start: int, stop: int) -> NDArray[np.int64]:
        written = isinstance(span, GenerationSequence) and stop > span.prompt_end
        tokens = span.tokens(0, span.prompt_end if written else stop)
        return canvas_positions(tokens, span.images, marks, stop)[:, start:]

    @contextmanager
    def showing(self, packed: PackedSpans) -> Iterator[None]:
        """The batch's forward runs inside. An image that cannot be shown is zeros; its rows fail (`error_of`)."""
        places = np.flatnonzero(packed.tokens >= IMAGE_IDS)
        if not len(places):
            yield
            return
        parts = [part for scheduled in packed.spans for part in self._parts(scheduled)]
        embeddings = torch.cat([part.embeddings for part in parts])
        blank = torch.zeros((), dtype=embeddings.dtype, device=embeddings.device)
        deep = {
            layer: torch.cat([part.deep.get(layer, blank.expand_as(part.embeddings)) for part in parts])
            for layer in {layer for part in parts for layer in part.deep}
        }
        self._shown = put(places, embeddings.device), Features(embeddings, deep)
        try:
            yield
        finally:
            self._shown = None
        for scheduled in packed.spans:
            self._drop_features(scheduled)

    def _drop_features(self, scheduled: ScheduledSpan) -> None:
        """Drops the features of the images that end in a span's part, which has run, and that no other prefix waits for."""
        span = scheduled.span
        if not span.images:
            return
        for image, end in zip(span.images, image_ends(span.images, span.tokens(0, scheduled.stop)), strict=False):
            if end > scheduled.start:
                self._waiting[image.token].discard((*span.key, end))
                if not self._waiting[image.token]:
                    del self._waiting[image.token]
                    self._paths.pop(image.token, None)
                    self._features.pop(image.token, None)

    def _parts(self, scheduled: ScheduledSpan) -> Iterator[Features]:
        """Yields the features of the image tokens of a span's part, in order."""
        span, end = scheduled.span, 0
        if not span.images:
            return
        seen = span.tokens(0, scheduled.stop) >= IMAGE_IDS
        first, last = int(np.count_nonzero(seen[: scheduled.start])), int(np.count_nonzero(seen))
        for image in span.images:
            start, end = end, end + image.count
            if start < last and end > first:
                at = slice(max(start, first) - start, min(end, last) - start)
                features = self._features_of(image)
                yield Features(features.embeddings[at], {layer: found[at] for layer, found in features.deep.items()})

    def _features_of(self, image: Image) -> Features:
        found = self._features.get(image.token)
        if found is None:
            try:
                found = self._encode(image)
            except (RowError, ValueError, IndexError, RuntimeError) as e:
                if is_out_of_memory(e) or isinstance(e, torch.AcceleratorError):
                    raise
                why = e.message if isinstance(e, RowError) else f"cannot be encoded: {in_one_line(e)}"
                self.failed[image.token] = why
                weight = self._module.get_input_embeddings().weight
                found = Features(weight.new_zeros(image.count, self._hidden_size))
            self._features[image.token] = found
            while len(self._features) > 1 and sum(of.size for of in self._features.values()) > self._room:
                self._features.popitem(last=False)
        self._features.move_to_end(image.token)
        return found

    @torch.inference_mode()
    def _encode(self, image: Image) -> Features:
        weight = self._module.get_input_embeddings().weight
        pixels = self._pixels(image)
        inputs = {name: value.to(weight.device) for name, value in pixels.items() if name in self._arguments}
        if "vision_feature_layer" in self._arguments and hasattr(self._encoder.config, "vision_feature_layer"):
            inputs["vision_feature_layer"] = self._encoder.config.vision_feature_layer
        with EncoderAttention() if self._fuse else nullcontext():
            output = self._image_features(**inputs)
        deep = {
            layer: _joined(found).to(weight.dtype)
            for layer, found in _by_layer(getattr(output, "deepstack_features", None) or ())
        }
        features = output.pooler_output
        if features is None and deep:  # Granite Vision has nothing at the embedding
            features = torch.zeros_like(next(iter(deep.values())))
        elif features is None:  # Llama 4's forward projects them
            features = self._encoder.multi_modal_projector(output.last_hidden_state)
        embeddings = _joined(features).to(weight.dtype)
        if "input_ids" in pixels:
            embeddings = _with_indicators(self._encoder.config, pixels["input_ids"], embeddings, output)
        if len(embeddings) != image.count:
            raise ValueError(
                f"it has {image.count} tokens in the prompt, and the encoder gave {len(embeddings)} vectors"
            )
        self._add_to_layers(deep)
        self.encoded += 1
        return Features(embeddings, deep)

    def _pixels(self, image: Image) -> dict[str, Any]:
        """Waits for an image's pixels, from another file with the same bytes if its own cannot be read. Raises `RowError`."""
        future = self._prepared.pop(image.token, None)
        if (
            future is None and len(self._prepared) == AHEAD
        ):  # the first may not be needed any more: its row may have ended
            del self._prepared[next(iter(self._prepared))]
        self._prepare_ahead()
        try:
            return self._read(image) if future is None else future.result()
        except RowError:
            for path in self._paths[image.token].keys() - {image.path}:
                with suppress(RowError):
                    return self._read(replace(image, path=path))
            raise

    def _read(self, image: Image) -> dict[str, Any]:
        """Returns `ImageProcessor.pixels`, floats in the encoder's type."""
        return {
            name: x.to(self._dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in self._processor.pixels(image).items()
        }

    def _prepare_ahead(self) -> None:
        while self._expected and len(self._prepared) < AHEAD:
            image = self._expected.popleft()
            known = self._features, self._prepared, self.failed
            if image.token in self._waiting and not any(image.token in kept for kept in known):
                self._prepared[image.token] = self._threads.submit(self._read, image)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2, "batchgen-pixels")

    @cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(self._config, self._tokenizer)

    @cached_property
    def _encoder(self) -> Any:
        device = self._module.get_input_embeddings().weight.device
        halves = self._fuse and self._dtype == torch.float32
        encoder = load_encoder(self._config, self._tokenizer, self._dtype, halves=halves).to(device)
        if self._fuse:
            fuse_small_parts(encoder)
            fuse_linear(encoder, Packing())
            unpack(packed_in(encoder))
            fill_activations(encoder)
            fuse_encoder_layers(encoder)
        return encoder

    @cached_property
    def _image_features(self) -> Any:
        return getattr(self._encoder, "model", self._encoder).get_image_features

    @cached_property
    def _arguments(self) -> frozenset[str]:
        return frozenset(inspect.signature(self._image_features).parameters)

    def _replace_embeddings(self, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        """Hook after the embedding [1, T, hidden size]."""
        if self._shown is None:
            return None
        places, features = self._shown
        return output.index_copy(1, places, features.embeddings[None])

    def _add_to_layers(self, indices: Iterable[int]) -> None:
        """Makes decoder layers add the images' deep features to their output, or the first one to its input (-1): [1, T, hidden size]."""
        for index in set(indices) - self._deep_layers:
            layers = self._module.get_decoder().layers
            if index < 0:
                layers[0].register_forward_pre_hook(self._add_before)
            else:
                layers[index].register_forward_hook(partial(self._add_deep, index))
            self._deep_layers.add(index)

    def _add_before(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        found = self._add_deep(-1, None, None, inputs[0])
        return inputs if found is None else (found, *inputs[1:])

    def _add_deep(self, index: int, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self._shown is None or index not in self._shown[1].deep:
            return None
        places, features = self._shown
        return output.index_add(1, places, features.deep[index][None])


def _joined(features: Any) -> torch.Tensor:
    """Returns the features of one image as [tokens, hidden size]."""
    tensor = features if isinstance(features, torch.Tensor) else torch.cat(list(features))
    return tensor.reshape(-1, tensor.shape[-1])


def _with_indicators(config: Any, ids: list[int], embeddings: torch.Tensor, output: Any) -> torch.Tensor:
    """Returns the embeddings of an image's tokens and of the marks between them, by their ids."""
    found = torch.tensor(ids, device=embeddings.device)
    every = embeddings.new_zeros(len(ids), embeddings.shape[1])
    every[found == config.image_token_id] = embeddings
    for token, mark in zip(config.visual_indicator_token_ids, output.visual_indicator_features, strict=True):
        every[found == token] = mark.to(every.dtype)
    return every


def _by_layer(deep: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yields deep features with the index of the layer to whose output they are added. Granite Vision names the layer to whose input they are added."""
    for index, found in enumerate(deep):
        if isinstance(found, tuple) and isinstance(found[0], int):
            yield found[0] - 1, found[1]
        else:
            yield index, found


def load_encoder(config: ModelConfig, tokenizer: LoadedTokenizer, dtype: torch.dtype, *, halves: bool = False) -> Any:
    """Loads the parts of a multimodal checkpoint that encode images. `halves`: linear layers of 16 bits stay in 16 bits. Raises `ModelError`."""
    hf_config = language_config(tokenizer.hf_config)
    wrapper = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(hf_config)]
    if without_timm(hf_config) is not hf_config and not is_timm_available():
        raise ModelError(
            "the image encoder of this model needs the packages timm and torchvision", "pip install timm torchvision"
        )
    packed = read_checkpoint(config, tokenizer.hf_config, halves=halves and not config.trust_remote_code)
    with quiet(), nullcontext() if packed is None else one_weight_at_a_time():
        encoder, found = images_only(wrapper).from_pretrained(
            config.model if packed is None else None,
            config=as_unquantized(hf_config) if is_weight_only(hf_config) else hf_config,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            **({} if packed is None else {"state_dict": packed}),
        )
    unfit = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if unfit:
        raise ModelError(
            f"the weights in {config.model!r} lack {counted(len(unfit), 'tensor')} of the image encoder, or have other shapes than its config.json "
            f"says, among them {unfit[0]}",
            "copy the weights and config.json from one model",
        )
    lora = config.lora if config.lora is not None and tensors_for(encoder, adapter_folder(config.lora)) else None
    halves = halves and lora is None  # what an adapter changes is merged
    layers = {part for part in encoder.modules() if type(part) is torch.nn.Linear} if halves else set()
    unpack([(part, name) for part, name in packed_in(encoder) if part not in layers])
    if lora is not None:
        with quiet():
            encoder, _ = add_adapter(encoder, lora, adapter_folder(lora))
    return encoder.eval()


def images_only(wrapper: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns a class that is built like `wrapper`, with an `Absent` module in place of the decoder, its head and what hears."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        wrapper.__init__(self, config, *args, **kwargs)
        language = {self.get_decoder(), self.get_output_embeddings()}
        for parent in list(self.modules()):
            for name, child in parent._modules.items():
                if child in language or "audio" in name:
                    parent._modules[name] = Absent(name)

    body = {
        "__init__": init, "__module__": wrapper.__module__, "__qualname__": wrapper.__qualname__,
        "get_input_embeddings": lambda self: None,
        "tie_weights": lambda self, *_, **__: None, "mark_tied_weights_as_initialized": lambda self, *_: None,
    }  # fmt: skip
    return type(wrapper.__name__, (wrapper,), body)
