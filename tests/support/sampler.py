"""A sampler whose `sample` returns the tokens themselves, and that can return the probabilities that it samples from."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchgen.kernels.transfer import Readback
from batchgen.sampling import sampler
from batchgen.sampling_params import SamplingParams


class SampledTokens(NamedTuple):
    tokens: list[int]
    valid: list[bool]
    logprobs: list[Any]


class Sampler(sampler.Sampler):
    def sample(self, *args: Any, **kwargs: Any) -> SampledTokens:  # type: ignore[override]
        sampled = super().sample(*args, **kwargs)
        return SampledTokens(*sampled.read(Readback(sampled.tensors, sampled.tokens.device).lists()))

    @torch.no_grad()
    def probabilities(
        self, logits: torch.Tensor, sampler_indices: Sequence[int], mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The probabilities float32 [N, V] that `sample` samples from, after penalties, mask and filters. A greedy row has 1 for one token."""
        records = self._batch_params.of(sampler_indices)
        step_params, _ = self._batch_params.of_step(sampler_indices, records, np.zeros(len(records)))
        scores = self._masked(self._penalties.applied(logits, step_params), mask)
        best, tokens = scores.max(dim=-1)
        result = torch.zeros(scores.shape, dtype=torch.float32, device=self.device).scatter_(1, tokens[:, None], 1.0)
        warm = np.flatnonzero(records["temperature"] > 0)
        if warm.size:
            some, at = step_params.part(warm)
            weights = self._weights(scores[at], best[at], some)
            result[at] = weights / weights.sum(dim=-1, keepdim=True)
        return result


PROMPT = np.array([3, 5, 5, 9], dtype=np.int32)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def sampler_of(
    *params: SamplingParams, vocabulary: int = 64, prompt: Any = PROMPT, generated: Sequence[int] = (), choice: int = 0, **options: Any
) -> Sampler:  # fmt: skip
    """A sampler that has sequence i at sampler index i, with key i."""
    made = Sampler(vocabulary, torch.device("cpu"), **options)
    for i, p in enumerate(params):
        made.add(i, p, key(i), prompt, generated, choice)
    return made


def words(*allowed: set[int] | None, vocabulary: int) -> torch.Tensor:
    """The mask that allows these sets of tokens, one for each row. None allows all tokens."""
    bits = np.zeros((len(allowed), -(-vocabulary // 32) * 32), dtype=np.uint8)
    for row, tokens in enumerate(allowed):
        bits[row, sorted(tokens) if tokens is not None else slice(None)] = 1
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def by_transformers(
    logits: torch.Tensor,
    p: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Probabilities [n, V] of rows of logits: transformers' own processors, with OpenAI's penalties as plain formulas.

    Which of several equal tokens transformers' top-p keeps depends on a sort. Here it is the first in the vocabulary.
    """
    scores = logits.float()
    if p.repetition_penalty != 1:
        ids = torch.tensor([[*map(int, prompt), *generated]]).expand(len(logits), -1)
        scores = RepetitionPenaltyLogitsProcessor(float(p.repetition_penalty))(ids, scores)
    counts = torch.bincount(torch.tensor(generated, dtype=torch.int64), minlength=logits.shape[1])
    scores = scores - p.frequency_penalty * counts
    scores = scores - p.presence_penalty * (counts > 0)
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    warped = TemperatureLogitsWarper(p.temperature)(None, scores)
    if p.top_k:
        warped = TopKLogitsWarper(p.top_k)(None, warped)
    if p.top_p < 1:
        warped = TopPLogitsWarper(p.top_p)(None, warped)
    if p.min_p:
        warped = MinPLogitsWarper(p.min_p)(None, warped)
    found = warped.softmax(-1)
    for row, values in zip(found, scores, strict=True):
        for value in values.unique():
            equal = (values == value).nonzero()[:, 0]
            row[equal] = row[equal].sort(descending=True).values
    return found
