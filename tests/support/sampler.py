"""A sampler whose `sample` returns the tokens themselves, and that can return the probabilities that it samples from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from batchgen.kernels.transfer import Readback
from batchgen.sampling import sampler
from batchgen.sampling.sampler import SampledTokens


class Sampler(sampler.Sampler):
    def sample(self, *args: Any, **kwargs: Any) -> SampledTokens:  # type: ignore[override]
        sampled = super().sample(*args, **kwargs)
        return sampled.read(Readback(sampled.tensors, sampled.tokens.device).lists())

    @torch.no_grad()
    def probabilities(
        self, logits: torch.Tensor, sampler_indices: Sequence[int], mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The probabilities float32 [N, V] that `sample` samples from, after penalties, mask and filters. A greedy row has 1 for one token."""
        records = self._records(logits, sampler_indices)
        step_params, _ = self._batch_params.of_step(sampler_indices, records, np.zeros(len(records)))
        scores = self._masked(self._penalties.applied(logits, step_params), mask)
        best, tokens = scores.max(dim=-1)
        result = torch.zeros(scores.shape, dtype=torch.float32, device=self._device).scatter_(1, tokens[:, None], 1.0)
        for _, at, ids, weights in self._choices(scores, best, step_params):
            if ids is not None:
                weights = torch.zeros((len(ids), self._vocab_size)).scatter_add_(1, ids, weights)
            result[at] = weights / weights.sum(dim=-1, keepdim=True)
        return result
