"""Linear layers whose weights lie as the kernels read them. `linear.cpp` says how; without the kernels there are none of these."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch

from batchgen.engine.kernels.build import kernel
from batchgen.engine.kernels.isa import instruction_set

PANEL = 64
"""Columns that lie side by side."""


class Activation(IntEnum):
    """What a gated layer does to its gate."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2


class _Product(ctypes.Structure):
    """`Product` in linear.cpp is the same."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "columns", "words", "x_row", "y_row", "activation", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "weights", "bias", "y")),
    )


def is_fast(dtype: torch.dtype) -> bool:
    """Whether packed layers of this type, float32 or bfloat16, are faster here than torch's own."""
    if dtype == torch.bfloat16:  # matrix units (AMX) are not used here
        return instruction_set() == "avx512_bf16"
    return instruction_set() in ("avx512", "avx512_bf16", "amx")


def fits(weight: torch.Tensor) -> bool:
    """Whether a weight [N, K] can be packed: bfloat16 goes in pairs."""
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0)


class PackedLinear(torch.nn.Module):
    """x [..., K] to [..., N]: a linear layer, or with an activation act(x gate^T) * (x up^T), rounded as the modules round."""

    def __init__(
        self, weights: list[torch.Tensor], biases: list[torch.Tensor | None], activation: Activation = Activation.NONE
    ) -> None:
        """`weights` are one [N, K], or gate and up of the same shape. They are copied."""
        super().__init__()
        self.out_features, self.in_features = weights[0].shape
        self.dtype = weights[0].dtype
        self.activation = activation
        words = [weight.detach().contiguous().view(torch.int32) for weight in weights]
        # Plain tensors: torch takes microseconds to find parameters and buffers.
        self.weights = _panels(words).transpose(1, 2).contiguous()
        """[panels, words of K, 64]"""
        self.bias = biases[0] if len(biases) == 1 else None
        self.biases: torch.Tensor | None = None
        """[panels, 64] in float32"""
        if any(bias is not None for bias in biases):
            columns = [torch.zeros(self.out_features) if b is None else b.detach().float() for b in biases]
            self.biases = _panels(columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.dtype or x.shape[-1] != self.in_features:
            raise ValueError(f"expected [..., {self.in_features}] in {self.dtype}, not {list(x.shape)} in {x.dtype}")
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        weights, biases = self.weights, self.biases
        y = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        product = _Product(
            rows.shape[0], self.out_features, weights.shape[1], rows.stride(0), self.out_features, self.activation,
            torch.get_num_threads(), rows.data_ptr(), weights.data_ptr(), None if biases is None else biases.data_ptr(),
            y.data_ptr(),
        )  # fmt: skip
        kernel("linear", self.dtype)(ctypes.byref(product))
        return y

    @property
    def weight(self) -> torch.Tensor:
        """[N, K] of a plain layer, unpacked anew each time: for models that look at it."""
        rows = self.weights.transpose(1, 2).reshape(-1, self.weights.shape[1])[: self.out_features]
        return rows.contiguous().view(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.dtype}, {self.activation.name.lower()}"


def _panels(parts: list[torch.Tensor]) -> torch.Tensor:
    """[panels, 64, ...] of one [N, ...], or of two whose rows share each panel; filled up with zeros."""
    width = PANEL // len(parts)
    size = parts[0].shape[0]
    if size % width:
        fill = parts[0].new_zeros((-size % width, *parts[0].shape[1:]))
        parts = [torch.cat([part, fill]) for part in parts]
    panels = [part.view(-1, width, *part.shape[1:]) for part in parts]
    return panels[0] if len(panels) == 1 else torch.cat(panels, 1)
