"""Merges a LoRA adapter into a model's weights while it is loaded, with the library peft."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from batchgen.errors import ModelError, in_one_line
from batchgen.model.multimodal import Absent
from batchgen.model_files import ADAPTER_WEIGHTS, read_json
from batchgen.prompts.tokenizer import text_config

# transformers 4.52 moved the language model of multimodal classes, and with it the names of all of its layers.
_OLD_NAMES = "; or, if transformers before 4.52 saved the adapter, rename its tensors as in this model"


def merge_adapter(module: Any, lora: str, folder: Path) -> Any:
    """Returns the model with the adapter in `folder` added to its weights. `lora` is the name that the user gave.

    Raises `ModelError` for an adapter of another kind or another model: one that has tensors without a place in the model, or lacks tensors
    for modules that its configuration names. peft only warns of the latter, and leaves these modules as they are.
    """
    if find_spec("peft") is None:
        raise ModelError("--lora needs the package peft", "pip install 'batchgen-llm[lora]'")
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    kind = read_json(folder / "adapter_config.json").get("peft_type")
    if kind != "LORA":
        raise ModelError(f"the adapter {lora!r} is of type {kind}, and only LORA can be merged")
    if any(type(p) is not torch.nn.Parameter for p in module.parameters()):
        raise ModelError(
            f"the adapter {lora!r} cannot be merged into quantized weights", "give the original model with --model"
        )
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        given = len(file.keys())
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    try:
        adapted = PeftModel.from_pretrained(module, str(folder))
        # Loads it a second time, because only this call reports missing and unexpected names. peft converts older names, so the file's names do not tell.
        loaded = adapted.load_adapter(str(folder), "default")
        changed = [part.get_base_layer() for part in module.modules() if isinstance(part, LoraLayer)]
        if head is not None and head.weight is embedding.weight and any(p is embedding or p is head for p in changed):
            _untie(module, head)  # only now, because peft may give tied layers one adapter
        left_out = {part.name for part in module.modules() if isinstance(part, Absent)}
        unused = _sorted_names(name for name in loaded.unexpected_keys if left_out.isdisjoint(name.split(".")))
        if unused:
            raise ModelError(
                f"the adapter {lora!r} does not fit the model: the model has no place for {len(unused)} of its {given} tensors, for example {unused[0]}",
                "give the model that the adapter was trained for" + (_OLD_NAMES if left_out else ""),
            )
        if missing := _sorted_names(name for name in loaded.missing_keys if ".lora_" in name):
            needed = sum(".lora_" in name for name in adapted.state_dict())
            raise ModelError(
                f"the adapter {lora!r} does not fit the model: it lacks {len(missing)} of the {needed} tensors that the model has places for, for example {missing[0]}",
                "give the model that the adapter was trained for, or the whole adapter",
            )
        return adapted.merge_and_unload(safe_merge=True)
    except NotImplementedError as e:
        raise ModelError(
            f"the adapter {lora!r} cannot be merged: {in_one_line(e, 300).rstrip('.')}",
            "give an adapter of another kind",
        ) from e
    except (ValueError, RuntimeError, KeyError, TypeError, re.error) as e:
        raise ModelError(
            f"the adapter {lora!r} cannot be merged: {in_one_line(e, 300)}",
            "give the model that the adapter was trained for",
        ) from e


def _sorted_names(names: Iterable[str]) -> list[str]:
    """Returns names of tensors as a file has them, without the adapter's name."""
    return sorted(name.replace(".default", "") for name in names)


def _untie(module: Any, head: Any) -> None:
    """Gives the head a weight of its own, which it shares with the embedding."""
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (module.config, text_config(module.config)):
        config.tie_word_embeddings = False
