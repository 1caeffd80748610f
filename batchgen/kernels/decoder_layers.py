"""Gives decoder layers forwards that do not use torch's threads: one call of the library if all parts of a layer are kernels, or those before its
MLP, and one for all layers if the model only runs them one after the other.

Layers, their attention and the bodies of models are recognized by their code (`recognition`). A layer's options of attention are found by
running its attention once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from batchgen.kernels.dense_layer import (
    Attention,
    DenseLayer,
    DenseStack,
    LayerNorms,
    OwnInput,
    Recurrence,
    ShortConvolution,
    Workspace,
    in_one_call,
    joined,
    stack_forward,
)
from batchgen.kernels.fusion import FusedGatedNorm, FusedMLP, FusedNorm, FusedRotary, eps_of
from batchgen.kernels.int8 import Int8Linear
from batchgen.kernels.ops import PackedLinear, add_rows, can_add
from batchgen.kernels.recognition import CACHES, Code, code_of, has_cache
from batchgen.kernels.recurrent import ACTIVATIONS, can_gate, sigmoid_gate
from batchgen.kernels.replacing import ACTIVATIONS as BY_TYPE
from batchgen.kernels.replacing import Around, can_fuse, first_part, known_code, own_forward
from batchgen.kernels.whole_vectors import filled


class KeepsKV(Protocol):
    """What is used here of `LayerShape`."""

    @property
    def same_as(self) -> int | None: ...


@torch.inference_mode()
def fuse_layers(model: torch.nn.Module, around: Around = nullcontext) -> None:
    """Gives decoder layers whose parts have been replaced (`fusion`) forwards of their own."""
    workspace = Workspace()
    module: Any
    for module in model.modules() if can_fuse(model) else ():
        _fuse_gate(module)
        plain = own_forward(module)
        code = known_code(module)
        if plain is None or code not in _KINDS:
            continue
        kind = _KINDS[code]
        with around(module):
            dense = _dense_layer(module, kind.norms)
        by_parts = plain if kind.by_parts is None else kind.by_parts
        if dense is not None:
            module.dense = DenseStack([dense], None, workspace)
            ends = dense.mlp is None and _mlp_of(module) is not None
            module.forward = MethodType(in_one_call(by_parts, _with_mlp if ends else None), module)
        elif kind.by_parts is not None:
            module.forward = MethodType(by_parts, module)
    for module in model.modules():
        _fuse_stack(module, workspace)
    _share_in_all_or_none(model)
    for module in model.modules():
        _narrow_again(module)


def _share_in_all_or_none(model: torch.nn.Module) -> None:
    """Layers that share keys and values run all in one call or none: the call keeps no keys and values for the parts of others."""
    layers = [m for m in model.modules() if code_of(type(m).forward, type(m)) is Code.SCALED_LAYER_OF_FOUR_NORMS]
    if not all("dense" in layer.__dict__ for layer in layers):
        for layer in layers:
            _unfuse(layer)


def unfuse_layers(model: torch.nn.Module) -> None:
    """Undoes what `fuse_layers` has given decoder layers and bodies of models, because their parts are replaced."""
    by_parts = {kind.by_parts for kind in _KINDS.values()} - {None}
    for module in model.modules():
        forward = getattr(module.__dict__.get("forward"), "__func__", None)
        if (
            forward in by_parts
            or "narrowed_at" in module.__dict__
            or not module.__dict__.keys().isdisjoint(("dense", "stack"))
        ):
            _unfuse(module)


def _unfuse(module: torch.nn.Module) -> None:
    for name in ("dense", "stack", "forward"):
        module.__dict__.pop(name, None)


def narrow_layers(model: torch.nn.Module, attending: Mapping[int, KeepsKV], recurrent: Collection[int]) -> int | None:
    """Lets the last decoder layers leave tokens out: those of which only the final norm and the head read the output, token by token. That is the
    last one, or all behind the last that stores something. Returns the index of the first.

    `attending` and `recurrent` are the layers that read keys and states. None for models with several stacks of decoder layers, for layers that
    keep their own forward, and if the last layer has no attention.
    """
    tail = _without_own_kv(attending, recurrent)
    layers: list[Any] = [m for m in model.modules() if getattr(m._modules.get("self_attn"), "layer_idx", None) in tail]
    if tail and len(layers) == len(tail):
        for layer in layers:
            index = layer.self_attn.layer_idx
            layer.narrowed_at = index == tail[0], index == tail[-1]
            _narrow_again(layer)
        return tail[0]
    stacks = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and any(map(_can_narrow, part))]
    if len(stacks) != 1 or not _can_narrow(stacks[0][-1]):
        return None
    last: Any = stacks[0][-1]
    own: int = last.self_attn.layer_idx
    return own if own in attending and own == max([*attending, *recurrent]) else None


def _without_own_kv(attending: Mapping[int, KeepsKV], recurrent: Collection[int]) -> list[int]:
    """Returns the layers after the last one that stores something."""
    own = [layer for layer, kept in attending.items() if kept.same_as is None]
    last = max([*own, *recurrent], default=-1)
    return sorted(layer for layer in attending if layer > last)


def _narrow_again(layer: Any) -> None:
    """Gives a layer that `narrow_layers` has narrowed its forward for the tokens that are wanted, if it has another one."""
    forward = getattr(layer.__dict__.get("forward"), "__func__", None)
    if "narrowed_at" in layer.__dict__ and getattr(forward, "__name__", "") != "narrow_forward":
        whole = type(layer).forward if forward is None else forward
        layer.forward = MethodType(_narrow(whole, *layer.narrowed_at), layer)


def _narrow(whole: Callable[..., torch.Tensor], first: bool, last: bool) -> Callable[..., torch.Tensor]:
    """Returns a forward of a layer for the tokens that are wanted. The first one chooses them, the last one gives 0 for the others."""

    def narrow_forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = _wanted(self, kwargs)
        if wanted is None:
            return whole(self, hidden_states, *args, **kwargs)
        tokens = len(kwargs["step_attention"].positions)

        def chosen(given: Any) -> Any:
            if isinstance(given, tuple):  # cos and sin
                return tuple(map(chosen, given))
            of_tokens = isinstance(given, torch.Tensor) and given.dim() > 2 and given.shape[-2] == tokens
            return given.index_select(given.dim() - 2, wanted) if of_tokens else given

        x = chosen(hidden_states) if first else hidden_states
        if len(wanted):
            x = whole(self, x, *map(chosen, args), **{name: chosen(given) for name, given in kwargs.items()})
        if not last:
            return x
        out = x.new_zeros((*x.shape[:-2], tokens, x.shape[-1]))
        return out.index_copy_(out.dim() - 2, wanted, x)

    return narrow_forward


def _can_narrow(layer: Any) -> bool:
    """Whether a module is a decoder layer that leaves out the tokens that `PackedAttention.wanted` does not name."""
    forward = getattr(layer.__dict__.get("forward"), "__func__", None)
    return layer._modules.get("self_attn") is not None and ("dense" in layer.__dict__ or forward is _plain_layer)


def _fuse_stack(body: Any, workspace: Workspace) -> None:
    """Gives the body of a model a forward that runs all of its layers in one call, if it only runs its parts one after the other."""
    layers = getattr(body, "layers", None)
    norm = first_part(body, "norm", "embedding_norm")
    if (
        not isinstance(layers, torch.nn.ModuleList)
        or not isinstance(norm, FusedNorm)
        or known_code(body) is not Code.BODY
    ):
        return
    stack = [dense for layer in layers if "dense" in layer.__dict__ for dense in layer.__dict__["dense"].layers]
    if not stack or len(stack) < len(layers) or any(dense.mlp is None for dense in stack):
        return
    if {(dense.o.dtype, dense.o.out_features) for dense in stack} == {(norm.dtype, len(norm.factor))}:
        body.stack = DenseStack(stack, norm, workspace)
        body.forward = MethodType(stack_forward, body)


def _dense_layer(layer: Any, names: LayerNorms[str]) -> DenseLayer | None:
    """Returns the layer as a `DenseLayer`; None if a part of it is not a kernel. `names`: the names of its norms.

    A layer without norms after attention and the MLP may end before its MLP, which is a mixture of experts.
    """
    mixer, whole = _mixer_of(layer), _mlp_of(layer)
    mlp: FusedMLP | None = whole if isinstance(whole, FusedMLP) and "block_sparse_moe" not in layer._modules else None
    if getattr(layer, "enable_moe_block", False):
        return None
    if hasattr(layer, "per_layer_input_gate") and type(layer.act_fn) not in BY_TYPE:
        return None
    found = (None if name is None else getattr(layer, name) for name in names)
    norms = LayerNorms(*(None if isinstance(norm, torch.nn.Identity) else norm for norm in found))
    if mlp is None and whole is not None and (norms.after_attention or norms.after_mlp):
        return None
    parts = _parts_of(mixer)
    of_mlp = [] if mlp is None else [mlp.gate_up, mlp.down]
    own = _own_input(layer)
    if parts is None or not run_as_kernels(
        [*parts.alike, parts.o, *of_mlp],
        [*parts.more, *([] if own is None else [own.gate, own.projection])],
        [*norms, *parts.head_norms, None if own is None else own.norm],
    ):
        return None
    made = _recurrent(mixer, parts) if "recurrent_step" in mixer.__dict__ else _attention(mixer, parts)
    if made is None or sum(part.out_features for part in (*parts.alike, *parts.more)) != made.widths[0]:
        return None
    return DenseLayer(
        mixer.layer_idx, norms, [*joined(parts.alike), *parts.more], made, parts.o, mlp, own,
        by=_multiplier(layer), times=float(getattr(layer, "layer_scalar", 1.0)),
    )  # fmt: skip


def _mixer_of(layer: Any) -> Any:
    """Returns a layer's attention, its recurrent mixer, or the only part that it has."""
    return first_part(layer, "self_attn", "linear_attn", "mamba", "conv", "mixer")


