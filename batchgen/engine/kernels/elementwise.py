"""Norms and rotary embedding by the kernels, on float32 and bfloat16 of the CPU. `elementwise.cpp` has the arithmetic."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import torch

from batchgen.engine.kernels.build import DTYPES, kernel


class _Norm(ctypes.Structure):
    """`Norm` in elementwise.cpp is the same."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("outer", "inner", "size", "x_outer", "x_inner", "rounds_first", "threads")
        ),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("weight", "x", "y")),
    )


class _Rotary(ctypes.Structure):
    """`Rotary` in elementwise.cpp is the same."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "q_heads", "k_heads", "size", "turned")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "cos_token", "threads")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "cos", "sin", "q_out", "k_out")),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounds_first: bool) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32; `weight` is float32.

    `rounds_first`: x over its root mean square is rounded to its type before the weight comes.
    """
    size = x.shape[-1]
    if x.stride(-1) != 1 or not _is_two_deep(x):
        x = x.contiguous()
    inner = x.shape[-2] if x.dim() > 2 else 1
    y = torch.empty(x.shape, dtype=x.dtype)
    outer = y.numel() // max(1, inner * size)
    x_outer = x.stride(-3) if x.dim() > 2 else x.stride(0) if x.dim() == 2 else 0
    norm = _Norm(
        outer, inner, size, x_outer, x.stride(-2) if x.dim() > 2 else 0, rounds_first, torch.get_num_threads(), eps,
        weight.data_ptr(), x.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    kernel("norm", x.dtype)(ctypes.byref(norm))
    return y


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """q [1, H, T, D] and k [1, K, T, D] times cos, and their halves turned times sin, [1, T, R]; None for what the kernel has not.

    Of each head the first R elements are rotated. Each product is rounded to the type of cos and sin: that of q, or float32.
    """
    if not _can_rotate(q, k, cos, sin):
        return None
    (_, heads, tokens, size), kv_heads = q.shape, k.shape[1]
    q_out = torch.empty((1, tokens, heads, size), dtype=q.dtype)
    k_out = torch.empty((1, tokens, kv_heads, size), dtype=q.dtype)
    rotary = _Rotary(
        tokens, heads, kv_heads, size, cos.shape[2], q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1),
        torch.get_num_threads(), q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_out.data_ptr(), k_out.data_ptr(),
    )  # fmt: skip
    kernel("rotary", q.dtype, "" if cos.dtype == q.dtype else "_by_float32")(ctypes.byref(rotary))
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def _can_rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
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
        and q.dtype in DTYPES
        and cos.dtype == sin.dtype
        and cos.dtype in (q.dtype, torch.float32)
        and q.stride(3) == k.stride(3) == cos.stride(2) == 1
        and q.device.type == k.device.type == cos.device.type == "cpu"
    )


def _is_two_deep(x: torch.Tensor) -> bool:
    """Whether all dimensions before the last two can be walked as one."""
    steps = [(x.stride(i), x.shape[i]) for i in range(x.dim() - 2) if x.shape[i] != 1]
    return all(before[0] == after[0] * after[1] for before, after in pairwise(steps))
