"""Replaces norms, gated norms, rotary embeddings, gated MLPs, experts and linear layers of a loaded model by the kernels for the CPU.

A part is replaced only if its code is known (`recognition`) and the kernel gives the same result on random numbers.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from transformers.activations import GELUTanh, SiLUActivation

from batchgen.kernels import recurrent
from batchgen.kernels.build import DTYPES
from batchgen.kernels.coded import PartsInPanels
from batchgen.kernels.codes import PackedTensor
from batchgen.kernels.experts import FusedExperts, LinearOfExperts, MixtureOfScaledInputs
from batchgen.kernels.ops import (
    Activation,
    Gating,
    KernelLinear,
    PackedLinear,
    SharedLinear,
    cos_and_sin,
    embed,
    fits,
    is_fast,
    linear,
    norm_after_sum,
    rotate,
    take_coded_rows,
)
from batchgen.kernels.recognition import Code, code_of
from batchgen.kernels.renaming import Replaced, names_in, with_names

NEAR = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}
"""Largest allowed difference of a replacement, relative to the largest number: some roundings, but far less than a mistake."""
ACTIVATIONS = {
    torch.nn.SiLU: Activation.SILU,
    SiLUActivation: Activation.SILU,
    GELUTanh: Activation.GELU_TANH,
}
COMPARED_ROWS = 256
"""Rows of a packed weight of a linear layer that are compared with the plain ones."""

Around = Callable[[torch.nn.Module], AbstractContextManager[Any]]
"""Returns the context in which a part of a model is packed."""


class Packing:
    """Packs the weights of linear layers in their own type. `quantization.Int8Packing` packs them in 8 bits."""

    def __init__(self, around: Around = nullcontext) -> None:
        """`around`: returns the context in which a part is packed."""
        self.around = around
        self._agreed: set[Any] = set()

    def agrees(self, part: Any, fused: Any, weights: list[torch.Tensor]) -> bool:
        """Whether a replacement gives what the part does. Of layers of codes, which are slow to unpack for this, one of each form is compared."""
        dtype, size = weights[0].dtype, weights[0].shape[-1]
        coded = all(isinstance(weight, PackedTensor) for weight in weights)
        key = (type(fused), *(getattr(weight, "coding", None) for weight in weights))
        if coded and key in self._agreed:
            return True
        agrees = _agree(part, fused, size, dtype, self.tolerance(dtype))
        if coded and agrees:
            self._agreed.add(key)
        return agrees

    def can_pack(self, layer: torch.nn.Linear) -> bool:
        return fits(layer.weight) and is_fast()

    def can_pack_experts(self, weights: list[torch.Tensor]) -> bool:
        return all(map(fits, weights)) and is_fast()

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
        return PackedLinear(weights, biases, activation)

    def tolerance(self, dtype: torch.dtype) -> float:
        """Returns the largest allowed difference from the plain layers, relative to the largest number."""
        return NEAR[dtype]


def fuse_small_parts(model: torch.nn.Module) -> None:
    """Replaces rotary embeddings, norms, gated norms and embeddings."""
    if can_fuse(model):
        fuse_rotary(model, rotate, FusedRotary.agrees)
        replace_parts(model, _norm)
        replace_parts(model, _gated_norm)
        for module in model.modules():
            _fuse_forward(module)


@torch.inference_mode()
def fuse_linear(model: torch.nn.Module, packing: Packing) -> None:
    """Replaces linear layers, gated MLPs, experts and convolutions over patches."""
    if can_fuse(model):
        shared = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        replace_parts(model, lambda part: _mlp(part, shared, packing), packing.around)
        replace_parts(model, lambda part: _experts(part, shared, packing), packing.around)
        _fuse_functional(model)
        replace_parts(model, _patches)
        replace_parts(model, lambda part: _linear(part, shared, packing), packing.around)


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


class FusedNorm(torch.nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, weight: torch.Tensor, offset: float, eps: float, rounds_first: bool) -> None:
        """Multiplies by `weight` + `offset`. `rounds_first`: see `norm_after_sum`."""
        super().__init__()
        self.weight = weight
        self.dtype = weight.dtype
        self.factor = weight.detach().float() + offset
        self.eps = eps
        self.rounds_first = rounds_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm in the dtype of `x`: Mamba keeps its residual in float32 beside bfloat16 weights."""
        return self.after_sum(x, None)[1]

    def after_sum(
        self, x: torch.Tensor, more: torch.Tensor | None, by: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x + more * by and its norm; without `more`, x and its norm."""
        if x.dtype not in (self.dtype, torch.float32):
            raise ValueError(f"expected {self.dtype} or float32, not {x.dtype}")
        return norm_after_sum(x, self.factor, self.eps, self.rounds_first, more, by)


_NORMS = {Code.NORM: (0.0, False), Code.ROUNDED_NORM: (0.0, True), Code.NORM_PLUS_ONE: (1.0, False)}
"""By code: `offset` and `rounds_first` of a `FusedNorm`."""


def norm_of(part: Any, dtypes: Collection[torch.dtype]) -> tuple[float, bool] | None:
    """Returns `offset` and `rounds_first` of a `FusedNorm` for a norm whose code is known and whose weight has one of these types; None for other modules."""
    code = known_code(part)
    weight: Any = getattr(part, "weight", None)
    if (
        code not in _NORMS
        or not is_plain(weight)
        or weight.dtype not in dtypes
        or weight.dim() != 1
        or getattr(part, "with_scale", True) is not True
    ):
        return None
    return _NORMS[code]


def eps_of(norm: Any) -> float:
    """Returns what a norm of transformers adds to the mean of squares."""
    eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return eps


def _norm(part: Any) -> torch.nn.Module | None:
    found = norm_of(part, DTYPES)
    if found is None:
        return None
    weight = part.weight
    fused = FusedNorm(weight, found[0], eps_of(part), rounds_first=found[1])
    return fused if _agree(part, fused, weight.shape[0], weight.dtype, NEAR[weight.dtype]) else None


class FusedGatedNorm(torch.nn.Module):
    """Root mean square norm of recurrent layers, which a gate multiplies before or after."""

    def __init__(self, plain: Any, *, gate_first: bool, rounds: bool) -> None:
        """`plain` is the module that this one replaces. `rounds`: see `gated_norm`."""
        super().__init__()
        self.plain = plain
        self.weight = plain.weight
        self.factor = plain.weight.detach().float()
        self.eps = float(plain.variance_epsilon)
        size = self.factor.shape[0]
        self.groups = size // getattr(plain, "group_size", size)
        self.gate_first = gate_first
        self.sigmoid = getattr(plain, "activation", "silu") == "sigmoid"
        self.rounds = rounds

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the norm in the dtype of `x`: the inputs in Mamba2 are float32 beside bfloat16 weights.

        With float32 weights and bfloat16 values, some modules round elsewhere or return float32, so the plain module runs.
        """
        known = x.dtype in (self.weight.dtype, torch.float32)
        if gate is None or not known or not recurrent.can_gated_norm(x, gate):
            plain: torch.Tensor = self.plain(x, gate)
            return plain
        return recurrent.gated_norm(
            x, gate, self.factor, self.eps,
            groups=self.groups, gate_first=self.gate_first, sigmoid=self.sigmoid, rounds=self.rounds,
        )  # fmt: skip


_GATED_NORMS = {
    Code.GATE_BEFORE_NORM: (True, True),
    Code.GATE_AFTER_NORM: (False, False),
    Code.GATE_AFTER_ROUNDED_NORM: (False, True),
}
"""By code: `gate_first` and `rounds` of a `FusedGatedNorm`."""


def _gated_norm(part: Any) -> torch.nn.Module | None:
    code = known_code(part)
    weight: Any = getattr(part, "weight", None)
    if (
        code not in _GATED_NORMS
        or not is_plain(weight)
        or weight.dtype not in DTYPES
        or weight.dim() != 1
        or getattr(part, "activation", "silu") not in ("silu", "sigmoid")
        or weight.shape[0] % getattr(part, "group_size", 1)
    ):
        return None
    gate_first, rounds = _GATED_NORMS[code]
    fused = FusedGatedNorm(part, gate_first=gate_first, rounds=rounds)
    gate = _random(torch.Generator().manual_seed(1), 1, 3, weight.shape[0]).to(weight.dtype)
    near = NEAR[weight.dtype]
    agrees = _agree(lambda x: part(x, gate), lambda x: fused(x, gate), weight.shape[0], weight.dtype, near)
    return fused if agrees else None


class FusedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x))"""

    def __init__(self, gate_up: torch.nn.Module, down: torch.nn.Module) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.gate_up(x))
        return y


OF_MLPS = (
    ("gate_proj", "up_proj", "down_proj", "act_fn"),
    ("gate_up_proj", "down_proj", "activation_fn"),
    ("input_linear", "output_linear", "activation"),
)
"""The names of the parts of gated MLPs in transformers."""


def _mlp(part: Any, shared: Counter[int], packing: Packing) -> torch.nn.Module | None:
    if known_code(part) is not Code.GATED_MLP:
        return None
    names = next(names for names in OF_MLPS if hasattr(part, names[0]))
    *gates, down, activation = (getattr(part, name) for name in names)
    act = ACTIVATIONS.get(type(activation))
    if act is None or not all(_can_pack(layer, shared, packing) for layer in (*gates, down)):
        return None
    weights = [half for layer in gates for half in layer.weight.chunk(3 - len(gates))]
    biases = [half for layer in gates for half in _halves(layer.bias, 3 - len(gates))]
    if weights[0].shape != weights[1].shape:
        return None
    gate_up = packing.pack(weights, biases, act, gates)
    fused = FusedMLP(gate_up, packing.pack([down.weight], [down.bias], layers=[down]))
    return fused if packing.agrees(part, fused, [*weights, down.weight]) else None


def _experts(part: Any, shared: Counter[int], packing: Packing) -> torch.nn.Module | None:
    """Returns what replaces the experts of a mixture; None for other modules."""
    made = _OTHER_EXPERTS.get(known_code(part), _decorated_experts)
    return made(part, shared, packing)


def _decorated_experts(part: Any, shared: Counter[int], packing: Packing) -> torch.nn.Module | None:
    """Replaces experts that transformers' `use_experts_implementation` has decorated."""
    names = ("gate_up_proj" if getattr(part, "has_gate", True) else "up_proj", "down_proj")
    found: list[Any] = [part._parameters.get(name) for name in names]
    if (
        not hasattr(part, "_apply_gate")
        or not hasattr(part, "is_transposed")
        or own_forward(part) is None
        or getattr(part, "_is_expert_parallel", False)
        or getattr(part, "has_post_expert_norm", False)
        or not all(isinstance(p, PackedTensor) or is_plain(p) for p in found)
        or any(p.dim() != 3 or shared[id(p)] > 1 for p in found)
    ):
        return None
    first, down = (p.transpose(1, 2) if part.is_transposed else p for p in found)
    if not packing.can_pack_experts([first, down]):
        return None
    first_bias, down_bias = (part._parameters.get(f"{name}_bias") for name in names)
    gate = _gate_of(part)
    weights, biases = [first], [first_bias]
    if gate.activation is not Activation.NONE:
        weights = _gate_and_up(first, together=part.is_concatenated)
        biases = [None, None] if first_bias is None else _gate_and_up(first_bias, together=part.is_concatenated)
    fused = FusedExperts(packing.pack(weights, biases, gate), packing.pack([down], [down_bias]), part)
    few, places = _few_experts(part)
    index, by = torch.tensor([[0, 1]] * 3), torch.tensor([[0.5, 0.25]]).to(first.dtype).expand(3, 2)
    agrees = packing.agrees(lambda x: few(x[0], index, by), lambda x: fused(x[0], places[index], by), [*weights, down])
    if not agrees:
        return None
    if fused.plain is not None:
        for name in [*names, *(f"{name}_bias" for name in names)]:
            part._parameters.pop(name, None)
    return fused


