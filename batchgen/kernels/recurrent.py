"""Recurrent layers by the kernels of the CPU: what goes along the sequence, for the spans of a step. `recurrent.cpp` has the arithmetic."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from batchgen.kernels.build import integers, kernel, pointers
from batchgen.kernels.ops import Activation, address_of, adjacent, are_known

ACTIVATIONS = {None: Activation.NONE, "silu": Activation.SILU, "swish": Activation.SILU}
"""By the names of transformers."""


class SpanPlaces(NamedTuple):
    """Where the spans of a step lie, int64 [N] each: their tokens in the packed batch, and their states in the slots."""

    starts: torch.Tensor
    lengths: torch.Tensor
    read: torch.Tensor
    """The slot of the state before each span."""
    write: torch.Tensor
    """The slot for the state after it."""

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(x.data_ptr() for x in self)


class Convolution(ctypes.Structure):
    """`Convolution` in recurrent.cpp is the same."""

    _fields_ = (
        *integers("spans", "channels", "taps", "x_token", "activation", "threads"),
        *pointers("starts", "lengths", "read", "write"),
        *pointers("x", "weight", "bias", "states", "out"),
    )


class Rule(ctypes.Structure):
    """`Rule` in recurrent.cpp is the same."""

    _fields_ = (
        *integers("spans", "heads", "groups", "rows", "columns", "row_decays", "normalize"),
        *integers("q_token", "k_token", "v_token", "threads"),
        *pointers("starts", "lengths", "read", "write", "decay", "strength", "skip"),
        *pointers("q", "k", "v", "out", "states"),
        ("scale", ctypes.c_float),
    )


class GatedNorm(ctypes.Structure):
    """`GatedNorm` in recurrent.cpp is the same."""

    _fields_ = (
        *integers("rows", "groups", "size", "x_row", "gate_row"),
        *integers("gate_first", "sigmoid", "rounds", "threads"),
        ("eps", ctypes.c_double),
        *pointers("weight", "x", "gate", "y"),
    )


class Gate(ctypes.Structure):
    """`Gate` in recurrent.cpp is the same."""

    _fields_ = (
        *integers("rows", "inner", "size", "x_row", "gate_row", "gate_inner", "activation", "threads"),
        *pointers("x", "gate", "y"),
    )


class RecurrentGates(ctypes.Structure):
    """`RecurrentGates` in recurrent.cpp is the same."""

    _fields_ = (
        *integers("tokens", "heads", "token", "threads"),
        *pointers("b", "a", "rate", "bias", "prompt", "decay", "strength"),
        ("least", ctypes.c_float),
        ("most", ctypes.c_float),
    )


class _Scan(ctypes.Structure):
    """`Scan` in recurrent.cpp is the same."""

    _fields_ = (
        *integers("spans", "channels", "size", "threads"),
        *pointers("starts", "lengths", "read", "write"),
        *pointers("x", "dt", "a", "b", "c", "out", "states"),
    )


def can_convolve(
    x_TC: torch.Tensor, weight_KC: torch.Tensor, bias_C: torch.Tensor | None, activation: str | None, states: torch.Tensor
) -> bool:  # fmt: skip
    """Whether the kernel has this convolution."""
    return are_known(x_TC, weight_KC, states, *([] if bias_C is None else [bias_C])) and activation in ACTIVATIONS


def convolve(
    x_TC: torch.Tensor, weight_KC: torch.Tensor, bias_C: torch.Tensor | None, activation: str | None, states: torch.Tensor, spans: SpanPlaces
) -> torch.Tensor:  # fmt: skip
    """The causal convolution [T, C] of the spans; `states` [slots, K-1, C], their last inputs, change in place. `weight_KC` is contiguous."""
    x_TC = adjacent(x_TC)
    out = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    bias_C = None if bias_C is None else bias_C.contiguous()
    what = Convolution(
        len(spans.starts), x_TC.shape[1], weight_KC.shape[0] - 1, x_TC.stride(0), ACTIVATIONS[activation], torch.get_num_threads(),
        *spans.addresses, x_TC.data_ptr(), weight_KC.data_ptr(), address_of(bias_C), states.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    kernel("convolve", x_TC.dtype)(ctypes.byref(what))
    return out


def delta_rule(
    q_TGK: torch.Tensor, k_TGK: torch.Tensor, v_THV: torch.Tensor, decay: torch.Tensor, beta_TH: torch.Tensor, scale: float,
    normalize: bool, states: torch.Tensor, spans: SpanPlaces,
) -> torch.Tensor:  # fmt: skip
    """The gated delta rule [T, H, V] of the spans, token after token; `states` [slots, H, K, V] change in place.

    `decay` is float32 [T, H], or [T, H, K] where each row of a state has its own. Groups of heads share queries and keys, which are
    brought to length one with `normalize`; queries are scaled.
    """
    out = torch.empty(v_THV.shape, dtype=v_THV.dtype)
    _run("delta_rule", q_TGK, k_TGK, v_THV, decay, beta_TH, None, scale, normalize, out, states, spans)
    return out


def mamba2(
    x_THP: torch.Tensor, dt_TH: torch.Tensor, decay_TH: torch.Tensor, b_TGN: torch.Tensor, c_TGN: torch.Tensor,
    skip_H: torch.Tensor | None, states: torch.Tensor, spans: SpanPlaces,
) -> torch.Tensor:  # fmt: skip
    """Mamba2's recurrence, float32 [T, H, P], of the spans, token after token; `states` [slots, H, N, P] change in place.

    Groups of heads share B and C. `skip_H` (D) times x is added to the outputs.
    """
    out = torch.empty(x_THP.shape, dtype=torch.float32)
    _run("mamba2", c_TGN, b_TGN, x_THP, decay_TH, dt_TH, skip_H, 1.0, False, out, states, spans)
    return out


def _run(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, strength: torch.Tensor,
    skip: torch.Tensor | None, scale: float, normalize: bool, out: torch.Tensor, states: torch.Tensor, spans: SpanPlaces,
) -> None:  # fmt: skip
    q, k, v = (_by_token(x) for x in (q, k, v))
    decay, strength = decay.float().contiguous(), strength.float().contiguous()
    skip = None if skip is None else skip.float().contiguous()
    what = Rule(
        len(spans.starts), v.shape[1], q.shape[1], *states.shape[2:], decay.dim() == 3, normalize,
        q.stride(0), k.stride(0), v.stride(0), torch.get_num_threads(),
        *spans.addresses, decay.data_ptr(), strength.data_ptr(), address_of(skip),
        *(x.data_ptr() for x in (q, k, v, out, states)), scale,
    )  # fmt: skip
    kernel(name, v.dtype)(ctypes.byref(what))


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """The tensor [T, H, D], a copy where the numbers of a token do not lie side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def mamba(
    x_TD: torch.Tensor, dt_TD: torch.Tensor, a_DN: torch.Tensor, b_TN: torch.Tensor, c_TN: torch.Tensor, states: torch.Tensor,
    spans: SpanPlaces,
) -> torch.Tensor:  # fmt: skip
    """Mamba's scan [T, D] of the spans, all float32; `states` [slots, N, D] change in place."""
    return _scan(x_TD, dt_TD, (a_DN.t(), b_TN, c_TN), states, spans)