def _mlp_of(layer: Any) -> Any:
    """Returns a layer's MLP, or the one that all tokens share beside experts, or these; None if it has none."""
    return first_part(layer, "mlp", "shared_mlp", "feed_forward", "block_sparse_moe")


def _own_input(layer: Any) -> OwnInput | None:
    if not hasattr(layer, "per_layer_input_gate"):
        return None
    activation = BY_TYPE[type(layer.act_fn)]
    return OwnInput(layer.per_layer_input_gate, activation, layer.per_layer_projection, layer.post_per_layer_input_norm)


class _Parts(NamedTuple):
    """The parts of attention, or of a recurrent mixer, that must be kernels."""

    alike: list[Any]
    """Linear layers that read the mixer's input, which may be joined."""
    more: list[Any]
    """Small ones after them, which may be packed in another way."""
    o: Any
    head_norms: list[Any]


def _parts_of(mixer: Any) -> _Parts | None:
    """Returns the parts of what `Attention`, `Recurrence` or `ShortConvolution` describe; None for other modules."""
    code = code_of(type(mixer).forward, type(mixer))
    if mixer._forward_hooks or mixer._forward_pre_hooks:
        return None
    if "recurrent_step" in mixer.__dict__:
        if code is Code.GATED_DELTA:
            return _Parts([mixer.in_proj_qkv, mixer.in_proj_z], [mixer.in_proj_b, mixer.in_proj_a], mixer.out_proj, [])
        known = code in (Code.MAMBA2, Code.SHORT_CONVOLUTION)
        return _Parts([mixer.in_proj], [], mixer.out_proj, []) if known else None
    if code is not Code.PLAIN_ATTENTION and (code not in _ATTENTION or "fused_rotary" not in mixer.__dict__):
        return None
    if getattr(mixer.config, "clip_qkv", None) is not None:
        return None
    fused = hasattr(mixer, "qkv_proj")
    names = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    inputs = [part for part in (getattr(mixer, name, None) for name in names) if part is not None]
    of_heads = ("q_norm", "q_layernorm", "query_layernorm", "k_norm", "k_layernorm", "key_layernorm")
    head_norms = [getattr(mixer, name) for name in of_heads if hasattr(mixer, name)]
    return _Parts(inputs, [], first_part(mixer, "o_proj", "out_proj"), head_norms)


