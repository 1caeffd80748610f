"""Layers of image encoders on the CPU, each in one call of the library, as decoder layers have it (kernels/dense_layer.py).

Layers are recognized by their code (`recognition`), and replaced if the call gives the same on random numbers. In bfloat16 it rounds where the
modules round.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers.activations import GELUActivation, QuickGELUActivation

from batchgen.attention.base import LayerOptions
from batchgen.attention.cpu_backend import SegmentAttention, segment_blocks, segment_cache
from batchgen.attention.encoder import seen_keys
from batchgen.attention.kv_cache import KVCache, LayerShape
from batchgen.kernels.decoder_layers import run_as_kernels
from batchgen.kernels.dense_layer import (
    Attention,
    DenseLayer,
    DenseStack,
    LayerNorms,
    PlainMLP,
    Turns,
    Workspace,
    joined,
)
from batchgen.kernels.fusion import FusedMLP, FusedNorm, RotaryForm
from batchgen.kernels.ops import Activation
from batchgen.kernels.recognition import Code, code_of
from batchgen.kernels.replacing import (
    ACTIVATIONS,
    NEAR,
    first_part,
    is_plain,
    known_code,
    near,
    own_forward,
    random_numbers,
)

MOST_BYTES = 1 << 28
"""Of results between a layer's kernels. With more tokens, the layer runs part by part."""


@torch.inference_mode()
def fuse_encoder_layers(encoder: torch.nn.Module) -> None:
    """Gives the layers of an encoder whose linear layers are packed (`fusion.fuse_linear`) a forward that is one call, if they have no hooks."""
    shared = _Shared()
    module: Any
    for module in encoder.modules():
        if known_code(module) is Code.ENCODER_LAYER:
            made = _encoder_layer(module, shared)
            if made is not None and made.agrees(module):
                module.forward = MethodType(made.forward(type(module).forward), module)


