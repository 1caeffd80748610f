"""What the forwards of a model call of torch, on a CPU, with the same bits for a row whatever is beside it: activations and linear functions.

Torch computes a tensor in vectors, and what is left over at its end and at the ends of the threads' parts number by number, which rounds otherwise
(float32: one of 10 to 30 numbers). Here tensors are filled up until nothing is left over. Torch's products of a row depend on the number of rows;
ours do not. Routers of mixtures call `functional.linear`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from batchgen.kernels.ops import linear_if_known
from batchgen.kernels.renaming import names_in, with_names

STEP = 64
"""Numbers that torch's loops take at a time: two vectors of at most 32."""
GRAIN = 1 << 15
"""Each of torch's threads gets so many numbers at least,"""
ALL_THREADS = 0x4000
"""but GELU is computed by all of them from so many on."""
_FUNCTIONS = {name: getattr(functional, name) for name in ("sigmoid", "softplus", "silu", "gelu", "logsigmoid")}
_NAMES = frozenset({*_FUNCTIONS, "linear"})
_MOVES = frozenset(
    (torch.split, *(getattr(torch.Tensor, name) for name in ("__getitem__", "float", "gather", "reshape", "split", "to", "type", "unsqueeze", "view")))
)  # fmt: skip
"""What is done with a layer's output before its activation."""
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
"""Modules of Python with classes of activations,"""
_NOT_ELEMENTWISE = tuple(
    getattr(torch.nn, name)
    for name in ("GLU", "LogSoftmax", "MultiheadAttention", "PReLU", "Softmax", "Softmax2d", "Softmin")
)
"""and others of them, whose result for a number depends on where it lies."""
_GATES = frozenset(("b_proj", "g_proj", "gate", "in_proj_b", "in_proj_ba"))
"""Names of layers whose outputs' method `sigmoid` is called."""


def filled(function: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of an elementwise function; `x` is filled up with zeros before, if it is on a CPU."""
    fill = _missing(x.numel()) if x.device.type == "cpu" else 0
    if not fill and x.is_contiguous():
        return function(x, *args, **kwargs)
    flat = functional.pad(x.reshape(-1), (0, fill))
    return function(flat, *args, **kwargs)[: x.numel()].view(x.shape)


def _missing(count: int) -> int:
    """Returns how many numbers a tensor of `count` lacks for each thread to have whole steps."""
    threads, size = torch.get_num_threads(), count
    while True:
        parts = threads if size > ALL_THREADS else 1
        rest = -size % (STEP * parts * max(1, min(threads, -(-size // GRAIN))))
        if not rest:
            return size - count
        size += rest


def fill_activations(model: torch.nn.Module) -> None:
    """Makes a model's forwards call ours in the place of these functions. Nothing may replace the forwards later."""
    module: Any
    in_class = cache(lambda kind, name: inspect.getattr_static(kind, name, None))  # layers are of the same few classes
    for module in reversed(list(model.modules())):  # a layer's own forward before what is done with its output
        if type(module).__module__ in _ACTIVATIONS and not isinstance(module, _NOT_ELEMENTWISE):
            module.forward = partial(filled, module.forward)
            continue
        if type(module).__module__.startswith("torch."):
            continue
        for name, value in list(vars(module).items()):
            if any(value is function for function in _FUNCTIONS.values()):
                setattr(module, name, partial(filled, value))
        calling = list(_calling(module, in_class))
        for name, function in calling:
            if ours := _ours(function, module):
                setattr(module, name, MethodType(with_names(function, ours), module))
        for layer in [layer for name, layer in module.named_children() if calling and name in _GATES]:
            layer.forward = partial(_marked, layer.forward)


def _calling(module: Any, in_class: Callable[[type, str], Any]) -> Iterator[tuple[str, FunctionType]]:
    """Yields a module's forward and the methods that it calls, of those that call such a function, with their names. `in_class` finds what a class defines."""
    todo, seen = ["forward"], {"forward"}
    for name in todo:
        own = module.__dict__.get(name)
        method = in_class(type(module), name) if own is None else getattr(own, "__func__", None)
        if not isinstance(method, FunctionType):
            continue
        function = inspect.unwrap(method)
        names = names_in(function)
        todo += sorted(names - seen)
        seen |= names
        if not names.isdisjoint(_NAMES) or ("super" in names and isinstance(module, torch.nn.Linear)):
            yield name, function


def _ours(function: FunctionType, module: Any) -> dict[str, Any]:
    """Returns what names in a function's code must mean for it to call our functions."""
    names = names_in(function)
    fills = not names.isdisjoint(_FUNCTIONS)
    linear = partial(_marked, linear_if_known) if fills else linear_if_known
    ours = _Replaced(functional, linear=linear, **{name: partial(filled, plain) for name, plain in _FUNCTIONS.items()})
    nn = _Replaced(torch.nn, functional=ours)
    stand_ins = {"F": ours, "nn": nn, "torch": _Replaced(torch, nn=nn, sigmoid=partial(filled, torch.sigmoid))}
    plain = {"F": functional, "nn": torch.nn} | ({"torch": torch} if fills else {})
    known = {name for name in names & plain.keys() if function.__globals__.get(name) is plain[name]}
    found: dict[str, Any] = {name: stand_ins[name] for name in known}
    if "super" in names and isinstance(module, torch.nn.Linear):  # routers of PhiMoE and Llama 4
        layer = SimpleNamespace(forward=lambda x: linear_if_known(x, module.weight, module.bias))
        found["super"] = lambda: layer
    return found


class _Replaced:
    """A module of Python of which some attributes have other values."""

    def __init__(self, plain: Any, **own: Any) -> None:
        self._plain = plain
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class _Marked(torch.Tensor):
    """The output of a layer whose activations are `filled`, also where they are methods."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.Tensor.sigmoid:
                return filled(function, *args, **(kwargs or {}))
            out = function(*args, **(kwargs or {}))
            if function not in _MOVES:
                return out
            return (
                out.as_subclass(cls) if isinstance(out, torch.Tensor) else tuple(part.as_subclass(cls) for part in out)
            )


def _marked(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out = forward(*args, **kwargs)
    return out.as_subclass(_Marked) if isinstance(out, torch.Tensor) else out