_ATTENTION = (
    Code.ATTENTION,
    Code.SCALED_ATTENTION,
    Code.GATED_ATTENTION,
    Code.SHARING_ATTENTION,
    Code.ATTENTION_WITH_LATE_NORMS,
    Code.GRANITE_ATTENTION,
)


def _attention(module: Any, parts: _Parts) -> Attention | None:
    rotary: FusedRotary | None = module.__dict__.get("fused_rotary")
    asked = _asked_of_attention(module, rotary, parts.alike[0])
    if asked is None:
        return None
    q_HTD, k_KTD, v_KTV, options = asked
    code = code_of(type(module).forward, type(module))
    scaled = (
        module.config.rope_parameters["original_max_position_embeddings"] if code is Code.SCALED_ATTENTION else None
    )
    size = q_HTD.shape[2]
    value_norm: Any = getattr(module, "v_norm", None)
    if v_KTV.shape != k_KTD.shape or (
        value_norm is not None and (code is not Code.SHARING_ATTENTION or known_code(value_norm) is not Code.NORM)
    ):
        return None
    if value_norm is not None:
        value_norm = FusedNorm(torch.ones(size, dtype=q_HTD.dtype), 0.0, eps_of(value_norm), rounds_first=False)
    return Attention(
        len(q_HTD), len(k_KTD), size, options, parts.head_norms, code is Code.ATTENTION_WITH_LATE_NORMS, code is Code.GATED_ATTENTION,
        rotary=None if rotary is None or q_HTD.any() or k_KTD.any() else rotary.form, scaled_from=scaled, value_norm=value_norm,
        made=3 if hasattr(module, "qkv_proj") else len(parts.alike),
    )  # fmt: skip


