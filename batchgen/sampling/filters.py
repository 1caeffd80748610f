"""Which tokens may be drawn, and the draw: top-k, top-p, grammar masks, the inverse of the cumulative distribution.

Shapes: n rows, V vocabulary, k tokens of a sorted head.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def forbid(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """`scores` [n, V] with -inf where a token is not allowed by `words`, int32 [n, words]: bit t % 32 of word t // 32 allows token t.

    Tokens beyond the words are not allowed.
    """
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    allowed = bits.view(len(words), -1)[:, : scores.shape[1]].bool()
    if allowed.shape[1] < scores.shape[1]:
        allowed = torch.nn.functional.pad(allowed, (0, scores.shape[1] - allowed.shape[1]))
    return scores.masked_fill(~allowed, -torch.inf)


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of each row [n, k], in falling order."""
    if x.device.type != "cpu":
        return x.topk(k).values if k < x.shape[1] else x.sort(dim=-1, descending=True).values
    # numpy sorts and partitions floats with vector instructions: 25 and 4 times as fast as torch on [256, 8192].
    values = x.numpy()
    if k < x.shape[1]:
        values = np.partition(values, x.shape[1] - k, axis=-1)[:, -k:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def head_tokens(scores: torch.Tensor, k: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """The k[i] largest of each row of `scores` [n, V] on the CPU and all that equal the last: ids and float32 values, [n, most].

    In the vocabulary's order; rows that have fewer end with id 0 and -inf. Tokens of -inf are left out.
    """
    values = scores.float().numpy()
    rows, vocabulary, most = len(values), values.shape[1], int(k.max())
    top = np.sort(np.partition(values, vocabulary - most, axis=-1)[:, vocabulary - most :], axis=-1)
    least = np.maximum(top[np.arange(rows), most - k], np.finfo(np.float32).min)
    row, token = np.divmod(np.flatnonzero(values >= least[:, None]), vocabulary)
    counts = np.bincount(row, minlength=rows)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    ids = np.zeros((rows, max(1, int(counts.max()))), dtype=np.int64)
    found = np.full(ids.shape, -np.inf, dtype=np.float32)
    ids[row, place], found[row, place] = token, values[row, token]
    return torch.from_numpy(ids), torch.from_numpy(found)


def nucleus(weights: torch.Tensor, x: torch.Tensor, head: torch.Tensor, top_p: torch.Tensor) -> None:
    """Top-p, in place: `weights` [n, V] = exp(`x`) become 0 but for the fewest tokens whose share reaches `top_p`.

    Those are one at least; among equal ones at the edge the first in the vocabulary stay. `head` [n, k] is `x` in falling
    order, as far as there are weights (further copies of the last need not be in it). `top_p` is [n, 1], infinite for off.
    """
    wide = top_p.dtype
    goal = top_p * weights.sum(dim=-1, keepdim=True, dtype=wide)
    reached = head.exp().to(wide).cumsum(dim=-1)
    edge = head.gather(1, torch.searchsorted(reached, goal).clamp_(max=head.shape[1] - 1))
    above = (head > edge).sum(dim=-1, keepdim=True)
    missing = goal - torch.where(above > 0, reached.gather(1, (above - 1).clamp_(min=0)), 0)
    room = (missing / edge.exp()).ceil_().clamp_(min=1, max=x.shape[1]).to(torch.int32)  # equal tokens that are needed
    equal = x == edge
    weights.masked_fill_((x < edge) | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) > room)), 0)


def nucleus_head(x: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`x` [n, V] in falling order as far as top-p reaches: on the CPU mostly not beyond the first eighth, which is quicker sorted."""
    if x.device.type == "cpu" and x.shape[1] >= 1024:
        head = largest(x, x.shape[1] // 8)
        # With room for what rounding may do to the sums.
        if bool((head.exp().sum(-1, keepdim=True) > top_p * weights.sum(-1, keepdim=True) * 1.001).all()):
            return head
    return largest(x, x.shape[1])


def inverse_cdf(weights: torch.Tensor, u: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution: the first token [n] at which it passes `u` [n] of its total."""
    cumulative = weights.cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
    tokens.clamp_(max=weights.shape[1] - 1)
    # Rounding can land on a token that has no probability: past the end, or where a parallel sum is not quite monotone.
    return torch.where(weights.gather(1, tokens) > 0, tokens, likeliest[:, None])[:, 0]
