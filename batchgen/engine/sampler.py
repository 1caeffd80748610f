"""Logits to tokens, for rows with different parameters at once. Knows slots and token ids, not text nor when to stop.

A sequence has a slot while it decodes; its parameters lie there, in one numpy record, and the tensors that penalties
need are kept on the device. `sample` gathers by slot, works on the whole batch, and copies to the host once.

The order is that of transformers' processors: repetition penalty, presence and frequency, a grammar's mask, temperature, top-k, top-p,
min-p. A token is then drawn by the inverse of the cumulative distribution in vocabulary order, from one uniform
number (randoms.py), so that a row's draw does not depend on the batch. No filter depends on how a sort orders equal
logits.

Shapes: N rows, V vocabulary, n rows of a subset, k tokens of a sorted head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.engine.filters import forbid, head_tokens, inverse_cdf, largest, nucleus, nucleus_head
from batchgen.engine.logprobs import TokenLogprobs, measure, read
from batchgen.engine.randoms import uniforms
from batchgen.engine.vocabulary_rows import VocabularyRows
from batchgen.request import TokenArray
from batchgen.sampling_params import SamplingParams

# What a slot holds. `seen` and `counts` are rows of the penalty tensors, -1 where the sequence needs none.
_SLOT = np.dtype(
    [
        ("used", "?"),
        ("temperature", "f4"),
        ("top_k", "i8"),
        ("top_p", "f8"),
        ("min_p", "f4"),
        ("repetition_penalty", "f4"),
        ("presence_penalty", "f4"),
        ("frequency_penalty", "f4"),
        ("seed", "i8"),
        ("key", "u8", 2),
        ("choice", "i8"),
        ("logprobs", "i8"),  # how many of the likeliest tokens; -1 for none
        ("seen", "i8"),
        ("counts", "i8"),
    ]
)

_EMPTY = np.zeros((), dtype=_SLOT)
_CACHED = 2**18  # logits worked on at once on the CPU


@dataclass(frozen=True)
class Sampled:
    """A token per row, in the order of the rows."""

    tokens: list[int]
    valid: list[bool]
    """False where the row's logits are not numbers: a NaN, +inf, or nothing but -inf. Its token means nothing."""
    logprobs: list[TokenLogprobs | None] | None = None
    """By row, where a row wants them; None where none does."""


