"""Scans whose channels do not depend on one another, over packed spans, in plain torch and float32: Mamba (arXiv:2312.00752) and the
RG-LRU of Griffin (arXiv:2402.19427).

Their decays differ from channel to channel, so that there are no matrix products to make of chunks: tokens run one after the other,
those of all spans side by side.
"""

from __future__ import annotations

import torch

from batchgen.state.chunks import Chunks

# S sequences, C chunks of c tokens, D channels, N numbers of a channel's state.


def mamba_token(
    x_SD: torch.Tensor, dt_SD: torch.Tensor, a_DN: torch.Tensor, b_SN: torch.Tensor, c_SN: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Runs one token of each of S sequences of Mamba. Returns the outputs [S, D] without D x, and the new states [S, N, D].

    With a token's step dt: S <- exp(dt A) S + dt B x; out = C S.
    """
    decay = (dt_SD.unsqueeze(1) * a_DN.t()).exp()
    states = states * decay + (x_SD * dt_SD).unsqueeze(1) * b_SN.unsqueeze(-1)
    return (states * c_SN.unsqueeze(-1)).sum(1), states


def linear_step(x_SD: torch.Tensor, decay_SD: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one token of each of S sequences of an RG-LRU: S <- decay S + x. Returns the states [S, D], twice."""
    states = states * decay_SD + x_SD
    return states, states


def mamba_tokens(
    chunks: Chunks, x: torch.Tensor, dt: torch.Tensor, a_DN: torch.Tensor, b: torch.Tensor, c: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Runs all tokens of S spans of Mamba. Returns the outputs [C, c, D] without D x, and updates `states` [S, N, D], in the order of the
    chunks' spans, in place.

    x and dt [T, D], b and c [T, N] are packed.
    """
    x, dt, b, c = (chunks.take(of) for of in (x, dt, b, c))
    dt = dt.masked_fill(chunks.padded[..., None], 0)  # neither decays a state nor writes to it
    out = torch.empty_like(x)
    for first, count in chunks.rounds:
        here = slice(first, first + count)
        for i in range(chunks.size):
            out[here, i], states[:count] = mamba_token(
                x[here, i], dt[here, i], a_DN, b[here, i], c[here, i], states[:count]
            )
    return out


def run_linear(chunks: Chunks, x: torch.Tensor, decay: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Runs all tokens of S spans of an RG-LRU. Returns the states [C, c, D] after each, and updates `states` [S, D] in place.

    x and decay [T, D] are packed.
    """
    padded = chunks.padded[..., None]
    x, decay = chunks.take(x).masked_fill(padded, 0), chunks.take(decay).masked_fill(padded, 1)
    out = torch.empty_like(x)
    for first, count in chunks.rounds:
        here = slice(first, first + count)
        for i in range(chunks.size):
            out[here, i], states[:count] = linear_step(x[here, i], decay[here, i], states[:count])
    return out
