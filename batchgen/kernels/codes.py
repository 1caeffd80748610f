"""Weights that stay packed in memory: codes of a few bits, and what they mean.

All packed formats come down to one form. A code stands for a level, or for itself less a zero; the number is

    round(level * scale [/ divisor] [+ offset])

in float32, with a scale (and an offset, a zero) for each group of inputs of each row. `PackedTensor` is a parameter in this form.

Codes lie in planes, or a number for each few inputs chooses them from a table (a grid, as in llama.cpp's types of 1 to 3 bits).
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

PLANES = {16: (16,), 8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""A code's bits lie in planes, lowest bits first: of 4 bits two numbers in a byte, of 2 bits four, of 1 bit eight. The first number is the lowest.
`plane16` has numbers of bfloat16 or float16, which stand for themselves."""
OF_ALL_ROWS = ("groups", "grid")
"""Parts that are not of single rows: the group of each input, and words of eight (or four) codes of 4 bits, the first in the lowest bits."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
AT_A_TIME = 1 << 22
"""Numbers that are unpacked at a time in plain torch, because each step of that takes memory."""

Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Coding:
    """What the codes of a weight mean, apart from its tensors (`Parts`)."""

    bits: int
    """A key of `PLANES`."""
    levels: tuple[float, ...] | str | None = None
    """The level of each code; "e4m3" for the numbers of float8_e4m3fn; None: the code less the zero."""
    zero: int = 0
    """Of a coding without levels and without the part `zeros`."""
    group: int = 0
    """Inputs that have one scale; 0: the part `groups` has the group of each input."""
    unit: int = 0
    """8 or 4: so many inputs have their codes from the part `grid`, at the number whose lowest 8 bits are in `plane_index` and the others, if any, in
    `plane_upper`. `plane1`, if there is one, has the codes' highest bits. 0: all codes lie in planes."""
    sub: str = ""
    """What the part `sub` means, a byte for each group: "u8", "i8", "e4m3", or "e8m0" for a power of two; or, of 4 bits, "u4" or "odd" for 2 n + 1. It
    multiplies the scale."""
    divides: bool = False
    """Whether the scale is `sub` divided by the part `scales`."""
    divisor: float = 1.0
    rounds: torch.dtype | None = None
    """A type that numbers are rounded to before they are rounded to the weight's own."""

    @property
    def sub_offsets(self) -> str:
        """What the part `sub_offsets` means, which multiplies the offset."""
        return "u4" if self.sub == "u4" else "u8"


IN_16_BITS = Coding(16)
"""Of weights of 16 bits in a model that is computed in float32."""
OF_4_BITS = ("u4", "odd")
"""The kinds of fine scales that have 4 bits, two in a byte, the first in the lower half."""


@cache
def levels_of(kind: str) -> torch.Tensor:
    """Returns the 256 numbers that a byte of this kind stands for, in float32."""
    numbers = torch.arange(256, dtype=torch.uint8)
    if kind == "e4m3":
        return numbers.view(torch.float8_e4m3fn).float()
    if kind == "e8m0":
        return torch.ldexp(torch.ones(256), numbers.int() - 127)
    if kind == "odd":
        numbers = 2 * numbers + 1  # of which the first 16 are meant
    return (numbers.view(torch.int8) if kind == "i8" else numbers).float()


