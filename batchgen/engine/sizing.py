"""How large the page pool and the steps are: what the user says, else what suits the device."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from batchgen.config import EngineConfig, parse_memory
from batchgen.engine.kv_cache import bytes_per_token
from batchgen.engine.loading import LoadedModel
from batchgen.engine.scheduler import Limits
from batchgen.errors import UsageError

PAGE_TOKENS = 32
"""A page is the smallest multiple of the chunk that has so many tokens (CPU: benchmarks/NOTES.md)."""
BATCH_SIZE = 256
BATCH_TOKENS = {"cpu": 2048, "mps": 2048, "cuda": 8192}
AUTO_SHARE = {"cpu": 0.5, "mps": 0.5, "cuda": 0.8}
"""Of the memory that is free once the model is loaded; the rest is for activations and other programs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that an engine is built with."""

    page_size: int
    """Tokens per page."""
    num_pages: int
    bytes_per_token: int
    """KV of one token in all layers."""
    limits: Limits


def page_size_of(chunk_size: int) -> int:
    """Tokens per page for a chunk size."""
    return -(-PAGE_TOKENS // chunk_size) * chunk_size


def size_engine(model: LoadedModel, config: EngineConfig, context_length: int) -> Sizes:
    """Sizes for this model on this device. Raises `UsageError` when the KV memory does not hold a single page."""
    page_size = page_size_of(config.chunk_size)
    token = bytes_per_token(model.layers, model.dtype)
    batch_tokens = config.max_batch_tokens or BATCH_TOKENS[model.device.type]
    batch_size = min(config.batch_size or BATCH_SIZE, batch_tokens)
    wish = parse_memory(config.kv_memory)
    free = free_memory(model.device)
    budget = wish if isinstance(wish, int) else int(free * (wish or AUTO_SHARE[model.device.type]))
    num_pages = budget // (page_size * token)
    if wish is None:  # more than a full batch of the longest sequences, twice, is of no use
        num_pages = min(num_pages, 2 * batch_size * -(-context_length // page_size))
    if num_pages < 1:
        raise UsageError(
            f"--kv-memory {config.kv_memory} holds no page of {page_size} tokens ({page_size * token} bytes)",
            "give more, or lower --chunk-size",
        )
    prefill = min(config.max_prefill_tokens or batch_tokens, batch_tokens)
    return Sizes(page_size, num_pages, token, Limits(batch_size, batch_tokens, prefill))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
