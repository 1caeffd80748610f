"""Packs a step into tensors and runs the transformers model on it. What happens on the device in a step happens here and in the sampler."""

from __future__ import annotations

import numpy as np
import torch

from batchgen.engine.attention.base import StepAttention
from batchgen.engine.attention.cascade import Cascade
from batchgen.engine.attention.plan import plan_attention
from batchgen.engine.kv_cache import KVCache
from batchgen.engine.loading import LoadedModel
from batchgen.engine.scheduler import Step, Work


class Runner:
    """Runs steps; the only one, with the sampler, that touches the device."""

    def __init__(self, model: LoadedModel, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.attention_parts = 0  # summed over steps

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor | None:
        """Logits [N, vocabulary] after the last token of each work that is sampled, in the order of the works.

        None when the step has nothing to run.
        """
        self.cache.copy(step.copies)
        if not step.works:
            return None
        device = self.model.device
        plan = plan_attention(step.works, self.cache.page_size)
        self.attention_parts += len(plan.shared) + len(plan.causal) + (plan.paged is not None)
        attention = StepAttention(plan, Cascade(plan, device), self.cache, device)
        output = self.model.module(
            input_ids=torch.from_numpy(_tokens(step.works)).to(device).unsqueeze(0),
            position_ids=torch.from_numpy(plan.positions).to(device).unsqueeze(0),
            use_cache=False,
            step_attention=attention,
            logits_to_keep=torch.from_numpy(_sampled(step.works)).to(device),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _tokens(works: tuple[Work, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([w.span.tokens(w.start, w.stop) for w in works]).astype(np.int64)


def _sampled(works: tuple[Work, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Places in the packed batch whose logits are wanted."""
    ends = np.cumsum([w.stop - w.start for w in works]) - 1
    return np.asarray([end for end, w in zip(ends, works, strict=True) if w.sample], dtype=np.int64)
