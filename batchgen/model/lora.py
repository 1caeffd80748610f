"""Merges a LoRA adapter into a model's weights while it is loaded, with the library peft."""

from __future__ import annotations

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
    from peft import PeftModel, get_peft_model_state_dict

    kind = read_json(folder / "adapter_config.json").get("peft_type")
    if kind != "LORA":
        raise ModelError(f"the adapter {lora!r} is of type {kind}, and only LORA can be merged")
    if any(type(p) is not torch.nn.Parameter for p in module.parameters()):
        raise ModelError(
            f"the adapter {lora!r} cannot be merged into quantized weights", "give the original model with --model"
        )
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        given = set(file.keys())
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    try:
        adapted = PeftModel.from_pretrained(module, str(folder))
        if head is not None and head.weight is embedding.weight:
            _untie(module, embedding, head, given)  # not before: peft may give tied layers one adapter
        used = set(get_peft_model_state_dict(adapted, save_embedding_layers=True))
        left_out = {part.name for part in module.modules() if isinstance(part, Absent)}
        unused = sorted(name for name in given - used if left_out.isdisjoint(name.split(".")))
        if unused:
            raise ModelError(
                f"the adapter {lora!r} does not fit the model: the model has no place for {len(unused)} of its {len(given)} tensors, for example {unused[0]}",
                "give the model that the adapter was trained for" + (_OLD_NAMES if left_out else ""),
            )
        needed = {name for name in used if ".lora_" in name}
        if missing := sorted(needed - given):
            raise ModelError(
                f"the adapter {lora!r} does not fit the model: it lacks {len(missing)} of the {len(needed)} tensors that the model has places for, for example {missing[0]}",
                "give the model that the adapter was trained for, or the whole adapter",
            )
        return adapted.merge_and_unload(safe_merge=True)
    except NotImplementedError as e:
        raise ModelError(
            f"the adapter {lora!r} cannot be merged: {in_one_line(e, 300).rstrip('.')}",
            "give an adapter of another kind",
        ) from e
    except (ValueError, RuntimeError, KeyError, TypeError) as e:
        raise ModelError(
            f"the adapter {lora!r} cannot be merged: {in_one_line(e, 300)}",
            "give the model that the adapter was trained for",
        ) from e


def _untie(module: Any, embedding: Any, head: Any, given: set[str]) -> None:
    """Gives the head a weight of its own if the adapter adds to the weight that it shares with the embedding."""
    changed = {
        name.removesuffix(".base_layer") for name, part in module.named_modules() if part is embedding or part is head
    }
    if any(f".{name}.lora_" in key for key in given for name in changed):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in (module.config, text_config(module.config)):
            config.tie_word_embeddings = False
