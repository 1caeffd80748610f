"""Puts the packed mixers into a transformers model.

Recurrent layers keep their projections, gates and norms. Of most, only the few functions that run along the sequence are replaced by
ours; transformers' forwards look them up by name. Others get a forward of ours (`_WHOLE`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch

from batchgen.errors import ModelError
from batchgen.kernels.renaming import names_in, with_names
from batchgen.kernels.replacing import linear_of
from batchgen.kernels.whole_vectors import filled
from batchgen.state.cache import StateShape
from batchgen.state.step import StateStep


class RecurrentLayers:
    """The recurrent layers of a model that `install` has changed. They only run inside `running`."""

    def __init__(self) -> None:
        self._step: StateStep | StateProbe | None = None

    @property
    def step(self) -> StateStep | StateProbe:
        """The states of the present step. Raises `ModelError` outside of `running`."""
        if self._step is None:
            raise ModelError("a recurrent layer runs without a step's states")
        return self._step

    @contextmanager
    def running(self, step: StateStep | StateProbe) -> Iterator[None]:
        """Inside the block the model's forwards read and write the states of `step`."""
        self._step = step
        try:
            yield
        finally:
            self._step = None


def install(model: torch.nn.Module) -> RecurrentLayers | None:
    """Changes the model's recurrent layers in place. Returns None if it has none.

    A recurrent layer is recognized by the functions that its forward calls. Raises `ModelError` for a layer without a layer index.
    """
    layers, found = RecurrentLayers(), False
    _number_blocks(model)
    module: Any
    for module in list(model.modules()):
        # The decorator that transformers puts around the forward is for weights on another device, which are refused.
        forward = inspect.unwrap(type(module).forward)
        names = names_in(forward)
        whole = _WHOLE.get(type(module).__name__)
        if whole is not None:
            whole(layers, module)
        elif not names.isdisjoint(_SEAMS):
            index = getattr(module, "layer_idx", None)
            if not isinstance(index, int):
                raise ModelError(f"{type(module).__name__} has no layer index")
            ours = {name: made(layers, index) for name, made in _SEAMS.items() if name in names}
            set_forward(module, MethodType(with_names(forward, ours), module))
            module.recurrent_step = lambda: layers.step
        else:
            continue
        found = True
    return layers if found else None


def _convolution(layers: RecurrentLayers, layer: int) -> Callable[..., torch.Tensor]:
    def convolve(
        hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None, **_: Any
    ) -> torch.Tensor:  # fmt: skip
        """[1, C, T]"""
        out = layers.step.convolve(layer, hidden_states[0].t(), weight, bias, activation)
        return out.t().unsqueeze(0)

    return convolve


