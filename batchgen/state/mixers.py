"""Puts the packed mixers into a transformers model.

The model's recurrent layers keep their projections, gates and norms. Only the few functions that run along the sequence are replaced by
ours; transformers' forwards look them up by name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch

from batchgen.errors import ModelError
from batchgen.state.cache import StateShape


class Recurrence(Protocol):
    """The functions that recurrent layers call in a forward. `StateStep` implements them."""

    def convolve(
        self,
        layer: int,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor: ...
    def delta_rule(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, normalize: bool
    ) -> torch.Tensor: ...  # fmt: skip
    def mamba2(
        self, layer: int, x: torch.Tensor, dt: torch.Tensor, limit: tuple[float, float],
        a_H: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    ) -> torch.Tensor: ...  # fmt: skip


class RecurrentLayers:
    """The recurrent layers of a model that `install` has changed. They only run inside `running`."""

    def __init__(self, kinds: Iterable[str] = ()) -> None:
        self.kinds = set(kinds)
        """The kinds of mixers in them."""
        self._step: Recurrence | None = None

    @property
    def step(self) -> Recurrence:
        """The states of the present step. Raises `ModelError` outside of `running`."""
        if self._step is None:
            raise ModelError("a recurrent layer runs without a step's states")
        return self._step

    @contextmanager
    def running(self, step: Recurrence) -> Iterator[None]:
        """Inside the block the model's forwards read and write the states of `step`."""
        self._step = step
        try:
            yield
        finally:
            self._step = None


def install(model: torch.nn.Module) -> RecurrentLayers | None:
    """Changes the model's recurrent layers in place. Returns None if it has none.

    A recurrent layer is recognized by the functions that its forward calls. Raises `ModelError` for a layer without a layer index.
    """
    layers = RecurrentLayers()
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        names = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
        if not names & set(_SEAMS):
            continue
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise ModelError(f"{type(module).__name__} has no layer index")
        seams = {name: seam for name, seam in _SEAMS.items() if name in names}
        ours = {name: made(layers, index) for name, (_, made) in seams.items()}
        # The wrapper that transformers puts around the forward is for weights on another device, which are refused.
        packed = FunctionType(
            forward.__code__, forward.__globals__ | ours, forward.__name__, forward.__defaults__, forward.__closure__
        )
        packed.__kwdefaults__ = forward.__kwdefaults__
        # accelerate keeps a module's own forward under this name and calls it from its hooks.
        setattr(module, "_old_forward" if hasattr(module, "_hf_hook") else "forward", MethodType(packed, module))
        layers.kinds |= {kind for kind, _ in seams.values()}
    return layers if layers.kinds else None


def _convolution(layers: RecurrentLayers, layer: int) -> Callable[..., torch.Tensor]:
    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[1, C, T]"""
        out = layers.step.convolve(layer, hidden_states[0].t(), weight, bias, activation)
        return out.t().unsqueeze(0)

    return causal_conv1d_fn


def _delta_rule(layers: RecurrentLayers, layer: int) -> Callable[..., tuple[torch.Tensor, None]]:
    def chunk_gated_delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, T, H, V]"""
        out = layers.step.delta_rule(
            layer, query[0], key[0], value[0], g[0].float(), beta[0], use_qk_l2norm_in_kernel
        )
        return out.unsqueeze(0).to(query.dtype), None

    return chunk_gated_delta_rule


def _mamba2(layers: RecurrentLayers, layer: int) -> Callable[..., torch.Tensor]:
    def mamba2_chunk_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        **_: Any,
    ) -> torch.Tensor:
        """[1, T, H, P]"""
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = torch.nn.functional.softplus(dt)
        x = hidden_states[0].float()
        out = layers.step.mamba2(
            layer, x, dt[0].float(), (dt_limit[0], dt_limit[1]), A.float(), B[0].float(), C[0].float()
        )
        if D is not None:
            out = out + D[:, None] * x
        return out.unsqueeze(0)

    return mamba2_chunk_scan


_SEAMS: dict[str, tuple[str, Callable[[RecurrentLayers, int], Callable[..., Any]]]] = {
    "causal_conv1d_fn": ("convolution", _convolution),
    "torch_chunk_gated_delta_rule": ("gated delta rule", _delta_rule),
    "chunk_kimi_delta_attention": ("gated delta rule", _delta_rule),
    "mamba2_chunk_scan": ("Mamba2", _mamba2),
}
"""By the name of the function in transformers: the kind of mixer, and what makes our function for a layer."""


class StateProbe:
    """Stands in for the states of a step. Records the shape of each layer's state; returns outputs of the right shape."""

    def __init__(self) -> None:
        self.layers: dict[int, StateShape] = {}

    def convolve(
        self,
        layer: int,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        if layer in self.layers:
            raise ModelError(f"the model convolves twice in layer {layer}, which is not supported")
        self.layers[layer] = StateShape(weight_CK.shape[1] - 1, x_TC.shape[1], (), x_TC.device)
        return x_TC

    def delta_rule(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, normalize: bool
    ) -> torch.Tensor:  # fmt: skip
        self._note(layer, (v.shape[1], k.shape[2], v.shape[2]))
        return v

    def mamba2(
        self, layer: int, x: torch.Tensor, dt: torch.Tensor, limit: tuple[float, float],
        a_H: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        self._note(layer, (x.shape[1], x.shape[2], b.shape[2]))
        return x

    def _note(self, layer: int, recurrent: tuple[int, ...]) -> None:
        known = self.layers.get(layer)
        if known is None or known.recurrent:
            raise ModelError(f"layer {layer} has another order of convolution and recurrence than is supported")
        self.layers[layer] = StateShape(known.taps, known.channels, recurrent, known.device)
