"""How parts of a loaded model are replaced by kernels: in their places, packed, and only if the kernel gives the same result on random numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers.activations import GELUTanh, SiLUActivation

from batchgen.kernels.codes import PackedTensor
from batchgen.kernels.ops import Activation, Gating, KernelLinear, PackedAdapter, PackedLinear, fits
from batchgen.kernels.recognition import Code, code_of

NEAR = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}
"""Largest allowed difference of a replacement, relative to the largest number: some roundings, but far less than a mistake."""
ACTIVATIONS = {
    torch.nn.SiLU: Activation.SILU,
    SiLUActivation: Activation.SILU,
    GELUTanh: Activation.GELU_TANH,
}

Around = Callable[[torch.nn.Module], AbstractContextManager[Any]]
"""Returns the context in which a part of a model is packed."""


class Packing:
    """Packs the weights of linear layers in their own type. `quantization.Int8Packing` packs them in 8 bits."""

    packs_tied = True
    """Whether weights that several modules share are packed."""

    def __init__(self, around: Around = nullcontext) -> None:
        """`around`: returns the context in which a part is packed."""
        self.around = around
        self._agreed: set[Any] = set()

    def agrees(self, part: Any, fused: Any, weights: list[torch.Tensor], *, adapted: bool = False) -> bool:
        """Whether a replacement gives what the part does. Of layers of codes, which are slow to unpack for this, one of each form is compared, and
        one that is `adapted`."""
        dtype, size = weights[0].dtype, weights[0].shape[-1]
        coded = all(isinstance(weight, PackedTensor) for weight in weights)
        key = (type(fused), adapted, *(getattr(weight, "coding", None) for weight in weights))
        if coded and key in self._agreed:
            return True
        agrees = agree(part, fused, size, dtype, self.tolerance(dtype))
        if coded and agrees:
            self._agreed.add(key)
        return agrees

    def can_pack(self, layer: torch.nn.Linear) -> bool:
        return fits(layer.weight)

    def can_pack_experts(self, weights: list[torch.Tensor]) -> bool:
        return all(map(fits, weights))

    def pack(
        self,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        activation: Activation | Gating = Activation.NONE,
        layers: Sequence[torch.nn.Linear] = (),
    ) -> KernelLinear:
        """Packs one weight, or gate and up, of `layers` or, without these, of a mixture's experts [E, N, K]. They may be packed ones.

        Gate and up may be halves of one layer.
        """
        made = PackedLinear(weights, biases, activation)
        made.adapter = adapter_of(layers, len(weights))
        return made

    def tolerance(self, dtype: torch.dtype) -> float:
        """Returns the largest allowed difference from the plain layers, relative to the largest number."""
        return NEAR[dtype]


def can_fuse(model: torch.nn.Module) -> bool:
    """Whether kernels may replace parts of this model."""
    return not getattr(model, "is_quantized", False) and all(p.device.type == "cpu" for p in model.parameters())


def replace_parts(
    model: torch.nn.Module, made: Callable[[torch.nn.Module], torch.nn.Module | None], around: Around = nullcontext
) -> None:
    for part, places in _parts(model):
        with around(part):
            fused = made(part)
        if fused is not None:
            for parent, name in places:
                parent._modules[name] = fused


def _parts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, list[tuple[torch.nn.Module, str]]]]:
    """Yields every module below the model with all its places (parent, name). Keeps no reference to it afterwards, so that a replaced one is freed."""
    places: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    parts = list(places)
    while parts:
        part = parts.pop()
        yield part, places.pop(part)


def linear_of(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.nn.Linear:
    """Returns a linear layer with these weights."""
    made = torch.nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=bias_N is not None, device="meta")
    made.weight = torch.nn.Parameter(weight_NK.detach(), requires_grad=False)
    if bias_N is not None:
        made.bias = torch.nn.Parameter(bias_N.detach(), requires_grad=False)
    return made


class AdaptedLinear(torch.nn.Linear):
    """A linear layer, and what a LoRA adapter adds to its output: y = x W^T + bias + up(down(x))."""

    def __init__(self, linear: torch.nn.Linear, down: torch.Tensor, up: torch.Tensor) -> None:
        """`linear` [N, K] gives weight and bias; `down` [R, K] and `up` [N, R] are the adapter's, scaled."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        weight: Any = linear.weight  # may be packed, which torch takes for no parameter
        self._parameters |= {"weight": weight, "bias": linear.bias}
        self.down = torch.nn.Parameter(down, requires_grad=False)
        self.up = torch.nn.Parameter(up, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps [..., K] to [..., N]."""
        return torch.nn.functional.linear(input, self.weight, self.bias).add_(self.added(input))

    def added(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch.nn.functional.linear(x, self.down), self.up)


def adapter_of(layers: Sequence[torch.nn.Linear], parts: int) -> PackedAdapter | None:
    """Returns the adapters of layers that read the same x as one, whose output has `parts` equal parts; None without adapters."""
    adapted = [layer for layer in layers if isinstance(layer, AdaptedLinear)]
    if not adapted:
        return None
    down = torch.cat([layer.down for layer in adapted])
    ups = [getattr(layer, "up", down.new_zeros(layer.out_features, 0)) for layer in layers]
    return PackedAdapter(down, list(torch.block_diag(*ups).chunk(parts)))  # type: ignore[no-untyped-call]


def own_forward(part: torch.nn.Module) -> Callable[..., Any] | None:
    """Returns the forward of the module's class, without decorators; None if the module has hooks or a forward of its own.

    Decorators of transformers take old names of arguments, and weights on other devices.
    """
    hooked = [*part._forward_hooks, *part._forward_pre_hooks, *(part.__dict__.keys() & {"forward", "_hf_hook"})]
    return None if hooked else inspect.unwrap(type(part).forward)


def known_code(part: torch.nn.Module) -> Code | None:
    """Returns what a module's forward computes; None if it is not known, or if the module has hooks or a forward of its own."""
    forward = own_forward(part)
    return None if forward is None else code_of(forward, type(part))


def first_part(module: torch.nn.Module, *names: str) -> Any:
    """Returns the first of these parts that a module has; None if it has none of them."""
    return next((part for part in map(module._modules.get, names) if part is not None), None)


def is_plain(tensor: Any) -> bool:
    return type(tensor) is torch.nn.Parameter and tensor.is_floating_point() and tensor.layout == torch.strided


def agree(part: Callable[..., Any], fused: Callable[..., Any], size: int, dtype: torch.dtype, tolerance: float) -> bool:
    """Whether the two give the same result on random numbers."""
    x = random_numbers(torch.Generator().manual_seed(0), 1, 3, size).to(dtype)
    return near(fused(x), part(x), tolerance)


def random_numbers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    difference = (a.float() - b.float()).abs().max()
    return a.shape == b.shape and a.dtype == b.dtype and bool(difference <= tolerance * b.float().abs().max())
