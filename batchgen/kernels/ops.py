"""The compiled CPU kernels as torch functions: norms, sums, rotary embeddings, rows of a table, packed linear layers, and sampling."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from batchgen.kernels.build import DTYPES, integers, kernel, library, pointers
from batchgen.kernels.coded import Codes, can_share
from batchgen.kernels.codes import PackedTensor
from batchgen.kernels.memory import empty_in_huge_pages

CACHED = 1 << 19
"""Numbers of a weight that are taken at a time where each is looked at several times, so that they stay in the caches."""
MIN_POSITIONS = 2048
"""Number of positions in a new table of cos and sin."""


class Call(NamedTuple):
    """A call of a kernel with one argument. The memory that the argument points to must be kept until the kernel has run."""

    kernel: Any
    argument: ctypes.Structure

    def run(self) -> None:
        self.kernel(ctypes.byref(self.argument))


class Heads(NamedTuple):
    """Where queries, keys or values [heads, tokens, size] of a step lie in memory. The last dimension is contiguous."""

    at: int
    """Address of the first number."""
    heads: int
    size: int
    to_head: int
    """Numbers from one head to the next."""
    to_token: int

    @classmethod
    def of(cls, x_HTD: torch.Tensor) -> Heads:
        """Returns those of a tensor, whose last stride must be 1."""
        return cls(x_HTD.data_ptr(), x_HTD.shape[0], x_HTD.shape[2], x_HTD.stride(0), x_HTD.stride(1))


def are_known(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the kernels read these tensors: all have the same type, one of `DTYPES`, and are on a CPU."""
    dtype, known = first.dtype, first.is_cpu
    for x in others:
        known = known and x.dtype == dtype and x.is_cpu
    return known and dtype in DTYPES


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, as a copy unless the numbers of its last dimension are adjacent in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Calls:
    """Calls of kernels, which the library runs in this order."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = tuple(calls)  # keeps the arguments
        pairs = ((ctypes.cast(kernel, ctypes.c_void_p).value or 0, ctypes.addressof(what)) for kernel, what in calls)
        addresses = [address for pair in pairs for address in pair]
        self._addresses = (ctypes.c_size_t * len(addresses))(*addresses)

    def run(self) -> None:
        library().batchgen_run(self._addresses, len(self._calls))


class NormArguments(ctypes.Structure):
    """`Norm` in elementwise.cpp is the same."""

    _fields_ = (
        *integers("outer", "inner", "size", "x_outer", "x_inner", "rounds_first", "threads"),
        ("eps", ctypes.c_double),
        *pointers("weight", "x", "y", "more", "sum", "q", "scales"),
        *integers("q_row", "rounding"),
        ("by", ctypes.c_double),
        ("times", ctypes.c_double),
        *pointers("shift", "each"),
    )

    def __init__(self, *fields: Any, by: float = 1.0, times: float = 1.0, **named: Any) -> None:
        super().__init__(*fields, by=by, times=times, **named)


class _Sampling(ctypes.Structure):
    """`Sampling` in sampling.cpp is the same."""

    _fields_ = (
        *integers("rows", "columns", "x_row", "threads"),
        *pointers("x", "best", "tokens", "temperature", "top_k", "top_p", "min_p", "u"),
    )


class _Mask(ctypes.Structure):
    """`Mask` in sampling.cpp is the same."""

    _fields_ = (
        *integers("rows", "columns", "words", "x_row", "allowed_row", "threads"),
        *pointers("x", "allowed", "y"),
    )


class _PenaltyArguments(ctypes.Structure):
    """`Penalties` in sampling.cpp is the same."""

    _fields_ = (
        *integers("rows", "columns", "x_row", "threads"),
        *pointers("x", "y", "seen", "counts", "seen_row", "counts_row", "repetition", "presence", "frequency"),
    )


class _Summary(ctypes.Structure):
    """`Summary` in sampling.cpp is the same."""

    _fields_ = (*integers("rows", "columns", "x_row", "k", "threads"), *pointers("x", "best", "log_weights", "tokens"))


class ActivationArguments(ctypes.Structure):
    """`Activated` in elementwise.cpp is the same."""

    _fields_ = (*integers("rows", "size", "activation", "threads"), *pointers("y"))


class RowTable(ctypes.Structure):
    """`RowTable` in rows.cpp is the same."""

    _fields_ = (*integers("rows", "table_rows", "bytes", "threads"), *pointers("table", "indices", "y"))


class RotaryArguments(ctypes.Structure):
    """`Rotary` in elementwise.cpp is the same."""

    _fields_ = (
        *integers("tokens", "q_heads", "k_heads", "size", "turned"),
        *integers("q_token", "q_head", "k_token", "k_head", "cos_token", "pairs", "threads"),
        *pointers("q", "k", "cos", "sin", "q_out", "k_out"),
    )


def norm_after_sum(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rounds_first: bool, more: torch.Tensor | None = None, by: float = 1.0,
    shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns x + more * by and its norm; without `more`, x and its norm. `can_add` says whether the two can be added.

    The norm of x is x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32; `weight` is float32. `rounds_first`: x over
    its root mean square is rounded to its type before it is multiplied by the weight. With `shift`, also float32, x is centered first, and `shift` is
    added to the result (LayerNorm).
    """
    size = x.shape[-1]
    x = adjacent(x)
    rows = x if x.dim() <= 3 else x.reshape(-1, *x.shape[-2:])
    inner = x.shape[-2] if x.dim() > 2 else 1
    y, total = torch.empty(x.shape, dtype=x.dtype), x if more is None else torch.empty_like(x)
    outer = y.numel() // max(1, inner * size)
    norm = NormArguments(
        outer, inner, size, rows.stride(0), rows.stride(-2) if x.dim() > 2 else 0, rounds_first, torch.get_num_threads(), eps,
        weight.data_ptr(), rows.data_ptr(), y.data_ptr(), by=by, shift=address_of(shift),
    )  # fmt: skip
    if more is not None:
        norm.more, norm.sum = more.data_ptr(), total.data_ptr()
    kernel("norm", x.dtype)(ctypes.byref(norm))
    return total, y


