"""Torch's activations on a CPU, with the same bits for a number wherever it lies in a tensor.

Torch computes a tensor in vectors, and what is left over at its end and at the ends of the threads' parts number by number, which rounds otherwise
(float32: one of 10 to 30 numbers). So a row's bits would depend on the rows beside it. Here tensors are filled up until nothing is left over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn import functional

from batchgen.kernels.renaming import Replaced, names_in, with_names

STEP = 64
"""Numbers that torch's loops take at a time: two vectors of at most 32."""
GRAIN = 1 << 15
"""Each of torch's threads gets so many numbers at least,"""
ALL_THREADS = 0x6000
"""but GELU is computed by all of them from so many on."""
_FUNCTIONS = {name: getattr(functional, name) for name in ("sigmoid", "softplus", "silu", "gelu", "logsigmoid")}
_METHODS = (torch.Tensor.sigmoid,)
_MOVES = frozenset(
    (torch.split, *(getattr(torch.Tensor, name) for name in ("__getitem__", "float", "reshape", "split", "to", "type", "view")))
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
    """Makes what a model calls of these functions fill up its tensors. Nothing may replace its forwards later."""
    module: Any
    for module in reversed(list(model.modules())):  # a layer's own forward before what is done with its output
        if type(module).__module__ in _ACTIVATIONS and not isinstance(module, _NOT_ELEMENTWISE):
            module.forward = partial(filled, module.forward)
            continue
        for name, value in list(vars(module).items()):
            if any(value is function for function in _FUNCTIONS.values()):
                setattr(module, name, partial(filled, value))
        calling = list(_calling(module))
        for name, function in calling:
            setattr(module, name, MethodType(with_names(function, _fillers(function)), module))
        for layer in [layer for name, layer in module.named_children() if calling and name in _GATES]:
            layer.forward = partial(_marked, layer.forward)


def _calling(module: Any) -> Iterator[tuple[str, FunctionType]]:
    """Yields a module's forward and the methods that it calls, of those that call such a function, with their names."""
    todo, seen = ["forward"], {"forward"}
    for name in todo:
        own = module.__dict__.get(name)
        method = inspect.getattr_static(type(module), name, None) if own is None else getattr(own, "__func__", None)
        if not isinstance(method, FunctionType):
            continue
        function = inspect.unwrap(method)
        names = names_in(function)
        todo += sorted(names - seen)
        seen |= names
        if not names.isdisjoint(_FUNCTIONS):
            yield name, function


def _fillers(function: FunctionType) -> dict[str, Any]:
    """Returns what names in a function's code must mean for its activations to be `filled`."""
    known = function.__globals__
    nn = known.get("nn", torch.nn)
    fillers = {"F": _with_ours(known.get("F", functional)), "nn": Replaced(nn, functional=_with_ours(nn.functional))}
    fillers["torch"] = Replaced(torch, nn=fillers["nn"], sigmoid=partial(filled, torch.sigmoid))
    return {name: fillers[name] for name in fillers.keys() & known.keys() & names_in(function)}


def _with_ours(plain: Any) -> Replaced:
    """`plain` is `torch.nn.functional`, or what stands for it already."""
    ours = {name: partial(filled, function) for name, function in _FUNCTIONS.items()}
    return Replaced(plain, linear=partial(_marked, plain.linear), **ours)


class _Marked(torch.Tensor):
    """The output of a layer whose activations are `filled`, also where they are methods."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function in _METHODS:
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
