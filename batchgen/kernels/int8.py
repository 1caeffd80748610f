"""Linear layers in 8 bits: weights are whole numbers with a scale for each output column, inputs with one for each row.

Weights go from -127 to 127. So do inputs, or further where no instruction multiplies bytes exactly (AVX2). Both are rotated before they are
rounded (int8.h), so that a few large inputs do not cost the others their precision. Sums over a row are exact, in 32 bits, so a row's result
depends only on the row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from batchgen.kernels.build import DTYPES, integers, kernel, library, pointers
from batchgen.kernels.coded import Codes
from batchgen.kernels.codes import Coding, PackedTensor
from batchgen.kernels.isa import least_coded_group
from batchgen.kernels.ops import (
    CACHED,
    Activation,
    Call,
    Gating,
    KernelLinear,
    PackedLinear,
    Product,
    address_of,
    adjacent,
    biases_in_panels,
    columns_in_panels,
    in_panels,
)

LARGEST = 127
STEP = 64
"""The length of quantized rows is a multiple of this (int8.h)."""


class Rounding(IntEnum):
    """How the inputs of a layer are rounded; `Rounding` in int8.h is the same."""

    ROW = 0
    """With one scale for each row."""
    ROTATED = 1
    """The same, of rotated rows."""
    GROUPS = 2
    """With one scale for each 64 inputs of a row, where inputs are bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Quantized rows in the layout of the kernels: x is about values * scales."""

    values: torch.Tensor
    """[rows, inner size], which is padded; int8.h says how numbers lie in memory."""
    scales: torch.Tensor
    """float32, those of a row or of its groups, one row after the other; room for one for each `STEP` values"""


class QuantizeArguments(ctypes.Structure):
    """`Rows` in linear_int8.cpp is the same."""

    _fields_ = (*integers("rows", "size", "x_row", "q_row", "threads", "rounding"), *pointers("x", "q", "scales"))


class Int8Weight(NamedTuple):
    """A weight in 8 bits, or those of several experts, stacked."""

    values: torch.Tensor
    """int8 [N, K] or [E, N, K]"""
    scales: torch.Tensor
    """float32 [N] or [E, N]"""
    rotated: bool = False
    """Whether it is for rotated inputs."""


def rotate_blocks(x: torch.Tensor) -> None:
    """Rotates contiguous rows x [N, K] in float32, in place. A second time gives what they were, but for rounding."""
    assert x.is_contiguous()
    arguments = QuantizeArguments(*x.shape, x.stride(0), threads=torch.get_num_threads(), x=x.data_ptr())
    library().batchgen_rotate_blocks(ctypes.byref(arguments))


def quantize_weight(weight: torch.Tensor, scales: torch.Tensor | None = None) -> Int8Weight:
    """Returns a weight [N, K] or [E, N, K] in 8 bits, rounded to nearest.

    Without `scales`, it is rotated, and then the largest magnitude of each row becomes 127. With `scales` [N], the weight already is whole
    numbers times these.
    """
    if weight.dim() == 3:
        each = [quantize_weight(one) for one in weight]
        return Int8Weight(torch.stack([w.values for w in each]), torch.stack([w.scales for w in each]), each[0].rotated)
    values, steps = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    size = max(1, CACHED // weight.shape[1])
    for first in range(0, len(weight), size):
        rows = slice(first, first + size)
        numbers = weight[rows].detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if scales is None:
            rotate_blocks(numbers)
            largest = numbers.abs().amax(1)
            steps[rows] = largest / LARGEST
            values[rows] = numbers.mul_(torch.where(largest > 0, LARGEST / largest, 0.0)[:, None]).round_()
        else:
            steps[rows] = scales[rows]
            values[rows] = numbers.div_(steps[rows, None]).round_().clamp_(-128, 127)
    return Int8Weight(values, steps, scales is None)


def row_length(size: int) -> int:
    """Returns the length in memory of quantized rows of `size` numbers."""
    # An odd number of steps, because rows an even number of cache lines apart would compete for places in the cache.
    return (-(-size // STEP) | 1) * STEP


def empty_rows(rows: int, size: int) -> QuantizedRows:
    """Returns room for quantized rows of up to `size` numbers."""
    dtype = torch.int16 if library().batchgen_int8_bytes() == 2 else torch.int8
    values = torch.empty((rows, row_length(size)), dtype=dtype)
    return QuantizedRows(values, torch.empty(values.numel() // STEP))


def quantize_rows(x: torch.Tensor, rounding: Rounding) -> QuantizedRows:
    """Quantizes x [rows, K] in float32 or bfloat16; numbers are rounded to nearest."""
    x = adjacent(x)
    made = empty_rows(*x.shape)
    rows = QuantizeArguments(
        x.shape[0], x.shape[1], x.stride(0), made.values.shape[1], torch.get_num_threads(), rounding,
        x.data_ptr(), made.values.data_ptr(), made.scales.data_ptr(),
    )  # fmt: skip
    kernel("quantize", x.dtype)(ctypes.byref(rows))
    return made


class Int8Linear(KernelLinear):
    """A layer in 8 bits."""

    kind = "int8"
    scales: torch.Tensor
    """[panels, columns of a panel], as `beginnings`"""
    beginnings: torch.Tensor | None = None
    rounding: Rounding
    """Of its inputs."""

    def __init__(
        self,
        weights: list[Int8Weight],
        biases: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        activation: Activation | Gating = Activation.NONE,
    ) -> None:
        """`weights` is one weight, or gate and up; they are copied. `dtype` is that of x and y."""
        shape = weights[0].values.shape
        super().__init__(shape, dtype, activation)
        self.rounding = Rounding.ROTATED if weights[0].rotated else Rounding.ROW
        fill = -self.in_features % STEP
        padded = [torch.nn.functional.pad(weight.values, (0, fill)).contiguous() for weight in weights]
        if library().batchgen_int8_has_beginnings():
            # The kernel reads x as x + 128, so sums begin at -128 times the weights.
            self.beginnings = columns_in_panels([-128 * values.sum(-1, dtype=torch.int32) for values in padded])
        if library().batchgen_int8_bytes() == 2:
            padded = [_middle_swapped(values) for values in padded]
        self.weights = in_panels([values.view(torch.int32) for values in padded], library().batchgen_int8_side())
        self.scales = columns_in_panels([weight.scales.float() for weight in weights])
        self.biases = biases_in_panels(biases, shape[:-1])

    @classmethod
    def of_codes(cls, layer: PackedLinear) -> Int8Linear:
        """Returns a layer that multiplies the codes of a packed one, which it shares, in 8 bits. They must be whole numbers, or halves."""
        assert layer.codes is not None
        made = cls.__new__(cls)
        shape = (layer.experts, layer.out_features, layer.in_features)
        KernelLinear.__init__(made, shape if layer.experts else shape[1:], layer.dtype, layer.gate)
        made.codes, made.biases, made.adapter = layer.codes, layer.biases, layer.adapter
        made.rounding = Rounding.GROUPS
        panels = len(layer.codes.parts["plane4"])
        made.scales = torch.full((panels, library().batchgen_linear_panel()), _factor(layer.codes.coding))
        return made

    def forward(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        """`starts` [E + 1] of experts: rows [starts[e], starts[e + 1]) of x are those of expert e."""
        x_rows = self.rows_of(x).to(self._kernel_dtype)
        rows = quantize_rows(x_rows, self.rounding)
        y = torch.empty((*x.shape[:-1], self.out_features), dtype=self._kernel_dtype)
        self.run_with_adapter(self.product(rows, len(x_rows), y.data_ptr(), self.out_features, starts), x_rows)
        return y.to(self.dtype)

    @property
    def _kernel_dtype(self) -> torch.dtype:
        return self.dtype if self.dtype in DTYPES else torch.float32

    def product(self, x: QuantizedRows, rows: int, y: int, y_row: int, starts: torch.Tensor | None = None) -> Call:
        """Returns the call of the kernel that maps the first `rows` rows of x to rows at address y that begin `y_row` numbers apart."""
        length = row_length(self.in_features)
        product = Product(
            rows, self.out_features, -(-self.in_features // STEP) * STEP // 4, length * x.values.itemsize // 4, y_row,
            self.activation, torch.get_num_threads(),
            x.values.data_ptr(), address_of(self.weights), address_of(self.biases), y,
            x.scales.data_ptr(), self.scales.data_ptr(), address_of(self.beginnings),
            codes=None if self.codes is None else self.codes.address, experts=self.experts, starts=address_of(starts),
            alpha=self.gate.alpha, limit=self.gate.limit, **self.adapter_fields,
        )  # fmt: skip
        return Call(kernel("linear_int8", self._kernel_dtype), product)

    def unpacked(self, words: torch.Tensor) -> torch.Tensor:
        values = words.view(torch.int8)
        if library().batchgen_int8_bytes() == 2:
            values = _middle_swapped(values)
        numbers = values[:, : self.in_features] * self.scales.flatten()[:, None]
        if self.rounding is Rounding.ROTATED:
            rotate_blocks(numbers)
        return numbers.to(self.dtype)


def _middle_swapped(values: torch.Tensor) -> torch.Tensor:
    """Returns int8 values with the middle two of each four swapped. Words are faster than an index: 0.9 ms instead of 14 for 4,864 by 896."""
    words = values.view(torch.int32)
    return ((words & ~0x00FFFF00) | ((words & 0x0000FF00) << 8) | ((words >> 8) & 0x0000FF00)).view(torch.int8)


def stay_packed(weights: Iterable[torch.Tensor]) -> bool:
    """Whether weights are packed as they are before they are in 8 bits: some have 4 bits, and codes may be multiplied as they are, or all that can have 16."""
    bits = {weight.coding.bits for weight in weights if isinstance(weight, PackedTensor)}
    return bits == {16} or (4 in bits and least_coded_group() < math.inf)


def are_multiplied(codes: Codes) -> bool:
    """Whether codes are multiplied in 8 bits as they are: 4 bits each in a plane, and whole numbers, or halves, times the scale of a large group."""
    coding = codes.coding
    if coding.bits != 4 or coding.unit or coding.group == 0 or "offsets" in codes.parts:
        return False
    if coding.group < least_coded_group():
        return False
    wholes = [float(level) / _factor(coding) for level in coding.levels or ()]
    return all(whole.is_integer() and abs(whole) <= LARGEST for whole in wholes)


def _factor(coding: Coding) -> float:
    """Returns what whole numbers stand for: 0.5 if some levels are not whole, such as those of FP4, else 1."""
    return 1.0 if all(float(level).is_integer() for level in coding.levels or ()) else 0.5