def add_rows(x: torch.Tensor, more: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    """Returns x + more * by. Both are [..., D], contiguous, of the same shape and type, one of `DTYPES`."""
    size = x.shape[-1]
    total = torch.empty_like(x)
    norm = NormArguments(
        x.numel() // max(1, size), 1, size, size, 0, threads=torch.get_num_threads(),
        x=x.data_ptr(), more=more.data_ptr(), sum=total.data_ptr(), by=by,
    )  # fmt: skip
    kernel("norm", x.dtype)(ctypes.byref(norm))
    return total


def can_add(x: torch.Tensor, more: torch.Tensor) -> bool:
    """Whether `add_rows` accepts these."""
    return are_known(x, more) and x.shape == more.shape and x.is_contiguous() and more.is_contiguous()


def sample_rows(x: torch.Tensor, records: NDArray[Any], u: NDArray[np.float64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a token for each row of logits x [N, V], int64 [N], and its largest logit [N], which is NaN for a row with one.

    `records` [N] have a row's `temperature`, `top_k`, `top_p` and `min_p` (batch_params.py), `u` [N] its uniform number. A row without a
    temperature takes the first of its likeliest tokens, and so does one whose largest logit is not finite.
    """
    x = adjacent(x)
    tokens, best = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x), dtype=x.dtype)
    sampling = _Sampling(
        *x.shape, x.stride(0), torch.get_num_threads(), x.data_ptr(), best.data_ptr(), tokens.data_ptr()
    )
    if (records["temperature"] > 0).any():
        asked = {name: records[name].copy() for name in ("temperature", "top_k", "top_p", "min_p")} | {"u": u.copy()}
        _point(sampling, asked)
    kernel("sample", x.dtype)(ctypes.byref(sampling))
    return tokens, best


def only_allowed(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Does what `filters.forbid` does. The bits of a row are adjacent in `words`."""
    x = adjacent(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    mask = _Mask(
        *x.shape, words.shape[1], x.stride(0), words.stride(0), torch.get_num_threads(), x.data_ptr(), words.data_ptr(), y.data_ptr()
    )  # fmt: skip
    kernel("mask", x.dtype)(ctypes.byref(mask))
    return y


def penalize(
    x: torch.Tensor,
    records: NDArray[Any],
    seen: tuple[torch.Tensor, NDArray[np.int64]],
    counts: tuple[torch.Tensor, NDArray[np.int64]],
) -> torch.Tensor:
    """Returns a float32 copy of logits x [N, V] with the penalties of penalties.py.

    `records` [N] have the rows' penalties. `seen` are marks, bool [.., V], and which of their rows each row of x has, int64 [N], -1 for
    none; `counts` are the same with int32.
    """
    x = adjacent(x)
    y = torch.empty(x.shape, dtype=torch.float32)
    penalties = _PenaltyArguments(
        *x.shape, x.stride(0), torch.get_num_threads(), x.data_ptr(), y.data_ptr(), seen[0].data_ptr(), counts[0].data_ptr()
    )  # fmt: skip
    asked = {name: records[f"{name}_penalty"].copy() for name in ("repetition", "presence", "frequency")}
    asked |= {"seen_row": seen[1].copy(), "counts_row": counts[1].copy()}
    _point(penalties, asked)
    kernel("penalize", x.dtype)(ctypes.byref(penalties))
    return y


def summarize(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what `logprobs.Summaries` has, of rows of logits x [N, V]; k is 1 or more."""
    x = adjacent(x)
    best, log_weights = torch.empty((2, len(x)), dtype=torch.float32)
    tokens = torch.empty((len(x), k), dtype=torch.int64)
    summary = _Summary(
        *x.shape, x.stride(0), k, torch.get_num_threads(), x.data_ptr(), best.data_ptr(), log_weights.data_ptr(), tokens.data_ptr()
    )  # fmt: skip
    kernel("summarize", x.dtype)(ctypes.byref(summary))
    return best, log_weights, tokens


def _point(structure: ctypes.Structure, arrays: dict[str, NDArray[Any]]) -> None:
    """Writes the addresses of arrays, which must live until the kernel has run, into fields."""
    for name, numbers in arrays.items():
        setattr(structure, name, numbers.ctypes.data)


def take_rows(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns rows of a contiguous table [N, D] by int64 indices of any shape. Raises `IndexError` for an index out of range."""
    return _taken(library().batchgen_take_rows, table.data_ptr(), table.shape, table.dtype, indices)


def take_wide_rows(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns rows of a contiguous table of bfloat16 or float16 in float32, as `take_rows` does."""
    name = str(table.dtype).removeprefix("torch.")
    function = library()[f"batchgen_take_wide_rows_{name}"]
    return _taken(function, table.data_ptr(), table.shape, torch.float32, indices)


def take_coded_rows(codes: Codes, shape: Sequence[int], dtype: torch.dtype, indices: torch.Tensor) -> torch.Tensor:
    """Returns rows of the codes of one weight of this shape and type, unpacked, as `take_rows` does."""
    return _taken(library()[f"batchgen_take_coded_rows_{DTYPES[dtype]}"], codes.address, shape, dtype, indices)


def _taken(
    function: Any, address: int, shape: Sequence[int], dtype: torch.dtype, indices: torch.Tensor
) -> torch.Tensor:
    """`shape`: of the table, [N, D]; `dtype`: of the rows that are returned."""
    indices, (count, size) = indices.contiguous(), shape
    y = torch.empty((*indices.shape, size), dtype=dtype)
    rows = RowTable(
        indices.numel(),
        count,
        size * dtype.itemsize,
        torch.get_num_threads(),
        address,
        indices.data_ptr(),
        y.data_ptr(),
    )
    if not function(ctypes.byref(rows)):
        raise IndexError(f"an index is out of range: the table has {count} rows")
    return y


def embed(self: torch.nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    """The forward of an embedding."""
    if input.dtype != torch.int64 or self.weight.device.type != "cpu":
        return torch.nn.functional.embedding(input, self.weight)
    return take_rows(self.weight, input)


def cos_and_sin(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward of a module of rotary embeddings: cos and sin [1, T, R] from a table over positions. The module's own forward makes the table, and a larger one if needed."""
    table = self.__dict__.get("table")
    positions = int(position_ids.max()) + 1 if position_ids.numel() else 0
    if table is None or table.dtype != x.dtype or len(table) < positions:
        every = torch.arange(max(MIN_POSITIONS, 1 << (positions - 1).bit_length()))
        self.table = table = torch.cat(type(self).forward(self, x, every[None]), -1)[0]
    size = table.shape[1] // 2
    rows = take_rows(table, position_ids)
    return rows[..., :size], rows[..., size:]


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: int = 0
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns q [1, H, T, D] and k [1, K, T, D] with rotary embeddings of cos and sin [1, T, R]; None if the kernel does not support the inputs.

    The first R elements of each head are rotated: those of both halves together, or with `pairs` neighbours, and then cos of a pair is so many
    elements behind that of the pair before. Each product is rounded to the type of cos and sin: that of q, or float32.
    """
    if not can_rotate(q, k, cos, sin) or not are_known(q):
        return None
    (_, heads, tokens, size), kv_heads = q.shape, k.shape[1]
    q_out = torch.empty((1, tokens, heads, size), dtype=q.dtype)
    k_out = torch.empty((1, tokens, kv_heads, size), dtype=q.dtype)
    rotary = RotaryArguments(
        tokens, heads, kv_heads, size, cos.shape[2], q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1),
        pairs, torch.get_num_threads(), q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_out.data_ptr(), k_out.data_ptr(),
    )  # fmt: skip
    kernel("rotary", q.dtype, "" if cos.dtype == q.dtype else "_by_float32")(ctypes.byref(rotary))
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def can_rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether these have the shapes and types that `rotate` describes, and lie in memory as a kernel reads them."""
    return (
        q.dim() == k.dim() == 4
        and cos.dim() == 3
        and q.shape[0] == k.shape[0] == cos.shape[0] == 1
        and q.shape[2:] == k.shape[2:]
        and cos.shape[1] == q.shape[2]
        and cos.shape[2] <= q.shape[3]
        and cos.shape[2] % 2 == 0
        and cos.shape == sin.shape
        and cos.stride() == sin.stride()
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype
        and cos.dtype in (q.dtype, torch.float32)
        and q.stride(3) == k.stride(3) == cos.stride(2) == 1
        and q.device == k.device == cos.device
    )


class Activation(IntEnum):
    """The activation of a gate."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    CLAMPED = 3
    """Of gpt-oss, with numbers of its own (`Gating`)."""
    SIGMOID = 4
    """Of `Gate` alone."""
    QUICK_GELU = 5
    """Of MLPs without a gate alone, like GELU."""
    GELU = 6


class Gating(NamedTuple):
    """How a gated layer makes one number of two."""

    activation: Activation = Activation.NONE
    alpha: float = 0.0
    limit: float = 0.0
    """Of `CLAMPED`: g * sigmoid(alpha * g) * (u + 1), g at most `limit` and u between -`limit` and `limit`."""


class Product(ctypes.Structure):
    """`Product` in linear.h is the same."""

    _fields_ = (
        *integers("rows", "columns", "words", "x_row", "y_row", "activation", "threads"),
        *pointers("x", "weights", "bias", "y", "x_scales", "scales", "beginnings"),
        *integers("inner", "group", "w_row"),
        *pointers("codes"),
        *integers("experts"),
        *pointers("starts"),
        *integers("first_panel"),
        *((name, ctypes.c_double) for name in ("alpha", "limit")),
        *pointers("chosen"),
        *integers("chosen_panels"),
        *pointers("low", "up"),
        *integers("rank"),
    )


_RANKS = 4
"""The rank of a packed adapter is a multiple of this (linear.h)."""


def plain_weight(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight that is not packed."""
    return weight.unpacked() if isinstance(weight, PackedTensor) else weight


def held_in_16_bits(weight: torch.Tensor) -> torch.Tensor | None:
    """Returns the numbers [..., N, K] of a weight of float32 that is held as bfloat16 or float16; None for others."""
    return weight.parts.get("plane16") if isinstance(weight, PackedTensor) and not weight.transposed else None


def fits(weight: torch.Tensor) -> bool:
    """Whether a weight [..., N, K] can be packed: it is not empty (a mixture may have no shared expert), and bfloat16 is read in pairs."""
    pairs = weight.dtype == torch.bfloat16 and weight.shape[-1] % 2 == 0
    return weight.numel() > 0 and (weight.dtype == torch.float32 or pairs)


class KernelLinear(torch.nn.Module):
    """Maps x [..., K] to [..., N]: a linear layer, or with an activation act(x gate^T) * (x up^T), rounded where the plain modules round.

    Or the same layer of all experts of a mixture, which maps rows that lie in the order of their experts.
    """

    kind = ""
    """The end of the kernel's name, after the type."""
    tied = False
    """Whether another module has its weight too."""
    # Plain tensors, because torch needs microseconds to look up parameters and buffers.
    weights: torch.Tensor | None = None
    """[sides of panels, words of K, columns of a side], one expert after the other; None of codes"""
    codes: Codes | None = None
    biases: torch.Tensor | None = None
    """[panels, columns of a panel]"""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, activation: Activation | Gating) -> None:
        """`shape`: of a weight, [N, K] or of experts [E, N, K]; `dtype`: of x and y."""
        super().__init__()
        self.out_features, self.in_features = shape[-2:]
        self.experts = shape[0] if len(shape) == 3 else 0
        self.dtype = dtype
        self.gate = activation if isinstance(activation, Gating) else Gating(activation)
        self.activation = self.gate.activation
        self.adapter: PackedAdapter | None = None

    @property
    def num_parts(self) -> int:
        """Number of plain linear layers that it stands for: gate and up are two, of each expert."""
        return max(1, self.experts) * (1 if self.activation is Activation.NONE else 2)

    @property
    def num_weights(self) -> int:
        """Number of numbers in their weights."""
        return self.num_parts * self.out_features * self.in_features

    @property
    def bytes(self) -> int:
        """Memory of the weights, with their scales, and of the biases."""
        parts = (
            self.weights,
            self.codes,
            self.biases,
            getattr(self, "scales", None),
            getattr(self, "beginnings", None),
        )
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def weight(self) -> torch.Tensor:
        """The weight [N, K] of the plain layer, unpacked at each call, for models that read it."""
        return self.plain()[0]

    def plain(self) -> list[torch.Tensor]:
        """Returns what the layer was made of, unpacked: one weight [N, K] ([E, N, K] of experts), or gate and up."""
        found = [torch.cat(rows) for rows in zip(*self.pieces(), strict=True)]
        return [weight.view(self.experts, -1, self.in_features) for weight in found] if self.experts else found

    def pieces(self) -> Iterator[list[torch.Tensor]]:
        """Yields the rows [rows, K] of the same, one expert after the other; of codes some at a time, which the caches hold."""
        panel, codes = library().batchgen_linear_panel(), self.codes
        parts = 1 if self.activation is Activation.NONE else 2
        width, size = panel // parts, self.in_features
        panels = -(-self.out_features // width)  # of an expert
        count = max(1, self.experts) * panels * panel  # columns of all panels
        if codes is None:
            step = panels
            words = self.words_in_order.transpose(1, 2).flatten(0, 1)
            columns = self.unpacked(words.clone(memory_format=torch.contiguous_format))  # also of one word
        else:
            step = max(1, CACHED // (panel * size))
        for expert in range(max(1, self.experts)):
            for first in range(0, panels, step):
                start, end = ((expert * panels + i) * panel for i in (first, min(panels, first + step)))
                if codes is None:
                    rows = columns[start:end]
                else:
                    rows = take_coded_rows(codes, (count, size), self.dtype, torch.arange(start, end))
                rows = rows.view(-1, parts, width, size)
                yield [rows[:, i].flatten(0, 1)[: self.out_features - first * width] for i in range(parts)]

    @property
    def words_in_order(self) -> torch.Tensor:
        """`weights`, of which each word has the numbers of its column."""
        assert self.weights is not None
        return self.weights

    def unpacked(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of all columns of the panels, of the words of `weights` in this order."""
        raise NotImplementedError

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x as rows [R, K]. Raises `ValueError` if the layer does not take it."""
        if x.dtype != self.dtype or x.shape[-1] != self.in_features:
            raise ValueError(f"expected [..., {self.in_features}] in {self.dtype}, not {list(x.shape)} in {x.dtype}")
        return x.reshape(-1, self.in_features)

    def run_with_adapter(self, call: Call, x: torch.Tensor) -> None:
        """Runs the layer's kernel, and before it the adapter, if there is one, on the rows x [R, K] that the kernel maps."""
        if self.adapter is not None:
            low = self.adapter.down(x)
            call.argument.low = low.data_ptr()
        call.run()

    @property
    def adapter_fields(self) -> dict[str, int]:
        """The fields of a `Product` that have the adapter's second matrix."""
        if self.adapter is None:
            return {}
        return {"up": self.adapter.up.data_ptr(), "rank": self.adapter.down.out_features}


class PackedLinear(KernelLinear):
    """A layer whose weights have its own type, or are codes."""

    def __init__(
        self,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        activation: Activation | Gating = Activation.NONE,
    ) -> None:
        """`weights` are one [N, K] ([E, N, K] of experts), or gate and up of the same shape; `biases` [N] or [E, N]. They are copied.

        Weights in codes stay codes if `can_share` holds. Weights in float32 that are all numbers of bfloat16, or that are held as float16,
        are kept in 16 bits: the products and sums are those of float32.
        """
        super().__init__(weights[0].shape, weights[0].dtype, activation)
        self.words = self.in_features // (4 // self.dtype.itemsize)
        if can_share(weights):
            self.codes = Codes(weights, in_panels)  # type: ignore[arg-type]
        else:
            held = map(held_in_16_bits, weights)
            self._pack([plain_weight(w) if half is None else half for w, half in zip(weights, held, strict=True)])
        self.bias = biases[0] if len(biases) == 1 and not self.experts else None
        self.biases = biases_in_panels(biases, weights[0].shape[:-1])

    def _pack(self, weights: list[torch.Tensor]) -> None:
        self._weight_dtype = _type_that_holds(weights) if self.dtype == torch.float32 else self.dtype
        if self._weight_dtype != self.dtype:
            self.kind = f"_by_{str(self._weight_dtype).removeprefix('torch.')}"
        words = [weight.detach().to(self._weight_dtype).contiguous().view(torch.int32) for weight in weights]
        self.words = words[0].shape[-1]
        bfloat16 = self.dtype == torch.bfloat16
        side = library().batchgen_linear_side_bfloat16() if bfloat16 else library().batchgen_linear_panel()
        self.weights = in_panels(words, side, halves=self._weight_dtype == torch.float16)

    @property
    def words_in_order(self) -> torch.Tensor:
        words = super().words_in_order
        if self._weight_dtype != torch.float16:
            return words
        halves = words.view(torch.int16).view(-1, 2, library().batchgen_lanes())
        return halves.transpose(1, 2).contiguous().view(torch.int32).view(words.shape)

    def forward(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        """`starts` [E + 1] of experts: rows [starts[e], starts[e + 1]) of x are those of expert e."""
        rows = _in_words(self.rows_of(x))
        y = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        x_row = rows.stride(0) * x.itemsize // 4
        call = self.product(rows.data_ptr(), len(rows), x_row, y.data_ptr(), self.out_features, starts)
        self.run_with_adapter(call, rows)
        return y

    def some_columns(self, x: torch.Tensor, panels: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Writes to y [R, N] what x [R, K] becomes, in the columns of these panels (int64) alone, and returns it."""
        rows = _in_words(x)
        call = self.product(rows.data_ptr(), len(rows), rows.stride(0) * x.itemsize // 4, y.data_ptr(), y.stride(0))
        call.argument.chosen, call.argument.chosen_panels = panels.data_ptr(), len(panels)
        self.run_with_adapter(call, rows)
        return y

    def product(self, x: int, rows: int, x_row: int, y: int, y_row: int, starts: torch.Tensor | None = None) -> Call:
        """Returns the call of the kernel that maps rows at address x, `x_row` words apart, to rows at address y that begin `y_row` numbers apart."""
        product = Product(
            rows, self.out_features, self.words, x_row, y_row, self.activation, torch.get_num_threads(),
            x, address_of(self.weights), address_of(self.biases), y, codes=None if self.codes is None else self.codes.address,
            experts=self.experts, starts=address_of(starts), alpha=self.gate.alpha, limit=self.gate.limit, **self.adapter_fields,
        )  # fmt: skip
        return Call(kernel("linear", self.dtype, self.kind), product)

    def unpacked(self, words: torch.Tensor) -> torch.Tensor:
        return words.view(self._weight_dtype).to(self.dtype)


class PackedAdapter(torch.nn.Module):
    """What a LoRA adapter adds to the products of a layer: (x down^T) up^T. The layer's kernel adds the second product."""

    def __init__(self, down: torch.Tensor, ups: list[torch.Tensor]) -> None:
        """`down` [R, K]; `ups` are one [N, R], or those of gate and up."""
        super().__init__()
        if down.dtype not in DTYPES:  # beside a layer in 8 bits, which computes in float32 then
            down, ups = down.float(), [up.float() for up in ups]
        fill = -len(down) % _RANKS
        self.down = PackedLinear([pad(down, (0, 0, 0, fill))], [None])
        self.up = in_panels([pad(up.detach(), (0, fill)).contiguous() for up in ups])
        """[panels, R, columns of a panel]"""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x [..., K] times a weight [N, K] that is packed on the way into the cache, plus a bias. The types must be those of x; see `fits`."""
    words, rows = weight.detach().view(torch.int32), _in_words(x.reshape(-1, x.shape[-1]))
    y = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype)
    fill = -len(weight) % library().batchgen_linear_panel()
    biases = None if bias is None else pad(bias.detach().float(), (0, fill))
    product = Product(
        len(rows), len(weight), words.shape[1], rows.stride(0) * x.itemsize // 4, len(weight), Activation.NONE, torch.get_num_threads(),
        rows.data_ptr(), words.data_ptr(), address_of(biases), y.data_ptr(), w_row=words.shape[1],
    )  # fmt: skip
    kernel("linear", x.dtype)(ctypes.byref(product))
    return y


def linear_if_known(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes what torch's `functional.linear` does, with the kernel if it takes these tensors."""
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter, PackedTensor)
    if plain and are_known(x, weight) and fits(weight) and weight.is_contiguous() and weight.dim() == 2:
        return linear(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows [R, K], as a copy unless each begins at a word and its numbers are adjacent."""
    return rows.contiguous() if rows.stride(1) != 1 or rows.stride(0) * rows.itemsize % 4 else rows


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Returns where a tensor's numbers are; None without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def _type_that_holds(weights: list[torch.Tensor]) -> torch.dtype:
    """Returns a type that holds all numbers of weights [..., N, K] of one layer exactly, and that the kernels read: 16 bits come in pairs."""
    pairs = weights[0].shape[-1] % 2 == 0
    if pairs and all(map(_is_bfloat16, weights)):
        return torch.bfloat16
    return torch.float16 if pairs and all(weight.dtype == torch.float16 for weight in weights) else torch.float32


def _is_bfloat16(weight: torch.Tensor) -> bool:
    """Whether bfloat16 holds all numbers of a weight exactly."""
    if weight.dtype != torch.float32:
        return weight.dtype == torch.bfloat16
    if weight.dim() == 3:
        return all(map(_is_bfloat16, weight))
    numbers = weight.detach().contiguous().view(torch.int32).flatten()
    pieces = torch.split(numbers, 1 << 18)  # most weights of float32 fail at the first
    return not any(bool((piece & 0xFFFF).any()) for piece in pieces)


def columns_in_panels(columns: list[torch.Tensor]) -> torch.Tensor:
    """[panels, columns of a panel] of one [N] or [E, N], or of two whose columns share each panel."""
    return in_panels([column[..., None] for column in columns]).squeeze(1)


def biases_in_panels(biases: Sequence[torch.Tensor | None], shape: Sequence[int]) -> torch.Tensor | None:
    """[panels, columns of a panel] in float32 of biases of this shape, [N] or [E, N]; None if there are none."""
    if all(bias is None for bias in biases):
        return None
    return columns_in_panels([torch.zeros(*shape) if bias is None else bias.detach().float() for bias in biases])


class PanelsArguments(ctypes.Structure):
    """`Panels` in panels.cpp is the same."""

    _fields_ = (
        *integers("experts", "rows", "size", "bytes", "parts", "part", "side", "halves", "threads"),
        *pointers("x", "y"),
    )


def in_panels(parts: list[torch.Tensor], side: int = 0, *, halves: bool = False) -> torch.Tensor:
    """[sides of panels, W, columns of a side] in huge pages, of one [N, W] or [E, N, W] or of two whose rows share each panel.

    `side`: columns that lie side by side, by default a panel. Each of E experts begins with a panel of its own. Columns that fill up the last
    panel are 0. `halves`: numbers are pairs of 16 bits, and the first ones of a vector lie before all second ones.
    """
    panel = library().batchgen_linear_panel()
    side = side or panel
    experts, rows, size = (1, *parts[0].shape)[-3:]
    panels = -(-rows * len(parts) // panel)
    made = empty_in_huge_pages((experts * panels * panel // side, size, side), parts[0].dtype)
    for i, part in enumerate(parts):
        x = part.contiguous()
        arguments = PanelsArguments(
            experts, rows, size, x.itemsize, len(parts), i, side, halves, torch.get_num_threads(), x.data_ptr(), made.data_ptr()
        )  # fmt: skip
        library().batchgen_write_in_panels(ctypes.byref(arguments))
    return made