class _Shared:
    """What the layers of an encoder share: memory between kernels, and that of the keys and values of one layer."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self._caches: dict[tuple[Any, ...], KVCache] = {}
        self._attentions: dict[tuple[Any, ...], SegmentAttention] = {}
        self._mask: Callable[[], Any] = lambda: None
        """Returns the last mask, while it is in use."""
        self._shows_all = True
        """Whether that shows all."""

    def shows_all(self, mask: Any) -> bool:
        """Whether a mask lets every token see every one. Layers that follow each other have the same mask."""
        if not isinstance(mask, torch.Tensor):
            return mask is None
        if mask is not self._mask():
            self._mask = weakref.ref(mask)
            self._shows_all = seen_keys(mask, mask.shape[-1]) == mask.shape[-1]
        return self._shows_all

    def attention(self, lengths: tuple[int, ...], shape: LayerShape, dtype: torch.dtype) -> SegmentAttention:
        """Returns the attention of segments of these lengths. It is the same one as before where they are those of the last layers."""
        found = self._attentions.get((lengths, shape, dtype))
        if found is not None:
            return found
        needed = segment_blocks(lengths)
        cache = self._caches.get((shape, dtype))
        if cache is None or cache.num_blocks < needed:
            self._attentions.clear()
            cache = self._caches[shape, dtype] = segment_cache(shape, needed, dtype)
        if len(self._attentions) == 4:  # an encoder has layers of one or two kinds
            self._attentions.clear()
        made = self._attentions[lengths, shape, dtype] = SegmentAttention(lengths, cache)
        return made


class _EncoderLayer:
    """A layer of an encoder, as a `DenseStack` of one layer."""

    def __init__(self, dense: DenseLayer, shared: _Shared, code: Code) -> None:
        """`code`: of its attention. In segments the layer's forward gets the tokens of one image and `cu_seqlens`, else [images, T, hidden]."""
        self._dense, self._shared = DenseStack([dense], None, shared.workspace), shared
        mixer: Any = dense.mixer
        self._mixer: Attention = mixer
        self._in_segments = code in (Code.ATTENTION_IN_SEGMENTS, Code.TURNED_ATTENTION_IN_SEGMENTS)
        self._shape = LayerShape(self._mixer.kv_heads, self._mixer.head_size, self._mixer.head_size)

    def __call__(self, x: torch.Tensor, lengths: tuple[int, ...], turns: Turns | None) -> torch.Tensor | None:
        """Returns the output for tokens [..., hidden] in segments; None if the call does not take them. `turns`: cos and sin [T, R]."""
        rows = x.reshape(1, -1, x.shape[-1])
        if turns is not None:
            wide = self._mixer.rotary is not None and self._mixer.rotary.in_float32
            cos, sin = (of.float() if wide else of for of in turns)
            turns = cos[None], sin[None]
        if rows.shape[1] * self._dense.row_bytes > MOST_BYTES or sum(lengths) != rows.shape[1]:
            return None
        attention = self._shared.attention(lengths, self._shape, x.dtype)
        return self._dense(rows, turns, attention).view(x.shape) if self._dense.takes(rows, turns, attention) else None

    def forward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a forward of the layer. `plain`: that of its class, for inputs that the call does not take."""

        def forward(module: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            given = self._given(hidden_states, *args, **kwargs)
            out = None if given is None else self(hidden_states, *given)
            return plain(module, hidden_states, *args, **kwargs) if out is None else out

        return forward

    def _given(
        self, x: torch.Tensor, second: Any = None, position_embeddings: Turns | None = None, **kwargs: Any
    ) -> tuple[tuple[int, ...], Turns | None] | None:
        """Returns the segments' lengths, and cos and sin, of the arguments of a layer; None for others than known ones."""
        if self._in_segments:
            ends: torch.Tensor | None = kwargs.get("cu_seqlens", second)
            if ends is None or kwargs.get("attention_mask") is not None or (x.dim() == 3 and len(x) > 1):
                return None
            return tuple(length for length in ends.diff().tolist() if length), position_embeddings
        if x.dim() != 3 or not self._shared.shows_all(kwargs.get("attention_mask", second)):
            return None
        return (x.shape[1],) * len(x), position_embeddings

    def agrees(self, module: Any) -> bool:
        """Whether it gives what a layer does on random numbers."""
        generator = torch.Generator().manual_seed(0)
        dtype, hidden = self._dense.layers[0].o.dtype, self._dense.layers[0].o.out_features
        x = random_numbers(generator, 1, 6, hidden).to(dtype)
        masked = "attention_mask" in inspect.signature(inspect.unwrap(type(module).forward)).parameters
        more: dict[str, Any] = {"attention_mask": None} if masked else {}
        if self._in_segments:
            x = x if masked else x[0]
            more |= {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32), "max_seqlen": 4}
        if self._mixer.rotary is not None:
            half = random_numbers(generator, 2, 6, self._mixer.head_size // 2).to(dtype)
            more["position_embeddings"] = tuple(torch.cat((of, of), -1) for of in half)
        given = self._given(x, **more)
        ours, theirs = None if given is None else self(x, *given), module(x, **more)
        return ours is not None and near(ours, theirs, NEAR[dtype])


def _encoder_layer(layer: Any, shared: _Shared) -> _EncoderLayer | None:
    """Returns a layer as one call; None if a part of it is not a kernel."""
    attention = first_part(layer, "attn", "self_attn", "attention")
    if attention is None or attention._forward_hooks or attention._forward_pre_hooks:
        return None
    code = code_of(type(attention).forward, type(attention))
    first = _norm(first_part(layer, "norm1", "layer_norm1", "rms_norm1", "attention_norm", "layernorm_before"))
    second = _norm(first_part(layer, "norm2", "layer_norm2", "rms_norm2", "ffn_norm", "layernorm_after"))
    mlp = _mlp(first_part(layer, "mlp", "ffn", "feed_forward"))
    if code not in _ROTARY or first is None or second is None or mlp is None:
        return None
    found = (first_part(attention, *names) for names in (("qkv", "q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")))
    inputs = [part for part in found if part is not None]
    o = first_part(attention, "proj", "out_proj", "o_proj", "projection_layer")
    of_heads = [first_part(attention, name) for name in ("q_norm", "k_norm")]
    head_norms = [norm for norm in of_heads if norm is not None and not isinstance(norm, torch.nn.Identity)]
    if not run_as_kernels([*inputs, o, mlp.gate_up, mlp.down], [], [first, second, *head_norms]):
        return None
    heads = attention.num_heads
    size, made = o.in_features // heads, sum(part.out_features for part in inputs)
    scale: float = attention.scaling if hasattr(attention, "scaling") else attention.scale
    mixer = Attention(
        heads, (made // size - heads) // 2, size, LayerOptions(scale), head_norms, late_norms=False, gated=False,
        rotary=_ROTARY[code], scaled_from=None, value_norm=None, made=3,
    )  # fmt: skip
    if made != mixer.widths[0]:
        return None
    norms = LayerNorms(before_attention=first, before_mlp=second)
    lambdas = (getattr(layer, name, None) for name in ("lambda_1", "lambda_2"))
    first_scale, second_scale = (None if by is None else by.detach().float() for by in lambdas)
    dense = DenseLayer(0, norms, joined(inputs), mixer, o, mlp, scales=(first_scale, second_scale))
    return _EncoderLayer(dense, shared, code)


_ROTARY = {
    Code.ENCODER_ATTENTION: None,
    Code.TURNED_ENCODER_ATTENTION: RotaryForm(),
    Code.ATTENTION_IN_SEGMENTS: None,
    Code.TURNED_ATTENTION_IN_SEGMENTS: RotaryForm(in_float32=True),
}
"""By the code of attention."""


def _norm(norm: Any) -> FusedNorm | None:
    """Returns a norm as a kernel; None for unknown ones."""
    if isinstance(norm, FusedNorm):
        return norm
    if type(norm) is not torch.nn.LayerNorm or own_forward(norm) is None:
        return None
    if not is_plain(norm.bias) or norm.weight.dim() != 1:
        return None
    return FusedNorm(norm.weight, 0.0, norm.eps, rounds_first=False, bias=norm.bias)


def _mlp(mlp: Any) -> FusedMLP | PlainMLP | None:
    """Returns an MLP whose linear layers are kernels; None for unknown ones."""
    if isinstance(mlp, FusedMLP):
        return mlp
    if known_code(mlp) is not Code.PLAIN_MLP:
        return None
    first, second = first_part(mlp, "fc1", "linear_fc1"), first_part(mlp, "fc2", "linear_fc2")
    activation = _ACTIVATIONS.get(type(first_part(mlp, "activation_fn", "act_fn", "act")))
    return None if activation is None else PlainMLP(first, activation, second)


_ACTIVATIONS = ACTIVATIONS | {GELUActivation: Activation.GELU, QuickGELUActivation: Activation.QUICK_GELU}
