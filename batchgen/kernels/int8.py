"""Linear layers in 8 bits: weights are whole numbers with a scale for each output column, inputs with one for each row of each step.

Both go from -127 to 127. Sums are exact, in 32 bits, so a row's result depends only on the row.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from batchgen.kernels.build import DTYPES, kernel, library
from batchgen.kernels.memory import in_huge_pages
from batchgen.kernels.ops import Activation, Call, Product, norm_arguments, panels

LARGEST = 127
STEP = 64
"""The length of quantized rows is a multiple of this (int8.h)."""
ROW_STEP = 16
"""The number of quantized rows in memory is a multiple of this, because matrix units read whole tiles."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Quantized rows in the layout of the kernels: x is about values * scales."""

    values: torch.Tensor
    """[rows, inner size], both padded; int8.h says how numbers lie in memory."""
    scales: torch.Tensor
    """[rows] float32"""


class QuantizeArguments(ctypes.Structure):
    """`Rows` in linear_int8.cpp is the same."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "size", "x_row", "q_row", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "q", "scales")),
    )


def quantize_weight(weight: torch.Tensor, scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight [N, K] as int8 [N, K], rounded to nearest, and scales [N] in float32.

    Without `scales`, the largest magnitude of each row becomes 127. With `scales` [N], the weight already is whole numbers times these.
    """
    numbers = weight.detach().to(torch.float32, copy=True)
    if scales is not None:
        numbers /= scales.float()[:, None]
        return numbers.round_().clamp_(-128, 127).to(torch.int8), scales.float()
    largest = numbers.abs().amax(1)
    inverse = torch.where(largest > 0, LARGEST / largest, 0.0)
    return numbers.mul_(inverse[:, None]).round_().to(torch.int8), largest / LARGEST


