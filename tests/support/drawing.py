"""A sampler that waits for what it draws."""

from __future__ import annotations

from typing import Any

from batchgen.kernels.transfer import Readback
from batchgen.sampling import sampler
from batchgen.sampling.logprobs import SampledTokens


class Sampler(sampler.Sampler):
    def sample(self, *args: Any, **kwargs: Any) -> SampledTokens:  # type: ignore[override]
        drawn = super().sample(*args, **kwargs)
        return drawn.read(Readback(drawn.tensors, drawn.tokens.device).lists())
