"""The language model inside a multimodal checkpoint, loaded without the parts for images, video and sound.

A wrapper of transformers (`…ForConditionalGeneration`) is loaded by its own class, so that text takes the same path as there. What text never
reaches is removed while the module is still on the meta device, so it never takes memory. transformers does not read tensors for which the module
has no place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from batchgen.errors import ModelError
from batchgen.model.architectures import causal_text_config, is_multimodal
from batchgen.prompts.tokenizer import language_config, text_config


def model_class(config: Any) -> Any:
    """Returns the class of transformers whose `from_pretrained` loads the language model that a configuration describes."""
    config = language_config(config)
    kind = type(config)
    wrapper = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(kind, None)
    if wrapper is not None and is_multimodal(config):
        return text_only(wrapper)
    if wrapper is not None and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return wrapper
    return AutoModelForCausalLM


def text_only(wrapper: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns a class that is built like `wrapper`, with an `Absent` module in place of every part that text never reaches."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config = without_timm(config)
        text = causal_text_config(config)
        if text is not text_config(config):
            config = copy.copy(config)
            config.text_config = text
        wrapper.__init__(self, config, *args, **kwargs)
        for parent, name in list(_other_parts(self)):
            parent._modules[name] = Absent(name)

    # The same name in the same module: transformers finds how to rename a checkpoint's tensors by the class's name.
    body = {"__init__": init, "__module__": wrapper.__module__, "__qualname__": wrapper.__qualname__}
    return type(wrapper.__name__, (wrapper,), body)


class Absent(torch.nn.Module):
    """Stands in for a part that was left out."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.dtype = torch.get_default_dtype()
        self.device = torch.device("cpu")

    def forward(self, *_: Any, **__: Any) -> Any:
        raise ModelError(f"the model runs its {self.name} on text, and only the language model was loaded")


def without_timm(config: Any) -> Any:
    """Returns the configuration of a wrapper whose tower from the package timm is not built, so that it need not be installed for text."""
    tower: Any = getattr(config, "vision_config", None)
    if getattr(MODEL_MAPPING.get(type(tower), None), "__name__", "") != "TimmWrapperModel":
        return config
    config = copy.deepcopy(config)
    kind: Any = type(tower)
    config.vision_config = _no_tower(kind)(**tower.to_dict())
    return config


@cache
def _no_tower(kind: Any) -> Any:
    """Returns a class of configurations like `kind`, for which transformers builds an empty model."""
    config_class = type(f"No{kind.__name__}", (kind,), {"model_type": kind.model_type})
    AutoModel.register(config_class, type("NoTower", (PreTrainedModel,), {"config_class": config_class}))
    return config_class


def _other_parts(module: Any) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yields the modules (parent and name) that are not on the path from the model to its decoder and head."""
    decoder = module.get_decoder()
    needed = {decoder, module.get_output_embeddings()}
    above = [module]
    while above:
        parent = above.pop()
        for name, child in parent._modules.items():
            if (
                child is None or child in needed or hasattr(child, "vocab_offset")
            ):  # Gemma 3n reads this offset for text too
                continue
            if any(part in needed for part in child.modules()):
                above.append(child)
            else:
                yield parent, name
    for parent in decoder.modules():  # inside the decoder: whole models of another kind
        for name, child in parent._modules.items():
            if isinstance(child, PreTrainedModel) and type(child.config) is not type(decoder.config):
                yield parent, name


def own_class(kind: Any, config: Any) -> Any:
    """Returns the model's own class behind one of transformers' Auto classes, which can load weights only from files.

    Raises `ValueError` for a model whose class is not one of transformers.
    """
    mapping = _MAPPINGS.get(kind)
    if mapping is None:
        return kind
    if type(config) not in mapping:
        raise ValueError(f"{type(config).__name__} is not a model of transformers")
    found = mapping[type(config)]
    return found[0] if isinstance(found, list | tuple) else found


_MAPPINGS: dict[Any, Any] = {
    AutoModel: MODEL_MAPPING,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}


def left_out(config: Any) -> frozenset[str]:
    """Returns the names of the modules that are not loaded; empty for a model that has only text."""
    kind = model_class(config)
    if kind is AutoModelForCausalLM or not is_multimodal(config):
        return frozenset()
    with torch.device("meta"):
        module = kind(language_config(config))
    return absent_in(module)


def absent_in(module: torch.nn.Module) -> frozenset[str]:
    """Returns the names of the `Absent` modules of a model."""
    return frozenset(part.name for part in module.modules() if isinstance(part, Absent))
