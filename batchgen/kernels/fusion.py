"""Replaces norms, gated norms, rotary embeddings, gated MLPs, experts and linear layers of a loaded model by the kernels for the CPU.

A part is replaced only if its code is known (`recognition`) and the kernel gives the same result on random numbers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch

from batchgen.kernels import recurrent
from batchgen.kernels.build import DTYPES
from batchgen.kernels.coded import PartsInPanels
from batchgen.kernels.codes import PackedTensor
from batchgen.kernels.experts import experts_on_kernels
from batchgen.kernels.ops import (
    Activation,
    KernelLinear,
    cos_and_sin,
    embed,
    fits,
    held_in_16_bits,
    linear,
    norm_after_sum,
    rotate,
    take_coded_rows,
    take_wide_rows,
)
from batchgen.kernels.recognition import Code, code_of
from batchgen.kernels.renaming import names_in, with_names
from batchgen.kernels.replacing import (
    ACTIVATIONS,
    NEAR,
    AdaptedLinear,
    Packing,
    adapter_of,
    agree,
    can_fuse,
    is_plain,
    known_code,
    near,
    own_forward,
    random_numbers,
    replace_parts,
)

COMPARED_ROWS = 256
"""Rows of a packed weight of a linear layer that are compared with the plain ones."""


def fuse_small_parts(model: torch.nn.Module) -> None:
    """Replaces rotary embeddings, norms, gated norms and embeddings."""
    if can_fuse(model):
        fuse_rotary(model, rotate, FusedRotary.agrees)
        replace_parts(model, _norm)
        replace_parts(model, _gated_norm)
        for module in model.modules():
            _fuse_forward(module)


@torch.inference_mode()
def fuse_linear(model: torch.nn.Module, packing: Packing) -> None:
    """Replaces linear layers, gated MLPs, experts and convolutions over patches."""
    if can_fuse(model):
        shared = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        replace_parts(model, lambda part: _mlp(part, shared, packing), packing.around)
        replace_parts(model, lambda part: experts_on_kernels(part, shared, packing), packing.around)
        replace_parts(model, _patches)
        tied: _Tied = {}
        replace_parts(model, lambda part: _linear(part, shared, packing, tied), packing.around)


class FusedNorm(torch.nn.Module):
    """Root mean square norm over the last dimension, or with a bias LayerNorm."""

    def __init__(
        self, weight: torch.Tensor, offset: float, eps: float, rounds_first: bool, bias: torch.Tensor | None = None
    ) -> None:
        """Multiplies by `weight` + `offset`. `rounds_first`: see `norm_after_sum`."""
        super().__init__()
        self.shift = None if bias is None else bias.detach().float()
        self.weight = weight
        self.dtype = weight.dtype
        self.factor = weight.detach().float() + offset
        self.eps = eps
        self.rounds_first = rounds_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm in the dtype of `x`: Mamba keeps its residual in float32 beside bfloat16 weights."""
        return self.after_sum(x, None)[1]

    def after_sum(
        self, x: torch.Tensor, more: torch.Tensor | None, by: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x + more * by and its norm; without `more`, x and its norm."""
        if x.dtype not in (self.dtype, torch.float32):
            raise ValueError(f"expected {self.dtype} or float32, not {x.dtype}")
        return norm_after_sum(x, self.factor, self.eps, self.rounds_first, more, by, self.shift)


_NORMS = {Code.NORM: (0.0, False), Code.ROUNDED_NORM: (0.0, True), Code.NORM_PLUS_ONE: (1.0, False)}
"""By code: `offset` and `rounds_first` of a `FusedNorm`."""


def norm_of(part: Any, dtypes: Collection[torch.dtype]) -> tuple[float, bool] | None:
    """Returns `offset` and `rounds_first` of a `FusedNorm` for a norm whose code is known and whose weight has one of these types; None for other modules."""
    code = known_code(part)
    weight: Any = getattr(part, "weight", None)
    if (
        code not in _NORMS
        or not is_plain(weight)
        or weight.dtype not in dtypes
        or weight.dim() != 1
        or getattr(part, "with_scale", True) is not True
    ):
        return None
    return _NORMS[code]


def eps_of(norm: Any) -> float:
    """Returns what a norm of transformers adds to the mean of squares."""
    eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return eps


def _norm(part: Any) -> torch.nn.Module | None:
    found = norm_of(part, DTYPES)
    if found is None:
        return None
    weight = part.weight
    fused = FusedNorm(weight, found[0], eps_of(part), rounds_first=found[1])
    return fused if agree(part, fused, weight.shape[0], weight.dtype, NEAR[weight.dtype]) else None


class FusedGatedNorm(torch.nn.Module):
    """Root mean square norm of recurrent layers, which a gate multiplies before or after."""

    def __init__(self, plain: Any, *, gate_first: bool, rounds: bool) -> None:
        """`plain` is the module that this one replaces. `rounds`: see `gated_norm`."""
        super().__init__()
        self.plain = plain
        self.weight = plain.weight
        self.factor = plain.weight.detach().float()
        self.eps = float(plain.variance_epsilon)
        size = self.factor.shape[0]
        self.groups = size // getattr(plain, "group_size", size)
        self.gate_first = gate_first
        self.sigmoid = getattr(plain, "activation", "silu") == "sigmoid"
        self.rounds = rounds

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the norm in the dtype of `x`: the inputs in Mamba2 are float32 beside bfloat16 weights.

        With float32 weights and bfloat16 values, some modules round elsewhere or return float32, so the plain module runs.
        """
        known = x.dtype in (self.weight.dtype, torch.float32)
        if gate is None or not known or not recurrent.can_gated_norm(x, gate):
            plain: torch.Tensor = self.plain(x, gate)
            return plain
        return recurrent.gated_norm(
            x, gate, self.factor, self.eps,
            groups=self.groups, gate_first=self.gate_first, sigmoid=self.sigmoid, rounds=self.rounds,
        )  # fmt: skip


_GATED_NORMS = {
    Code.GATE_BEFORE_NORM: (True, True),
    Code.GATE_AFTER_NORM: (False, False),
    Code.GATE_AFTER_ROUNDED_NORM: (False, True),
}
"""By code: `gate_first` and `rounds` of a `FusedGatedNorm`."""


def _gated_norm(part: Any) -> torch.nn.Module | None:
    code = known_code(part)
    weight: Any = getattr(part, "weight", None)
    if (
        code not in _GATED_NORMS
        or not is_plain(weight)
        or weight.dtype not in DTYPES
        or weight.dim() != 1
        or getattr(part, "activation", "silu") not in ("silu", "sigmoid")
        or weight.shape[0] % getattr(part, "group_size", 1)
    ):
        return None
    gate_first, rounds = _GATED_NORMS[code]
    fused = FusedGatedNorm(part, gate_first=gate_first, rounds=rounds)
    gate = random_numbers(torch.Generator().manual_seed(1), 1, 3, weight.shape[0]).to(weight.dtype)
    near = NEAR[weight.dtype]
    agrees = agree(lambda x: part(x, gate), lambda x: fused(x, gate), weight.shape[0], weight.dtype, near)
    return fused if agrees else None


class FusedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x))"""

    def __init__(self, gate_up: torch.nn.Module, down: torch.nn.Module) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.gate_up(x))
        return y


_OF_MLPS = (
    (("gate_proj", "up_proj", "down_proj"), "act_fn"),
    (("gate_proj", "up_proj", "down_proj"), "activation_fn"),
    (("gate_up_proj", "down_proj"), "activation_fn"),
    (("input_linear", "output_linear"), "activation"),
)
"""The names of the linear layers of gated MLPs in transformers, and of their activation."""


def parts_of_mlp(part: Any) -> tuple[tuple[str, ...], Activation] | None:
    """Returns the names of a gated MLP's linear layers, gate and up before down, and its activation; None for other modules and activations."""
    if known_code(part) is not Code.GATED_MLP:
        return None
    if hasattr(part, "w1"):  # LFM2, whose activation is in its code
        return ("w1", "w3", "w2"), Activation.SILU
    names, act = next((names, act) for names, act in _OF_MLPS if hasattr(part, names[0]) and hasattr(part, act))
    activation = ACTIVATIONS.get(type(getattr(part, act)))
    return None if activation is None else (names, activation)


