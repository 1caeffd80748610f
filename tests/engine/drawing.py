"""A sampler that waits for what it draws."""

from __future__ import annotations

from typing import Any

from batchgen.engine import sampler
from batchgen.engine.drawn import Sampled
from batchgen.engine.readback import Readback


class Sampler(sampler.Sampler):
    def sample(self, *args: Any, **kwargs: Any) -> Sampled:  # type: ignore[override]
        drawn = super().sample(*args, **kwargs)
        return drawn.read(Readback(drawn.tensors, drawn.tokens.device).lists())
