"""Gives a model a LoRA adapter while it is loaded, with the library peft.

Plain weights become those with the adapter. A linear layer that is packed (codes, or 16 bits of a model that is computed in float32) stays as it is,
and the adapter's two matrices run beside it (`AdaptedLinear`): the sum would have to be unpacked. Most adapters of quantized models were trained
so (QLoRA, https://arxiv.org/abs/2305.14314). So does one whose weight other layers share (Zamba), each of which has an adapter of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from batchgen.errors import ModelError, in_one_line
from batchgen.kernels.codes import PackedTensor
from batchgen.kernels.replacing import AdaptedLinear
from batchgen.model.heads import LANGUAGE_HEADS
from batchgen.model.multimodal import Absent, absent_in
from batchgen.model.weights.quantized import packed_in, unpack
from batchgen.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_merged, read_json
from batchgen.prompts.tokenizer import text_config

# transformers 4.52 moved the language model of multimodal classes, and with it the names of all of its layers.
_OLD_NAMES = "; or, if transformers before 4.52 saved the adapter, rename its tensors as in this model"


def add_adapter(
    module: Any, lora: str, folder: Path, keep: Callable[[torch.Tensor], None] | None = None
) -> tuple[Any, str]:
    """Returns the model with the adapter in `folder`, and a note for the user. `lora` is the name that the user gave.

    `keep` gets each weight that is unpacked, because it cannot stay packed with the adapter: of an embedding, a head, experts, or with DoRA.
    Raises `ModelError` for an adapter of another kind or another model.
    """
    if find_spec("peft") is None:
        raise ModelError("--lora needs the package peft", "pip install 'batchgen-llm[lora]'")
    from peft.tuners.lora import LoraLayer

    settings = read_json(folder / ADAPTER_CONFIG)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"the adapter {lora!r} is of type {kind}, and only LORA can be used")
    if str(begun := settings.get("init_lora_weights")).startswith("pissa_niter"):
        raise ModelError(
            f"the adapter {lora!r} cannot be merged: peft starts it with other numbers in each load (init_lora_weights {begun})",
            "convert it with path_initial_model_for_weight_conversion of peft's save_pretrained",
        )
    if settings.get("layer_replication"):
        raise ModelError(
            f"the adapter {lora!r} cannot be merged: it adds layers (layer_replication)",
            "give an adapter of another kind",
        )
    if any(type(p) not in (torch.nn.Parameter, PackedTensor) for p in module.parameters()):
        raise ModelError(
            f"the adapter {lora!r} cannot be merged into quantized weights", "give the original model with --model"
        )
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = embedding is not None and head is not None and head.weight is embedding.weight

    def unpack_in(parts: Iterable[torch.nn.Module]) -> bool:
        """Unpacks the weights of these modules. Returns whether they have the weight that embedding and head share."""
        chosen = {*parts}
        shared = tied and not chosen.isdisjoint((embedding, head))
        chosen |= {embedding, head} if shared else set()
        unpack([(part, name) for part, name in packed_in(module) if part in chosen], keep)
        return shared

    with _errors_of_peft(lora):
        unpack_in(_copied_by_peft(module, settings))
        adapted = _loaded_by_peft(module, lora, folder)
        beside = _put_beside(module, head)
        if unpack_in(part.get_base_layer() for part in module.modules() if isinstance(part, LoraLayer)):
            _untie(module, head)  # only now, because peft may give tied layers one adapter
        merged = adapted.merge_and_unload(safe_merge=True)
    packed = any(isinstance(part.weight, PackedTensor) for part in beside)
    where = "packed weights" if packed else "weights that layers share"
    how = f"runs beside the {where}" if beside else "was merged into the weights"
    return merged, f"the adapter {lora} {how}"


def tensors_for(module: Any, folder: Path) -> list[str]:
    """Returns the names of the adapter's tensors that are not those of parts of a multimodal model that were left out (`Absent`)."""
    left_out = absent_in(module)
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        names = file.keys()
    return [name for name in names if left_out.isdisjoint(name.split("."))]


def _loaded_by_peft(module: Any, lora: str, folder: Path) -> Any:
    """Returns peft's model around the module, which may lack the language head, and parts that the adapter adapts too."""
    from peft import PeftConfig, PeftModel
    from peft.utils.constants import DUMMY_TARGET_MODULES

    config = PeftConfig.from_pretrained(str(folder))
    if config.task_type == "CAUSAL_LM":
        config.task_type = None  # peft's class for it wants a model that generates
    if left_out := [name for name, part in module.named_modules() if isinstance(part, Absent)]:
        excluded = config.exclude_modules
        names = [excluded, *map(re.escape, left_out)] if isinstance(excluded, str) else [*(excluded or ()), *left_out]
        config.exclude_modules = "|".join(names) if isinstance(excluded, str) else names
        if not any(".lora_" in name for name in tensors_for(module, folder)):
            config.target_modules = DUMMY_TARGET_MODULES  # otherwise peft refuses an adapter that targets no module
    shorter: dict[str, str] | None = None
    heads: tuple[str, ...] = ()
    if module.base_model is module:
        shorter, heads = {rf"^{module.base_model_prefix}\.": ""}, LANGUAGE_HEADS
        _shorten_names(config, module.base_model_prefix)
    adapted = PeftModel.from_pretrained(module, str(folder), config=config, key_mapping=shorter)
    # Loads it a second time, because only this call reports missing and unexpected names. peft converts older names, so the file's names do not tell.
    loaded = adapted.load_adapter(str(folder), "default", key_mapping=shorter)
    _check_names(lora, folder, adapted, loaded, heads)
    return adapted