def linear_scan(x_TD: torch.Tensor, decay_TD: torch.Tensor, states: torch.Tensor, spans: SpanPlaces) -> torch.Tensor:
    """States [T, D] after each token of the spans, which decay and take up x, all float32; `states` [slots, D] change in place."""
    return _scan(x_TD, decay_TD, (None, None, None), states.unsqueeze(1), spans)


def _scan(
    x: torch.Tensor, dt: torch.Tensor, parts: tuple[torch.Tensor | None, ...], states: torch.Tensor, spans: SpanPlaces
) -> torch.Tensor:
    x, dt = x.contiguous(), dt.contiguous()
    parts = tuple(None if part is None else part.contiguous() for part in parts)
    out = torch.empty_like(x)
    what = _Scan(
        len(spans.starts), x.shape[1], states.shape[1], torch.get_num_threads(), *spans.addresses, x.data_ptr(), dt.data_ptr(),
        *map(address_of, parts), out.data_ptr(), states.data_ptr(),
    )  # fmt: skip
    kernel("scan", torch.float32)(ctypes.byref(what))
    return out


def can_gated_norm(x: torch.Tensor, gate: torch.Tensor) -> bool:
    """Whether `gated_norm` takes these tensors."""
    return are_known(x) and are_known(gate) and gate.shape == x.shape and gate.dtype in (x.dtype, torch.bfloat16)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, groups: int, gate_first: bool, sigmoid: bool, rounds: bool
) -> torch.Tensor:  # fmt: skip
    """The root mean square norm of each of `groups` parts of the last dimension, times `weight` (float32), gated before or after; as `x`.

    The gate is SiLU or a sigmoid. `rounds`: to the type of `x` where the modules of transformers round that norm in this type.
    """
    size = x.shape[-1]
    rows, gates = (adjacent(of.reshape(-1, size)) for of in (x, gate))
    y = torch.empty(x.shape, dtype=x.dtype)
    what = GatedNorm(
        rows.shape[0], groups, size // groups, rows.stride(0), gates.stride(0), gate_first, sigmoid, rounds, torch.get_num_threads(),
        eps, weight.data_ptr(), rows.data_ptr(), gates.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    kernel("gated_norm", x.dtype, "" if gate.dtype == x.dtype else "_by_bfloat16")(ctypes.byref(what))
    return y


def can_gate(x: torch.Tensor, gate: torch.Tensor) -> bool:
    """Whether `sigmoid_gate` takes these tensors."""
    return are_known(x, gate) and x.shape == gate.shape


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), both [..., D]; contiguous. The sigmoid and the product are rounded to the type of `x`."""
    size = x.shape[-1]
    rows, gates = (adjacent(of.reshape(-1, size)) for of in (x, gate))
    y = torch.empty(x.shape, dtype=x.dtype)
    what = Gate(
        rows.shape[0], 1, size, rows.stride(0), gates.stride(0), 0, Activation.SIGMOID, torch.get_num_threads(), rows.data_ptr(), gates.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    kernel("gate", x.dtype)(ctypes.byref(what))
    return y
