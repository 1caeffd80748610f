"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464) over packed spans, in plain torch and float32.

Each head has a state S [K, V]. Queries read it, and keys write it. With a token's decay a = exp(g) and strength b:
    S <- a S;  S <- S + k (b (v - S^T k))^T;  out = S^T q
"""

from __future__ import annotations

import torch

from batchgen.state.chunks import Chunks, decays

# N spans, C chunks of c tokens, H value heads, K key size, V value size.


def delta_rule_token(
    q_NHK: torch.Tensor,
    k_NHK: torch.Tensor,
    v_NHV: torch.Tensor,
    g_NH: torch.Tensor,
    beta_NH: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one token of each of N sequences. Returns the outputs [N, H, V] and the new states [N, H, K, V].

    With g [N, H, K] each row of a state decays by itself (Kimi Delta Attention, arXiv:2510.26692).
    """
    states = states * (g_NH.exp()[..., None, None] if g_NH.dim() == 2 else g_NH.exp().unsqueeze(-1))
    known = (states * k_NHK.unsqueeze(-1)).sum(-2)
    delta = (v_NHV - known) * beta_NH.unsqueeze(-1)
    states = states + k_NHK.unsqueeze(-1) * delta.unsqueeze(-2)
    return (states * q_NHK.unsqueeze(-1)).sum(-2), states


def delta_rule_chunks(
    chunks: Chunks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """Runs all tokens of N spans. Returns the outputs [C, c, H, V], and updates `states` [N, H, K, V], in the order of the chunks' spans, in place.

    q, k [T, H, K], v [T, H, V], g and beta [T, H] are packed. Inside a chunk the updates of its tokens are one triangular system (the
    UT transform of arXiv:2406.06484). Only the state goes from chunk to chunk.
    """
    q, k, v = (chunks.take(x).transpose(1, 2) for x in (q, k, v))  # [C, H, c, size]
    g, beta = (chunks.take(x).masked_fill(chunks.padded[..., None], 0).transpose(1, 2) for x in (g, beta))
    before, between, after, ends = decays(g)
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.transpose(-1, -2)).mul_(between)
    inside = (q @ k.transpose(-1, -2)).mul_(between)
    sides = torch.cat([v * beta.unsqueeze(-1), k_beta * before.unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    q = q * before.unsqueeze(-1)
    k = k * after.unsqueeze(-1)
    ends = ends[..., None, None]
    out = torch.empty_like(v)
    for first, count in chunks.rounds:
        here = slice(first, first + count)
        state = states[:count]
        new = values[here] - keys[here] @ state
        out[here] = q[here] @ state + inside[here] @ new
        state.mul_(ends[here]).add_(k[here].transpose(-1, -2) @ new)
    return out.transpose(1, 2)


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Returns the vectors scaled to length one, as in fla's kernels."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
