"""LongRoPE (https://arxiv.org/abs/2402.13753): rotary frequencies for short texts and others for long ones.

transformers chooses by the longest text of a batch. Here a request says which it needs (`Request.long`), and an engine never runs both kinds in one step.
"""

from __future__ import annotations

from typing import Any

import torch


class LongRope:
    """The rotary embeddings of a model that has LongRoPE, with the frequencies of short texts until `use` changes them."""

    def __init__(self, parts: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]) -> None:
        """`parts`: module, name of the buffer with its frequencies, and these for short and for long texts (float32 [rotary dimensions / 2])."""
        self._parts = parts
        self.use(long=False)

    def use(self, *, long: bool) -> None:
        """Changes the frequencies of all steps from now on. KV that was computed with the others is of no use then."""
        self.long = long
        for module, name, short_N, long_N in self._parts:
            getattr(module, name).copy_(long_N if long else short_N)  # in place: CUDA graphs read it where it lies
            module.__dict__.pop("table", None)  # of cos and sin (`ops.cos_and_sin`)


def settle_frequencies(module: torch.nn.Module) -> LongRope | None:
    """Keeps transformers from changing rotary frequencies by the positions of a batch, at which every forward would look. Returns what changes those of
    LongRoPE instead, if the model has it. (Dynamic NTK changes only where the context has ended.)"""
    parts: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]] = []
    part: Any
    for part in module.modules():
        kind = getattr(part, "rope_type", None)
        if isinstance(kind, str):
            parts += _of(part, kind, None)
            part.rope_type = _settled(kind)
        elif isinstance(kind, dict):
            for layers, of in kind.items():
                parts += _of(part, of, layers)
            part.rope_type = {layers: _settled(of) for layers, of in kind.items()}
    return LongRope(parts) if parts else None


def _of(part: Any, kind: str, layers: str | None) -> list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]:
    """The frequencies of a module, for layers of a type if it tells them apart; none without LongRoPE, or if it is another's code."""
    if kind != "longrope" or not type(part).__module__.startswith("transformers."):
        return []
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    name = "inv_freq" if layers is None else f"{layers}_inv_freq"
    device = getattr(part, name).device
    ropes = part.config.rope_parameters
    original = (ropes if layers is None else ropes[layers])["original_max_position_embeddings"]
    short_N, long_N = (
        ROPE_INIT_FUNCTIONS[kind](part.config, torch.device("cpu"), seq_len=length, layer_type=layers)[0].to(device)
        for length in (original, original + 1)
    )
    return [(part, name, short_N, long_N)]


def _settled(rope_type: str) -> str:
    """Returns a type that transformers' `dynamic_rope_update` does not change."""
    return "default" if rope_type == "longrope" or "dynamic" in rope_type else rope_type
