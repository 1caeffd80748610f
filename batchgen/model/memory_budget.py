"""The sizes of the block pool and of the steps: as the user asks, else as they suit the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from batchgen.attention.kv_cache import KVCache, bytes_per_token
from batchgen.config import EngineConfig, parse_memory
from batchgen.errors import OutOfMemory, RowError, UsageError, is_out_of_memory
from batchgen.model.cuda_graphs import full_steps_pay
from batchgen.model.loaded_model import LoadedModel
from batchgen.model.runner import Runner
from batchgen.model.weights.weight_size import step_numbers
from batchgen.process.machine import free_host_memory
from batchgen.prompts.tokenizer import text_config
from batchgen.request import Leaf, Request
from batchgen.sampling.sampler import AT_ONCE
from batchgen.scheduling.batch import Limits, ScheduledBatch, ScheduledSpan
from batchgen.scheduling.pool_size import (
    AUTO_SHARE,
    SNAPSHOTS,
    MemoryShare,
    limits_for,
    max_useful_blocks,
    memory_option,
    sufficient_memory,
)
from batchgen.scheduling.rehearsal import sequences_of
from batchgen.state.cache import StateCache, bytes_per_state_slot
from batchgen.stats import counted, size_text


def step_bytes(model: LoadedModel, limits: Limits, block_size: int) -> dict[torch.device, int] | None:
    """Runs the largest step within the limits. Returns the most bytes that it held at once on each CUDA device, without the pool; None if it
    does not fit."""
    spans = largest_spans(limits, block_size)
    try:
        cache = KVCache(model.layers, sum(len(scheduled.span.table) for scheduled in spans), block_size, model.dtype)
        states = StateCache(model.states, len(spans), model.dtype) if model.states else None
        runner = Runner(replace(model, compile="off"), cache, limits, [], states)
        before = {device: torch.cuda.memory_allocated(device) for device in model.devices}
        for device in model.devices:
            torch.cuda.reset_peak_memory_stats(device)
        runner.run(ScheduledBatch.of(spans))
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        return None
    if runner.max_forward_tokens is not None:
        return None
    return {device: torch.cuda.max_memory_allocated(device) - before[device] for device in model.devices}


def largest_spans(limits: Limits, block_size: int) -> list[ScheduledSpan]:
    """Returns the largest step within the limits: as many prompts as may run at once, which fill it, with logits wanted after each."""
    each, longer = divmod(limits.max_batch_tokens, limits.batch_size)
    texts = [np.zeros(each + (row < longer), dtype=np.int32) for row in range(limits.batch_size)]
    sizes = [len(text) for text in texts]
    return [
        ScheduledSpan(sequence, 0, size, size - 1)
        for sequence, size in zip(sequences_of(texts, sizes, block_size), sizes, strict=True)
    ]


STEP_SHARE, STEP_BESIDE = 0.5, 0.25
"""The largest share of the free memory that a step may take, on CUDA and elsewhere; otherwise steps are made smaller."""
MIN_STEP, LEAST_STEP = 256, 32
"""Steps of this many tokens, and elsewhere than on CUDA of so many rows, are not made smaller."""
STEP_SLACK = 1.5
"""Memory that steps take, as a multiple of what the largest one holds. Steps of other sizes leave gaps, and graphs have memory of their own."""
SAMPLING_COPIES = 12
"""Memory of sampling, in float32 copies of the logits that are sampled from at once. Sorting alone takes six."""
GRAPHS_BYTES = 512 << 20
"""Memory that CUDA graphs take beside their tensors."""
SPARE = 0.02
"""Share of the free memory that is left for anything else."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that an engine is built with."""

    block_size: int
    """Tokens per block."""
    num_blocks: int
    bytes_per_token: int
    """KV of one token in all layers."""
    limits: Limits
    num_state_slots: int = 0
    """Number of state slots; 0 for a model without recurrent layers."""
    bytes_per_state_slot: int = 0
    """The bytes of one state slot in all recurrent layers."""

    def blocks_for(self, leaf: Leaf) -> int:
        """Returns the largest number of blocks that the leaf can need."""
        return -(-leaf.max_kv_tokens // self.block_size)

    def fitted(self, request: Request) -> Request:
        """Returns the request with fewer `max_tokens` if the user gave none and so long a completion would not fit an empty pool."""
        room = self.num_blocks * self.block_size - len(request.tokens) + 1
        if request.texts or "max_tokens" in request.params.given or not 1 <= room < request.max_tokens:
            return request
        return replace(request, max_tokens=room)

    def does_not_fit(self, leaf: Leaf) -> RowError:
        """Returns the error of a leaf that does not fit: how much memory it needs, and what would make it fit."""
        block = self.bytes_per_token * self.block_size
        needed = self.blocks_for(leaf) * block
        prompt = len(leaf.request.tokens)
        what = "the text to score" if leaf.request.texts else "completion"
        enough = sufficient_memory(needed, self.bytes_per_state_slot, self.limits.batch_size)
        shared = ", which recurrent states share," if self.bytes_per_state_slot else ""
        return RowError(
            "does_not_fit",
            f"prompt ({counted(prompt, 'token')}) and {what} (up to {leaf.max_kv_tokens - prompt + 1}) need {size_text(needed)} of KV memory, "
            f"there are {size_text(self.num_blocks * block)}; "
            f"give --kv-memory {memory_option(enough)}{shared}{'' if leaf.request.texts else ' or lower max_tokens'}",
        )


def size_engine(model: LoadedModel, config: EngineConfig, context_length: int) -> Sizes:
    """Returns the sizes for this model on its devices. Raises `UsageError` if the KV memory does not hold a single block."""
    block_size = config.block_size
    token = bytes_per_token(model.layers, model.dtype)
    state_slot = bytes_per_state_slot(model.states, model.dtype)
    limits = limits_for(config, model.device.type, model.vocab_size, streamed=model.streamed is not None)
    wish = parse_memory(config.kv_memory)
    if isinstance(wish, int):
        shares = [MemoryShare(wish, block_size * token, state_slot)]
    elif wish is None and model.device.type == "cuda":
        limits, room = _measured(model, limits, block_size)
        shares = [_share(model, block_size, on, size) for on, size in room.items()]
    else:  # a block has a share on every device: the tightest decides
        free = {
            device: free_memory(device) // (config.processes if device.type == "cpu" else 1) for device in model.devices
        }
        if wish is None:
            hf_config, itemsize = model.module.config, model.dtype.itemsize
            limits = limits_within(limits, min(free.values()), hf_config, model.vocab_size, itemsize)
        shares = [
            _share(model, block_size, device, int(size * (wish or AUTO_SHARE[device.type])))
            for device, size in free.items()
        ]
    return sizes_within(config, limits, shares, token, state_slot, context_length)


def limits_within(limits: Limits, free: int, hf_config: Any, vocab_size: int, itemsize: int) -> Limits:
    """Returns limits for steps that take little of the `free` bytes of a device that is not CUDA.

    `itemsize`: bytes of a number of the model's type.
    """
    token = step_numbers(text_config(hf_config))
    while limits.max_batch_tokens > LEAST_STEP:
        of_tokens, logits = limits.max_batch_tokens * token, limits.batch_size * vocab_size
        if itemsize * (of_tokens + logits) <= STEP_BESIDE * free:
            break
        if of_tokens > logits or limits.batch_size <= LEAST_STEP:
            limits = halved(limits)
        else:
            limits = replace(limits, batch_size=max(LEAST_STEP, limits.batch_size // 2))
    return limits


def sizes_within(
    config: EngineConfig, limits: Limits, shares: Sequence[MemoryShare], token: int, state_slot: int, context_length: int
) -> Sizes:  # fmt: skip
    """Returns the sizes that fit all `shares` of memory; as large as is of use if there are none. `token` and `state_slot` are their bytes.

    Raises `UsageError` if not even a block fits.
    """
    useful = max_useful_blocks(limits, context_length, config.block_size)
    num_state_slots = 0
    if state_slot:
        wanted = limits.batch_size + SNAPSHOTS
        num_state_slots = min((share.state_slots(limits.batch_size) for share in shares), default=wanted)
    num_blocks = min((share.blocks(num_state_slots) for share in shares), default=useful)
    if parse_memory(config.kv_memory) is None or not token:
        num_blocks = min(num_blocks, useful)
    if num_blocks < 1 or (state_slot and num_state_slots < 2):
        block = config.block_size * token
        parts = [f"a block of {config.block_size} tokens ({size_text(block)})"] if token else []
        parts += [f"two recurrent states ({size_text(state_slot)} each)"] if state_slot else []
        enough = sufficient_memory(block, state_slot, limits.batch_size)
        raise UsageError(
            f"--kv-memory {config.kv_memory} does not hold {' and '.join(parts)}",
            f"give {memory_option(enough)} or more" + (", or lower --chunk-size" if token else ""),
        )
    return Sizes(
        block_size=config.block_size,
        num_blocks=num_blocks,
        bytes_per_token=token,
        limits=limits,
        num_state_slots=num_state_slots,
        bytes_per_state_slot=state_slot,
    )


def _share(model: LoadedModel, block_size: int, device: torch.device, room: int) -> MemoryShare:
    token = bytes_per_token(model.layers, model.dtype, device)
    return MemoryShare(room, block_size * token, bytes_per_state_slot(model.states, model.dtype, device))


def _measured(model: LoadedModel, limits: Limits, block_size: int) -> tuple[Limits, dict[torch.device, int]]:
    """Runs a step of the largest size. Returns the bytes for blocks on each CUDA device, and the limits, which are smaller if that step did not fit."""
    sampling = SAMPLING_COPIES * 4 * min(limits.batch_size * model.vocab_size, AT_ONCE)
    while True:
        free = {device: free_memory(device) for device in model.devices}
        steps = step_bytes(model, limits, block_size)
        if steps is not None and (
            limits.max_batch_tokens <= MIN_STEP or all(steps[on] <= STEP_SHARE * free[on] for on in free)
        ):
            reserved = model.vision.reserved_bytes if model.vision else 0
            left = {
                on: free_memory(on) - reserved for on in free
            }  # without what the libraries have loaded for the step
            # The graph of the largest step holds as much as the step again.
            steps_held = 1 + full_steps_pay(model.num_parameters, len(model.layers), limits.max_batch_tokens)
            return limits, {
                on: room_for_blocks(left[on], steps_held * steps[on], sampling if on == model.device else 0)
                for on in left
            }
        if limits.max_batch_tokens == 1:
            raise OutOfMemory(
                f"{model.device} does not have enough memory for a forward of one token", "use a smaller --dtype"
            )
        limits = halved(limits)


def room_for_blocks(free: int, step: int, sampling: int) -> int:
    """Returns the bytes for blocks of a CUDA device's free bytes, if the largest step holds `step` bytes and sampling takes `sampling`."""
    return max(0, free - int(STEP_SLACK * step) - sampling - GRAPHS_BYTES - int(SPARE * free))


def halved(limits: Limits) -> Limits:
    """Returns limits for steps of half as many tokens."""
    tokens = max(1, limits.max_batch_tokens // 2)
    return replace(
        limits,
        batch_size=min(limits.batch_size, tokens),
        max_batch_tokens=tokens,
        max_prefill_tokens=min(limits.max_prefill_tokens, tokens),
    )


def free_memory(device: torch.device) -> int:
    """Returns the bytes that can still be allocated on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()
