"""Runs a decoder layer with attention and a gated MLP in one call of the library, so that no Python runs between its kernels.

The kernels and their results are those of the separate modules, except that the weights of q, k and v are joined if possible, so that one
product makes all three.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from batchgen.kernels.build import kernel, library
from batchgen.kernels.int8 import Int8Linear, QuantizeArguments, empty_rows, row_length
from batchgen.kernels.memory import give_back, in_huge_pages
from batchgen.kernels.ops import Call, Heads, NormArguments, PackedLinear, Product, RotaryArguments, RowTable, run_all

T = TypeVar("T")
Linear = PackedLinear | Int8Linear


class Norm(Protocol):
    """What is used here of `fusion.FusedNorm`."""

    factor: torch.Tensor
    eps: float
    rounds_first: bool


class Attends(Protocol):
    """What is used here of `PackedAttention`."""

    def prepared(
        self, layer: int, q: Heads, k: Heads, v: Heads, out: int, dtype: torch.dtype, options: Any
    ) -> tuple[Call, object]: ...

    def wanted(self, layer: int) -> torch.Tensor | None: ...


class LayerNorms(NamedTuple, Generic[T]):
    """The norms of a decoder layer; None where it has none."""

    before_attention: T | None = None
    after_attention: T | None = None
    """Before the sum with the residual."""
    before_mlp: T | None = None
    after_mlp: T | None = None
    """Before the sum with the residual."""


def can_join(linear: Sequence[Linear]) -> bool:
    """Whether these layers have the same kernel."""
    return len({(part.dtype, part.kind) for part in linear}) == 1


def joined(parts: Sequence[Linear]) -> Sequence[Linear]:
    """Joins layers that read the same x into one, whose memory they then share.

    Returns them unchanged if one does not fill its last panel, or if one would be joined twice, because it stands in several places.
    """
    panel = library().batchgen_linear_panel()
    if len(parts) == 1 or any(part.out_features % panel for part in parts):
        return parts
    if len({id(part) for part in parts}) < len(parts) or any(map(_is_joined, parts)):
        return parts
    whole = copy.copy(parts[0])
    whole.out_features = sum(part.out_features for part in parts)
    whole.weights = in_huge_pages(torch.cat([part.weights for part in parts]))
    for part, weights in zip(parts, torch.split(whole.weights, [len(part.weights) for part in parts]), strict=True):
        give_back(part.weights)
        part.weights = weights
    for name in ("scales", "beginnings"):  # of 8 bits
        if getattr(whole, name, None) is not None:
            setattr(whole, name, torch.cat([getattr(part, name) for part in parts]))
    if any(part.biases is not None for part in parts):
        whole.biases = torch.cat(
            [torch.zeros(p.out_features // panel, panel) if p.biases is None else p.biases for p in parts]
        )
    return [whole]


def _is_joined(part: Linear) -> bool:
    """Whether a layer's weights are a part of those of a joined layer."""
    return part.weights.untyped_storage().nbytes() > part.weights.nbytes


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """s = x + o(attention(qkv(norm(x)))), then s + down(act(gate(norm(s))) * up(norm(s))), with the norms that the layer has."""

    index: int
    heads: int
    kv_heads: int
    head_size: int
    options: Any
    """The layer's options of attention (`LayerOptions`)."""
    norms: LayerNorms[Norm]
    qkv: Sequence[Linear]
    """One linear layer that makes q, k and v, or three layers."""
    head_norms: Sequence[Norm]
    """Empty, or a norm for the queries and one for the keys, of each head or of all heads together."""
    o: Linear
    gate_up: Linear
    down: Linear
    float32_cos: bool
    """Whether cos and sin may be float32 if heads have another type."""

    def takes(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether the kernels can read this x [1, T, hidden] and these cos and sin [1, T, R]."""
        first = self.qkv[0]
        return (
            x.dim() == cos.dim() == 3
            and x.shape[0] == cos.shape[0] == 1
            and x.shape[1:] == (cos.shape[1], first.in_features)
            and x.is_contiguous()
            and x.dtype == first.dtype
            and cos.dtype == sin.dtype
            and (cos.dtype == x.dtype or (self.float32_cos and cos.dtype == torch.float32))
            and cos.shape == sin.shape
            and cos.stride() == sin.stride()
            and cos.stride(2) == 1
            and cos.shape[2] <= self.head_size
            and cos.shape[2] % 2 == 0
        )

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attends) -> torch.Tensor:
        """Returns the layer's output for x [1, T, hidden], which `takes` must accept. Rows that `attention` does not want are 0."""
        rows, hidden, size, norms = x.shape[1], x.shape[2], self.head_size, self.norms
        q_width, kv_width = self.heads * size, self.kv_heads * size
        qkv_width = q_width + 2 * kv_width
        # All results between the kernels are in one piece of memory.
        widths = (hidden, qkv_width, q_width, kv_width, q_width, hidden, hidden, self.gate_up.out_features)
        memory = torch.empty(rows * sum(widths), dtype=x.dtype)
        starts = accumulate(widths[:-1], initial=0)
        normed, qkv, q, k, mixed, more, total, gated = (
            memory.data_ptr() + rows * start * x.itemsize for start in starts
        )
        in_8_bits = isinstance(self.o, Int8Linear)
        kernels = _Kernels(rows, x.dtype, max(hidden, q_width, self.gate_up.out_features) if in_8_bits else 0)

        y = kernels.norm(norms.before_attention, x.data_ptr(), normed, hidden, quantizes=in_8_bits)
        place = qkv
        for part in self.qkv:
            kernels.product(part, y, place, qkv_width)
            place += part.out_features * x.itemsize
        keys, values = qkv + q_width * x.itemsize, qkv + (q_width + kv_width) * x.itemsize
        plain = Heads(qkv, self.heads, size, size, qkv_width), Heads(keys, self.kv_heads, size, size, qkv_width)
        turned = Heads(q, self.heads, size, size, q_width), Heads(k, self.kv_heads, size, size, kv_width)
        for norm, heads, to in zip(self.head_norms, plain, turned, strict=False):
            kernels.head_norm(norm, heads, to.at)
        kernels.rotary(turned if self.head_norms else plain, turned, cos, sin)
        call, kept = attention.prepared(
            self.index, *turned, Heads(values, self.kv_heads, size, size, qkv_width), mixed, x.dtype, self.options
        )
        kernels.calls.append(call)
        residual, wanted = x.data_ptr(), attention.wanted(self.index)
        if wanted is not None:  # only these rows are computed after attention
            picked = torch.empty(len(wanted) * (hidden + q_width), dtype=x.dtype)
            places = picked.data_ptr(), picked.data_ptr() + len(wanted) * hidden * x.itemsize
            kernels.take(wanted, residual, places[0], hidden)
            kernels.take(wanted, mixed, places[1], q_width)
            residual, mixed = places
            kernels.rows = len(wanted)
        out = torch.empty((1, kernels.rows, hidden), dtype=x.dtype)
        kernels.product(self.o, mixed, more, hidden)
        y = kernels.norm(norms.after_attention, more, normed, hidden)
        y = kernels.norm_of_sum(norms.before_mlp, residual, y, total, normed, hidden, quantizes=in_8_bits)
        kernels.product(self.gate_up, y, gated, self.gate_up.out_features)
        kernels.product(self.down, gated, more, hidden)
        y = kernels.norm(norms.after_mlp, more, normed, hidden)
        kernels.norm_of_sum(None, total, y, out.data_ptr(), normed, hidden)
        run_all(kernels.calls)
        del kept
        return out if wanted is None else torch.zeros_like(x).index_copy_(1, wanted, out)


class _Kernels:
    """Collects the calls of a layer's kernels on `rows` rows, in order. x, y, more and total are addresses."""

    def __init__(self, rows: int, dtype: torch.dtype, int8_size: int) -> None:
        """`int8_size`: the largest size of rows that linear layers in 8 bits read, or 0."""
        self.rows, self.dtype, self.threads = rows, dtype, torch.get_num_threads()
        self.calls: list[Call] = []
        # One place for all rows in 8 bits, because the kernels run one after the other.
        self._int8 = empty_rows(rows, int8_size) if int8_size else None
        self._quantized: int | None = None
        """The address of the rows that the place then has in 8 bits."""

    def product(self, of: Linear, x: int, y: int, y_row: int) -> None:
        """Adds a linear layer of the rows at x, into rows at y that begin `y_row` numbers apart."""
        if isinstance(of, Int8Linear):
            assert self._int8 is not None
            if self._quantized != x:
                self._quantize(x, of.in_features)
            self.calls.append(of.product(self._int8, self.rows, y, y_row))
            return
        product = Product(
            self.rows, of.out_features, of.words, of.in_features * of.dtype.itemsize // 4, y_row, of.activation, self.threads,
            x, of.weights.data_ptr(), None if of.biases is None else of.biases.data_ptr(), y,
        )  # fmt: skip
        self.calls.append(Call(kernel("linear", of.dtype, of.kind), product))

    def _quantize(self, x: int, size: int) -> None:
        assert self._int8 is not None
        rows = QuantizeArguments(
            self.rows, size, size, row_length(size), self.threads,
            x, self._int8.values.data_ptr(), self._int8.scales.data_ptr(),
        )  # fmt: skip
        self.calls.append(Call(kernel("quantize", self.dtype), rows))
        self._quantized = x

    def take(self, places: torch.Tensor, x: int, y: int, size: int) -> None:
        """Adds a copy of the rows of x at these places, which must exist, to y."""
        row = size * self.dtype.itemsize
        rows = RowTable(len(places), self.rows, row, self.threads, x, places.data_ptr(), y)
        self.calls.append(Call(library().batchgen_take_rows, rows))

    def norm(self, of: Norm | None, x: int, y: int, size: int, *, quantizes: bool = False) -> int:
        """Adds the norm of the rows at x, into y. Returns where the result is: x without a norm. `quantizes`: in 8 bits, too."""
        if of is None:
            return x
        self._norm(of, 1, size, size, x, y, quantizes=quantizes)
        return y

    def head_norm(self, of: Norm, heads: Heads, y: int) -> None:
        """Adds the norm of each head, or of all heads together if the norm is as wide, into contiguous rows at y."""
        size = len(of.factor)
        self._norm(of, heads.heads * heads.size // size, size, heads.to_token, heads.at, y)

    def norm_of_sum(
        self, of: Norm | None, x: int, more: int, total: int, y: int, size: int, *, quantizes: bool = False
    ) -> int:
        """Adds the sum of the rows at x and `more`, into `total`, and its norm, into y. Returns where the result is: `total` without a norm."""
        self._norm(of, 1, size, size, x, None if of is None else y, more, total, quantizes=quantizes and of is not None)
        return total if of is None else y

    def _norm(
        self, of: Norm | None, inner: int, size: int, x_row: int, x: int, y: int | None,
        more: int | None = None, total: int | None = None, *, quantizes: bool = False,
    ) -> None:  # fmt: skip
        rounds_first, eps, factor = (0, 0.0, None) if of is None else (of.rounds_first, of.eps, of.factor.data_ptr())
        norm = NormArguments(
            self.rows, inner, size, x_row, size, rounds_first, self.threads, eps, factor, x, y, more, total
        )
        if y is not None:
            self._quantized = None  # what was at y before
        if quantizes:
            assert self._int8 is not None
            norm.q, norm.scales = self._int8.values.data_ptr(), self._int8.scales.data_ptr()
            norm.q_row = row_length(size)
            self._quantized = y
        self.calls.append(Call(kernel("norm", self.dtype), norm))

    def rotary(self, heads: tuple[Heads, Heads], to: tuple[Heads, Heads], cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Adds the rotary embeddings of queries and keys, into `to`, which may be the same memory."""
        q, k = heads
        turned = RotaryArguments(
            self.rows, q.heads, k.heads, q.size, cos.shape[2], q.to_token, q.to_head, k.to_token, k.to_head, cos.stride(1),
            self.threads, q.at, k.at, cos.data_ptr(), sin.data_ptr(), to[0].at, to[1].at,
        )  # fmt: skip
        self.calls.append(Call(kernel("rotary", self.dtype, "" if cos.dtype == self.dtype else "_by_float32"), turned))
