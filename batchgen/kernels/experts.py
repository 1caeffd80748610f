"""The experts of a mixture on the kernels for the CPU.

The rows of a step lie in the order of their experts, whose weights follow each other. A row's result does not depend on the rows beside it, so
a mixture's tokens are the same whatever the batch. Most mixtures of transformers are written in one way, which its
`use_experts_implementation` marks. Others are recognized by their code.
"""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from batchgen.kernels.build import integers, kernel, library, pointers
from batchgen.kernels.codes import PackedTensor
from batchgen.kernels.ops import Activation, Gating, KernelLinear, adjacent
from batchgen.kernels.recognition import Code, code_of
from batchgen.kernels.replacing import ACTIVATIONS, Packing, is_plain, known_code, own_forward


class _Route(ctypes.Structure):
    """`Route` in experts.cpp is the same."""

    _fields_ = (
        *integers("tokens", "chosen", "experts", "bytes", "x_row", "threads"),
        *pointers("indices", "x", "starts", "places", "rows"),
    )


class _Combine(ctypes.Structure):
    """`Combine` in experts.cpp is the same."""

    _fields_ = (*integers("tokens", "chosen", "size", "threads"), *pointers("rows", "weights", "places", "y"))


class FusedExperts(torch.nn.Module):
    """Maps x [T, K] to the weighted sum of what a token's experts give: down(act(gate(x)) * up(x)), rounded where transformers rounds."""

    def __init__(self, up: KernelLinear, down: KernelLinear, plain: Any = None, identities: int = 0) -> None:
        """`up`: gate and up of all experts. `plain`: the module of transformers, which runs the activation that `up` leaves out.

        `identities`: how many experts behind the others return their input.
        """
        super().__init__()
        self.up = up
        self.down = down
        self.plain = plain if up.activation == Activation.NONE else None
        self.identities = identities

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`hidden_states` [..., K] of T tokens. `top_k_index` and `top_k_weights` [T, C]: the experts of each token, and what their
        results are multiplied by.
        """
        x, indices = adjacent(hidden_states.to(self.up.dtype).flatten(0, -2)), top_k_index.long().contiguous()
        tokens, chosen = indices.shape
        experts, threads = self.up.experts + self.identities, torch.get_num_threads()
        starts, places = torch.empty(experts + 1, dtype=torch.int64), torch.empty_like(indices)
        rows = torch.empty((tokens * chosen, x.shape[1]), dtype=x.dtype)
        route = _Route(
            tokens, chosen, experts, x.shape[1] * x.itemsize, x.stride(0) * x.itemsize, threads,
            indices.data_ptr(), x.data_ptr(), starts.data_ptr(), places.data_ptr(), rows.data_ptr(),
        )  # fmt: skip
        if not library().batchgen_route(ctypes.byref(route)):
            raise IndexError(f"the number of an expert is out of range: there are {experts}")
        y = self.up(rows, starts)
        if self.plain is not None:
            y = self.plain._apply_gate(y) if self.plain.has_gate else self.plain.act_fn(y)
        y = self.down(y, starts)
        if self.identities:
            first = int(starts[self.up.experts])
            y[first:] = rows[first:]
        return self._combined(y, top_k_weights, places).to(hidden_states.dtype).view(hidden_states.shape)

    def _combined(self, rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the rows of each token, which lie at `places`, times their weights."""
        tokens, chosen = places.shape
        if weights.dtype != rows.dtype:
            weights = weights.float()
        weights = weights.contiguous()
        out = torch.empty((tokens, rows.shape[1]), dtype=rows.dtype)
        combine = _Combine(
            tokens, chosen, rows.shape[1], torch.get_num_threads(),
            rows.data_ptr(), weights.data_ptr(), places.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        kernel("combine", rows.dtype, "_by_float32" if weights.dtype != rows.dtype else "")(ctypes.byref(combine))
        return out


class MixtureOfScaledInputs(torch.nn.Module):
    """Maps x [..., K] of T tokens to the sum [T, K] of what an expert for all tokens and a token's own experts give, whose inputs are scaled.

    Also returns the router's logits [T, E]. Only a token's own experts run on it. As in Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence/).
    """

    def __init__(self, plain: Any, experts: FusedExperts) -> None:
        """`plain`: the module of transformers, whose router and shared expert run."""
        super().__init__()
        self.router, self.shared_expert, self.experts = plain.router, plain.shared_expert, experts
        self.chosen = plain.top_k

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = hidden_states.flatten(0, -2)
        scores, logits = self.router(x)
        by, index = scores.topk(self.chosen, dim=1)
        scaled = (x[:, None] * by[..., None]).flatten(0, 1)
        y = self.experts(scaled, index.view(-1, 1), torch.ones((len(scaled), 1), dtype=x.dtype))
        return self.shared_expert(x) + y.view(-1, self.chosen, x.shape[1]).sum(1), logits


class LinearOfExperts(torch.nn.Module):
    """Maps the rows [N, K] of all experts, in the order of the experts, to [N, M] by a linear layer of each expert."""

    def __init__(self, linear: KernelLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
        """`expert_size`: how many rows belong to each expert."""
        y: torch.Tensor = self.linear(inputs, torch.tensor([0, *accumulate(expert_size)]))
        return y


def experts_on_kernels(part: Any, shared: Counter[int], packing: Packing) -> torch.nn.Module | None:
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
