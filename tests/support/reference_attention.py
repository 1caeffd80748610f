"""Reference attention: each query alone, with keys gathered by its block table and softmax in float32. Slow, but easy to verify."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from batchgen.attention.base import LayerOptions
from batchgen.scheduling.batch import ScheduledSpan
from support.simulation import kv_index

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
OPTIONS: list[dict[str, Any]] = [
    {"sliding_window": 1}, {"sliding_window": 5}, {"sliding_window": 40}, {"sliding_window": 1000}, {"softcap": 0.7}, {"sinks": True},
    {"scale": 0.25}, {"scale": 1.0}, {"sliding_window": 20, "softcap": 2.0, "sinks": True},
]  # fmt: skip
"""What a layer may ask for, alone and together."""


def random_options(rng: random.Random, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> dict[str, Any]:
    """Random options of a layer, sizes of its heads and types for `AttentionCase`."""
    return {
        "sliding_window": rng.choice([None, None, 3, 33]), "softcap": rng.choice([None, 1.5]), "sinks": rng.random() < 0.3,
        "K": rng.choice([1, 2]), "G": rng.choice([1, 2, 3, 8]), "D": rng.choice([8, 9, 64]), "V": rng.choice([4, 16, 72]),
        "dtype": rng.choice(dtypes),
    }  # fmt: skip


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


class AttentionCase:
    """Random keys and values [K, N, D or V] at the places that these spans read, queries [H, T, D] with the strides of a model's, and what comes out."""

    def __init__(
        self, spans: Sequence[ScheduledSpan], blocks: int, block_size: int, *, K: int = 2, G: int = 2, D: int = 8, V: int = 8,
        dtype: torch.dtype = torch.float32, seed: int = 0, sinks: bool = False, unread: tuple[float, float] = (0.0, 0.0),
        padding: int = 0, device: torch.device | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """`unread`: the keys and values of the places that no query may read. `padding`: queries beyond those of the spans."""
        numbers = torch.Generator().manual_seed(seed)
        self.spans, self.block_size, self.dtype, self.heads = tuple(spans), block_size, dtype, (K, G)
        self.read = torch.tensor(sorted({kv_index(w.span, p, block_size) for w in spans for p in range(w.stop)}))
        self.own = torch.tensor([kv_index(w.span, p, block_size) for w in spans for p in range(w.start, w.stop)])
        pools = []
        for size, filled in zip((D, V), unread, strict=True):
            pool = torch.full((K, blocks * block_size, size), filled)
            pool[:, self.read] = torch.randn((K, len(self.read), size), generator=numbers)
            pools.append(pool.to(device, dtype))
        self.keys, self.values = pools
        q = torch.randn((len(self.own) + padding, K * G, D), generator=numbers)
        self.q_HTD = q.to(device, dtype).transpose(0, 1)
        self.q_KTGD = self.q_HTD[:, : len(self.own)].reshape(K, G, len(self.own), D).transpose(1, 2)
        if sinks:
            options["sinks"] = torch.randn(K * G, generator=numbers).to(device)
        self.options = LayerOptions(**({"scale": 0.3} | options))

    def check(self, got: torch.Tensor) -> None:
        """Compares an output [T, H, V] or [T, K, G, V] with the reference."""
        want = Reference(self.spans, self.block_size).attend(self.q_KTGD, self.keys, self.values, self.options)
        assert got.dtype == self.dtype
        assert got.numel() == want.numel()
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(got.reshape(want.shape).float(), want.float(), atol=tolerance, rtol=tolerance)