def _gate_of(part: Any) -> Gating:
    """Returns how experts make one number of two; an activation of NONE if the kernels do not know that."""
    code = code_of(type(part)._apply_gate, type(part)) if part.has_gate else None
    if code is Code.EXPERTS_GATE:
        return Gating(ACTIVATIONS.get(type(part.act_fn), Activation.NONE))
    if code is Code.CLAMPED_GATE:
        alpha, limit = ((getattr(part, name, None) or getattr(part, f"swiglu_{name}")) for name in ("alpha", "limit"))
        return Gating(Activation.CLAMPED, float(alpha), float(limit))
    return Gating()


def _gate_and_up(x: Any, *, together: bool) -> list[Any]:
    """Returns the two halves of [E, 2 N, ...], of which the first half lies before the second or, not `together`, each number before its pair."""
    return list(x.chunk(2, 1)) if together else [x[:, ::2], x[:, 1::2]]


def _few_experts(part: Any) -> tuple[Any, torch.Tensor]:
    """Returns a copy of a module of experts that has only the first and the last one, and their numbers in the module."""
    few = copy.copy(part)
    places = torch.tensor([0, len(part.down_proj) - 1])
    few._parameters = {
        name: torch.nn.Parameter(weight[places], requires_grad=False) for name, weight in part._parameters.items()
    }
    few.num_experts = 2
    return few, places


