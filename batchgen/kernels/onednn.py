"""Linear layers in 8 bits with torch's oneDNN, for machines without batchgen's kernels: the same whole numbers, scales and exact sums."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from batchgen.kernels.int8 import LARGEST


class OneDnnInt8Linear(torch.nn.Module):
    """Maps x [..., K] to [..., N] with the results of `Int8Linear`."""

    def __init__(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        """`values` int8 [N, K] and their scales [N]. `dtype` is that of x and y."""
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.dtype = dtype
        self.packed = _packed(values)
        self.scales = scales.float()
        self.bias = None if bias is None else bias.detach().float()
        self.bytes = values.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).float()
        if not len(rows):
            return x.new_empty((*x.shape[:-1], self.out_features))
        largest = rows.abs().amax(1, keepdim=True)
        # The kernels divide; torch divides a number by a tensor through a reciprocal, which rounds twice.
        inverse = torch.where(largest > 0, torch.full_like(largest, LARGEST) / largest, 0.0)
        whole = (rows * inverse).round_().to(torch.int8)
        y = _sums(whole, self.packed, self.out_features) * (largest / LARGEST * self.scales)
        if self.bias is not None:
            y += self.bias
        return y.to(self.dtype).view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:
        """The weight [N, K] of the plain layer, unpacked at each call, for models that read it."""
        values: torch.Tensor = self.packed.to_dense()
        return (values.t() * self.scales[:, None]).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.dtype}"


@cache
def sums_are_exact() -> bool:
    """Whether oneDNN sums products of 8 bits exactly on this machine. Without VNNI or AMX, sums of two products saturate at 16 bits."""
    weight = torch.full((64, 64), LARGEST, dtype=torch.int8)
    try:
        y = _sums(weight[:3], _packed(weight), 64)
    except (RuntimeError, AttributeError):  # a build of torch without oneDNN
        return False
    return bool((y == 64 * LARGEST * LARGEST).all())


def _packed(values: torch.Tensor) -> Any:
    return torch.ops.onednn.qlinear_prepack(values.contiguous(), None)


def _sums(x: torch.Tensor, packed: Any, columns: int) -> torch.Tensor:
    """Returns int8 [rows, K] times packed int8 [N, K], in float32 [rows, N]."""
    y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, packed, torch.ones(columns), torch.zeros(columns, dtype=torch.int32),
        None, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return y
