"""Checkpoints whose weights are quantized, and what they are in memory.

`packed` and `gguf` read them, and they stay packed, on every kind of device. transformers dequantizes the few kinds that these do not know.
Weights of torchao stay as they are.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from batchgen.kernels.codes import PackedTensor
from batchgen.model.weights.variants import compressed_groups, is_read_packed, quant_method
from batchgen.model.weights.weight_size import configs_of, quantization
from batchgen.model_files import WEIGHT_ONLY
from batchgen.prompts.gguf import METHOD
from batchgen.stats import size_text


def is_weight_only(hf_config: Any) -> bool:
    """Whether the weights stand for plain ones of 16 or 32 bits."""
    return quant_method(hf_config) in WEIGHT_ONLY


def is_int8(hf_config: Any) -> bool:
    """Whether the weights are whole numbers of 8 bits with a scale for each output column, and activations are quantized in each forward (W8A8)."""
    settings = quantization(hf_config)
    if settings is None or settings.get("quant_method") != "compressed-tensors":
        return False
    groups = compressed_groups(settings)
    return bool(groups) and all(
        _has(group.get("weights"), strategy="channel", symmetric=True)
        and _has(group.get("input_activations"), strategy="token", dynamic=True)
        for group in groups
    )


def _has(arguments: dict[str, Any] | None, **wanted: Any) -> bool:
    wanted |= {"type": "int", "num_bits": 8}
    return arguments is not None and all(arguments.get(name) == value for name, value in wanted.items())


def as_unquantized(hf_config: Any) -> Any:
    """Returns a copy of the configuration with which transformers makes the model of an unquantized checkpoint, and dequantizes weights not read here."""
    asked = copy.deepcopy(hf_config)
    settings = quantization(asked)
    if is_read_packed(settings) or quant_method(asked) == METHOD:
        for part in configs_of(asked):
            if hasattr(part, "quantization_config"):
                del part.quantization_config
    elif settings is not None and is_weight_only(asked):
        settings["dequantize"] = True
    return asked


def plain_layers(module: torch.nn.Module) -> None:
    """Removes everything but weights and biases from a dequantized model's layers, in place. Not for a model on several devices.

    With transformers 5.17, layers of compressed-tensors keep their scales and a forward that rounds activations, and every part has a
    forward of compressed-tensors' own that moves its weights between devices. With later versions there is nothing to do.
    """
    if any(type(part._parameters) is not dict for part in module.modules()):
        from compressed_tensors.offload import remove_dispatch

        remove_dispatch(module, onload_tensors=True)
    for part in module.modules():
        dequantized = getattr(getattr(part, "quantization_status", None), "value", None) == "decompressed"
        if dequantized:
            part.__dict__.pop("quantization_scheme", None)
            for name in part._parameters.keys() - {"weight", "bias"}:
                del part._parameters[name]
        if dequantized or getattr(part.__dict__.get("forward"), "__func__", None) is type(part).forward:
            part.__dict__.pop("forward", None)


def note_of(hf_config: Any, module: torch.nn.Module) -> str:
    """Returns a sentence for the user about the weights of a quantized model in memory."""
    parameters = list(module.parameters())
    whole = size_text(sum(p.numel() * p.element_size() for p in parameters))
    dtype = str(max(parameters, key=torch.Tensor.numel).dtype).removeprefix("torch.")
    name = WEIGHT_ONLY[quant_method(hf_config) or ""]
    if not any(isinstance(p, PackedTensor) for p in parameters):
        return f"the {name} weights were dequantized to {dtype} and take {whole}; activations are not quantized"
    size = size_text(sum(map(bytes_of, parameters)))
    return f"the {name} weights stay packed and take {size} ({whole} in {dtype}); activations are not quantized"


def bytes_of(weight: torch.Tensor) -> int:
    """Returns the memory that a weight takes."""
    return weight.packed_bytes if isinstance(weight, PackedTensor) else weight.nbytes


@contextmanager
def one_weight_at_a_time() -> Iterator[None]:
    """Keeps transformers from reading weights in threads of its own, ahead of those that it needs."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def packed_in(module: torch.nn.Module) -> list[tuple[Any, str]]:
    """Returns the packed parameters of a module: the part that has each, and its name there."""
    parameters: list[tuple[Any, str, Any]] = [
        (m, name, p) for m in module.modules() for name, p in m._parameters.items()
    ]
    return [(part, name) for part, name, weight in parameters if isinstance(weight, PackedTensor)]


def fitting(packed: Sequence[tuple[Any, str]], free: Callable[[torch.device], int]) -> list[tuple[Any, str]]:
    """Returns the packed parameters whose plain ones take at most half of the `free` bytes of their device."""
    plain: dict[torch.device, int] = {}
    for part, name in packed:
        weight = getattr(part, name)
        plain[weight.device] = plain.get(weight.device, 0) + weight.nbytes
    fit = {device for device, size in plain.items() if size <= free(device) // 2}
    return [(part, name) for part, name in packed if getattr(part, name).device in fit]


@torch.no_grad()
def unpack(packed: Sequence[tuple[Any, str]], keep: Callable[[torch.Tensor], None] | None = None) -> None:
    """Makes plain parameters of packed ones (`packed_in`), in place. What shares a packed one shares the plain one. `keep` gets each plain one."""
    plain: dict[int, torch.nn.Parameter] = {}
    kept = [getattr(part, name) for part, name in packed]  # so that no id is used twice
    for (part, name), weight in zip(packed, kept, strict=True):
        if id(weight) not in plain:
            plain[id(weight)] = torch.nn.Parameter(weight.unpacked(), requires_grad=False)
            if keep is not None:
                keep(plain[id(weight)])
        part._parameters[name] = plain[id(weight)]
