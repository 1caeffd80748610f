"""The causal convolution before a recurrence (in LFM2, instead of one), over a few tokens of each channel. Plain torch."""

from __future__ import annotations

import torch
from transformers.activations import ACT2FN

# T packed tokens, N spans, C channels, K taps of the filter: the token's own and those of K-1 tokens before it.


def convolve_spans(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    activation: str | None,
    before_NKC: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    owners: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the convolution of N packed spans [T, C], and the inputs that their next tokens need [N, K-1, C].

    `before_NKC` are the K-1 inputs before each span's first token. `starts` and `lengths` [N] are the places of the spans, and `owners` [T] is
    the span of each token.
    """
    taps = weight_CK.shape[1] - 1
    line, places, after = _line(x_TC.to(weight_CK.dtype), before_NKC, starts, lengths, owners)
    out = line.index_select(0, places).mul_(weight_CK[:, taps])
    for tap in range(taps):
        out.addcmul_(line.index_select(0, places - (taps - tap)), weight_CK[:, tap])
    if bias_C is not None:
        out += bias_C
    if activation is not None:
        out = ACT2FN[activation](out)
    return out, after


def unfold_spans(
    x_TC: torch.Tensor, before_NKC: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, owners: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input of each token behind the K-1 inputs before it [T, K, C], and the inputs that the next tokens need [N, K-1, C].

    The arguments are those of `convolve_spans`.
    """
    line, places, after = _line(x_TC, before_NKC, starts, lengths, owners)
    return torch.stack([line.index_select(0, places - back) for back in range(before_NKC.shape[1], -1, -1)], 1), after


def _line(
    x_TC: torch.Tensor, before_NKC: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, owners: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One line with each span after its earlier inputs, so that the taps of a token are adjacent: span i begins at starts[i] + i * taps.

    Returns the line, the places of the tokens in it, and the last inputs of each span [N, K-1, C].
    """
    taps = before_NKC.shape[1]
    line = x_TC.new_empty((x_TC.shape[0] + before_NKC.shape[0] * taps, x_TC.shape[1]))
    heads = starts + torch.arange(len(starts), device=starts.device) * taps
    reach = torch.arange(taps, device=starts.device)
    line.index_copy_(0, (heads[:, None] + reach).flatten(), before_NKC.to(x_TC.dtype).flatten(0, 1))
    places = torch.arange(x_TC.shape[0], device=starts.device) + (owners + 1) * taps
    line.index_copy_(0, places, x_TC)
    after = line.index_select(0, ((heads + lengths)[:, None] + reach).flatten()).view(len(starts), taps, -1)
    return line, places, after
