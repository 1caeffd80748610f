"""A step's recurrent layers: which slot each span's state is read from and which it is written to, and the mixers' work on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.kernels import recurrent
from batchgen.state import delta_rule, mamba2
from batchgen.state.cache import StateCache
from batchgen.state.chunks import Chunks, chunks_of
from batchgen.state.convolution import convolve


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Tokens of a step that follow one another."""

    length: int
    read: int
    """The slot with the state before them; -1 where they begin a text."""
    write: int
    """The slot that takes the state after them."""
    generated: int = 0
    """How many of the tokens, the last ones, were generated: the others are a prompt's."""


class StateStep:
    """One step as the model's recurrent layers meet it. Made once for a step; each layer calls `convolve` and maybe a recurrence.

    Spans of one token are run together, one recurrent step each; longer ones in chunks. No slot is both read by one span and written
    by another in a step.
    """

    def __init__(self, spans: Sequence[StateSpan], cache: StateCache, kernels: bool = False) -> None:
        """`kernels`: those of the CPU do what they have, in float32 and bfloat16."""
        self._cache = cache
        self._kernels = kernels
        lengths = np.array([s.length for s in spans], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        read = np.array([s.read if s.read >= 0 else cache.num_slots for s in spans], dtype=np.int64)
        write = np.array([s.write for s in spans], dtype=np.int64)
        generated = np.array([s.generated for s in spans], dtype=np.int64)
        # From the end of each token's span, counted from 1: a token that is nearer than the span's generated ones is one of them.
        left = np.repeat(starts + lengths, lengths) - np.arange(lengths.sum())
        self._arrays = _Arrays(starts, lengths, read, write, left > np.repeat(generated, lengths))
        self._on: dict[torch.device, _Layout] = {}

    def convolve(
        self,
        layer: int,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """The causal convolution [T, C] of the packed tokens, each span's behind its own past."""
        at, states = self._layout(x_TC.device), self._cache.convolution[layer]
        if self._kernels and recurrent.can_convolve(x_TC, weight_CK, bias_C, activation, states):
            weight_KC = weight_CK.t().contiguous()
            return recurrent.convolve(
                x_TC, weight_KC, bias_C, activation, states, at.starts, at.lengths, at.read, at.write
            )
        out, after = convolve(
            x_TC, weight_CK, bias_C, activation, states.index_select(0, at.read), at.starts, at.lengths, at.owners
        )
        states.index_copy_(0, at.write, after.to(states.dtype))
        return out.to(x_TC.dtype)

    def delta_rule(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """The gated delta rule: q, k [T, H, K] and v [T, H, V], float32, give [T, H, V]; g and beta [T, H]."""
        at, states = self._layout(v.device), self._cache.recurrent[layer]
        if self._kernels and at.single is not None and not at.chunks:
            return recurrent.delta_rule(q, k, v, g.exp(), beta, states, at.single_read, at.single_write)
        out = torch.empty_like(v)
        if at.single is not None:
            q1, k1, v1, g1, beta1 = (x.index_select(0, at.single) for x in (q, k, v, g, beta))
            if self._kernels:
                y = recurrent.delta_rule(q1, k1, v1, g1.exp(), beta1, states, at.single_read, at.single_write)
            else:
                y, after = delta_rule.step(q1, k1, v1, g1, beta1, states.index_select(0, at.single_read))
                states.index_copy_(0, at.single_write, after)
            out.index_copy_(0, at.single, y)
        for chunks in at.chunks:
            ends = states.index_select(0, at.read.index_select(0, chunks.spans))
            chunks.put(out, delta_rule.run_chunks(chunks, q, k, v, g, beta, ends))
            states.index_copy_(0, at.write.index_select(0, chunks.spans), ends)
        return out

    def mamba2(
        self, layer: int, x: torch.Tensor, dt: torch.Tensor, limit: tuple[float, float],
        a_H: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """The recurrence of Mamba2 without D x: x [T, H, P], float32, gives [T, H, P]; dt [T, H], b and c [T, G, N].

        dt keeps to the `limit` in prompts only, as in transformers.
        """
        at, states = self._layout(x.device), self._cache.recurrent[layer]
        if limit != (0.0, math.inf):
            dt = torch.where(at.prompt[:, None], dt.clamp(*limit), dt)
        if self._kernels and at.single is not None and not at.chunks:
            return recurrent.mamba2(x, dt, (dt * a_H).exp(), b, c, states, at.single_read, at.single_write)
        out = torch.empty_like(x)
        if at.single is not None:
            x1, dt1, b1, c1 = (of.index_select(0, at.single) for of in (x, dt, b, c))
            if self._kernels:
                decay = (dt1 * a_H).exp()
                y = recurrent.mamba2(x1, dt1, decay, b1, c1, states, at.single_read, at.single_write)
            else:
                y, after = mamba2.step(x1, dt1, a_H, b1, c1, states.index_select(0, at.single_read))
                states.index_copy_(0, at.single_write, after)
            out.index_copy_(0, at.single, y)
        for chunks in at.chunks:
            ends = states.index_select(0, at.read.index_select(0, chunks.spans))
            chunks.put(out, mamba2.run_chunks(chunks, x, dt, a_H, b, c, ends))
            states.index_copy_(0, at.write.index_select(0, chunks.spans), ends)
        return out

    def _layout(self, device: torch.device) -> _Layout:
        if device not in self._on:
            self._on[device] = _Layout(self._arrays, device)
        return self._on[device]


class _Arrays(NamedTuple):
    """By span where it starts, how long it is and its slots; by token whether it is a prompt's."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    read: NDArray[np.int64]
    write: NDArray[np.int64]
    prompt: NDArray[np.bool_]


class _Layout:
    """A step's spans as tensors on a device."""

    def __init__(self, spans: _Arrays, device: torch.device) -> None:
        def put(x: NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(x).to(device)

        starts, lengths, read, write, prompt = spans
        self.starts, self.lengths, self.read, self.write = put(starts), put(lengths), put(read), put(write)
        self.owners = put(np.repeat(np.arange(len(lengths)), lengths))
        self.prompt = torch.from_numpy(prompt).to(device)
        single, longer = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
        self.single: torch.Tensor | None = None
        """Where the tokens of spans of one token are; None without such spans."""
        if len(single):
            self.single, self.single_read, self.single_write = (
                put(starts[single]),
                put(read[single]),
                put(write[single]),
            )
        self.chunks: list[Chunks] = chunks_of(starts[longer], lengths[longer], longer, device) if len(longer) else []
