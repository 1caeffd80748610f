"""Logits to tokens, for rows with different parameters at once. Knows sampler indices and token ids, not text nor when to stop.

A sequence has a sampler index while it decodes: the row of its parameters (batch_params.py) and of what penalties need (penalties.py).
`sample` gathers these rows and works on the whole batch. Nothing in it waits for the device: which rows need which filter is known on the host.

The order is that of transformers' processors: repetition penalty, presence and frequency penalties, the grammar's mask, temperature,
top-k, top-p, min-p. A token is then sampled by the inverse of the cumulative distribution in vocabulary order, from one uniform
number (philox.py). So a row's token does not depend on the batch. No filter depends on how a sort orders equal logits.

Shapes: N rows, V vocabulary, n rows of a subset, the k likeliest tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.kernels.build import DTYPES
from batchgen.kernels.ops import only_allowed, sample_rows
from batchgen.kernels.transfer import put
from batchgen.request import TokenArray
from batchgen.sampling.batch_params import BatchParams, StepParams
from batchgen.sampling.filters import forbid, inverse_cdf, largest, nucleus, nucleus_top, row_sums
from batchgen.sampling.logprobs import TokenLogprobs, measure, read
from batchgen.sampling.penalties import Penalties
from batchgen.sampling.philox import uniforms
from batchgen.sampling_params import SamplingParams

AT_ONCE = 1 << 24
"""Number of logits that are filtered and sampled from at once. This takes about ten times their size in float32."""
AT_ONCE_CPU = 1 << 18
"""The same on a CPU without kernels: as many as stay in its cache (twice as fast)."""
AT_ONCE_THREAD = 1 << 19
"""The same for each thread of the kernels, which take only a copy of them: memory of that size is used again (twice as fast)."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One sampled token per row, on the device, without the rows that do not count."""

    tokens: torch.Tensor
    """int64 [N]"""
    valid: torch.Tensor
    """bool [N], False where the row's logits are not numbers: a NaN, +inf, or nothing but -inf. Its token means nothing."""
    measured: torch.Tensor | None
    """What `measure` returned for the rows that want log-probabilities; None if no row does."""
    wanted: dict[int, int]
    """The number of likeliest tokens that each of those rows wants, by row, in their order."""
    kept: list[int] | None = None
    """The rows that count: those whose drafts were all sampled. None for all."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors to copy to the host."""
        return [self.tokens, self.valid, *([] if self.measured is None else [self.measured])]

    def read(self, numbers: Sequence[Sequence[float]]) -> tuple[list[int], list[bool], list[TokenLogprobs | None]]:
        """Returns `tokens`, `valid` and the log-probabilities of each row, None for rows that do not want them. `numbers` are those of `tensors`, each flat."""
        tokens, valid = [int(t) for t in numbers[0]], [bool(v) for v in numbers[1]]
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if self.measured is not None:
            width = self.measured.shape[1]
            rows = [numbers[2][i : i + width] for i in range(0, len(numbers[2]), width)]
            for row, found in zip(self.wanted, read(rows, list(self.wanted.values())), strict=True):
                logprobs[row] = found
        return tokens, valid, logprobs


