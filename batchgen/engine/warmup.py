"""What the largest step takes of a device's memory: it is run once, before the page pool is sized, on a pool that just holds it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from batchgen.engine.kv_cache import KVCache
from batchgen.engine.policy import POLICIES
from batchgen.engine.prepared import LoadedModel
from batchgen.engine.runner import Runner
from batchgen.engine.spans import Sequence
from batchgen.engine.steps import Limits, Step, Work
from batchgen.engine.window import Window
from batchgen.errors import is_out_of_memory
from batchgen.prefix import plan_prefixes
from batchgen.request import Request, leaves_of
from batchgen.sampling_params import SamplingParams
from batchgen.state.cache import StateCache


def step_bytes(model: LoadedModel, limits: Limits, page_size: int) -> dict[torch.device, int] | None:
    """Most bytes that a step within the limits holds at once on each of the model's CUDA devices, beside the pool; None where it does not fit."""
    try:
        return _step_bytes(model, limits, page_size)
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
    return None


def _step_bytes(model: LoadedModel, limits: Limits, page_size: int) -> dict[torch.device, int] | None:
    works = largest_works(limits, page_size)
    cache = KVCache(model.layers, sum(len(work.span.table) for work in works), page_size, model.dtype)
    states = StateCache(model.states, len(works), model.dtype) if model.states else None
    runner = Runner(replace(model, compile="off"), cache, limits, [], states)
    before = {device: torch.cuda.memory_allocated(device) for device in model.devices}
    for device in model.devices:
        torch.cuda.reset_peak_memory_stats(device)
    runner.run(step_of(works))
    if runner.most_tokens is not None:
        return None
    return {device: torch.cuda.max_memory_allocated(device) - before[device] for device in model.devices}


def step_of(works: list[Work]) -> Step:
    """A step that is nothing but these works."""
    return Step(works=tuple(works), moves=(), preempted=(), started=(), ready=(), scored=())


def largest_works(limits: Limits, page_size: int) -> list[Work]:
    """As many prompts as run at once, of as many tokens as fit into a step; after each the logits are wanted."""
    each, longer = divmod(limits.max_batch_tokens, limits.batch_size)
    requests = [
        Request(
            row=row,
            tokens=np.zeros(each + (row < longer), dtype=np.int32),
            params=SamplingParams(max_tokens=1),
            max_tokens=1,
            key=row.to_bytes(16, "little"),
        )
        for row in range(limits.batch_size)
    ]
    leaves = leaves_of(requests)
    plan = plan_prefixes([leaf.tokens for leaf in leaves], page_size, share=False)
    window = Window.of(leaves, plan, POLICIES["prefix"], 0)
    works: list[Work] = []
    page = 0
    for i, leaf in enumerate(leaves):
        size = len(leaf.tokens)
        table = list(range(page, page - (-size // page_size)))
        page += len(table)
        span = Sequence(
            window=window, place=window.place(~i), parent=None, start=0, table=table, computed=0, claims_tail=False,
            leaf=leaf, index=i, stops=None, slot=i, state_slot=i,
        )  # fmt: skip
        works.append(Work(span, 0, size, size - 1))
    return works