def _recurrent(module: Any, parts: _Parts) -> Recurrence | ShortConvolution | None:
    convolution, dtype = first_part(module, "conv1d", "conv"), parts.o.dtype
    bias = convolution.bias
    if convolution.weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        return None
    taps, step = convolution.weight.squeeze(1).t().contiguous(), lambda: module.recurrent_step()
    code = code_of(type(module).forward, type(module))
    if code is Code.SHORT_CONVOLUTION:
        return ShortConvolution(taps, bias, step)
    delta, norm = code is Code.GATED_DELTA, module.norm
    if module.activation not in ACTIVATIONS or not isinstance(norm, FusedGatedNorm) or norm.weight.dtype != dtype:
        return None
    if delta:
        sizes = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
    else:
        sizes = module.n_groups, module.num_heads, module.ssm_state_size, module.head_dim
    biases = module.dt_bias if delta else module.dt_bias.to(dtype)
    return Recurrence(
        delta, *sizes, taps, bias, ACTIVATIONS[module.activation], -module.A_log.float().exp(), biases.float(),
        skip=None if delta else module.D.float(), limits=(0.0, math.inf) if delta else tuple(module.time_step_limit), norm=norm,
        factor=norm.factor.repeat(sizes[1]) if delta else norm.factor, step=step,
    )  # fmt: skip


def run_as_kernels(linear: list[Any], small: list[Any], norms: list[Any]) -> bool:
    """Whether a layer's linear layers are packed for one kernel and its norms (which may be None) are kernels, all in one type.

    `small`: linear layers that may be packed in another way than the others.
    """
    return (
        type(linear[0]) in (PackedLinear, Int8Linear)
        and all(type(part) is type(linear[0]) for part in linear)
        and len({(part.dtype, part.kind) for part in linear}) == 1
        and all(type(part) in (PackedLinear, type(linear[0])) and part.dtype == linear[0].dtype for part in small)
        and all(isinstance(norm, FusedNorm) and norm.dtype == linear[0].dtype for norm in norms if norm is not None)
    )


