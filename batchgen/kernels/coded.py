"""Packed weights in the layout of the kernels for the CPU, which unpack a panel on its way into the cache (codes.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from batchgen.kernels.build import integers, pointers
from batchgen.kernels.codes import (
    OF_4_BITS,
    OF_ALL_ROWS,
    Coding,
    PackedTensor,
    Parts,
    are_alike,
    fine_codes,
    levels_of,
    upper_bits,
)

_LEVELS = {"table": 1, "e4m3": 2, "table of bfloat16": 3, "divided": 4}
_TYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_FINE = {"u8": 1, "i8": 2, "e4m3": 3, "e8m0": 4, "u4": 5, "odd": 6}
_RANGE = (1e-20, 1e20)
"""Of scales and offsets, except 0: numbers between are neither infinite nor so small that processors differ."""


class _Groups(ctypes.Structure):
    _fields_ = (*pointers("coarse", "fine"), *integers("type", "fine_type", "per_coarse", "divides"))


class CodesArguments(ctypes.Structure):
    """`Codes` in codes.h is the same."""

    _fields_ = (
        ("planes", ctypes.c_void_p * 4),
        *pointers("table", "zeros", "group_of", "index", "upper", "grid"),
        *((name, _Groups) for name in ("scales", "offsets")),
        *integers("inputs", "groups", "group", "levels", "zero", "exact", "rounds", "unit", "upper_bits"),
        ("divisor", ctypes.c_double),
    )


def can_unpack(weight: torch.Tensor) -> bool:
    """Whether the kernels can unpack a weight [N, K] or [E, N, K] to exactly the numbers that it stands for."""
    if not isinstance(weight, PackedTensor) or weight.transposed or weight.dim() not in (2, 3):
        return False
    coding, parts = weight.coding, weight.parts
    return (
        coding.bits <= 8
        and weight.shape[-1] % (256 if coding.unit else 32) == 0
        and (coding.group % 8 == 0 if "groups" not in parts else coding.levels is None and "offsets" not in parts)
        and (coding.bits in (2, 4, 8) or ("groups" not in parts and _zeros_are_exact(coding, parts)))
        and coding.rounds in (None, torch.bfloat16)
        and weight.dtype in (torch.float32, torch.bfloat16)
        and all(parts[name].dtype in _TYPES for name in ("scales", "offsets") if name in parts)
        and (
            coding.divisor == 1
            or (coding.levels is None and coding.bits == 8 and not parts.keys() & {"offsets", "zeros", "groups"})
        )
        and (
            "offsets" not in parts
            or (coding.levels is None and coding.zero == 0 and _products_are_exact(coding, parts))
        )
        and (not isinstance(coding.levels, tuple) or coding.bits == 4)
        and (not coding.unit or _are_short(coding.levels))
        and (coding.levels != "e4m3" or not _has_nan(parts["plane8"]))
        and _are_in_range(parts, "scales", coding.sub, coding.divides)
        and ("offsets" not in parts or _are_in_range(parts, "offsets", coding.sub_offsets))
    )


def _are_short(levels: tuple[float, ...] | str | None) -> bool:
    """Whether levels are a table of numbers that bfloat16 holds."""
    return isinstance(levels, tuple) and torch.tensor(levels).bfloat16().tolist() == list(levels)


def _has_nan(codes: torch.Tensor) -> bool:
    """Whether a number of e4m3 is none: 0x7F or 0xFF."""
    return int(codes.max()) == 0xFF or int(codes.view(torch.int8).max()) == 0x7F


def _products_are_exact(coding: Coding, parts: Parts) -> bool:
    """Whether float32 holds every product of a code and a scale, so that rounding it before an offset is added changes nothing."""
    coarse = parts.get("scales")
    bits = coding.bits + 11 + (8 if coding.sub else 0)
    return (
        coarse is not None
        and "zeros" not in parts
        and coarse.dtype != torch.float32
        and coding.sub in ("", "u8", "i8", *OF_4_BITS)
        and not coding.divides
        and bits <= 24
    )


def _zeros_are_exact(coding: Coding, parts: Parts) -> bool:
    """Whether float32 holds every product of a zero and a scale."""
    if "zeros" not in parts:
        return coding.zero & (coding.zero - 1) == 0  # a power of two, or 0
    return parts["scales"].dtype != torch.float32 and not coding.sub


def _are_in_range(parts: Parts, name: str, kind: str, divides: bool = False) -> bool:
    """Whether all products of the coarse and the fine numbers of groups are 0 or in `_RANGE`."""
    smallest, largest = _sizes(parts[name].float()) if name in parts else (1.0, 1.0)
    if divides:
        smallest, largest = 1 / largest, 1 / smallest
    sub = parts.get("sub" if name == "scales" else f"sub_{name}")
    if sub is not None:
        found = fine_codes(sub, kind).flatten().bincount(minlength=256) > 0
        fine_smallest, fine_largest = _sizes(levels_of(kind)[found])
        smallest, largest = smallest * fine_smallest, largest * fine_largest
    return smallest > _RANGE[0] and largest < _RANGE[1]


def _sizes(x: torch.Tensor) -> tuple[float, float]:
    """Returns the smallest absolute number but 0, and the largest; 1 without any."""
    sizes = x.abs()
    smallest, largest = sizes.masked_fill_(sizes == 0, 1.0).aminmax()
    return float(smallest), float(largest)


class Codes:
    """Packed weights [N, K] or [E, N, K], one or two of the same form whose rows share each panel."""

    def __init__(
        self, weights: Sequence[PackedTensor], in_panels: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> None:
        """`weights` must be alike, and `can_unpack` hold for each. They are copied. `in_panels`: see `ops`."""
        first = weights[0]
        coding, parts = first.coding, first.parts
        self.coding = coding
        self._dtype = first.dtype
        self.parts: dict[str, torch.Tensor] = {}
        """[panels, words or groups, columns of a panel]"""
        for name, part in parts.items():
            if name in OF_ALL_ROWS:
                self.parts[name] = part.int().contiguous()
            else:
                rows = [weight.parts[name].contiguous() for weight in weights]
                rows = [row.view(torch.int32) for row in rows] if name.startswith("plane") else rows
                self.parts[name] = in_panels(rows)
        self._table = None
        if isinstance(coding.levels, tuple):
            levels = torch.zeros(16)
            levels[: len(coding.levels)] = torch.tensor(coding.levels, dtype=torch.float32)
            in_bytes = levels.view(torch.uint8).view(16, 4).T.contiguous()
            self._table = torch.cat([levels, in_bytes.view(torch.float32).flatten()])
        self.argument = self._argument(first.shape[-1], upper_bits(first.parts))

    def _argument(self, inputs: int, upper_bits: int) -> CodesArguments:
        coding, parts = self.coding, self.parts
        counts = [
            parts[name].shape[1] for name in ("scales", "sub", "zeros", "offsets", "sub_offsets") if name in parts
        ]
        groups = max(*counts, 2 * parts["sub"].shape[1] if coding.sub in OF_4_BITS else 0)
        levels = 0 if coding.levels is None else _LEVELS.get(str(coding.levels), 1)
        if coding.divisor != 1:
            levels = _LEVELS["divided"]
        if _are_short(coding.levels):
            levels = _LEVELS["table of bfloat16"]
        argument = CodesArguments(
            table=None if self._table is None else self._table.data_ptr(), zeros=self._address("zeros"),
            group_of=self._address("groups"), index=self._address("plane_index"), upper=self._address("plane_upper"),
            grid=self._address("grid"), unit=coding.unit, upper_bits=upper_bits, scales=self._groups("scales", "sub", coding.sub, groups, coding.divides),
            offsets=self._groups("offsets", "sub_offsets", coding.sub_offsets, groups), inputs=inputs, groups=groups, group=coding.group or inputs,
            levels=levels, zero=coding.zero, exact=_zeros_are_exact(coding, parts),
            rounds=coding.rounds is not None or self._dtype == torch.bfloat16, divisor=coding.divisor,
        )  # fmt: skip
        for i, size in enumerate((8, 4, 2, 1)):
            argument.planes[i] = self._address(f"plane{size}")
        return argument

    def _groups(self, name: str, sub: str, kind: str, groups: int, divides: bool = False) -> _Groups:
        coarse, fine = self.parts.get(name), self.parts.get(sub)
        per_coarse = groups if coarse is None else -(-groups // coarse.shape[1])
        return _Groups(
            self._address(name), self._address(sub), 0 if coarse is None else _TYPES[coarse.dtype],
            0 if fine is None else _FINE[kind], per_coarse, divides,
        )  # fmt: skip

    def _address(self, name: str) -> int | None:
        return self.parts[name].data_ptr() if name in self.parts else None

    @property
    def address(self) -> int:
        return ctypes.addressof(self.argument)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def part(self, name: str, rows: int) -> torch.Tensor:
        """Returns a copy of a part of the first rows of one weight, as it is in a `PackedTensor`."""
        part = self.parts[name]
        if name in OF_ALL_ROWS:
            return part
        found = part.transpose(1, 2).flatten(0, 1)[:rows].contiguous()
        return found.view(torch.uint8) if name.startswith("plane") else found


class PartsInPanels(Mapping[str, torch.Tensor]):
    """The parts of a weight [N, K] that only the kernels hold, copied at each access."""

    def __init__(self, codes: Codes, rows: int) -> None:
        self._codes, self._rows = codes, rows

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._codes.part(name, self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._codes.parts)

    def __len__(self) -> int:
        return len(self._codes.parts)


def can_share(weights: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels can unpack all of these weights, in panels that they share."""
    return all(map(can_unpack, weights)) and all(are_alike(weight, weights[0]) for weight in weights)
