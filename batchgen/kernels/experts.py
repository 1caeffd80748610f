"""The experts of a mixture on the kernels for the CPU: the rows of a step lie in the order of their experts, whose weights follow each other.

A row's result does not depend on the rows beside it, so a mixture's tokens are the same whatever the batch.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import Any

import torch

from batchgen.kernels.build import integers, kernel, library, pointers
from batchgen.kernels.ops import Activation, KernelLinear


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
        x, indices = hidden_states.to(self.up.dtype).flatten(0, -2), top_k_index.long().contiguous()
        tokens, chosen = indices.shape
        experts, threads = self.up.experts + self.identities, torch.get_num_threads()
        starts, places = torch.empty(experts + 1, dtype=torch.int64), torch.empty_like(indices)
        rows = torch.empty((tokens * chosen, x.shape[1]), dtype=x.dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
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
