"""Filters of logits (top-k, top-p, grammar masks), and sampling by the inverse of the cumulative distribution.

Shapes: n rows, V vocabulary, the k likeliest tokens of a row.
"""

from __future__ import annotations

import numpy as np
import torch


def forbid(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Returns `scores` [n, V] with -inf for the tokens that `words`, int32 [n, words], does not allow.

    Bit t % 32 of word t // 32 allows token t. Tokens beyond the words are not allowed.
    """
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    allowed = bits.view(len(words), -1)[:, : scores.shape[1]].bool()
    if allowed.shape[1] < scores.shape[1]:
        allowed = torch.nn.functional.pad(allowed, (0, scores.shape[1] - allowed.shape[1]))
    return scores.masked_fill(~allowed, -torch.inf)


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the k largest numbers of each row [n, k], the largest first."""
    if x.device.type != "cpu":
        return x.topk(k).values if k < x.shape[1] else x.sort(dim=-1, descending=True).values
    # numpy sorts and partitions floats with vector instructions: 25 and 4 times as fast as torch on [256, 8192].
    values = x.numpy()
    if k < x.shape[1]:
        values = np.partition(values, x.shape[1] - k, axis=-1)[:, -k:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def row_sums(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sums of the rows [n, 1]. A single row is summed as part of two rows, because torch would split it between threads and add in another order."""
    rows = x.expand(2, -1) if len(x) == 1 else x
    return rows.sum(dim=-1, keepdim=True, dtype=dtype)[: len(x)]


def nucleus(
    weights: torch.Tensor, x: torch.Tensor, top: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor
) -> None:
    """Applies top-p in place: keeps the fewest `weights` [n, V] = exp(`x`) whose share reaches `top_p`, and sets the others to 0.

    At least one token stays. Of equal tokens at the edge, the first in the vocabulary stay. `top` [n, k] is `x` sorted, the largest
    first, as far as the weights go; it need not repeat its last number. `top_p` is [n, 1], infinite for off;
    `total` [n, 1] are the sums of the weights.
    """
    wide = top_p.dtype
    goal = top_p * total
    reached = top.exp().to(wide).cumsum(dim=-1)
    edge = top.gather(1, torch.searchsorted(reached, goal).clamp_(max=top.shape[1] - 1))
    above = (top > edge).sum(dim=-1, keepdim=True)
    missing = goal - torch.where(above > 0, reached.gather(1, (above - 1).clamp_(min=0)), 0)
    room = (
        (missing / edge.exp()).ceil_().clamp_(min=1, max=x.shape[1]).to(torch.int32)
    )  # how many of the equal tokens stay
    equal = x == edge
    weights.masked_fill_((x < edge) | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) > room)), 0)


def nucleus_top(x: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Returns `x` [n, V] sorted, the largest first, as far as top-p reaches. On the CPU only the first eighth is sorted if that is enough."""
    if x.device.type == "cpu" and x.shape[1] >= 1024:
        top = largest(x, x.shape[1] // 8)
        # The factor leaves room for rounding in the sums.
        if bool((top.exp().sum(-1, keepdim=True) > top_p * total * 1.001).all()):
            return top
    return largest(x, x.shape[1])


def inverse_cdf(weights: torch.Tensor, u: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """Returns the first token [n] at which the cumulative distribution of `weights` [n, V] passes `u` [n] of its total."""
    cumulative = weights.cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
    tokens.clamp_(max=weights.shape[1] - 1)
    # Rounding can land on a token that has no probability: past the end, or where a parallel sum is not quite monotone.
    return torch.where(weights.gather(1, tokens) > 0, tokens, likeliest[:, None])[:, 0]
