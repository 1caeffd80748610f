"""A decoder layer with attention and a gated MLP in one call of the library: its kernels follow each other without Python between them.

The kernels and their numbers are those of the modules, one by one; only the weights of q, k and v lie side by side where they can, so that one
product makes all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch

from batchgen.kernels.build import kernel, library
from batchgen.kernels.ops import Call, Heads, NormArguments, PackedLinear, Product, RotaryArguments, run_all


class Norm(Protocol):
    """`fusion.FusedNorm`."""

    factor: torch.Tensor
    eps: float
    rounds_first: bool


class Attends(Protocol):
    """`PackedAttention`."""

    def prepared(
        self, layer: int, q: Heads, k: Heads, v: Heads, out: int, dtype: torch.dtype, options: Any
    ) -> tuple[Call, object]: ...


def can_join(linear: Sequence[PackedLinear]) -> bool:
    """Whether the kernels of these layers are the same, and read x as it is."""
    return len({(part.dtype, part.kind) for part in linear}) == 1 and not any(part.widens for part in linear)


@dataclass(eq=False)
class DenseLayer:
    """x + o(attention(qkv(norm(x)))) = s; s + down(act(gate(norm(s))) * up(norm(s)))."""

    index: int
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    input_norm: Norm
    q: PackedLinear
    k: PackedLinear
    v: PackedLinear
    o: PackedLinear
    second_norm: Norm
    gate_up: PackedLinear
    down: PackedLinear
    _joined: tuple[torch.Tensor, torch.Tensor | None] | None = field(init=False, default=None)
    """The weights and biases of q, k and v side by side, where each ends at the end of a panel."""

    def __post_init__(self) -> None:
        parts, panel = (self.q, self.k, self.v), library().batchgen_linear_panel()
        if any(part.out_features % panel for part in parts):
            return
        joined = torch.cat([part.weights for part in parts])
        for part, weights in zip(parts, torch.split(joined, [len(part.weights) for part in parts]), strict=True):
            part.weights = weights  # the same memory
        biases = None
        if any(part.biases is not None for part in parts):
            biases = torch.cat(
                [torch.zeros(p.out_features // panel, panel) if p.biases is None else p.biases for p in parts]
            )
        self._joined = joined, biases

    def takes(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether these are x [1, T, hidden] and cos and sin [1, T, R] as the kernels read them."""
        return (
            x.dim() == cos.dim() == 3
            and x.shape[0] == cos.shape[0] == 1
            and x.shape[1:] == (cos.shape[1], self.q.in_features)
            and x.is_contiguous()
            and x.dtype == cos.dtype == sin.dtype == self.q.dtype
            and cos.shape == sin.shape
            and cos.stride() == sin.stride()
            and cos.stride(2) == 1
            and cos.shape[2] <= self.head_size
            and cos.shape[2] % 2 == 0
        )

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attends) -> torch.Tensor:
        """What the layer gives for x [1, T, hidden]; `takes` says whether it can."""
        rows, size, number = x.shape[1], self.head_size, x.itemsize
        q_width, kv_width = self.q.out_features, self.k.out_features
        qkv_width = q_width + 2 * kv_width
        # What is between the kernels, in one piece of memory.
        widths = (x.shape[2], qkv_width, q_width, kv_width, q_width, x.shape[2], x.shape[2], self.gate_up.out_features)
        memory = torch.empty(rows * sum(widths), dtype=x.dtype)
        starts = accumulate(widths[:-1], initial=0)
        normed, qkv, q, k, mixed, more, total, gated = (memory.data_ptr() + rows * start * number for start in starts)
        keys, values = qkv + q_width * number, qkv + (q_width + kv_width) * number
        out = torch.empty_like(x)
        turned = RotaryArguments(
            rows, self.heads, self.kv_heads, size, cos.shape[2], qkv_width, size, qkv_width, size, cos.stride(1),
            torch.get_num_threads(), qkv, keys, cos.data_ptr(), sin.data_ptr(), q, k,
        )  # fmt: skip
        attend, kept = attention.prepared(
            self.index,
            Heads(q, self.heads, size, size, q_width),
            Heads(k, self.kv_heads, size, size, kv_width),
            Heads(values, self.kv_heads, size, size, qkv_width),
            mixed, x.dtype, self.scale,
        )  # fmt: skip
        if self._joined is None:
            makes = zip((self.q, self.k, self.v), (qkv, keys, values), strict=True)
            products = [_product_call(part, rows, normed, at, qkv_width) for part, at in makes]
        else:
            weights, biases = self._joined
            products = [_product_call(self.q, rows, normed, qkv, qkv_width, qkv_width, weights, biases)]
        run_all((
            _norm_call(self.input_norm, x, x.data_ptr(), normed),
            *products,
            Call(kernel("rotary", x.dtype), turned),
            attend,
            _product_call(self.o, rows, mixed, more, x.shape[2]),
            _norm_call(self.second_norm, x, x.data_ptr(), normed, more, total),
            _product_call(self.gate_up, rows, normed, gated, self.gate_up.out_features),
            _product_call(self.down, rows, gated, more, x.shape[2]),
            _norm_call(self.second_norm, x, total, None, more, out.data_ptr()),
        ))  # fmt: skip
        del kept
        return out


def _product_call(
    of: PackedLinear, rows: int, x: int, y: int, y_row: int,
    columns: int | None = None, weights: torch.Tensor | None = None, biases: torch.Tensor | None = None,
) -> Call:  # fmt: skip
    """The product of the rows at address x into those at y; with `weights`, these and `biases`, of so many columns, in the place of the layer's."""
    if weights is None:
        columns, weights, biases = of.out_features, of.weights, of.biases
    product = Product(
        rows, columns, of.words, of.in_features * of.dtype.itemsize // 4, y_row, of.activation, torch.get_num_threads(),
        x, weights.data_ptr(), None if biases is None else biases.data_ptr(), y,
    )  # fmt: skip
    return Call(kernel("linear", of.dtype, of.kind), product)


def _norm_call(
    of: Norm, like: torch.Tensor, x: int, y: int | None, more: int | None = None, total: int | None = None
) -> Call:
    """The norm at address y of the rows at x, or of x + `more`, which goes to `total`; no norm but the sum where y is None."""
    _, rows, size = like.shape
    norm = NormArguments(
        rows,
        1,
        size,
        size,
        0,
        of.rounds_first,
        torch.get_num_threads(),
        of.eps,
        of.factor.data_ptr(),
        x,
        y,
        more,
        total,
    )
    return Call(kernel("norm", like.dtype), norm)
