"""Tokens of an image that see one another, in plain torch and with the kernels, against masks written out."""

from typing import Any

import pytest
import torch

from batchgen.attention.base import LayerOptions
from batchgen.attention.cpu_backend import PackedAttention, storage
from batchgen.attention.kv_cache import KVCache, LayerShape
from batchgen.attention.plan import plan_attention
from batchgen.attention.torch_backend import StepAttention
from batchgen.kernels.build import NoKernels, library
from batchgen.scheduling.batch import ScheduledSpan
from support.whole_images import sequence

LAST = [0, 1, 4, 4, 4, 6, 6, 7, 10, 10, 10]
"""By token of `sequence`: the last one that it sees."""


@pytest.mark.parametrize("prompt", [0, 7])
@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 4}, {"causal": True}, {"causal": True, "softcap": 2.0}], ids=str
)
def test_an_image_or_a_prompt_is_seen_whole_unless_the_layer_is_causal(backend, options, prompt):
    spans = [ScheduledSpan(sequence(prompt=prompt), 0, 11, 11)]
    layers = {0: LayerShape(2, 8, 16)}
    attention: Any
    if backend == "torch":
        attention = StepAttention(plan_attention(spans, 16), KVCache(layers, 1, 16, torch.float32))
    else:
        try:
            library()
        except NoKernels as e:
            pytest.skip(e.message)
        attention = PackedAttention(spans, KVCache(storage(layers, torch.float32), 1, 16, torch.float32))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((heads, 11, size), generator=generator) for heads, size in ((4, 8), (2, 8), (2, 16)))
    layer = LayerOptions(0.5, **options)
    at = torch.arange(11)
    last = at if layer.causal else torch.tensor([10] * 11 if prompt else LAST)
    hidden = at[None] > last[:, None]
    if layer.sliding_window:
        hidden |= at[None] <= at[:, None] - layer.sliding_window
    scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 0)
    torch.testing.assert_close(attention(0, q, k, v, layer), want.transpose(0, 1), atol=2e-5, rtol=2e-5)