class Sampler:
    """Samples the next token of many sequences.

    `vocab_size` is the width of the logits, padding included. `capacity` is the number of sequences that there is room for at first; more room is made when needed.
    `at_once` is the number of logits to filter and sample from at once; None for what suits the device.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        capacity: int = 16,
        at_once: int | None = None,
        *,
        own_kernels: bool = False,
    ) -> None:
        self._vocab_size = vocab_size
        self.device = device
        """Where the logits are to be."""
        self.own_kernels = own_kernels
        """Whether the kernels for the CPU are used (ops.py)."""
        self._at_once = at_once or _at_once(device, own_kernels)
        # Cumulative sums are in float64: rounding in float32 would move the samples. MPS has no float64.
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._batch_params = BatchParams(vocab_size, device, self._wide, capacity)
        self._penalties = Penalties(vocab_size, device, own_kernels=own_kernels)

    @property
    def last(self) -> torch.Tensor:
        """int64 on the device: by sampler index, the token that was sampled last."""
        return self._batch_params.last

    @property
    def used(self) -> list[int]:
        """The sampler indices that are in use."""
        return np.flatnonzero(self._batch_params.records["used"]).tolist()

    def add(
        self,
        sampler_index: int,
        params: SamplingParams,
        key: bytes,
        prompt: TokenArray,
        generated: Sequence[int] = (),
        choice: int = 0,
    ) -> None:
        """A sequence takes `sampler_index`. After a preemption, `generated` are the tokens that it had already sampled."""
        record = self._batch_params.take(sampler_index, params, key, choice)
        self._penalties.add(record, params, prompt, generated)

    def remove(self, sampler_indices: Sequence[int]) -> None:
        """Forgets the sequences at these indices."""
        self._penalties.remove(self._batch_params.free(sampler_indices))

    def clear(self) -> None:
        """Forgets all sequences."""
        self.remove(self.used)

    @torch.no_grad()
    def sample(
        self,
        logits: torch.Tensor,
        sampler_indices: Sequence[int],
        positions: Sequence[int],
        mask: torch.Tensor | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> SamplerOutput:
        """Samples one token per row and remembers it, for penalties and in `last`.

        Row i of `logits` [N, V] (any float dtype, on the device) belongs to `sampler_indices[i]`. `positions[i]` is
        the number of tokens that the completion had before. `mask`, int32 [N, words] on the host, says which tokens are allowed
        (filters.forbid); rows without a limit have all bits set.

        An index occurs once, or with `drafts` in several rows that follow one another: `drafts[i]` are the tokens before row i that are not
        sampled yet, none for an index's first row and one more for each next row. A row counts if the rows before it have sampled
        just these tokens; the others leave no trace. To find that out, the sampler waits for the device.
        """
        if logits.shape != (len(sampler_indices), self._vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, not {(len(sampler_indices), self._vocab_size)}")
        records = self._batch_params.of(sampler_indices)
        if not len(records):
            return SamplerOutput(self.last[:0], self.last[:0], None, {})
        u = np.zeros(len(records))
        if (records["temperature"] > 0).any():
            places = np.asarray(positions, dtype=np.int64)
            u = uniforms(records["key"], records["seed"], records["choice"], places)
        step_params, at = self._batch_params.of_step(sampler_indices, records, u, drafts)
        chunks = [
            self._sample(logits[part], step_params.chunk(part), None if mask is None else mask[part])
            for part in self._chunks(logits, records, mask)
        ]
        tokens = torch.cat([tokens for tokens, _ in chunks])
        valid = torch.cat([valid for _, valid in chunks])
        kept = None if drafts is None else _kept(tokens.tolist(), valid.tolist(), drafts)
        if kept is not None and len(kept) < len(records):
            step_params, rows = step_params.part(np.array(kept))
            records, at, tokens, valid = records[kept], at[rows], tokens[rows], valid[rows]
        if step_params.penalized:
            self._penalties.note(tokens, step_params)
        self.last.index_copy_(0, at, tokens)
        wanted = np.flatnonzero(records["logprobs"] >= 0)
        if not wanted.size:
            return SamplerOutput(tokens, valid, None, {}, kept)
        counts, (_, chosen) = records["logprobs"][wanted], step_params.part(wanted)
        if kept is not None:
            logits = logits[put(np.array(kept), self.device)]
        measured = measure(logits[chosen], tokens[chosen], int(counts.max()), own_kernels=self.own_kernels)
        wants = dict(zip(wanted.tolist(), counts.tolist(), strict=True))
        return SamplerOutput(tokens, valid, measured, wants, kept)

    def _sample(
        self, logits: torch.Tensor, step_params: StepParams, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [n] and whether the logits are numbers [n]."""
        scores = self._penalties.applied(logits, step_params) if step_params.penalized else logits
        scores = self._masked(scores, mask)
        if self._has_kernels(scores):
            tokens, best = sample_rows(scores, step_params.records, step_params.u)
            return tokens, torch.isfinite(best)
        best, tokens = scores.max(dim=-1)
        warm = np.flatnonzero(step_params.records["temperature"] > 0)
        if warm.size:
            some, at = step_params.part(warm)
            weights = self._weights(scores[at], best[at], some)
            tokens[at] = inverse_cdf(weights.to(self._wide), some.rows("u"), tokens[at])
        return tokens, torch.isfinite(best)

    def _has_kernels(self, scores: torch.Tensor) -> bool:
        return self.own_kernels and scores.dtype in DTYPES

    def _chunks(self, logits: torch.Tensor, records: NDArray[Any], mask: torch.Tensor | None) -> list[slice]:
        """The rows to work on at once: all of them if nothing of the logits' size is made."""
        plain = (records["seen"] < 0) & (records["counts"] < 0)
        if not self._has_kernels(logits):
            plain &= records["temperature"] == 0
        size = len(records)
        if not (plain.all() and mask is None):
            size = max(1, self._at_once // self._vocab_size)
        return [slice(i, i + size) for i in range(0, len(records), size)]

    def _masked(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns a copy of `scores` with -inf for the tokens that are not allowed; `scores` themselves if there is no mask, or if all tokens are allowed."""
        if mask is not None and self._has_kernels(scores):
            return only_allowed(scores, mask)
        at = np.flatnonzero((mask.numpy() != -1).any(axis=1)) if mask is not None else np.zeros(0)
        if mask is None or not at.size:
            return scores
        words = put(mask.numpy()[at], self.device)
        if at.size == len(scores):
            return forbid(scores, words)
        scores, rows = scores.clone(), put(at, self.device)
        scores[rows] = forbid(scores[rows], words)
        return scores

    def _weights(self, scores: torch.Tensor, best: torch.Tensor, step_params: StepParams) -> torch.Tensor:
        """Unnormalised probabilities [n, V] of rows that are not greedy, float32, 1 for the likeliest token."""
        x = scores.float().sub(best.float()[:, None]).div_(step_params.column("temperature"))
        weights = x.exp()
        limited = step_params.records["top_k"] > 0
        has_top_p = step_params.records["top_p"] < 1
        for rows in (np.flatnonzero(limited), np.flatnonzero(has_top_p & ~limited)):
            if rows.size == len(step_params):
                self._filter(weights, x, step_params)
            elif rows.size:
                some, at = step_params.part(rows)
                part = weights[at]
                self._filter(part, x[at], some)
                weights[at] = part
        if (step_params.records["min_p"] > 0).any():
            weights.masked_fill_(weights < step_params.column("min_p"), 0)
        return weights

    def _filter(self, weights: torch.Tensor, x: torch.Tensor, step_params: StepParams) -> None:
        """Applies top-k, then top-p, in place: `weights` [n, V] = exp(`x`) become 0 for the tokens that are filtered out.

        Either all rows have a top-k or none has. Tokens are compared by `x` because different `x` may have equal weights.
        """
        if step_params.records["top_k"][0]:
            top = largest(x, int(step_params.records["top_k"].max()))
            last = top.gather(1, step_params.column("top_k") - 1)
            weights.masked_fill_(x < last, 0)  # tokens equal to the k-th stay, as in transformers
            total = row_sums(weights, self._wide)
        else:
            total = row_sums(weights, self._wide)
            top = nucleus_top(x, step_params.column("top_p"), total)
        if (step_params.records["top_p"] < 1).any():
            nucleus(weights, x, top, step_params.column("top_p"), total)


def _at_once(device: torch.device, own_kernels: bool) -> int:
    if own_kernels:
        return AT_ONCE_THREAD * torch.get_num_threads()
    return AT_ONCE_CPU if device.type == "cpu" else AT_ONCE


def _kept(tokens: list[int], valid: list[bool], drafts: Sequence[Sequence[int]]) -> list[int]:
    """Returns the rows whose drafts the rows before have sampled. A row behind a draft must have numbers too: without them, the next
    step finds that out."""
    kept: list[int] = []
    for row, before in enumerate(drafts):
        if not before or (kept[-1] == row - 1 and tokens[row - 1] == before[-1] and valid[row]):
            kept.append(row)
    return kept
