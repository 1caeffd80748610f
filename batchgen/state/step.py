"""Runs the recurrent layers of a step: reads the state of each span from its slot, and writes the new one to its slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.kernels import recurrent
from batchgen.kernels.ops import are_known
from batchgen.state import delta_rule, mamba
from batchgen.state.cache import CPU, StateCache
from batchgen.state.chunks import Chunks, chunks_of
from batchgen.state.convolution import convolve_spans, unfold_spans


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A span of tokens in a step."""

    length: int
    read: int
    """The slot with the state before them; -1 if they begin a text."""
    write: int
    """The slot for the state after them."""
    generated: int = 0
    """How many of the tokens, at the end, were generated. The others belong to a prompt."""


class StateStep:
    """The recurrent layers' view of one step. Made once for a step; each layer calls `convolve` and possibly a recurrence.

    Spans of one token run together, as one recurrent step. Longer spans run in chunks. In a step no slot is read by one span and written
    by another.
    """

    def __init__(self, spans: Sequence[StateSpan], cache: StateCache, kernels: bool = False) -> None:
        """`kernels`: whether our kernels for the CPU run what they can, in float32 and bfloat16."""
        self._cache = cache
        self._kernels = kernels
        lengths = np.array([s.length for s in spans], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        read = np.array([s.read if s.read >= 0 else cache.num_state_slots for s in spans], dtype=np.int64)
        write = np.array([s.write for s in spans], dtype=np.int64)
        generated = np.array([s.generated for s in spans], dtype=np.int64)
        # Distance of each token from the end of its span, from 1. A token is generated if it is not farther than the number of those.
        left = np.repeat(starts + lengths, lengths) - np.arange(lengths.sum())
        self._arrays = starts, lengths, read, write, left > np.repeat(generated, lengths)
        self._on: dict[torch.device, _Layout] = {}

    def convolve(
        self,
        layer: int,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """Returns the causal convolution [T, C] of the packed tokens; each span continues its own earlier inputs."""
        at, states = self._layout(x_TC.device), self._cache.convolution[layer]
        spans = at.spans
        if self._kernels and recurrent.can_convolve(x_TC, weight_CK, bias_C, activation, states):
            weight_KC = self._cache.filter_of(layer, weight_CK)
            return recurrent.convolve(x_TC, weight_KC, bias_C, activation, states, spans)
        out, after = convolve_spans(
            x_TC,
            weight_CK,
            bias_C,
            activation,
            states.index_select(0, spans.read),
            spans.starts,
            spans.lengths,
            at.owners,
        )
        states.index_copy_(0, spans.write, after.to(states.dtype))
        return out.to(x_TC.dtype)

    def delta_rule(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, normalize: bool
    ) -> torch.Tensor:  # fmt: skip
        """Returns the outputs [T, H, V] of the gated delta rule for q, k [T, G, K], v [T, H, V], g (float32) and beta [T, H].

        Groups of heads share queries and keys, which are brought to length one with `normalize`. With g [T, H, K] each row of a state
        has a decay of its own.
        """
        at, states = self._layout(v.device), self._cache.recurrent[layer]
        scale = q.shape[-1] ** -0.5
        if self._kernels and are_known(q, k, v):
            return recurrent.delta_rule(q, k, v, g.exp(), beta, scale, normalize, states, at.spans)
        dtype = v.dtype
        q, k, v, beta = (x.float() for x in (q, k, v, beta))
        if normalize:
            q, k = delta_rule.normalized(q), delta_rule.normalized(k)
        q = q * scale
        if v.shape[1] > k.shape[1]:
            q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))
        chunked = delta_rule.delta_rule_chunks if g.dim() == 2 else None
        out = _run_spans(at, states, (q, k, v, g, beta), torch.empty_like(v), delta_rule.delta_rule_token, chunked)
        return out.to(dtype)

    def take_over(
        self, layer: int, convolution: recurrent.Convolution, rule: recurrent.Rule | None, gates: recurrent.RecurrentGates | None
    ) -> None:  # fmt: skip
        """Makes the kernels' arguments for a layer's convolution and recurrence those of this step, which must be kept until they have run."""
        at = self._layout(CPU)
        if gates is not None:
            gates.prompt = at.prompt.data_ptr()
        count, addresses = len(at.spans.starts), at.spans.addresses
        for of, states in ((convolution, self._cache.convolution), (rule, self._cache.recurrent)):
            if of is not None:
                of.spans, of.states = count, states[layer].data_ptr()
                of.starts, of.lengths, of.read, of.write = addresses

    def mamba2(
        self, layer: int, x: torch.Tensor, dt: torch.Tensor, limit: tuple[float, float],
        a_H: torch.Tensor, b: torch.Tensor, c: torch.Tensor, skip_H: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the outputs of Mamba2's recurrence, float32 [T, H, P], for x [T, H, P], dt [T, H] (float32), b and c [T, G, N].

        dt is clamped to `limit` in prompts only, as in transformers. `skip_H` (D) times x is added to the outputs.
        """
        at, states = self._layout(x.device), self._cache.recurrent[layer]
        if limit != (0.0, math.inf):
            dt = torch.where(at.prompt[:, None], dt.clamp(*limit), dt)
        if self._kernels and are_known(c, b, x):
            decay = (dt * a_H).exp()
            return recurrent.mamba2(x, dt, decay, b, c, skip_H, states, at.spans)
        x, b, c = (of.float() for of in (x, b, c))
        out = _run_spans(
            at, states, (x, dt, b, c), torch.empty_like(x), partial(mamba.mamba2_token, a_H), partial(mamba.mamba2_chunks, a_H)
        )  # fmt: skip
        return out if skip_H is None else out + skip_H[:, None] * x

    def mamba(
        self, layer: int, x: torch.Tensor, dt: torch.Tensor, a_DN: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        """Returns the outputs [T, D] of Mamba's recurrence without D x, for x and dt [T, D], b and c [T, N], all float32."""
        at, states = self._layout(x.device), self._cache.recurrent[layer]
        if self._kernels:
            return recurrent.mamba(x, dt, a_DN, b, c, states, at.spans)
        return _run_spans(at, states, (x, dt, b, c), torch.empty_like(x), partial(mamba.mamba_token, a_DN))

    def linear_scan(self, layer: int, x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        """Returns the states [T, D] after each token, which decay and take up x: x and decay [T, D] are float32."""
        at, states = self._layout(x.device), self._cache.recurrent[layer]
        if self._kernels:
            return recurrent.linear_scan(x, decay, states, at.spans)
        return _run_spans(at, states, (x, decay), torch.empty_like(x), mamba.linear_step)

    def unfold(self, layer: int, x_TC: torch.Tensor, taps: int, *, exact: bool = False) -> torch.Tensor:
        """Returns the input of each token behind the `taps` inputs before it in its text [T, taps + 1, C], zeros before its first.

        The state keeps inputs in the model's dtype, or with `exact` in float32.
        """
        at, kept = self._layout(x_TC.device), self._cache.recurrent if exact else self._cache.convolution
        before = kept[layer].index_select(0, at.spans.read)
        out, after = unfold_spans(x_TC, before, at.spans.starts, at.spans.lengths, at.owners)
        kept[layer].index_copy_(0, at.spans.write, after.to(before.dtype))
        return out

    def _layout(self, device: torch.device) -> _Layout:
        if device not in self._on:
            self._on[device] = _Layout(self._arrays, device)
        return self._on[device]


def _run_spans(
    at: _Layout,
    states: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    token: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    chunked: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Runs a recurrence on the spans of a step, and writes their new states. Returns the outputs in `out`.

    `token(*inputs, states)` runs one token of several spans and returns their outputs and new states. `chunked(chunks, *inputs, states)`
    runs longer spans, returns their outputs and changes the states in place; without it, these run token after token, side by side.
    """
    if at.single is not None:
        one = [x.index_select(0, at.single) for x in inputs]
        y, after = token(*one, states.index_select(0, at.single_read))
        states.index_copy_(0, at.single_write, after)
        out.index_copy_(0, at.single, y)
    for chunks in at.chunks:
        ends = states.index_select(0, at.spans.read.index_select(0, chunks.spans))
        if chunked is not None:
            chunks.put(out, chunked(chunks, *inputs, ends))
        else:
            chunks.put(out, _token_by_token(chunks, inputs, out.shape[1:], token, ends))
        states.index_copy_(0, at.spans.write.index_select(0, chunks.spans), ends)
    return out


def _token_by_token(
    chunks: Chunks,
    inputs: tuple[torch.Tensor, ...],
    shape: torch.Size,
    token: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    states: torch.Tensor,
) -> torch.Tensor:
    """Runs all tokens of the chunks' spans, and updates `states`, in their order, in place. Returns the outputs [C, c, *shape]."""
    taken = [chunks.take(x) for x in inputs]
    out = states.new_empty((chunks.num_chunks, chunks.size, *shape))
    padded = chunks.padded.view(*chunks.padded.shape, *[1] * (states.dim() - 1))
    for first, count in chunks.rounds:
        here, state = slice(first, first + count), states[:count]
        for i in range(chunks.size):
            out[here, i], after = token(*(x[here, i] for x in taken), state)
            torch.where(padded[here, i], state, after, out=state)
    return out


class _Layout:
    """The spans of a step as tensors on one device."""

    def __init__(self, arrays: tuple[NDArray[Any], ...], device: torch.device) -> None:
        """`arrays`: by span its start, its length and its two slots; by token whether it belongs to a prompt."""

        def put(x: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(x).to(device)

        starts, lengths, read, write, prompt = arrays
        self.spans = recurrent.SpanPlaces(put(starts), put(lengths), put(read), put(write))
        self.owners = put(np.repeat(np.arange(len(lengths)), lengths))
        self.prompt = put(prompt)
        single, longer = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
        self.single: torch.Tensor | None = None
        """The places of the tokens whose span has one token; None without such spans."""
        if len(single):
            self.single, self.single_read, self.single_write = (put(x[single]) for x in (starts, read, write))
        self.chunks: list[Chunks] = chunks_of(starts[longer], lengths[longer], longer, device) if len(longer) else []
