"""Attention for models that do not call transformers' `AttentionInterface`: their modules are changed to call batchgen's attention.

A bias that depends only on the key is stored in the key, as additional numbers (`with_key_bias`). ALiBi (https://arxiv.org/abs/2108.12409) is such
a bias: what it subtracts by the position of the query is the same for all keys and does not change a softmax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch

from batchgen.attention.base import NAME, attention_forward, with_key_bias
from batchgen.state.mixers import set_forward

# T packed tokens, H query heads, K key/value heads, D key size.


class StepInputs:
    """The arguments of the model's current forward, for modules whose parents do not pass them on."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.attention: Any = None
        self.positions = torch.empty(0)
        self.logits_to_keep: Any = slice(None)
        model.register_forward_pre_hook(self._note, with_kwargs=True)
        model.register_forward_hook(self._forget, always_call=True)

    def _note(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.attention, self.positions = kwargs.get("step_attention"), kwargs["position_ids"]
        self.logits_to_keep = kwargs.get("logits_to_keep", slice(None))

    def _forget(self, *_: Any) -> None:
        self.attention = None  # it holds a KV cache, whose memory is to be free as soon as its runner is gone

    def pass_on(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Pre-forward hook of an attention module: gives it the step's attention."""
        return args, kwargs | {"step_attention": self.attention}

    def choose(self, _: Any, args: Any) -> Any:
        """Pre-forward hook of the head, for models that ignore `logits_to_keep`: gives it only the wanted tokens."""
        return args[0][:, self.logits_to_keep], *args[1:]


def hand_over(module: Any) -> bool:
    """Gives a model without `AttentionInterface` batchgen's attention, in place. Returns False for other models, which are not changed."""
    found = {part: name for part in module.modules() if (name := type(part).__name__) in _MODULES}
    if not found:
        return False
    step = StepInputs(module)
    for part, name in found.items():
        _MODULES[name](part, step)
    if "MptAttention" not in found.values():  # whose code needs a mask, although nothing reads it
        module.config._attn_implementation = NAME  # no masks are made then
    return True


def _attend(
    module: Any, step: StepInputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, sliding_window: int | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns [1, T, H, V]."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    return attention_forward(
        module, q, k, v, None, scaling=scaling, sliding_window=sliding_window, step_attention=step.attention
    )[0]


def _gpt_neo(module: Any, step: StepInputs) -> None:
    module.layer_idx = module.layer_id
    # `bias` is a lower triangle: as wide as the sliding window in layers with one, else as wide as the longest text.
    sliding_window = int(module.bias[0, 0, -1].sum()) if module.attention_type == "local" else None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any = None) -> tuple[torch.Tensor, None]:
        return _attend(module, step, q, k, v, 1.0, sliding_window).transpose(1, 2), None

    module._attn = attend


def _gpt_j(module: Any, step: StepInputs) -> None:
    """GPT-J and CodeGen."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any = None) -> tuple[torch.Tensor, None]:
        return _attend(module, step, q, k, v, module.head_dim**-0.5).transpose(1, 2), None

    module._attn = attend


def _bloom(module: Any, step: StepInputs) -> None:
    slopes_H = _alibi_slopes(module)

    def forward(hidden_states: torch.Tensor, residual: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        bias_HT = slopes_H.to(q.device)[:, None] * step.positions.to(q.device)
        q, k = with_key_bias(q, k, bias_HT, module.inv_norm_factor)
        out = _attend(module, step, q, k, v, module.inv_norm_factor).flatten(2)
        return residual + module.dense(out), None

    set_forward(module, forward)


def _alibi_slopes(module: Any) -> torch.Tensor:
    """Returns ALiBi's slopes [H] as the module's own code computes them, in float32."""
    build = vars(sys.modules[type(module).__module__])["build_alibi_tensor"]
    of_two = build(torch.ones((1, 2), dtype=torch.int64), module.num_heads, torch.float32)
    return cast(torch.Tensor, of_two.view(module.num_heads, 2)[:, 1])


def _mpt(module: Any, step: StepInputs) -> None:
    def forward(hidden_states: torch.Tensor, position_bias: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        qkv = module.Wqkv(hidden_states)
        if module.clip_qkv:
            qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        q, k, v = (x.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
        slopes_H = position_bias[:, 0, -1] - position_bias[:, 0, -2]
        q, k = with_key_bias(q, k, slopes_H.to(q.device)[:, None] * step.positions.to(q.device), module.softmax_scale)
        return module.out_proj(_attend(module, step, q, k, v, module.softmax_scale).flatten(2)), None

    set_forward(module, forward)


def _falcon(module: Any, step: StepInputs) -> None:
    groups = module.num_heads // module.num_kv_heads if module.new_decoder_architecture else 1
    rotate = vars(sys.modules[type(module).__module__])["apply_rotary_pos_emb"]
    slopes_H = _alibi_slopes(module).bfloat16()  # the type in which its own code multiplies positions

    def forward(
        hidden_states: torch.Tensor, alibi: torch.Tensor | None, *_: Any, position_embeddings: Any = None, **__: Any
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden_states)))
        k, v = k[:, ::groups], v[:, ::groups]  # transformers repeats them
        if alibi is None:
            q, k = rotate(q, k, *position_embeddings)
        else:
            bias_HT = (slopes_H.to(q.device)[:, None] * step.positions.to(q.device)).float() * module.inv_norm_factor
            # Heads that share a key have different biases.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            q, k = with_key_bias(q, k, bias_HT, module.inv_norm_factor)
        return module.dense(_attend(module, step, q, k, v, module.inv_norm_factor).flatten(2)), None

    set_forward(module, forward)


def _doge(module: Any, _: StepInputs) -> None:
    """Doge's mask is a bias of keys as long as it keeps every key. Contexts end before it would leave one out (`prompts/tokenizer.py`)."""

    def mask(dt_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return dt_states[:, :, None]

    module.prepare_dynamic_mask = mask
    module.mask_is_key_bias = True


_MODULES: dict[str, Callable[[Any, StepInputs], None]] = {
    "BloomAttention": _bloom,
    "CodeGenAttention": _gpt_j,
    "DogeAttention": _doge,
    "FalconAttention": _falcon,
    "GPTJAttention": _gpt_j,
    "GPTNeoSelfAttention": _gpt_neo,
    "MptAttention": _mpt,
}
"""The function that changes an attention module, by the name of its class."""