def _mlp(part: Any, shared: Counter[int], packing: Packing) -> torch.nn.Module | None:
    found = parts_of_mlp(part)
    if found is None:
        return None
    names, act = found
    *gates, down = (getattr(part, name) for name in names)
    if not all(_can_pack(layer, shared, packing) for layer in (*gates, down)):
        return None
    weights = [half for layer in gates for half in layer.weight.chunk(3 - len(gates))]
    biases = [half for layer in gates for half in _halves(layer.bias, 3 - len(gates))]
    if weights[0].shape != weights[1].shape:
        return None
    gate_up = packing.pack(weights, biases, act, gates)
    fused = FusedMLP(gate_up, packing.pack([down.weight], [down.bias], layers=[down]))
    adapted = any(isinstance(layer, AdaptedLinear) for layer in (*gates, down))
    return fused if packing.agrees(part, fused, [*weights, down.weight], adapted=adapted) else None


def _halves(bias: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
    return [None] * count if bias is None else list(bias.chunk(count))


def as_linear(part: Any) -> torch.nn.Linear | None:
    """Returns torch's linear layer in the place of one of GPT-2 or Falcon, which have code of their own."""
    code = known_code(part)
    if code not in (Code.LINEAR, Code.TRANSPOSED_LINEAR) or not is_plain(part.weight):
        return None
    weight = part.weight if code is Code.LINEAR else torch.nn.Parameter(part.weight.t(), requires_grad=False)
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made._parameters.update(weight=weight, bias=part.bias)
    return made


_Tied = dict[int, tuple[torch.Tensor, KernelLinear]]
"""The layers without a bias that were made of weights which other modules share, by the weights' ids."""


def _linear(part: Any, shared: Counter[int], packing: Packing, tied: _Tied) -> torch.nn.Module | None:
    plain, part = part, as_linear(part) or part
    if not _can_replace(part) or not packing.can_pack(part):
        return None
    weight, bias = part.weight, part.bias
    is_tied = shared[id(weight)] > 1
    if is_tied and not packing.packs_tied:
        return None
    adapted = isinstance(part, AdaptedLinear)
    known = None if bias is not None or id(weight) not in tied else tied[id(weight)][1]
    if known is not None and known.adapter is None and not adapted:
        return known
    fused = packing.pack([weight], [bias], layers=[part]) if known is None else _with_adapter(known, part)
    if isinstance(weight, PackedTensor):  # of a head, which is large when it is unpacked, some rows are enough
        few = weight[:COMPARED_ROWS]
        few_biases = None if bias is None else bias[:COMPARED_ROWS]

        def few_columns(x: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.linear(x, few, few_biases)
            return y + part.added(x)[..., :COMPARED_ROWS] if adapted else y

        agrees = packing.agrees(few_columns, lambda x: fused(x)[..., :COMPARED_ROWS], [weight], adapted=adapted)
    else:
        agrees = packing.agrees(plain, fused, [weight])
    if not agrees:
        return None
    fused.tied = is_tied
    if is_tied and bias is None:
        tied[id(weight)] = weight, fused
    codes = getattr(fused, "codes", None)
    if is_tied and codes is not None:  # the embedding takes its rows from the codes of the head
        weight.take_rows = partial(take_coded_rows, codes, weight.shape, weight.dtype)
        weight.parts = PartsInPanels(codes, len(weight))
    return fused


def _with_adapter(known: KernelLinear, part: torch.nn.Linear) -> KernelLinear:
    """Returns a layer with the same packed weights, and the adapter of another one that shares them, if it has one."""
    made = copy.copy(known)
    made._modules = {}  # those of the copy are the other's
    made.adapter = adapter_of([part], 1)
    return made


class FusedPatches(torch.nn.Module):
    """A convolution over patches that lie side by side: a linear layer of each patch. torch has no fast one in bfloat16 everywhere."""

    def __init__(self, plain: Any) -> None:
        """`plain` is the convolution that this module replaces."""
        super().__init__()
        self.weight, self.bias, self.size = plain.weight, plain.bias, plain.kernel_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [N, C, sizes of an image] to [N, D, numbers of patches]. What does not fill a patch is left out."""
        if x.dtype != self.weight.dtype:
            raise ValueError(f"expected {self.weight.dtype}, not {x.dtype}")
        counts = [whole // side for whole, side in zip(x.shape[2:], self.size, strict=True)]
        for i, (count, side) in enumerate(zip(counts, self.size, strict=True)):
            at = 2 + 2 * i
            x = x.narrow(at, 0, count * side).reshape(*x.shape[:at], count, side, *x.shape[at + 1 :])
        patches = x.permute(0, *range(2, x.dim(), 2), 1, *range(3, x.dim(), 2)).flatten(1 + len(counts))
        return linear(patches, self.weight.flatten(1), self.bias).movedim(-1, 1).contiguous()


def _patches(part: Any) -> torch.nn.Module | None:
    if (
        type(part) not in (torch.nn.Conv2d, torch.nn.Conv3d)
        or own_forward(part) is None
        or not is_plain(part.weight)
        or not part.weight.is_contiguous()
        or part.stride != part.kernel_size
        or part.padding not in ("valid", (0,) * len(part.kernel_size))
        or part.groups != 1
        or set(part.dilation) != {1}
        or not fits(part.weight.flatten(1))
    ):
        return None
    fused = FusedPatches(part)
    sizes = [2 * side + 1 for side in part.kernel_size]
    x = random_numbers(torch.Generator().manual_seed(0), 1, part.in_channels, *sizes).to(part.weight.dtype)
    return fused if near(fused(x), part(x), NEAR[part.weight.dtype]) else None


def _can_pack(part: Any, shared: Counter[int], packing: Packing) -> bool:
    """Whether this is a plain linear layer whose weights no other module shares, such as an embedding."""
    return _can_replace(part) and shared[id(part.weight)] == 1 and packing.can_pack(part)


def _can_replace(part: Any) -> bool:
    bias = getattr(part, "bias", None)
    return (
        (type(part) is torch.nn.Linear or (type(part) is AdaptedLinear and fits(part.down)))
        and own_forward(part) is not None
        and (isinstance(part.weight, PackedTensor) or is_plain(part.weight))
        and (bias is None or is_plain(bias))
    )


def _fuse_forward(module: Any) -> None:
    """Gives an embedding, or a module that makes cos and sin, a forward that does not use torch's threads.

    torch has a pool of threads beside that of the kernels. Threads of one pool that look for work would keep the other's from the cores.
    """
    if isinstance(module, torch.nn.Embedding) and (table := held_in_16_bits(module.weight)) is not None:
        weight: Any = module.weight
        weight.take_rows = partial(take_wide_rows, table)
    if _is_plain_embedding(module) and own_forward(module) is not None:
        module.forward = MethodType(embed, module)
    if _is_plain_rotary(module):
        module.forward = MethodType(cos_and_sin, module)


def _is_plain_embedding(module: Any) -> bool:
    return (
        type(module) is torch.nn.Embedding
        and module.max_norm is None
        and is_plain(module.weight)
        and module.weight.is_contiguous()
    )


def _is_plain_rotary(module: Any) -> bool:
    """Whether cos and sin of a position are the same in every step. Those of some types are after `settle_frequencies`, which changes the name."""
    kind = getattr(module, "rope_type", None)
    return (
        known_code(module) is Code.COS_AND_SIN
        and isinstance(kind, str)
        and kind != "longrope"
        and "dynamic" not in kind
    )


def fuse_rotary(model: torch.nn.Module, rotate: Callable[..., Any], agrees: Callable[[FusedRotary], bool]) -> None:
    """Gives attention modules a copy of their forward in which the name `apply_rotary_pos_emb` means the kernel `rotate`, if it `agrees`."""
    made: dict[Callable[..., Any], FusedRotary | None] = {}
    module: Any
    for module in model.modules():
        forward: Any = own_forward(module)
        if _ROTARY not in names_in(forward):
            continue
        plain = forward.__globals__[_ROTARY]
        if plain not in made:
            code = code_of(plain)
            form = None if code is None else _ROTARY_FORMS.get(code)
            kind = FusedRotaryOfOne if code is Code.ROTARY_OF_ONE else FusedRotary
            found = None if form is None else kind(plain, rotate, form)
            made[plain] = found if found is not None and agrees(found) else None
        fused = made[plain]
        if fused is not None:
            module.fused_rotary = fused
            module.forward = MethodType(with_names(forward, {_ROTARY: fused}), module)


_ROTARY = "apply_rotary_pos_emb"


class RotaryForm(NamedTuple):
    """How `apply_rotary_pos_emb` of a model turns queries and keys."""

    keeps_type: bool = False
    """Whether results have the types of queries and keys, whatever the type of cos and sin."""
    of_halves: bool = False
    """Whether cos and sin are those of half a head."""
    pairs: int = 0
    """See `ops.rotate`."""
    in_float32: bool = False
    """Whether products are not rounded."""

    def takes(self, cos: torch.dtype, heads: torch.dtype) -> bool:
        """Whether a kernel computes the same with cos and sin and with heads of these types."""
        return cos == torch.float32 if self.in_float32 else cos == heads or (self.keeps_type and cos == torch.float32)


_ROTARY_FORMS = {
    Code.ROTARY: RotaryForm(),
    Code.ROTARY_OF_ONE: RotaryForm(),
    Code.ROTARY_KEEPS_TYPE: RotaryForm(keeps_type=True),
    Code.ROTARY_OF_HALVES: RotaryForm(of_halves=True),
    Code.ROTARY_OF_PAIRS: RotaryForm(pairs=1),
    Code.ROTARY_OF_PAIRS_IN_FLOAT32: RotaryForm(pairs=1, in_float32=True),
    Code.ROTARY_OF_PAIRS_TWICE_IN_FLOAT32: RotaryForm(pairs=2, in_float32=True),
}


def of_both_halves(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin [..., R] of whole heads, of those [..., R/2] of half a head."""
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


class FusedRotary:
    """`apply_rotary_pos_emb` with the kernel; with the model's own function if the kernel does not support the call."""

    def __init__(self, plain: Callable[..., Any], rotate: Callable[..., Any], form: RotaryForm) -> None:
        """`rotate`: the kernel; it returns None for what it does not support."""
        self.plain = plain
        self.rotate = rotate
        self.form = form

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        wide = (cos.float(), sin.float()) if self.form.in_float32 else (cos, sin)
        if unsqueeze_dim == 1 and self.form.takes(wide[0].dtype, q.dtype):
            turned = self.rotate(q, k, *(of_both_halves(*wide) if self.form.of_halves else wide), self.form.pairs)
            if turned is not None:
                return turned
        return self.plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    def agrees(self) -> bool:
        """Whether it gives the same as the model's own function on random numbers."""
        generator = torch.Generator().manual_seed(0)
        for dtype in DTYPES:
            q, k = (random_numbers(generator, 1, heads, 3, 40).to(dtype) for heads in (4, 2))
            cos, sin = (random_numbers(generator, 1, 3, 20 if self.form.of_halves else 40).to(dtype) for _ in range(2))
            if not self._agrees_on(q, k, cos, sin):
                return False
        return True

    def _agrees_on(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        pairs = zip(self(q, k, cos, sin), self.plain(q, k, cos, sin), strict=True)
        return all(near(ours, theirs, NEAR[q.dtype]) for ours, theirs in pairs)


class FusedRotaryOfOne(FusedRotary):
    """The same of queries or keys alone."""

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:  # type: ignore[override]
        if unsqueeze_dim in (1, 2) and cos.dtype == x.dtype:
            heads = x if unsqueeze_dim == 1 else x.transpose(1, 2)
            turned = self.rotate(heads, heads[:, :0], cos, sin)
            if turned is not None:
                return turned[0] if unsqueeze_dim == 1 else turned[0].transpose(1, 2)
        return self.plain(x, cos, sin, unsqueeze_dim=unsqueeze_dim)

    def _agrees_on(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        return all(
            near(self(x, cos, sin, unsqueeze_dim), self.plain(x, cos, sin, unsqueeze_dim), NEAR[q.dtype])
            for x, unsqueeze_dim in ((q, 1), (k.transpose(1, 2), 2))
        )