def _shorten_names(config: Any, prefix: str) -> None:
    """Takes the name of the model's body from the beginning of names and regular expressions in an adapter's configuration."""

    def shorter(name: str) -> str:
        return re.sub(rf"^(\^?){prefix}\\?\.", r"\1", name)

    for field in ("target_modules", "exclude_modules"):
        names = getattr(config, field)
        setattr(config, field, shorter(names) if isinstance(names, str) else names and {shorter(n) for n in names})
    for field in ("rank_pattern", "alpha_pattern"):
        setattr(config, field, {shorter(name): value for name, value in getattr(config, field).items()})


def _copied_by_peft(module: Any, settings: Mapping[str, Any]) -> Iterator[torch.nn.Module]:
    """Yields the modules that peft copies, or takes rows of: copies of packed weights would be packed, and what peft writes into them would be lost."""
    tokens = settings.get("trainable_token_indices") or ()
    names = (*(settings.get("modules_to_save") or ()), *(tokens if isinstance(tokens, dict) else ()))
    every = is_merged(settings)
    yield from (part for name, part in module.named_modules() if every or name.endswith(names))
    if tokens:
        yield module.get_input_embeddings()


@contextmanager
def _errors_of_peft(lora: str) -> Iterator[None]:
    """Raises `ModelError` instead of what peft raises."""
    try:
        yield
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


def _check_names(lora: str, folder: Path, adapted: Any, loaded: Any, heads: Iterable[str]) -> None:
    """Raises `ModelError` for an adapter that has tensors without a place in the model, or lacks tensors for modules that its configuration names.
    peft only warns of the latter, and leaves these modules as they are. `loaded` is what `load_adapter` of the model `adapted` returned, and `heads`
    are language heads that the model was loaded without."""
    left_out = absent_in(adapted)
    unplaced = left_out.union(heads)
    unused = _sorted_names(name for name in loaded.unexpected_keys if unplaced.isdisjoint(name.split(".")))
    if unused:
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            given = len(file.keys())
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


def _put_beside(module: torch.nn.Module, head: Any) -> list[AdaptedLinear]:
    """Replaces peft's layers around linear layers that stay as they are (`_runs_beside`). Returns what replaces them."""
    made: list[AdaptedLinear] = []
    shared = Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)
    for parent in list(module.modules()):
        for name, part in parent._modules.items():
            if _runs_beside(part, head, shared):
                made.append(_adapted(part))
                parent._modules[name] = made[-1]
    return made


def _runs_beside(part: Any, head: Any, shared: Counter[int]) -> bool:
    """Whether peft's layer adds two products, and nothing else (`lora_variant`), to a linear layer that is packed, or whose weight other layers have
    too: the sum would be theirs. `shared`: how many modules have a weight, by its id. Raises `NotImplementedError` for a shared weight that is changed
    in another way."""
    from peft.tuners.lora import Linear

    base: Any = part.get_base_layer() if isinstance(part, Linear) else None
    if type(base) is not torch.nn.Linear or base is head:
        return False
    is_shared, varies = shared[id(base.weight)] > 1, "default" in part.lora_variant
    if is_shared and varies:
        raise NotImplementedError("it changes a weight that several layers share, and not by LoRA alone")
    return not varies and (is_shared or isinstance(base.weight, PackedTensor))


def _adapted(part: Any) -> AdaptedLinear:
    scale, down, up = part.scaling["default"], part.lora_A["default"], part.lora_B["default"]
    base = part.get_base_layer()
    if up.bias is not None:
        more = up.bias.float() * scale
        bias = more if base.bias is None else base.bias.float() + more
        base.bias = torch.nn.Parameter(bias.to(base.weight.dtype), requires_grad=False)
    dtype = base.weight.dtype
    return AdaptedLinear(base, down.weight.to(dtype), (up.weight.float() * scale).to(dtype))


def _sorted_names(names: Iterable[str]) -> list[str]:
    """Returns names of tensors as a file has them, without the adapter's name."""
    return sorted(name.replace(".default", "") for name in names)


def _untie(module: Any, head: Any) -> None:
    """Gives the head a weight of its own, which it shares with the embedding."""
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (module.config, text_config(module.config)):
        config.tie_word_embeddings = False
