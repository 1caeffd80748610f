"""Attention as the merge of shared and causal parts, in plain torch: any device, any float dtype.

Scores and merges are in float32. A shared part's KV is read once: its queries are the rows of one matrix product a key/value head (Hydragen,
arXiv:2402.05099). Partial results are merged by their log-sum-exp.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from batchgen.attention.base import LayerOptions
from batchgen.attention.kv_cache import KVCache
from batchgen.attention.plan import AttentionPlan, CausalPart, SharedPart

MAX_SCORES = 1 << 21
"""Maximum number of scores of one matrix product. More would not fit the cache."""


class StepAttention:
    """The attention of a step as the model's layers call it: writes their KV, then attends by the plan on the device of the layer's KV."""

    def __init__(self, plan: AttentionPlan, cache: KVCache) -> None:
        self._kv_indices = {device: torch.from_numpy(plan.kv_indices).to(device) for device in cache.devices}
        self._cascades = {device: Cascade(plan, device) for device in cache.devices}
        self._cache = cache
        self.positions = plan.positions
        self.num_parts = len(plan.shared) + len(plan.causal)

    def __call__(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTV: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Returns the layer's attention output [T, H, V]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._cache.write(layer, self._kv_indices[keys.device], k_KTD, v_KTV)
        kv_heads, size = k_KTD.shape[0], q_HTD.shape[1]
        q_KTGD = q_HTD.view(kv_heads, -1, size, q_HTD.shape[2]).transpose(1, 2)
        out = self._cascades[keys.device].attend(q_KTGD, keys, values, options)
        return out.reshape(size, q_HTD.shape[0], -1)


class Cascade:
    """The attention plan of one step, as tensors."""

    def __init__(self, plan: AttentionPlan, device: torch.device, max_scores: int = MAX_SCORES) -> None:
        """`max_scores`: see `MAX_SCORES`."""
        self.plan = plan
        self._max_scores = max_scores
        self.positions = torch.from_numpy(plan.positions).to(device)
        self.causal = [_Causal(part, device) for part in plan.causal]

    def attend(
        self, q_KTGD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Returns the attention output [T, K, G, V] in the queries' dtype.

        `keys` [K, S, D] and `values` [K, S, V] are a layer's whole pool of S tokens, which already has this step's tokens. Each query is
        written once by its causal part; shared parts are merged into that.
        """
        K, T, G, _ = q_KTGD.shape
        q_KTGD = q_KTGD.contiguous()
        if (
            q_KTGD.dtype == torch.float32 or math.frexp(options.scale)[0] == 0.5
        ):  # the scaling is exact, and needs no pass over the scores
            q_KTGD = q_KTGD * options.scale
            options = replace(options, scale=1.0)
        # The extra row takes the padding of causal chunks.
        out = torch.empty((K, T + 1, G, values.shape[-1]), dtype=torch.float32, device=q_KTGD.device)
        lse = torch.empty((K, T + 1, G), dtype=torch.float32, device=q_KTGD.device)
        for part in self.causal:
            part.attend(q_KTGD, keys, values, options, out, lse)
        for shared in self.plan.shared:
            self._attend_shared(shared, q_KTGD, keys, values, options, out, lse)
        out, lse = out[:, :T], lse[:, :T]
        if options.sinks is not None:
            out = out * torch.sigmoid(lse - options.sinks.float().view(K, 1, G)).unsqueeze(-1)
        return out.permute(1, 0, 2, 3).to(q_KTGD.dtype)

    def _attend_shared(
        self,
        part: SharedPart,
        q_KTGD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: LayerOptions,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        K, _, G, D = q_KTGD.shape
        size = self.plan.block_size
        first, last = part.block * size, (part.block + part.num_blocks) * size
        q_chunk = max(1, min(part.q_end - part.q_start, self._max_scores // (K * G * min(last - first, 1024))))
        for q_start in range(part.q_start, part.q_end, q_chunk):
            q_end = min(q_start + q_chunk, part.q_end)
            count = q_end - q_start
            q = q_KTGD[:, q_start:q_end].reshape(K, count * G, D)
            k_chunk = max(size, self._max_scores // (K * G * count))
            for k_start in range(first, last, k_chunk):
                k_end = min(k_start + k_chunk, last)
                masked = None
                if options.sliding_window is not None:
                    at = torch.arange(k_start, k_end, device=q_KTGD.device) + (part.position - first)
                    masked = at <= self.positions[q_start:q_end, None] - options.sliding_window
                    masked = masked.repeat_interleave(G, dim=0)
                o, s = partial(q, keys[:, k_start:k_end], values[:, k_start:k_end], options, masked)
                merge(out[:, q_start:q_end], lse[:, q_start:q_end], o.view(K, count, G, -1), s.view(K, count, G))


def partial(
    q_NMD: torch.Tensor,
    k_NSD: torch.Tensor,
    v_NSV: torch.Tensor,
    options: LayerOptions,
    masked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns softmax attention over these keys alone: (out [N, M, V], log-sum-exp of the scores [N, M]), float32.

    `masked` is broadcast against [N, M, S]. A query whose keys are all masked has lse -inf and out 0.
    """
    weights, lse, total = _softmax(torch.bmm(q_NMD, k_NSD.transpose(1, 2)), options, masked)
    out = torch.bmm(weights.to(v_NSV.dtype), v_NSV).float()
    return out.div_(total.unsqueeze(-1)), lse


def _softmax(
    scores: torch.Tensor, options: LayerOptions, masked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the unnormalised weights (the largest is 1), the log-sum-exp, and the sum of the weights, over the last dimension, float32."""
    scores = scores.float()
    if options.scale != 1.0:
        scores = scores.mul_(options.scale)
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    if masked is not None:
        scores = scores.masked_fill_(masked, -math.inf)
    # All of them may be -inf: masked, or of keys with a bias (ALiBi's) that float16 has no number for.
    top = scores.amax(-1).clamp_min_(torch.finfo(torch.float32).min)
    weights = scores.sub_(top.unsqueeze(-1)).exp_()
    total = weights.sum(-1)
    lse = total.log().add_(top)
    return weights, lse, total.clamp_min_(torch.finfo(torch.float32).tiny)


def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merges attention over other keys into (out [..., V], lse [...]), float32, in place."""
    both = torch.logaddexp(lse, other_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1)).addcmul_(other, (other_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


class _Causal:
    """A batch of causal chunks. `B` chunks of `L` queries and `S` keys."""

    def __init__(self, part: CausalPart, device: torch.device) -> None:
        self.queries = torch.from_numpy(part.queries.reshape(-1)).to(device)
        self.kv_indices = torch.from_numpy(part.kv_indices.reshape(-1)).to(device)
        self.q_positions = torch.from_numpy(part.q_positions).to(device)
        self.k_positions = torch.from_numpy(part.k_positions).to(device)
        q_ends = torch.from_numpy(part.q_ends).to(device)
        self.later = self.k_positions[:, None, :] > q_ends[:, :, None]  # [B, L, S]
        self.whole_images = bool((part.q_ends != part.q_positions).any())  # on the host: a step waits for no device

    def attend(
        self,
        q_KTGD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: LayerOptions,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        K, T, G, D = q_KTGD.shape
        B, L, S = self.later.shape
        masked = self.later
        if options.causal and self.whole_images:
            masked = self.k_positions[:, None, :] > self.q_positions[:, :, None]
        if options.sliding_window is not None:
            masked = masked | (self.k_positions[:, None, :] <= self.q_positions[:, :, None] - options.sliding_window)
        q = q_KTGD.index_select(1, self.queries.clamp(max=T - 1)).view(K * B, L * G, D)
        k = keys.index_select(1, self.kv_indices).view(K * B, S, D)
        v = values.index_select(1, self.kv_indices).view(K * B, S, -1)
        masked = masked.view(1, B, L, 1, S).expand(K, B, L, G, S).reshape(K * B, L * G, S)
        o, s = partial(q, k, v, options, masked)
        out.index_copy_(1, self.queries, o.view(K, B * L, G, -1))
        lse.index_copy_(1, self.queries, s.view(K, B * L, G))