class _AttentionProbe:
    """Stands in for a step's attention, and keeps the arguments of its call."""

    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any] | None = None

    def __call__(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTV: torch.Tensor, options: Any
    ) -> torch.Tensor:
        self.given = q_HTD, k_KTD, v_KTV, options
        return q_HTD.new_zeros(q_HTD.shape[1], q_HTD.shape[0], v_KTV.shape[2])


def _asked_of_attention(
    attention: Any, rotary: FusedRotary | None, first: PackedLinear | Int8Linear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any] | None:
    """Runs attention on one token. Returns its queries, keys, values and options; None if it does not call batchgen's attention.

    Queries and keys are 0 if they have rotary embeddings, because cos and sin are.
    """
    asked = _AttentionProbe()
    x = torch.ones(1, 1, first.in_features, dtype=first.dtype)
    width = attention.head_dim // 2 if rotary is not None and rotary.form.of_halves else attention.head_dim
    cos = torch.zeros(1, 1, width, dtype=first.dtype)
    turns: tuple[torch.Tensor, torch.Tensor] | None = cos, cos
    more: dict[str, Any] = {}
    code = code_of(type(attention).forward, type(attention))
    if code is Code.GRANITE_ATTENTION and attention.config.position_embedding_type != "rope":
        turns = None
    if code is Code.SHARING_ATTENTION:
        heads = attention.q_proj.out_features // attention.head_dim // attention.num_key_value_groups
        given = torch.zeros(1, heads, 1, attention.head_dim, dtype=first.dtype)
        more["shared_kv_states"] = defaultdict(lambda: (given, given))
    attention(
        hidden_states=x, position_embeddings=turns, attention_mask=None, step_attention=asked,
        position_ids=torch.zeros(1, 1, dtype=torch.int64), **more,
    )  # fmt: skip
    return asked.given