def _linear_of_experts(part: Any, shared: Counter[int], packing: Packing) -> torch.nn.Module | None:
    """Replaces JetMoE's: each expert of an MLP or of attention is two of these layers."""
    weight = part.weight
    if not (is_plain(weight) and shared[id(weight)] == 1 and packing.can_pack_experts([weight])):
        return None
    fused = LinearOfExperts(packing.pack([weight], [None]))
    counts = [3] if len(weight) == 1 else [1, *[0] * (len(weight) - 2), 2]
    return fused if packing.agrees(lambda x: part(x[0], counts), lambda x: fused(x[0], counts), [weight]) else None


def _experts_in_one_weight(part: Any, shared: Counter[int], packing: Packing) -> torch.nn.Module | None:
    """Replaces DBRX's."""
    names = ("w1", "v1", "w2")
    if not _are_plain([getattr(part.mlp, name) for name in names], shared):
        return None
    gate, up, down = (getattr(part.mlp, name).view(part.num_experts, -1, part.hidden_size) for name in names)
    return _gated_experts(part, part.mlp.activation_fn, [gate, up], down.transpose(1, 2), packing)


def _experts_with_identities(part: Any, shared: Counter[int], packing: Packing) -> torch.nn.Module | None:
    """Replaces LongCat's."""
    if not _are_plain([part.gate_up_proj, part.down_proj], shared):
        return None
    gate_up = part.gate_up_proj[: part.num_routed_experts]
    return _gated_experts(
        part, part.act_fn, list(gate_up.chunk(2, 1)), part.down_proj, packing, identities=part.zero_expert_num
    )