def _delta_rule(layers: RecurrentLayers, layer: int) -> Callable[..., tuple[torch.Tensor, None]]:
    def delta_rule(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """[1, T, H, V]"""
        out = layers.step.delta_rule(layer, query[0], key[0], value[0], g[0].float(), beta[0], use_qk_l2norm_in_kernel)
        return out.unsqueeze(0).to(query.dtype), None

    return delta_rule


def _mamba2(layers: RecurrentLayers, layer: int) -> Callable[..., torch.Tensor]:
    def scan(
        hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf), **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        """[1, T, H, P]"""
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = filled(torch.nn.functional.softplus, dt)
        skip = None if D is None else D.float()
        limit = (dt_limit[0], dt_limit[1])
        out = layers.step.mamba2(layer, hidden_states[0], dt[0].float(), limit, A.float(), B[0], C[0], skip)
        return out.unsqueeze(0)

    return scan


def _mamba(layers: RecurrentLayers, mixer: Any) -> None:
    """transformers multiplies by the weights of `dt_proj` without calling it, which kernels could not replace. The bias is added in float32."""
    mixer.dt_bias, mixer.dt_proj.bias = mixer.dt_proj.bias, None
    _run_heads(layers, mixer, [mixer], lambda projected: projected.chunk(2, -1))


def _mamba_in_heads(layers: RecurrentLayers, mixer: Any) -> None:
    """Zamba convolves once and then scans once for each head. The first head's state has the layer's number; numbers of the others come after
    those of all layers.
    """
    mixer.heads = torch.nn.ModuleList()
    of_heads = mixer.x_proj_weight, mixer.dt_proj_weight, mixer.dt_proj_bias, mixer.A_log, mixer.D
    for number, (x_proj, dt_proj, dt_bias, a_log, skip) in enumerate(zip(*of_heads, strict=True)):
        head: Any = torch.nn.Module()
        head.layer_idx = mixer.layer_idx + number * mixer.config.num_hidden_layers
        head.x_proj, head.dt_proj = linear_of(x_proj), linear_of(dt_proj)
        head.dt_bias, head.A_log, head.D = dt_bias, a_log, skip
        mixer.heads.append(head)
    del mixer.x_proj_weight, mixer.dt_proj_weight
    _run_heads(layers, mixer, mixer.heads, lambda projected: projected.view(len(projected), -1, 2).unbind(-1))


def _run_heads(
    layers: RecurrentLayers, mixer: Any, heads: Sequence[Any], parts: Callable[[torch.Tensor], Sequence[torch.Tensor]]
) -> None:
    """`parts` makes channels and gates of the input's projection, each divided among the heads."""

    def forward(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[1, T, hidden size]"""
        x, gate = parts(mixer.in_proj(hidden_states)[0])
        weight = mixer.conv1d.weight.squeeze(1)
        x = layers.step.convolve(mixer.layer_idx, x, weight, mixer.conv1d.bias, mixer.activation)
        of_heads = zip(heads, x.chunk(len(heads), -1), gate.chunk(len(heads), -1), strict=True)
        done = [_mamba_head(layers.step, *of) for of in of_heads]
        return cast(torch.Tensor, mixer.out_proj(torch.cat(done, -1).to(hidden_states.dtype).unsqueeze(0)))

    set_forward(mixer, forward)


def _mamba_head(step: StateStep | StateProbe, head: Any, x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
    """Returns what Mamba (arXiv:2312.00752) computes of convolved channels, float32 [T, D]: steps, B and C, the scan, and the gate."""
    size = head.A_log.shape[1]
    parts = head.x_proj(x_TD).split((head.dt_proj.in_features, size, size), -1)
    if hasattr(head, "dt_layernorm"):
        parts = [
            norm(of) for norm, of in zip((head.dt_layernorm, head.b_layernorm, head.c_layernorm), parts, strict=True)
        ]
    dt, b, c = parts
    dt = filled(torch.nn.functional.softplus, head.dt_proj(dt).float() + head.dt_bias.float())
    x = x_TD.float()
    out = step.mamba(head.layer_idx, x, dt, -head.A_log.float().exp(), b.float(), c.float()) + head.D.float() * x
    return cast(torch.Tensor, out * filled(torch.nn.functional.silu, gate_TD))


def _rg_lru(layers: RecurrentLayers, block: Any) -> None:
    """RecurrentGemma keeps states in its modules and has no seam: its convolution and its RG-LRU (arXiv:2402.19427) are exchanged."""
    layer, convolution, lru = block.layer_idx, block.conv_1d, block.rg_lru
    for name in ("input_gate", "recurrent_gate"):
        weights, biases = lru._parameters.pop(f"{name}_weight"), lru._parameters.pop(f"{name}_bias")
        setattr(
            lru,
            name,
            torch.nn.ModuleList(linear_of(weight.t(), bias) for weight, bias in zip(weights, biases, strict=True)),
        )

    def convolve(x: torch.Tensor) -> torch.Tensor:
        """[1, C, T]"""
        weight = convolution.weight.squeeze(1)
        return layers.step.convolve(layer, x[0].t(), weight, convolution.bias, None).t().unsqueeze(0)

    def gate(projections: Any, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(projections), -1)
        return cast(
            torch.Tensor,
            filled(torch.sigmoid, torch.cat([of(part) for of, part in zip(projections, parts, strict=True)], -1)),
        )

    def recur(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[1, T, D]"""
        first = position_ids.unsqueeze(-1) == 0
        log_decay = -8.0 * gate(lru.recurrent_gate, x) * filled(torch.nn.functional.softplus, lru.recurrent_param)
        norm = (1 - (2 * log_decay).exp()).sqrt().masked_fill(first, 1.0)
        taken = x * gate(lru.input_gate, x) * norm.to(x.dtype)
        out = layers.step.linear_scan(layer, taken[0].float(), log_decay.exp().masked_fill(first, 0.0)[0].float())
        return out.unsqueeze(0).to(x.dtype)

    convolution.forward, lru.forward = convolve, recur


def _lightning(layers: RecurrentLayers, module: Any) -> None:
    """The linear attention of MiniMax (lightning attention, arXiv:2401.04658) is Mamba2's recurrence with steps of one and a decay a head."""

    def forward(hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """[1, T, hidden size]"""
        qkv = module.act_fn(module.qkv_proj(hidden_states))[0]
        qkv = qkv.view(len(qkv), module.num_attention_heads, 3 * module.head_dim)
        q, k, v = qkv.split(module.head_dim, dim=2)
        decay = -module.slope_rate.flatten().float()
        steps = torch.ones(v.shape[:2], device=v.device)
        out = layers.step.mamba2(module.layer_idx, v, steps, (0.0, math.inf), decay, k, q, None)
        out = module.norm(out.flatten(1).to(hidden_states.dtype)).unsqueeze(0)
        return module.out_proj(filled(torch.sigmoid, module.output_gate(hidden_states)) * out), None

    set_forward(module, forward)


def _per_layer_embedding(layers: RecurrentLayers, module: Any) -> None:
    """The embedding of a token and those before it in Qwen4-exp, and the dilated convolution over it."""
    tokens, convolution = module.ple_embedding, module.conv1d

    def embed(input_ids: torch.Tensor, _: Any = None) -> torch.Tensor:
        """[1, T]"""
        # No earlier token is as an end of text. Tokens are counted from 1, because 0 stands for none.
        counted = (input_ids[0] + 1).float()[:, None]
        texts = layers.step.unfold(module.layer_idx, counted, tokens.context_len, exact=True)[:, :, 0].long() - 1
        texts = texts.where(texts >= 0, tokens.eos_token_id)
        return cast(torch.Tensor, type(tokens).forward(tokens, texts, None)[:, -1]).unsqueeze(0)

    def convolve(x: torch.Tensor, _: Any = None) -> torch.Tensor:
        """[1, T, C]"""
        dilation, weight_CK = convolution.dilation[0], convolution.weight.squeeze(1)
        spread = weight_CK.new_zeros((weight_CK.shape[0], (weight_CK.shape[1] - 1) * dilation + 1))
        spread[:, ::dilation] = weight_CK
        return layers.step.convolve(module.layer_idx, x[0], spread, None, "silu").unsqueeze(0)

    set_forward(tokens, embed)
    module._short_conv = convolve


def _compressed_attention(layers: RecurrentLayers, module: Any) -> None:
    """The projections of Zaya (compressed convolutional attention, arXiv:2510.04476): two convolutions, and values of the token before."""
    index, size, taps = module.layer_idx, module.head_dim, module.conv_kernel_size

    def forward(hidden_states: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[1, T, hidden size]"""
        q, k = module.q_proj(hidden_states), module.k_proj(hidden_states)
        # Before a text is a token whose hidden state is zero.
        first = module.v_proj_delayed(torch.zeros_like(hidden_states[:, :1]))[0]
        inputs = torch.cat([q, k, module.v_proj_delayed(hidden_states) - first], -1)[0]
        unfolded = layers.step.unfold(index, inputs, taps)
        channels = q.shape[-1] + k.shape[-1]
        convolved = module.conv_qk_depthwise(unfolded[:, :, :channels].transpose(1, 2))
        mixed = module.conv_qk_grouped(convolved)[None, :, :, 0]
        q, k, mixed = (x.unflatten(-1, (-1, size)) for x in (q, k, mixed))
        both = (q + k.repeat_interleave(module.num_key_value_groups, 2)) * 0.5
        of_keys = both.view(*q.shape[:2], -1, module.num_key_value_groups, size).mean(3)
        delayed = unfolded[None, :, -2, channels:] + first
        values = torch.cat([module.v_proj_current(hidden_states), delayed], -1).view(*q.shape[:2], -1, size)
        heads = q.shape[2]
        return mixed[:, :, :heads] + both, mixed[:, :, heads:] + of_keys, values

    set_forward(module, forward)


def set_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Replaces a module's forward; hooks of accelerate stay around it."""
    # accelerate keeps a module's own forward under this name and calls it from its hooks.
    setattr(module, "_old_forward" if hasattr(module, "_hf_hook") else "forward", forward)


def _number_blocks(model: torch.nn.Module) -> None:
    """Numbers what has a state of its own: RecurrentGemma's recurrent blocks, to which transformers does not tell the index of their layer,
    and the per-layer embeddings of Qwen4-exp behind all layers.
    """
    for blocks in model.modules():
        if isinstance(blocks, torch.nn.ModuleList):
            for i, block in enumerate(blocks):
                inner: Any = getattr(block, "temporal_block", None)
                if type(inner).__name__ in _WHOLE:
                    inner.layer_idx = i
                embedding: Any = getattr(block, "ple", None)
                if type(embedding).__name__ in _WHOLE:
                    embedding.layer_idx = len(blocks) + i


_WHOLE: dict[str, Callable[[RecurrentLayers, Any], None]] = {
    "MambaMixer": _mamba,
    "FalconMambaMixer": _mamba,
    "JambaMambaMixer": _mamba,
    "ZambaMambaMixer": _mamba_in_heads,
    "RecurrentGemmaRecurrentBlock": _rg_lru,
    "MiniMaxLightningAttention": _lightning,
    "Qwen4ExpTextPLELayer": _per_layer_embedding,
    "ZayaCCAProjection": _compressed_attention,
}
"""By the name of a layer's class: what replaces its forward, or those of its parts."""

_SEAMS: dict[str, Callable[[RecurrentLayers, int], Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
"""By the name of the function in transformers: what makes our function for a layer."""


class StateProbe:
    """Stands in for `StateStep`. Records the shape of each layer's state; returns outputs of the right shape. Arguments are those of `StateStep`."""

    def __init__(self) -> None:
        self.layers: dict[int, StateShape] = {}

    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CK: torch.Tensor, *_: Any) -> torch.Tensor:
        if layer in self.layers and self.layers[layer].taps:
            raise ModelError(f"the model convolves twice in layer {layer}, which is not supported")
        known = self.layers.get(layer, StateShape(0, 0, (), x_TC.device))
        self.layers[layer] = StateShape(weight_CK.shape[1] - 1, x_TC.shape[1], known.recurrent, x_TC.device)
        return x_TC

    def delta_rule(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        self._note(layer, (v.shape[1], k.shape[2], v.shape[2]), v.device)
        return v

    def mamba2(
        self, layer: int, x: torch.Tensor, dt: Any, limit: Any, a_H: Any, b: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        self._note(layer, (x.shape[1], b.shape[2], x.shape[2]), x.device)
        return x.float()

    def mamba(self, layer: int, x: torch.Tensor, dt: Any, a_DN: Any, b: torch.Tensor, *_: Any) -> torch.Tensor:
        self._note(layer, (b.shape[1], x.shape[1]), x.device)
        return x

    def linear_scan(self, layer: int, x: torch.Tensor, *_: Any) -> torch.Tensor:
        self._note(layer, (x.shape[1],), x.device)
        return x

    def unfold(self, layer: int, x_TC: torch.Tensor, taps: int, *, exact: bool = False) -> torch.Tensor:
        if exact:
            self._note(layer, (taps, x_TC.shape[1]), x_TC.device)
        else:
            self.layers[layer] = StateShape(taps, x_TC.shape[1], (), x_TC.device)
        return x_TC[:, None].expand(-1, taps + 1, -1)

    def _note(self, layer: int, recurrent: tuple[int, ...], device: torch.device) -> None:
        known = self.layers.get(layer, StateShape(0, 0, (), device))  # lightning attention has no convolution
        if known.recurrent:
            raise ModelError(f"the model has two recurrences in layer {layer}, which is not supported")
        self.layers[layer] = StateShape(known.taps, known.channels, recurrent, known.device)
