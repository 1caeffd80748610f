"""Scans whose channels do not depend on one another, in plain torch and float32: Mamba (arXiv:2312.00752) and the RG-LRU of Griffin
(arXiv:2402.19427).

Their decays differ from channel to channel, so that there are no matrix products to make of chunks.
"""

from __future__ import annotations

import torch

# S sequences, D channels, N numbers of a channel's state.


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