class Sampler:
    """Draws the next token of many sequences. `vocab_size` is the width of the logits, padding included."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # Cumulative sums are in float64: in float32 their rounding would move the draws. MPS has no float64.
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._slots = np.zeros(0, dtype=_SLOT)
        self._params: SamplingParams | None = None
        """Those that came last, and what a slot holds of them."""
        self._record_of = _EMPTY
        self._seen = VocabularyRows(vocab_size, torch.bool, device)
        self._counts = VocabularyRows(vocab_size, torch.int32, device)

    def add(
        self,
        slot: int,
        params: SamplingParams,
        key: bytes,
        prompt: TokenArray,
        generated: Sequence[int] = (),
        choice: int = 0,
    ) -> None:
        """A sequence takes `slot`. After a preemption `generated` are the tokens it had already drawn."""
        if slot >= len(self._slots):
            self._slots = np.concatenate([self._slots, np.zeros(max(slot + 1, 16), dtype=_SLOT)])
        record = self._slots[slot]
        if record["used"]:
            raise ValueError(f"slot {slot} is in use")
        if params is not self._params:
            self._params, self._record_of = params, self._settings(params)
        self._slots[slot] = self._record_of
        record["key"] = np.frombuffer(key, dtype="<u8")
        record["choice"] = choice
        if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
            return
        drawn = np.asarray(generated, dtype=np.int64)
        if params.repetition_penalty != 1:
            seen = np.zeros(self._vocab_size, dtype=np.bool_)
            ids = np.concatenate([prompt, drawn])
            seen[ids[ids < self._vocab_size]] = True  # a prompt may hold ids that the model has no logits for
            record["seen"] = self._seen.take(seen)
        if params.presence_penalty or params.frequency_penalty:
            counts = np.bincount(drawn, minlength=self._vocab_size).astype(np.int32)
            record["counts"] = self._counts.take(counts)

    def _settings(self, params: SamplingParams) -> NDArray[Any]:
        """A slot's record with the parameters in it. Rows without parameters of their own have one object of them."""
        record = np.zeros((), dtype=_SLOT)
        for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"):
            record[name] = getattr(params, name)
        record["top_k"] = min(params.top_k, self._vocab_size)
        # Divides differences of logits in float32, where it must become neither 0 nor infinite.
        record["temperature"] = 0 if params.greedy else min(max(params.temperature, 1e-30), 1e30)
        record["logprobs"] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        record["seen"] = record["counts"] = -1
        record["used"] = True
        return record

    def remove(self, slot: int) -> None:
        """The sequence leaves; nothing of it stays."""
        if slot >= len(self._slots) or not self._slots[slot]["used"]:
            raise ValueError(f"slot {slot} is not in use")
        record = self._slots[slot]
        for name, rows in (("seen", self._seen), ("counts", self._counts)):
            if record[name] >= 0:
                rows.give_back(int(record[name]))
        self._slots[slot] = _EMPTY

    @torch.no_grad()
    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        mask: torch.Tensor | None = None,
    ) -> Sampled:
        """Draws one token per row and remembers it for penalties.

        Row i of `logits` [N, V] (any float dtype, on the device) belongs to `slots[i]`, a slot at most once;
        `positions[i]` is the number of tokens that its completion had before. `mask`, int32 [N, words] on the host, says
        which tokens may be drawn (filters.forbid); rows that may draw any have all bits set.
        """
        if not len(slots):
            return Sampled([], [])
        records = self._records(logits, slots)
        u = np.zeros(len(records))
        if (records["temperature"] > 0).any():
            places = np.asarray(positions, dtype=np.int64)
            u = uniforms(records["key"], records["seed"], records["choice"], places)
        blocks = [
            self._draw(logits[part], records[part], u[part], None if mask is None else mask[part])
            for part in self._blocks(records, mask)
        ]
        tokens = torch.cat([tokens for tokens, _ in blocks])
        valid = torch.cat([valid for _, valid in blocks])
        self._record(tokens, records)
        return self._to_host(logits, tokens, valid, records)

    def _to_host(
        self, logits: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor, records: NDArray[Any]
    ) -> Sampled:
        """In one piece: the only wait for the device."""
        count = len(records)
        wanted = np.flatnonzero(records["logprobs"] >= 0)
        if not wanted.size:
            drawn = torch.stack([tokens, valid.to(tokens.dtype)]).tolist()
            return Sampled(drawn[0], [bool(v) for v in drawn[1]])
        counts = records["logprobs"][wanted]
        at = self._put(wanted)
        measured = measure(logits if wanted.size == count else logits[at], tokens[at], int(counts.max()))
        whole = torch.cat([tokens.to(measured.dtype), valid.to(measured.dtype), measured.flatten()]).tolist()
        width = measured.shape[1]
        rows = [whole[i : i + width] for i in range(2 * count, len(whole), width)]
        logprobs: list[TokenLogprobs | None] = [None] * count
        for i, found in zip(wanted.tolist(), read(rows, counts.tolist()), strict=True):
            logprobs[i] = found
        return Sampled([int(t) for t in whole[:count]], [bool(v) for v in whole[count : 2 * count]], logprobs)

    @torch.no_grad()
    def probabilities(
        self, logits: torch.Tensor, slots: Sequence[int], mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What `sample` draws from: float32 [N, V], penalties, mask and filters applied; greedy rows have 1 on one token."""
        records = self._records(logits, slots)
        scores = self._masked(self._penalised(logits, records), mask)
        best, tokens = scores.max(dim=-1)
        result = torch.zeros(scores.shape, dtype=torch.float32, device=self._device).scatter_(1, tokens[:, None], 1.0)
        for rows, ids, weights in self._choices(scores, best, records):
            if ids is not None:
                weights = torch.zeros((len(rows), self._vocab_size)).scatter_add_(1, ids, weights)
            result[self._put(rows)] = weights / weights.sum(dim=-1, keepdim=True)
        return result

    def _draw(
        self, logits: torch.Tensor, records: NDArray[Any], u: NDArray[np.float64], mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [n] and whether the logits are numbers [n]."""
        scores = self._masked(self._penalised(logits, records), mask)
        best, tokens = scores.max(dim=-1)  # a NaN is the largest
        for rows, ids, weights in self._choices(scores, best, records):
            at = self._put(rows)
            likeliest = tokens[at] if ids is None else weights.argmax(dim=-1)
            drawn = inverse_cdf(weights.to(self._wide), self._put(u[rows]), likeliest)
            tokens[at] = drawn if ids is None else ids.gather(1, drawn[:, None])[:, 0]
        return tokens, torch.isfinite(best)

    def _blocks(self, records: NDArray[Any], mask: torch.Tensor | None) -> list[slice]:
        """The rows to work on at once: all, but on the CPU as many as stay in its cache (twice as fast)."""
        plain = (records["temperature"] == 0) & (records["seen"] < 0) & (records["counts"] < 0)
        size = len(records)
        if self._device.type == "cpu" and not (plain.all() and mask is None):
            size = max(1, _CACHED // self._vocab_size)
        return [slice(i, i + size) for i in range(0, len(records), size)]

    def _records(self, logits: torch.Tensor, slots: Sequence[int]) -> NDArray[Any]:
        if logits.shape != (len(slots), self._vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, not {(len(slots), self._vocab_size)}")
        records = self._slots[np.asarray(slots, dtype=np.int64)]
        if not records["used"].all():
            raise ValueError(f"slots {np.asarray(slots)[~records['used']].tolist()} are not in use")
        return records

    def _penalised(self, logits: torch.Tensor, records: NDArray[Any]) -> torch.Tensor:
        """The logits themselves where no row has a penalty, else a float32 copy with the penalties in it."""
        repetition, counted = np.flatnonzero(records["seen"] >= 0), np.flatnonzero(records["counts"] >= 0)
        if not repetition.size and not counted.size:
            return logits
        scores = logits.to(torch.float32, copy=True)
        if repetition.size:
            at, chosen = self._put(repetition), records[repetition]
            part, penalty = scores[at], self._column(chosen["repetition_penalty"])
            seen = self._seen.rows[self._put(chosen["seen"])]
            scores[at] = torch.where(seen, torch.where(part < 0, part * penalty, part / penalty), part)
        if counted.size:
            at, chosen = self._put(counted), records[counted]
            counts = self._counts.rows[self._put(chosen["counts"])]
            part = scores[at] - self._column(chosen["frequency_penalty"]) * counts
            scores[at] = part - self._column(chosen["presence_penalty"]) * (counts > 0)
        return scores

    def _masked(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """`scores` themselves where every row may draw any token, else a copy with -inf for what may not be drawn."""
        at = np.flatnonzero((mask.numpy() != -1).any(axis=1)) if mask is not None else np.zeros(0)
        if mask is None or not at.size:
            return scores
        words = self._put(mask.numpy()[at])
        if at.size == len(scores):
            return forbid(scores, words)
        scores, rows = scores.clone(), self._put(at)
        scores[rows] = forbid(scores[rows], words)
        return scores

    def _choices(
        self, scores: torch.Tensor, best: torch.Tensor, records: NDArray[Any]
    ) -> Iterator[tuple[NDArray[np.int64], torch.Tensor | None, torch.Tensor]]:
        """Of the rows that are not greedy, by groups: which, and the unnormalised probabilities of all tokens [n, V], or of a few [n, k]

        with their ids [n, k], in the vocabulary's order. A few are enough on the CPU where a small top-k leaves no more.
        """
        warm = records["temperature"] > 0
        few = warm & (records["top_k"] > 0) & (records["top_k"] <= self._vocab_size // 8) & (self._device.type == "cpu")
        for rows in (np.flatnonzero(few), np.flatnonzero(warm & ~few)):
            if not rows.size:
                continue
            at = self._put(rows)
            some = scores if rows.size == len(records) else scores[at]
            if few[rows[0]]:
                yield rows, *self._head_weights(some, best[at], records[rows])
            else:
                yield rows, None, self._weights(some, best[at], records[rows])

    def _head_weights(
        self, scores: torch.Tensor, best: torch.Tensor, records: NDArray[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, values = head_tokens(scores, records["top_k"])
        x = values.sub_(best.float()[:, None]).div_(self._column(records["temperature"]))
        weights = x.exp()
        if (records["top_p"] < 1).any():
            top_p = self._column(np.where(records["top_p"] < 1, records["top_p"], np.inf))
            nucleus(weights, x, largest(x, x.shape[1]), top_p)
        if (records["min_p"] > 0).any():
            weights.masked_fill_(weights < self._column(records["min_p"]), 0)
        return ids, weights

    def _weights(self, scores: torch.Tensor, best: torch.Tensor, records: NDArray[Any]) -> torch.Tensor:
        """Unnormalised probabilities [n, V] of rows that are not greedy, float32, 1 for the likeliest token."""
        x = scores.float().sub(best.float()[:, None]).div_(self._column(records["temperature"]))
        weights = x.exp()
        limited = (records["top_k"] > 0) & (records["top_k"] < self._vocab_size)
        nucleus = records["top_p"] < 1
        for rows in (np.flatnonzero(limited), np.flatnonzero(nucleus & ~limited)):
            if rows.size == len(records):
                self._filter(weights, x, records)
            elif rows.size:
                at = self._put(rows)
                part = weights[at]
                self._filter(part, x[at], records[rows])
                weights[at] = part
        if (records["min_p"] > 0).any():
            weights.masked_fill_(weights < self._column(records["min_p"]), 0)
        return weights

    def _filter(self, weights: torch.Tensor, x: torch.Tensor, records: NDArray[Any]) -> None:
        """Top-k, then top-p, in place: `weights` [n, V] = exp(`x`) become 0 where a token falls out.

        Either all rows have a top-k or none has. Tokens are compared by `x`: more of them are equal as weights.
        """
        top_p = self._column(np.where(records["top_p"] < 1, records["top_p"], np.inf))
        if records["top_k"][0]:
            head = largest(x, int(records["top_k"].max()))
            least = head.gather(1, self._column(records["top_k"] - 1))
            weights.masked_fill_(x < least, 0)  # tokens equal to the k-th stay, as in transformers
        else:
            head = nucleus_head(x, weights, top_p)
        if (records["top_p"] < 1).any():
            nucleus(weights, x, head, top_p)

    def _record(self, tokens: torch.Tensor, records: NDArray[Any]) -> None:
        for name, state in (("seen", self._seen), ("counts", self._counts)):
            at = np.flatnonzero(records[name] >= 0)
            if at.size:
                rows, ids = self._put(records[name][at]), tokens[self._put(at)]
                state.rows[rows, ids] = True if name == "seen" else state.rows[rows, ids] + 1

    def _put(self, values: NDArray[Any]) -> torch.Tensor:
        """On the device. CUDA stages a small copy from the host by itself, so nothing has to wait for it."""
        if values.dtype == np.float64 and self._wide == torch.float32:
            values = values.astype(np.float32)
        return torch.from_numpy(values.copy()).to(self._device, non_blocking=self._device.type == "cuda")

    def _column(self, values: NDArray[Any]) -> torch.Tensor:
        return self._put(values)[:, None]
