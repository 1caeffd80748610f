"""Parts of a model on a CUDA device: norms, rotary embeddings and gated MLPs as Triton kernels, where plain torch runs four to ten kernels for each,
and the projections of queries, keys and values as one product.

The kernels run inside `running()`, which is where the attention kernels run too (`model/cuda_runner.py`); elsewhere a part's own forward runs. So the
check of a GPU compares both, and a GPU on which one of them fails runs neither. Imports triton only when a kernel is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from batchgen.kernels.fusion import FusedRotaryOfOne, eps_of, fuse_rotary, norm_of, parts_of_mlp
from batchgen.kernels.ops import Activation, can_rotate
from batchgen.kernels.recognition import Code
from batchgen.kernels.replacing import is_plain, known_code, own_forward, replace_parts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_NORM = 16384
"""Largest size of a norm: a program holds a row."""
BLOCK = 2048
"""Numbers that a program of a norm or of a rotary embedding holds, if a row or a head is not larger."""

_in_a_step = False


@contextmanager
def running() -> Iterator[None]:
    """Within the block, replaced parts run as kernels."""
    global _in_a_step  # engines in several threads may mix both, which differ by rounding
    _in_a_step = True
    try:
        yield
    finally:
        _in_a_step = False


def fuse_on_device(model: torch.nn.Module) -> None:
    """Replaces norms, rotary embeddings, gated MLPs and projections whose code is known, once."""
    if any(isinstance(module, (DeviceNorm, DeviceMLP, DeviceProjection)) for module in model.modules()):
        return
    replace_parts(model, _norm_on_device)
    replace_parts(model, _mlp_on_device)
    _join_projections(model)
    # After this the code of an attention is batchgen's own.
    fuse_rotary(model, rotated, lambda fused: not (isinstance(fused, FusedRotaryOfOne) or fused.form.pairs))


class DeviceNorm(torch.nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, plain: Any, offset: float, rounds_first: bool) -> None:
        """`plain` is the module that this one replaces. Multiplies by its weight + `offset`. `rounds_first`: see `norm_after_sum`."""
        super().__init__()
        self.plain = plain
        self.weight = plain.weight
        self.factor = plain.weight.detach().float() + offset
        self.eps = eps_of(plain)
        self.rounds_first = rounds_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _in_a_step and x.dtype == self.weight.dtype:
            return norm(x, self.factor, self.eps, self.rounds_first)
        y: torch.Tensor = self.plain(x)
        return y


def _norm_on_device(part: Any) -> torch.nn.Module | None:
    found = norm_of(part, DTYPES)
    return None if found is None or part.weight.shape[0] > MAX_NORM else DeviceNorm(part, *found)


class DeviceMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x))"""

    def __init__(self, plain: Any, names: tuple[str, ...], activation: Activation) -> None:
        """`plain` is the module that this one replaces, with its parts' `names`: gate and up (or both in one layer), and down."""
        super().__init__()
        self.plain = plain
        self.names = names
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor
        if _in_a_step:
            *gates, down = (getattr(self.plain, name) for name in self.names)
            found = [layer(x) for layer in gates]
            g, u = found if len(found) == 2 else found[0].chunk(2, -1)
            y = down(gated(g, u, self.activation))
        else:
            y = self.plain(x)
        return y


def _mlp_on_device(part: Any) -> torch.nn.Module | None:
    found = parts_of_mlp(part)
    return None if found is None else DeviceMLP(part, *found)


class DeviceProjection(torch.nn.Module):
    """One of the linear layers of an attention that take the same input. The first that gets an input computes all of them."""

    def __init__(self, plain: torch.nn.Linear, joint: _Joint, begin: int) -> None:
        """`plain` is the module that this one replaces; its output begins at the number `begin` of the joint one."""
        super().__init__()
        self.plain = plain
        self.joint = joint
        self.begin = begin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _in_a_step:
            y: torch.Tensor = self.plain(x)
            return y
        return self.joint(x, self.begin, self.begin + self.plain.out_features)


class _Joint:
    """Linear layers of one input as a single one, whose output is kept until its last numbers are taken."""

    def __init__(self, layers: list[Any]) -> None:
        """The layers' weights become parts of the joint weight."""
        self.weight = torch.cat([layer.weight.detach() for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        begin = 0
        for layer in layers:
            weight = self.weight[begin : begin + layer.out_features]
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            begin += layer.out_features

    def __call__(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, torch.nn.functional.linear(x, self.weight, self.bias)
        y = self._last[1][..., begin:end]
        if end == len(self.weight):
            self._last = None
        return y


PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _join_projections(model: torch.nn.Module) -> None:
    for module in model.modules():
        layers: list[Any] = [module._modules.get(name) for name in PROJECTIONS]
        if known_code(module) not in (Code.ATTENTION, Code.GATED_ATTENTION) or not _can_join(layers):
            continue
        joint, begin = _Joint(layers), 0
        for name, layer in zip(PROJECTIONS, layers, strict=True):
            module._modules[name] = DeviceProjection(layer, joint, begin)
            begin += layer.out_features


def _can_join(layers: list[Any]) -> bool:
    return (
        all(type(layer) is torch.nn.Linear and own_forward(layer) is not None and is_plain(layer.weight) for layer in layers)
        and len({(layer.weight.dtype, layer.in_features, layer.bias is None) for layer in layers}) == 1
    )  # fmt: skip


def norm(x: torch.Tensor, factor: torch.Tensor, eps: float, rounds_first: bool) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * factor over the last dimension, computed in float32; `factor` is float32.

    `rounds_first`: x over its root mean square is rounded to its type before it is multiplied by the factor.
    """
    import triton

    from batchgen.kernels.triton_parts import norm_kernel

    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    rows, block = x.numel() // size, triton.next_power_of_2(size)
    block_rows = max(1, BLOCK // block)
    norm_kernel[(-(-rows // block_rows),)](
        x, factor, y, rows, eps, size, rounds_first, block_rows, block, num_warps=8 if block > 2 * BLOCK else 4
    )
    return y


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns act(gate) * up [..., N]. Both are [..., N] and may be halves of one tensor."""
    import triton

    from batchgen.kernels.triton_parts import gate_kernel

    size = gate.shape[-1]
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates, ups = (x.reshape(-1, size) for x in (gate, up))
    block = min(BLOCK // 2, triton.next_power_of_2(size))
    gate_kernel[len(gates), -(-size // block)](
        gates, ups, y, gates.stride(0), ups.stride(0), size, activation is Activation.GELU_TANH, block, num_warps=4
    )
    return y


def rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, _pairs: int = 0
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Does what `ops.rotate` does, but for pairs; None outside of `running()` too."""
    if not (_in_a_step and can_rotate(q, k, cos, sin)):
        return None
    import triton

    from batchgen.kernels.triton_parts import rotary_kernel

    (_, heads, tokens, size), kv_heads, turned = q.shape, k.shape[1], cos.shape[2]
    q_out, k_out = (torch.empty((1, tokens, x.shape[1], size), dtype=x.dtype, device=x.device) for x in (q, k))
    block = triton.next_power_of_2(turned // 2)
    block_tokens = max(1, min(16, BLOCK // block))
    rotary_kernel[-(-tokens // block_tokens), heads + kv_heads](
        q, k, cos, sin, q_out, k_out, tokens, q.stride(1), q.stride(2), k.stride(1), k.stride(2), cos.stride(1), heads, kv_heads, size,
        turned, block_tokens, block, num_warps=4,
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