def _gated_experts(
    part: Any, act_fn: Any, gate_and_up: list[torch.Tensor], down: torch.Tensor, packing: Packing, identities: int = 0
) -> torch.nn.Module | None:
    fused = _packed_experts(act_fn, gate_and_up, down, packing, identities)
    last = len(down) + identities - 1
    index, by = torch.tensor([[0, last]] * 3), torch.tensor([[0.5, 0.25]]).to(down.dtype).expand(3, 2)
    if fused is None or not packing.agrees(
        lambda x: part(x[0], index, by).flatten(0, -2), lambda x: fused(x[0], index, by), [*gate_and_up, down]
    ):
        return None
    return fused


def _packed_experts(
    act_fn: Any, gate_and_up: list[torch.Tensor], down: torch.Tensor, packing: Packing, identities: int = 0
) -> FusedExperts | None:
    act = ACTIVATIONS.get(type(act_fn))
    if act is None or not packing.can_pack_experts([*gate_and_up, down]):
        return None
    up = packing.pack(gate_and_up, [None, None], act)
    return FusedExperts(up, packing.pack([down], [None]), identities=identities)


def _mixture_of_scaled_inputs(part: Any, shared: Counter[int], packing: Packing) -> torch.nn.Module | None:
    """Replaces Llama 4's, which runs every expert on every token."""
    plain = [part.experts.gate_up_proj, part.experts.down_proj]
    if not _are_plain(plain, shared):
        return None
    gate_up, down = (weight.transpose(1, 2) for weight in plain)
    experts = _packed_experts(part.experts.act_fn, list(gate_up.chunk(2, 1)), down, packing)
    if experts is None:
        return None
    fused = MixtureOfScaledInputs(part, experts)
    return fused if packing.agrees(lambda x: part(x)[0], lambda x: fused(x)[0], [gate_up, down]) else None


