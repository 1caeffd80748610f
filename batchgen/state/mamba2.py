"""The state space recurrence of Mamba2 (arXiv:2405.21060) over packed spans, in plain torch and float32.

Each head has a state S [N, P]. A token has an input x [P], a step dt, and B and C [N] that groups of heads share. With a = exp(dt A):
    S <- a S + B (dt x)^T;  out = S^T C + D x
"""

from __future__ import annotations

import torch

from batchgen.state.chunks import Chunks, decays

# S sequences, C chunks of c tokens, H heads, P head size, G groups, N state size.


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