def _plain_layer(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    mixed = _mixed(self, hidden_states, kwargs)
    return _after_mixing(self, hidden_states, mixed, _wanted(self, kwargs))


def _mixed(layer: Any, hidden_states: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Returns the output of a layer's attention, or of its recurrent mixer. `given`: the arguments of the layer's forward."""
    y, mixer = layer.input_layernorm(hidden_states), _mixer_of(layer)
    mixed: torch.Tensor
    if mixer is layer._modules.get("self_attn"):
        mixed, _ = mixer(hidden_states=y, **given)
    else:
        rest = {name: value for name, value in given.items() if name not in _FOR_ATTENTION}
        mixed = mixer(hidden_states=y, **rest)
    return mixed


_FOR_ATTENTION = frozenset({*CACHES, "position_ids", "position_embeddings", "use_cache"})
"""The arguments of a decoder layer that its recurrent mixer does not get."""


def _fuse_gate(attention: Any) -> None:
    """Gives an attention module with a gate after it a forward that computes the gate with a kernel, if it has `FusedRotary`."""
    rotary: FusedRotary | None = attention.__dict__.get("fused_rotary")
    if rotary is None or code_of(type(attention).forward, type(attention)) is not Code.GATED_ATTENTION:
        return

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        kind = self.config._attn_implementation
        if has_cache(kwargs) or self.training or kind not in ALL_ATTENTION_FUNCTIONS:
            found: tuple[torch.Tensor, Any] = type(self).forward(
                self, hidden_states, position_embeddings, attention_mask, **kwargs
            )
            return found
        shape = hidden_states.shape[:-1]
        q, gate = self.q_proj(hidden_states).view(*shape, -1, 2 * self.head_dim).chunk(2, dim=-1)
        k, v = (part(hidden_states).view(*shape, -1, self.head_dim) for part in (self.k_proj, self.v_proj))
        q, k = rotary(self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), *position_embeddings)
        attend: Any = ALL_ATTENTION_FUNCTIONS[kind]
        mixed, weights = attend(
            self, q, k, v.transpose(1, 2), attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        gated = sigmoid_gate(mixed, gate) if can_gate(mixed, gate) else mixed * filled(torch.sigmoid, gate)
        return self.o_proj(gated.reshape(*shape, -1)), weights

    attention.forward = MethodType(forward, attention)


def _wanted(layer: Any, given: dict[str, Any]) -> torch.Tensor | None:
    """Returns the places of the tokens whose results of a layer are wanted; None if all are. `given`: the arguments of its forward."""
    attention: Any = given.get("step_attention")
    mixer: Any = layer._modules.get("self_attn")
    if not hasattr(attention, "wanted") or mixer is None:
        return None
    wanted: torch.Tensor | None = attention.wanted(mixer.layer_idx)
    return wanted


def _after_mixing(
    layer: Any, hidden_states: torch.Tensor, mixed: torch.Tensor, wanted: torch.Tensor | None
) -> torch.Tensor:
    """Computes the rest of a decoder layer, after attention or a recurrent mixer: sum, norm, MLP, sum. Rows that are not wanted are 0."""
    x, by = hidden_states, _multiplier(layer)
    if wanted is not None:
        x, mixed = x.index_select(1, wanted), mixed.index_select(1, wanted)
    norm = layer.post_attention_layernorm
    if can_add(x, mixed) and hasattr(norm, "after_sum"):
        x, y = norm.after_sum(x, mixed, by)
    else:
        x = x + mixed * by
        y = norm(x)
    return _with_mlp(layer, hidden_states, x, y, wanted)


def _multiplier(layer: Any) -> float:
    """Returns what a layer multiplies what it adds to the residual by."""
    by: float = getattr(layer, "residual_multiplier", 1.0)
    return by


def _with_mlp(
    layer: Any, hidden_states: torch.Tensor, x: torch.Tensor, y: torch.Tensor, wanted: torch.Tensor | None
) -> torch.Tensor:
    """Returns a layer's output: the sum of the residual x [1, W, hidden] of the tokens that are wanted, and of what the MLP makes of y."""
    mlp, experts = _mlp_of(layer), layer._modules.get("block_sparse_moe")
    more: Any = mlp(y)
    if experts is not None and experts is not mlp:
        more = experts(y) + more
    if isinstance(more, tuple):  # with the scores of a router
        more, _ = more
    by = _multiplier(layer)
    out = add_rows(x, more, by) if can_add(x, more) else x + more * by
    return out if wanted is None else torch.zeros_like(hidden_states).index_copy_(1, wanted, out)


class _Kind(NamedTuple):
    """A kind of decoder layer."""

    norms: LayerNorms[str]
    """The names of its norms."""
    by_parts: Callable[..., torch.Tensor] | None = None
    """A forward that runs its parts, with kernels for the sums; None for the layer's own."""


_TWO_NORMS = LayerNorms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
_FOUR_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_LATE_NORMS = LayerNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
_KINDS = {
    Code.LAYER: _Kind(_TWO_NORMS, _plain_layer),
    Code.LAYER_WITH_DROPOUT: _Kind(_TWO_NORMS),
    Code.LAYER_OF_FOUR_NORMS: _Kind(_FOUR_NORMS),
    Code.GLM_LAYER: _Kind(
        LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    ),
    Code.HYPERCLOVA_LAYER: _Kind(LayerNorms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")),
    Code.SCALED_LAYER_OF_FOUR_NORMS: _Kind(_FOUR_NORMS),
    Code.LAYER_OF_LATE_NORMS: _Kind(_LATE_NORMS),
    Code.LFM_LAYER: _Kind(LayerNorms(before_attention="operator_norm", before_mlp="ffn_norm")),
    Code.LFM_LAYER_OF_FOUR_NORMS: _Kind(LayerNorms("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")),
    Code.BLOCK: _Kind(LayerNorms(before_attention="norm")),
}