_OTHER_EXPERTS: dict[Code | None, Callable[[Any, Counter[int], Packing], torch.nn.Module | None]] = {
    Code.LINEAR_OF_EXPERTS: _linear_of_experts,
    Code.EXPERTS_IN_ONE_WEIGHT: _experts_in_one_weight,
    Code.EXPERTS_WITH_IDENTITIES: _experts_with_identities,
    Code.SCALED_INPUTS: _mixture_of_scaled_inputs,
}


def _are_plain(weights: list[Any], shared: Counter[int]) -> bool:
    return all(weight is not None and is_plain(weight) and shared[id(weight)] == 1 for weight in weights)


def _linear_by_kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes what torch's linear layer does, if possible with a kernel."""
    known = weight.dtype in DTYPES and fits(weight) and weight.is_contiguous() and weight.dim() == 2
    if known and x.dtype == weight.dtype and x.device.type == "cpu":
        return linear(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def _fuse_functional(model: torch.nn.Module) -> None:
    """Gives routers and other modules that call `functional.linear` a copy of their forward in which it is a kernel: torch's result for a
    row depends on the rows beside it.
    """
    for module in model.modules() if is_fast() else ():
        forward: Any = None if type(module).__module__.startswith("torch.") else own_forward(module)
        stand_ins = {} if forward is None else _stand_ins(module, forward)
        if stand_ins:
            module.forward = MethodType(with_names(forward, stand_ins), module)


def _stand_ins(module: Any, forward: Any) -> dict[str, Any]:
    """Returns what names in a module's forward must mean for its linear layer to be a kernel; nothing if it calls no such function."""
    names = names_in(forward)
    if "super" in names and isinstance(module, torch.nn.Linear):  # it is the layer itself (PhiMoE, Llama 4)
        layer = SimpleNamespace(forward=lambda x: _linear_by_kernel(x, module.weight, module.bias))
        return {"super": lambda: layer}
    found = {name: forward.__globals__.get(name) for name in names & {"F", "nn"} if "linear" in names}
    if found.get("F") is not torch.nn.functional and found.get("nn") is not torch.nn:
        return {}
    functional = Replaced(torch.nn.functional, linear=_linear_by_kernel)
    stand_ins = {"F": functional, "nn": Replaced(torch.nn, functional=functional)}
    return {name: stand_ins[name] for name, value in found.items() if value is not None}


def _halves(bias: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
    return [None] * count if bias is None else list(bias.chunk(count))


def as_linear(part: Any) -> torch.nn.Linear | None:
    """Returns torch's linear layer in the place of one of GPT-2 or Falcon, which have code of their own."""
    code = known_code(part)
    if code not in (Code.LINEAR, Code.TRANSPOSED_LINEAR) or not is_plain(part.weight):
        return None
    weight = part.weight if code is Code.LINEAR else torch.nn.Parameter(part.weight.t(), requires_grad=False)
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made._parameters.update(weight=weight, bias=part.bias)
    return made


def _linear(part: Any, shared: Counter[int], packing: Packing) -> torch.nn.Module | None:
    plain, part = part, as_linear(part) or part
    if not _can_replace(part):
        return None
    dtype = part.weight.dtype
    if shared[id(part.weight)] > 1 and not isinstance(part.weight, PackedTensor):
        if not (part.weight.is_contiguous() and fits(part.weight) and is_fast()):
            return None
        fused: torch.nn.Module = SharedLinear(part.weight, part.bias)
        return fused if _agree(plain, fused, part.in_features, dtype, NEAR[dtype]) else None
    if not packing.can_pack(part):
        return None
    weight, bias = part.weight, part.bias
    fused = packing.pack([weight], [bias], layers=[part])
    if isinstance(weight, PackedTensor):  # of a head, which is large when it is unpacked, some rows are enough
        few, few_biases = weight[:COMPARED_ROWS], None if bias is None else bias[:COMPARED_ROWS]
        agrees = packing.agrees(
            lambda x: torch.nn.functional.linear(x, few, few_biases), lambda x: fused(x)[..., :COMPARED_ROWS], [weight]
        )
    else:
        agrees = packing.agrees(plain, fused, [weight])
    if not agrees:
        return None
    codes = getattr(fused, "codes", None)
    if shared[id(weight)] > 1 and codes is not None:  # the embedding takes its rows from the codes of the head
        like = torch.empty(weight.shape, dtype=dtype, device="meta")
        weight.parts, weight.take_rows = PartsInPanels(codes, len(weight)), partial(take_coded_rows, codes, like)
    return fused


class FusedPatches(torch.nn.Module):
    """A convolution over patches that lie side by side: a linear layer of each patch. torch has no fast one in bfloat16 everywhere."""

    def __init__(self, plain: Any) -> None:
        """`plain` is the convolution that this module replaces."""
        super().__init__()
        self.weight, self.bias, self.size = plain.weight, plain.bias, plain.kernel_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [N, C, sizes of an image] to [N, D, numbers of patches]. What does not fill a patch is left out."""
        if x.dtype != self.weight.dtype:
            raise ValueError(f"expected {self.weight.dtype}, not {x.dtype}")
        counts = [whole // side for whole, side in zip(x.shape[2:], self.size, strict=True)]
        for i, (count, side) in enumerate(zip(counts, self.size, strict=True)):
            at = 2 + 2 * i
            x = x.narrow(at, 0, count * side).reshape(*x.shape[:at], count, side, *x.shape[at + 1 :])
        patches = x.permute(0, *range(2, x.dim(), 2), 1, *range(3, x.dim(), 2)).flatten(1 + len(counts))
        return linear(patches, self.weight.flatten(1), self.bias).movedim(-1, 1).contiguous()


def _patches(part: Any) -> torch.nn.Module | None:
    if (
        type(part) not in (torch.nn.Conv2d, torch.nn.Conv3d)
        or own_forward(part) is None
        or not is_plain(part.weight)
        or not part.weight.is_contiguous()
        or part.stride != part.kernel_size
        or part.padding not in ("valid", (0,) * len(part.kernel_size))
        or part.groups != 1
        or set(part.dilation) != {1}
        or not (fits(part.weight.flatten(1)) and is_fast())
    ):
        return None
    fused = FusedPatches(part)
    sizes = [2 * side + 1 for side in part.kernel_size]
    x = _random(torch.Generator().manual_seed(0), 1, part.in_channels, *sizes).to(part.weight.dtype)
    return fused if _near(fused(x), part(x), NEAR[part.weight.dtype]) else None


def _can_pack(part: Any, shared: Counter[int], packing: Packing) -> bool:
    """Whether this is a plain linear layer whose weights no other module shares, such as an embedding."""
    return _can_replace(part) and shared[id(part.weight)] == 1 and packing.can_pack(part)


def _can_replace(part: Any) -> bool:
    bias = getattr(part, "bias", None)
    return (
        type(part) is torch.nn.Linear
        and own_forward(part) is not None
        and (isinstance(part.weight, PackedTensor) or is_plain(part.weight))
        and (bias is None or is_plain(bias))
    )


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


def is_plain(tensor: Any) -> bool:
    return type(tensor) is torch.nn.Parameter and tensor.is_floating_point() and tensor.layout == torch.strided


def _agree(
    part: Callable[..., Any], fused: Callable[..., Any], size: int, dtype: torch.dtype, tolerance: float
) -> bool:
    """Whether the two give the same result on random numbers."""
    x = _random(torch.Generator().manual_seed(0), 1, 3, size).to(dtype)
    return _near(fused(x), part(x), tolerance)


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _near(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    difference = (a.float() - b.float()).abs().max()
    return a.shape == b.shape and a.dtype == b.dtype and bool(difference <= tolerance * b.float().abs().max())


def _fuse_forward(module: Any) -> None:
    """Gives an embedding, or a module that makes cos and sin, a forward that does not use torch's threads.

    torch has a pool of threads beside that of the kernels. Threads of one pool that look for work would keep the other's from the cores.
    """
    if _is_plain_embedding(module) and own_forward(module) is not None:
        module.forward = MethodType(embed, module)
    if _is_plain_rotary(module):
        module.forward = MethodType(cos_and_sin, module)


def _is_plain_embedding(module: Any) -> bool:
    return (
        type(module) is torch.nn.Embedding
        and module.max_norm is None
        and is_plain(module.weight)
        and module.weight.is_contiguous()
    )


def _is_plain_rotary(module: Any) -> bool:
    """Whether cos and sin of a position are the same in every step."""
    kind = getattr(module, "rope_type", None)
    return (
        known_code(module) is Code.COS_AND_SIN
        and isinstance(kind, str)
        and kind != "longrope"
        and "dynamic" not in kind
    )


def fuse_rotary(model: torch.nn.Module, rotate: Callable[..., Any], agrees: Callable[[FusedRotary], bool]) -> None:
    """Gives attention modules a copy of their forward in which the name `apply_rotary_pos_emb` means the kernel `rotate`, if it `agrees`."""
    made: dict[Callable[..., Any], FusedRotary | None] = {}
    module: Any
    for module in model.modules():
        forward: Any = own_forward(module)
        if _ROTARY not in names_in(forward):
            continue
        plain = forward.__globals__[_ROTARY]
        if plain not in made:
            code = code_of(plain)
            found = FusedRotary(plain, rotate, keeps_type=code is Code.ROTARY_KEEPS_TYPE)
            known = code in (Code.ROTARY, Code.ROTARY_KEEPS_TYPE)
            made[plain] = found if known and agrees(found) else None
        fused = made[plain]
        if fused is not None:
            module.fused_rotary = fused
            module.forward = MethodType(with_names(forward, {_ROTARY: fused}), module)


_ROTARY = "apply_rotary_pos_emb"


class FusedRotary:
    """`apply_rotary_pos_emb` with the kernel; with the model's own function if the kernel does not support the call."""

    def __init__(self, plain: Callable[..., Any], rotate: Callable[..., Any], keeps_type: bool) -> None:
        """`rotate`: the kernel; it returns None for what it does not support."""
        self.plain = plain
        self.rotate = rotate
        self.keeps_type = keeps_type

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        if unsqueeze_dim == 1 and (cos.dtype == q.dtype or self.keeps_type):
            turned = self.rotate(q, k, cos, sin)
            if turned is not None:
                return turned
        return self.plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    def agrees(self) -> bool:
        """Whether it gives the same as the model's own function on random numbers."""
        generator = torch.Generator().manual_seed(0)
        for dtype in DTYPES:
            q, k = (_random(generator, 1, heads, 3, 40).to(dtype) for heads in (4, 2))
            cos, sin = (_random(generator, 1, 3, 40).to(dtype) for _ in range(2))
            pairs = zip(self(q, k, cos, sin), self.plain(q, k, cos, sin), strict=True)
            if not all(_near(ours, theirs, NEAR[dtype]) for ours, theirs in pairs):
                return False
        return True
