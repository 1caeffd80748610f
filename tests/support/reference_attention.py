"""Reference attention: each query alone, with keys gathered by its block table and softmax in float32. Slow, but easy to verify."""

from __future__ import annotations

import torch

from batchgen.attention.base import LayerOptions
from batchgen.scheduling.batch import ScheduledSpan


class Reference:
    """Computes the attention of a step from its spans, without a plan."""

    def __init__(self, spans: tuple[ScheduledSpan, ...], block_size: int) -> None:
        self.spans = spans
        self.block_size = block_size

    def attend(
        self, q_KTGD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Does what `Cascade.attend` does."""
        rows: list[torch.Tensor] = []
        for scheduled in self.spans:
            table = torch.tensor(scheduled.span.table, device=keys.device)
            for position in range(scheduled.start, scheduled.stop):
                first = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
                at = torch.arange(first, position + 1, device=keys.device)
                kv_indices = table[at // self.block_size] * self.block_size + at % self.block_size
                q = q_KTGD[:, len(rows)].float()
                scores = q @ keys[:, kv_indices].float().transpose(1, 2) * options.scale  # [K, G, S]
                if options.softcap is not None:
                    scores = torch.tanh(scores / options.softcap) * options.softcap
                if options.sinks is not None:
                    sink = options.sinks.float().view(*scores.shape[:2], 1)
                    scores = torch.cat([scores, sink], -1)
                weights = scores.softmax(-1)[..., : len(at)]
                rows.append(weights @ values[:, kv_indices].float())
        return torch.stack(rows).to(q_KTGD.dtype)
