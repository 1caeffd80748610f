"""Log-probabilities of sampled tokens, of the likeliest tokens and of given texts, from raw logits, in float32.

Shapes: N rows, V vocabulary, the k likeliest tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from batchgen.kernels.build import DTYPES
from batchgen.kernels.ops import summarize
from batchgen.kernels.transfer import put
from batchgen.sampling.filters import row_sums

AT_ONCE = 1 << 24
"""Number of logits converted to float32 at once."""
AT_ONCE_CPU = 1 << 19
"""The same on the CPU: as many as stay in its cache (three times as fast)."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a sampled token, and the likeliest tokens in its place."""

    logprob: float
    top_ids: tuple[int, ...]
    """The likeliest first; of equal logits the first in the vocabulary, as in greedy decoding."""
    top_logprobs: tuple[float, ...]


class Summaries(NamedTuple):
    """What a row's log-probabilities are made of: logit - `best` - `log_weights`."""

    best: torch.Tensor
    """float32 [N]: the largest logit."""
    log_weights: torch.Tensor
    """float32 [N]: the logarithm of the sum of exp(logit - best); NaN where logits are not numbers."""
    ids: torch.Tensor
    """int64 [N, max(k, 1)]: the likeliest tokens, of equal ones the first."""


def summaries(logits: torch.Tensor, k: int = 1, at_once: int | None = None, *, own_kernels: bool = False) -> Summaries:
    """Returns those of rows of logits [N, V]. `at_once`: the number of logits converted to float32 at once, None for what suits the device."""
    if own_kernels and logits.dtype in DTYPES:
        return Summaries(*summarize(logits, max(k, 1)))
    at_once = at_once or (AT_ONCE_CPU if logits.device.type == "cpu" else AT_ONCE)
    size = max(1, at_once // logits.shape[1])
    chunks = []
    for start in range(0, len(logits), size):
        chunk = logits[start : start + size].float()
        best, first = chunk.max(dim=-1)
        log_weights = row_sums(chunk.sub(best[:, None]).exp_(), torch.float32)[:, 0].log_()
        chunks.append((best, log_weights, _likeliest(chunk, k) if k > 1 else first[:, None]))
    return Summaries(*map(torch.cat, zip(*chunks, strict=True)))


def measure(logits: torch.Tensor, tokens: torch.Tensor, k: int, *, own_kernels: bool = False) -> torch.Tensor:
    """Returns [n, 1 + 2k] for rows of `logits` [n, V] and their sampled `tokens` [n].

    The columns are the log-probability of the sampled token, the ids of the k likeliest tokens, and their log-probabilities. All are
    float64 (float32 on MPS), which holds token ids exactly, so that one copy takes them to the host.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    found = summaries(logits, k, own_kernels=own_kernels)
    ids = found.ids[:, :k]
    of_ids = logits.gather(1, torch.cat([tokens[:, None], ids], dim=1)).float()
    logprobs = (of_ids - found.best[:, None] - found.log_weights[:, None]).to(wide)
    return torch.cat([logprobs[:, :1], ids.to(wide), logprobs[:, 1:]], dim=1)


def _likeliest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the places [n, k] of the `k` largest numbers of each row of `x`, float32 [n, V]; of equal numbers the first.

    Which of several equal numbers `topk` takes depends on k, and k is the largest that any row of the batch asks for. Logits in bfloat16
    are often equal. So the sort key is an integer: in the high bits the float, as an integer that sorts as floats do, and in the low bits the place.
    """
    last = x.shape[1] - 1
    bits = (x + 0.0).view(torch.int32)  # -0 becomes 0
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long().bitwise_left_shift_(32)
    keys.bitwise_or_(torch.arange(last, -1, -1, device=x.device))
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def read(rows: Sequence[Sequence[float]], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Reads rows of `measure` on the host. Row i keeps the first `counts[i]` of its likeliest tokens."""
    found = []
    for (own, *likeliest), count in zip(rows, counts, strict=True):
        ids, logprobs = likeliest[:count], likeliest[len(likeliest) // 2 :][:count]
        found.append(TokenLogprobs(own, tuple(map(int, ids)), tuple(logprobs)))
    return found


@torch.inference_mode()
def score_targets(
    logits: torch.Tensor, rows: Sequence[int], targets: Sequence[int], *, own_kernels: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for each pair of a row of `logits` [N, V] and a target token, its log-probability and whether no token is likelier.

    Both are on the device, the first in float64 (float32 on MPS); nothing waits for the device. Of equally likely tokens the first
    counts as the likeliest, as in greedy decoding. The log-probability is that of the softmax over the row in float32. It is NaN if
    the row's logits are not numbers (a NaN, +inf, or nothing but -inf), or if the model has no logit for the target.
    """
    device = logits.device
    found = summaries(logits, own_kernels=own_kernels)
    row, target = put(np.array([list(rows), list(targets)], dtype=np.int64), device)
    known = target < logits.shape[1]  # a text may hold ids that the model has no logits for
    logprob = logits[row, target.where(known, 0)].float() - found.best[row] - found.log_weights[row]
    logprob = logprob.where(known, torch.nan)
    return (logprob if device.type == "mps" else logprob.double()), found.ids[row, 0] == target