def row_length(size: int) -> int:
    """Returns the length in memory of quantized rows of `size` numbers."""
    # An odd number of steps, because rows an even number of cache lines apart would compete for places in the cache.
    return (-(-size // STEP) | 1) * STEP


def padded_rows(rows: int) -> int:
    """Returns how many quantized rows the memory for `rows` of them has."""
    return -(-rows // ROW_STEP) * ROW_STEP


def empty_rows(rows: int, size: int) -> QuantizedRows:
    """Returns room for quantized rows of up to `size` numbers."""
    dtype = torch.int16 if library().batchgen_int8_bytes() == 2 else torch.int8
    values = torch.empty((padded_rows(rows), row_length(size)), dtype=dtype)
    return QuantizedRows(values, torch.empty(rows))


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """Quantizes x [rows, K] in float32 or bfloat16, each row by itself: its largest magnitude becomes 127; numbers are rounded to nearest."""
    if x.stride(1) != 1:
        x = x.contiguous()
    made = empty_rows(*x.shape)
    rows = QuantizeArguments(
        x.shape[0], x.shape[1], x.stride(0), made.values.shape[1], torch.get_num_threads(),
        x.data_ptr(), made.values.data_ptr(), made.scales.data_ptr(),
    )  # fmt: skip
    kernel("quantize", x.dtype)(ctypes.byref(rows))
    return made


class Int8Linear(torch.nn.Module):
    """Maps x [..., K] to [..., N]: a linear layer, or with an activation act(x gate^T) * (x up^T), rounded where the plain modules round."""

    kind = "int8"

    def __init__(
        self,
        weights: list[tuple[torch.Tensor, torch.Tensor]],
        biases: list[torch.Tensor | None],
        dtype: torch.dtype,
        activation: Activation = Activation.NONE,
    ) -> None:
        """`weights` is one weight, or gate and up, as int8 [N, K] with scales [N]; they are copied. `dtype` is that of x and y."""
        super().__init__()
        self.out_features, self.in_features = weights[0][0].shape
        self.dtype = dtype
        self.activation = activation
        self._kernel_dtype = dtype if dtype in DTYPES else torch.float32
        fill = -self.in_features % STEP
        padded = [torch.nn.functional.pad(values, (0, fill)).contiguous() for values, _ in weights]
        beginnings = None
        if (
            library().batchgen_int8_is_unsigned()
        ):  # the kernel reads x as x + 128, so sums begin at -128 times the weights
            beginnings = panels([-128 * values.sum(1, dtype=torch.int32) for values in padded])
        if library().batchgen_int8_bytes() == 2:
            padded = [values.view(-1, 4)[:, [0, 2, 1, 3]].contiguous().view(values.shape) for values in padded]
        # Plain tensors, because torch needs microseconds to look up parameters and buffers.
        words = panels([values.view(torch.int32) for values in padded])
        side = library().batchgen_int8_side()
        self.weights = in_huge_pages(words.view(len(words), -1, side, words.shape[2]).transpose(2, 3))
        """[panels, columns of a panel / side, words of K, side]"""
        self.scales = panels([scales.float() for _, scales in weights])
        self.beginnings = beginnings
        """[panels, columns of a panel]"""
        self.biases: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            self.biases = panels([torch.zeros(self.out_features) if b is None else b.detach().float() for b in biases])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.dtype or x.shape[-1] != self.in_features:
            raise ValueError(f"expected [..., {self.in_features}] in {self.dtype}, not {list(x.shape)} in {x.dtype}")
        rows: QuantizedRows | None = getattr(x, "as_int8", None)
        if rows is None:
            norm = getattr(x, "from_norm", None)
            if norm is not None:
                norm.quantizes = True  # from the next step on
            rows = quantize_rows(x.reshape(-1, self.in_features).to(self._kernel_dtype))
        y = torch.empty((*x.shape[:-1], self.out_features), dtype=self._kernel_dtype)
        self.product(rows, rows.scales.shape[0], y.data_ptr(), self.out_features).run()
        return y.to(self.dtype)

    def product(self, x: QuantizedRows, rows: int, y: int, y_row: int) -> Call:
        """Returns the call of the kernel that maps the first `rows` rows of x to rows at address y that begin `y_row` numbers apart."""
        product = Product(
            rows, self.out_features, self.weights.shape[2], row_length(self.in_features) * x.values.itemsize // 4, y_row,
            self.activation, torch.get_num_threads(),
            x.values.data_ptr(), self.weights.data_ptr(), _address(self.biases), y,
            x.scales.data_ptr(), self.scales.data_ptr(), _address(self.beginnings),
        )  # fmt: skip
        return Call(kernel("linear_int8", self._kernel_dtype), product)

    @property
    def weight(self) -> torch.Tensor:
        """The weight [N, K] of the plain layer, unpacked at each call, for models that read it."""
        words = self.weights.transpose(2, 3).reshape(-1, self.weights.shape[2])[: self.out_features].contiguous()
        values = words.view(torch.int8)
        if library().batchgen_int8_bytes() == 2:
            values = values.view(-1, 4)[:, [0, 2, 1, 3]].view(values.shape)
        scales = self.scales.flatten()[: self.out_features, None]
        return (values[:, : self.in_features] * scales).to(self.dtype)

    @property
    def bytes(self) -> int:
        """Memory of the weights, scales and biases."""
        parts = (self.weights, self.scales, self.beginnings, self.biases)
        return sum(part.nbytes for part in parts if part is not None)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.dtype}, {self.activation.name.lower()}"


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class QuantizingNorm(torch.nn.Module):
    """A root mean square norm whose result the kernel also quantizes, as soon as an `Int8Linear` has read one."""

    def __init__(self, norm: Any) -> None:
        """`norm` is a `FusedNorm`."""
        super().__init__()
        self.weight = norm.weight
        self.norm = norm
        self.quantizes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after_sum(x, None)[1]

    def after_sum(
        self, x: torch.Tensor, more: torch.Tensor | None, by: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FusedNorm.after_sum`."""
        if not self.quantizes:
            total, plain = self.norm.after_sum(x, more, by)
            plain.from_norm = self
            return total, plain
        norm = self.norm
        arguments, y, total = norm_arguments(x, norm.factor, norm.eps, norm.rounds_first, more, by)
        rows = empty_rows(arguments.outer * arguments.inner, y.shape[-1])
        arguments.q, arguments.scales = rows.values.data_ptr(), rows.scales.data_ptr()
        arguments.q_row = rows.values.shape[1]
        kernel("norm", x.dtype)(ctypes.byref(arguments))
        y.as_int8 = rows  # type: ignore[attr-defined]
        return total, y