def _levels_on(levels: str | tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Returns levels in float32 on a device, where they stay: a CUDA graph must not copy them from the host."""
    return _kept_levels(levels if isinstance(levels, str) else array("f", levels).tobytes(), device)


@cache
def _kept_levels(levels: str | bytes, device: torch.device) -> torch.Tensor:
    """`levels`: a kind, or float32 numbers as bytes, because -0.0 equals 0.0 in a tuple."""
    found = levels_of(levels) if isinstance(levels, str) else torch.frombuffer(bytearray(levels), dtype=torch.float32)
    return found.to(device)


def packed_planes(codes: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """Returns the planes of codes [..., K] in uint8; K must be a multiple of 8."""
    found, shift = {}, 0
    for size in PLANES[bits]:
        part = codes if len(PLANES[bits]) == 1 else (codes >> shift) & ((1 << size) - 1)
        found[f"plane{size}"] = packed_plane(part.contiguous(), size)
        shift += size
    return found


def packed_plane(codes: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the plane of codes [..., K] of 1, 2, 4 or 8 bits in uint8, contiguous."""
    if size == 8:
        return codes
    words = codes.view({4: torch.int16, 2: torch.int32, 1: torch.int64}[size])  # of the codes of one byte
    plane = words
    for i in range(1, 8 // size):
        plane = plane | (words >> (i * (8 - size)))
    return plane.to(torch.uint8)


def unpacked_codes(coding: Coding, parts: Parts) -> torch.Tensor:
    """Returns the codes [..., K] in uint8."""
    if coding.unit:
        return _codes_of_grid(coding, parts)
    codes, shift = None, 0
    for size in PLANES[coding.bits]:
        plane = in_fields(parts[f"plane{size}"], size)
        codes = plane if codes is None else codes | (plane << shift)
        shift += size
    assert codes is not None
    return codes


def in_fields(numbers: torch.Tensor, size: int, count: int = 8) -> torch.Tensor:
    """Returns the fields of `size` bits of numbers of `count` bits, lowest first."""
    if size == count:
        return numbers
    shifts = torch.arange(0, count, size, dtype=numbers.dtype, device=numbers.device)
    return ((numbers[..., None] >> shifts) & ((1 << size) - 1)).flatten(-2)


def upper_bits(parts: Parts) -> int:
    """Returns how many bits of a number that chooses codes are in `plane_upper`."""
    upper = parts.get("plane_upper")
    return 0 if upper is None else 8 * upper.shape[-1] // parts["plane_index"].shape[-1]


def _codes_of_grid(coding: Coding, parts: Parts) -> torch.Tensor:
    index = parts["plane_index"].long()
    if "plane_upper" in parts:
        index |= in_fields(parts["plane_upper"], upper_bits(parts)).long() << 8
    codes = in_fields(parts["grid"][index], 4, 4 * coding.unit).to(torch.uint8)
    return codes | (in_fields(parts["plane1"], 1) << 3) if "plane1" in parts else codes


def fine_codes(sub: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns a code for each group of what the part `sub` or `sub_offsets` of this kind holds."""
    return in_fields(sub, 4) if kind in OF_4_BITS else sub


def _by_group(parts: Parts, name: str, kind: str, divides: bool = False) -> torch.Tensor:
    """Returns the scale or the offset of each group, [..., G] in float32. `name`: of the coarse part; `kind`: what the fine one means."""
    sub = parts.get("sub" if name == "scales" else f"sub_{name}")
    if sub is None:
        return parts[name].float()
    fine = _levels_on(kind, sub.device)[fine_codes(sub, kind).long()]
    if name not in parts:
        return fine
    coarse = parts[name].float()
    coarse = coarse.repeat_interleave(-(-fine.shape[-1] // coarse.shape[-1]), -1)[..., : fine.shape[-1]]
    return fine / coarse if divides else coarse * fine


def dequantize(coding: Coding, parts: Parts) -> torch.Tensor:
    """Returns the numbers [..., K] in float32, before they are rounded to the weight's type."""
    if coding == IN_16_BITS:
        return parts["plane16"].float()
    codes = unpacked_codes(coding, parts)
    size = codes.shape[-1]

    def spread(x: torch.Tensor) -> torch.Tensor:
        """Returns [..., K] of one number for each group."""
        if x.shape[-1] == 1 or not coding.group:
            return x if "groups" not in parts else x[..., parts["groups"].long()]
        return x.repeat_interleave(coding.group, -1)[..., :size]

    if coding.levels is not None:
        numbers = _levels_on(coding.levels, codes.device)[codes.long()]
    elif "zeros" in parts:
        numbers = codes.float() - spread(parts["zeros"].float())
    else:
        numbers = codes.float() - coding.zero
    numbers *= spread(_by_group(parts, "scales", coding.sub, coding.divides))
    if coding.divisor != 1:
        numbers /= coding.divisor
    if "offsets" in parts:
        numbers += spread(_by_group(parts, "offsets", coding.sub_offsets))
    return numbers if coding.rounds is None else numbers.to(coding.rounds)


_scratch: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
"""Memory that weights are unpacked into, one after the other: one for each device and type. It grows."""
_scratch_lock = threading.Lock()
"""Held from unpacking a weight into this memory to the product that reads it: models may run in several threads."""
_outgrown: list[torch.Tensor] = []
"""Such memory on CUDA devices that was too small for another model: CUDA graphs of the models before may have its address."""


def _in_scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns room for a tensor, which the next call may hand out again."""
    size = math.prod(shape)
    found = _scratch.get((device, dtype))
    if found is None or found.numel() < size:
        if found is not None and device.type == "cuda":
            _outgrown.append(found)
        with torch.inference_mode(False):  # may be written in any mode
            _scratch[device, dtype] = found = torch.empty(size, dtype=dtype, device=device)
    return found[:size].view(*shape)


def free_scratch() -> None:
    """Frees the memory on the CPU that weights were unpacked into."""
    with _scratch_lock:
        for key in [key for key in _scratch if key[0].type == "cpu"]:
            del _scratch[key]


def reserve_scratch(weights: Iterable[torch.Tensor]) -> None:
    """Takes the memory that these weights are unpacked into, so that it never moves: CUDA graphs keep its address."""
    with _scratch_lock:
        for weight in weights:
            if isinstance(weight, PackedTensor):
                _in_scratch(weight.shape, weight.dtype, weight.device)


class PackedTensor(torch.Tensor):
    """A weight [..., N, K] that stays packed. It behaves as the plain tensor of its shape and type.

    What only moves, selects or joins rows keeps it packed. Everything else unpacks it first: a product into memory that all weights share.
    """

    coding: Coding
    parts: Parts
    transposed: bool
    """Whether the last two dimensions of the tensor are those of the parts the other way round."""
    is_view: bool
    """Whether the plain tensor is a transposed view of another, whose layout products see."""
    take_rows: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Returns rows of the plain tensor by indices of any shape, if the kernels of a linear layer hold the codes. `parts` then copies them."""

    @staticmethod
    def __new__(
        cls,
        coding: Coding,
        parts: Parts,
        dtype: torch.dtype = torch.float32,
        *,
        transposed: bool = False,
        is_view: bool = False,
    ) -> PackedTensor:
        size = PLANES[coding.bits][0]
        first = parts["plane_index" if coding.unit else f"plane{size}"]
        shape = [*first.shape[:-1], first.shape[-1] * (coding.unit or 8 * first.itemsize // size)]
        if transposed:
            shape[-2:] = shape[:-3:-1]
        with torch.inference_mode(False):  # views of parameters are not inference tensors
            made: PackedTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=first.device)
        made.coding, made.parts, made.transposed, made.is_view = coding, dict(parts), transposed, is_view
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedTensor({list(self.shape)}, {self.dtype}, {self.coding})"

    @property
    def packed_bytes(self) -> int:
        """Memory of the parts; 0 if the kernels of a linear layer hold them."""
        return sum(part.nbytes for part in self.parts.values()) if isinstance(self.parts, dict) else 0

    def with_parts(self, change: Callable[[torch.Tensor], torch.Tensor], **new: Any) -> PackedTensor:
        """Returns a tensor whose parts of single rows are changed."""
        parts = {name: part if name in OF_ALL_ROWS else change(part) for name, part in self.parts.items()}
        settings: dict[str, Any] = {
            name: getattr(self, name) for name in ("coding", "dtype", "transposed", "is_view")
        } | new
        return PackedTensor(parts=parts, **settings)

    @torch.inference_mode(False)  # views of it may be views of parameters
    @torch.no_grad()
    def unpacked(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the plain tensor. `into`: room for it as the parts lie, [..., N, K]."""
        shape = self.shape if not self.transposed else (*self.shape[:-2], self.shape[-1], self.shape[-2])
        out = torch.empty(shape, dtype=self.dtype, device=self.device) if into is None else into
        rows, to = math.prod(shape[:-1]), out.view(-1, shape[-1])
        flat = self if len(shape) == 2 else self.with_parts(lambda part: part.reshape(rows, part.shape[-1]))
        at_a_time = max(1, AT_A_TIME // shape[-1])
        for first in range(0, rows, at_a_time):
            some = {n: p if n in OF_ALL_ROWS else p[first : first + at_a_time] for n, p in flat.parts.items()}
            to[first : first + at_a_time] = dequantize(self.coding, some)
        if self.transposed != self.is_view:
            out = out.transpose(-1, -2).contiguous()
        out = out.transpose(-1, -2) if self.is_view else out
        return out.contiguous() if self.coding == IN_16_BITS else out  # as transformers has plain weights

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        packed = _KEPT.get(func)
        if packed is not None:
            found = packed(*args, **kwargs)
            if found is not None:
                return found
        shared = func in _PRODUCTS
        if not shared and func not in _KEPT and (found := func.decompose(*args, **kwargs)) is not NotImplemented:
            return found  # in inference mode, operations arrive that consist of others

        def plain(x: Any) -> Any:
            if isinstance(x, PackedTensor):
                if shared and x.transposed == x.is_view:
                    shape = x.transpose(-1, -2).shape if x.transposed else x.shape
                    return x.unpacked(_in_scratch(shape, x.dtype, x.device))
                return x.unpacked()
            return type(x)(map(plain, x)) if isinstance(x, list | tuple) else x

        with _scratch_lock if shared else nullcontext():
            return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


_aten = torch.ops.aten
_PRODUCTS = {_aten.linear.default, _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.matmul.default, _aten._grouped_mm.default}  # fmt: skip
"""Operations that read one weight and give something new."""


def _copied(x: PackedTensor, *_: Any, dtype: torch.dtype | None = None, device: Any = None, **__: Any) -> PackedTensor:
    coding = x.coding
    if dtype is not None and not dtype.is_floating_point:
        return None  # type: ignore[return-value]
    if dtype is not None and x.dtype != torch.float32 and dtype != x.dtype and coding.rounds is None:
        coding = replace(coding, rounds=x.dtype)
    parts = {name: part.to(device=device) for name, part in x.parts.items()}
    return PackedTensor(coding, parts, dtype or x.dtype, transposed=x.transposed, is_view=x.is_view)


def _leading(x: Any, dim: int) -> int | None:
    """Returns the dimension of the parts; None if it is not one before the rows' numbers."""
    dim %= x.dim()
    return dim if dim < x.dim() - (2 if x.transposed else 1) else None


def _along(operation: Any) -> Callable[..., Any]:
    """Returns an operation on one leading dimension of a packed tensor."""

    def run(x: PackedTensor, dim: int = 0, *args: Any) -> Any:
        at = _leading(x, dim)
        return None if at is None else x.with_parts(lambda part: operation(part, at, *args))

    return run


def _split(x: PackedTensor, sizes: Any, dim: int = 0) -> Any:
    at = _leading(x, dim)
    if at is None:
        return None
    sizes = [sizes] * -(-x.shape[at] // sizes) if isinstance(sizes, int) else sizes
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [x.with_parts(lambda part, s=s, n=n: part.narrow(at, s, min(n, x.shape[at] - s))) for s, n in zip(starts, sizes, strict=True)]  # type: ignore[misc]  # fmt: skip


def _joined(operation: Any) -> Callable[..., Any]:
    def run(tensors: Sequence[Any], dim: int = 0) -> Any:
        first = tensors[0]
        if not all(isinstance(x, PackedTensor) and are_alike(x, first) for x in tensors):
            return None
        inner = 2 if first.transposed else 1
        at = dim % (first.dim() + (operation is torch.stack))
        if at > first.dim() - inner or (at == first.dim() - inner and operation is torch.cat):
            return None
        parts = {n: p if n in OF_ALL_ROWS else operation([x.parts[n] for x in tensors], at) for n, p in first.parts.items()}  # fmt: skip
        return PackedTensor(first.coding, parts, first.dtype, transposed=first.transposed, is_view=first.is_view)

    return run


def are_alike(x: Any, y: Any) -> bool:
    """Whether two packed tensors differ only in their rows."""
    return (
        (x.coding, x.dtype, x.transposed, x.is_view, x.device) == (y.coding, y.dtype, y.transposed, y.is_view, y.device)
        and {n: (p.dtype, p.shape[-1]) for n, p in x.parts.items()} == {n: (p.dtype, p.shape[-1]) for n, p in y.parts.items()}
        and all(torch.equal(x.parts[name], y.parts[name]) for name in OF_ALL_ROWS if name in x.parts)
    )  # fmt: skip


def _viewed(x: PackedTensor, sizes: Sequence[int]) -> Any:
    known = -math.prod(sizes)
    sizes = [x.numel() // known if size == -1 else size for size in sizes]
    if x.transposed or not sizes or sizes[-1] != x.shape[-1]:
        return x if list(sizes) == list(x.shape) else None
    return x.with_parts(lambda part: part.reshape(*sizes[:-1], part.shape[-1]))


def _swapped(x: PackedTensor, first: int, second: int) -> Any:
    first, second = sorted((first % x.dim(), second % x.dim()))
    if (first, second) == (x.dim() - 2, x.dim() - 1):
        return x.with_parts(lambda part: part, transposed=not x.transposed, is_view=not x.is_view)
    inner = x.dim() - (2 if x.transposed else 1)
    return None if second >= inner else x.with_parts(lambda part: part.transpose(first, second))


def _rows(x: PackedTensor, indices: Sequence[Any]) -> Any:
    if len(indices) != 1 or indices[0] is None or _leading(x, 0) is None:
        return None
    return x.with_parts(lambda part: part[indices[0]])


def _embedded(x: PackedTensor, indices: torch.Tensor, *_: Any) -> Any:
    if x.take_rows is not None:
        return x.take_rows(indices.long())
    return None if x.transposed else x.with_parts(lambda part: part[indices]).unpacked()


_KEPT: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: lambda x: x.with_parts(lambda part: part),
    _aten.alias.default: lambda x: x.with_parts(lambda part: part),
    _aten.clone.default: lambda x, **_: x.with_parts(torch.clone),
    _aten._to_copy.default: _copied,
    _aten.to.dtype: lambda x, dtype, *_: _copied(x, dtype=dtype),
    _aten.view.default: _viewed,
    _aten._unsafe_view.default: _viewed,
    _aten.reshape.default: _viewed,
    _aten.t.default: lambda x: _swapped(x, 0, 1),
    _aten.transpose.int: _swapped,
    _aten.unsqueeze.default: lambda x, dim: None if dim % (x.dim() + 1) > x.dim() - 1 - x.transposed else x.with_parts(lambda part: part.unsqueeze(dim % (x.dim() + 1))),
    _aten.select.int: _along(lambda part, dim, index: part.select(dim, int(index))),
    _aten.slice.Tensor: _along(lambda part, dim, start=None, end=None, step=1: part[(slice(None),) * dim + (slice(start, end, step),)]),
    _aten.index_select.default: _along(torch.index_select),
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.index.Tensor: _rows,
    _aten.cat.default: _joined(torch.cat),
    _aten.stack.default: _joined(torch.stack),
    _aten.embedding.default: _embedded,
}  # fmt: skip
"""What keeps a weight packed. A function returns None where the weight must be unpacked."""
