"""State space recurrences over packed spans, in plain torch and float32: Mamba2 (arXiv:2405.21060), Mamba (arXiv:2312.00752) and the RG-LRU of
Griffin (arXiv:2402.19427).

A head of Mamba2 has a state S [N, P]. A token has an input x [P], a step dt, and B and C [N] that groups of heads share. With a = exp(dt A):
    S <- a S + B (dt x)^T;  out = S^T C + D x
The decays of the others differ from channel to channel, so that there are no matrix products to make of chunks.
"""

from __future__ import annotations

import torch

from batchgen.state.chunks import Chunks, decays

# S sequences, C chunks of c tokens, H heads, P head size, G groups, D channels, N state size.


def mamba2_token(
    a_H: torch.Tensor, x_SHP: torch.Tensor, dt_SH: torch.Tensor, b_SGN: torch.Tensor, c_SGN: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Runs one token of each of S sequences. Returns the outputs [S, H, P] without D x, and the new states [S, H, N, P]."""
    heads = x_SHP.shape[1] // b_SGN.shape[1]
    b, c = (of.repeat_interleave(heads, 1) for of in (b_SGN, c_SGN))
    states = states * (dt_SH * a_H).exp()[..., None, None] + b[..., None] * (x_SHP * dt_SH[..., None])[..., None, :]
    return (c.unsqueeze(-2) @ states).squeeze(-2), states


def mamba2_chunks(
    a_H: torch.Tensor, chunks: Chunks, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Runs all tokens of S spans. Returns the outputs [C, c, H, P] without D x, and updates `states` [S, H, N, P], in the order of the
    chunks' spans, in place.

    x [T, H, P], dt [T, H], b and c [T, G, N] are packed. Inside a chunk, tokens read one another as in attention. Only the state goes
    from chunk to chunk.
    """
    heads = x.shape[1] // b.shape[1]
    dt = chunks.take(dt).masked_fill(chunks.padded[..., None], 0).transpose(1, 2)  # [C, H, c]
    x = chunks.take(x).transpose(1, 2) * dt.unsqueeze(-1)  # [C, H, c, P]
    b, c = (chunks.take(of).transpose(1, 2) for of in (b, c))  # [C, G, c, N]
    before, between, after, ends = decays(dt * a_H[:, None])
    weights = (c @ b.transpose(-1, -2)).repeat_interleave(heads, 1).mul_(between)
    out = weights @ x
    c = c.repeat_interleave(heads, 1) * before.unsqueeze(-1)
    b = b.repeat_interleave(heads, 1) * after.unsqueeze(-1)
    ends = ends[..., None, None]
    for first, count in chunks.rounds:
        here = slice(first, first + count)
        state = states[:count]
        out[here] += c[here] @ state
        state.mul_(ends[here]).add_(b[here].transpose(-1, -2) @ x[here])
    return out.transpose(1, 2)


def mamba_token(
    a_DN: torch.Tensor, x_SD: torch.Tensor, dt_SD: torch.Tensor, b_SN: torch.Tensor, c_SN: torch.Tensor, states: torch.Tensor
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
