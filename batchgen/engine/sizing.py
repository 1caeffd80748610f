"""How large the page pool and the steps are: what the user says, else what suits the device."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from batchgen.config import EngineConfig, parse_memory
from batchgen.engine.kv_cache import bytes_per_token, devices_of
from batchgen.engine.prepared import LoadedModel
from batchgen.engine.steps import Limits
from batchgen.errors import RowError, UsageError
from batchgen.request import Leaf

PAGE_TOKENS = 32
"""A page is the smallest multiple of the chunk that has so many tokens (CPU: benchmarks/NOTES.md)."""
BATCH_SIZE = 256
BATCH_TOKENS = {"cpu": 2048, "mps": 2048, "cuda": 8192}
SCORED_LOGITS = 1 << 25
"""Most logits of texts to score in one forward: tokens times vocabulary."""
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
    host_pages: int = 0
    """Pages of idle nodes kept in host memory."""

    def pages_for(self, leaf: Leaf) -> int:
        """Pages that the leaf can need."""
        return -(-leaf.most_tokens // self.page_size)

    def does_not_fit(self, leaf: Leaf) -> RowError:
        """Says how much it needs, and what would make it fit."""
        page = self.bytes_per_token * self.page_size
        needed = self.pages_for(leaf) * page
        prompt = len(leaf.request.tokens)
        what = "the text to score" if leaf.request.texts else "completion"
        return RowError(
            "does_not_fit",
            f"prompt ({prompt} tokens) and {what} (up to {leaf.most_tokens - prompt + 1}) need {_size(needed)} of KV memory, "
            f"there are {_size(self.num_pages * page)}; "
            f"give --kv-memory {_option(needed)}{'' if leaf.request.texts else ' or lower max_tokens'}",
        )


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
    if isinstance(wish, int):
        num_pages = wish // (page_size * token)
    else:  # a page has a share on every device: the tightest decides
        num_pages = min(
            int(free_memory(device) * (wish or AUTO_SHARE[device.type]))
            // (page_size * bytes_per_token(model.layers, model.dtype, device))
            for device in devices_of(model.layers)
        )
    if wish is None:  # more than a full batch of the longest sequences, twice, is of no use
        num_pages = min(num_pages, 2 * batch_size * -(-context_length // page_size))
    if num_pages < 1:
        raise UsageError(
            f"--kv-memory {config.kv_memory} holds no page of {page_size} tokens ({page_size * token} bytes)",
            "give more, or lower --chunk-size",
        )
    limits = Limits(
        batch_size=batch_size,
        max_batch_tokens=batch_tokens,
        max_prefill_tokens=min(config.max_prefill_tokens or batch_tokens, batch_tokens),
        max_scored_tokens=max(1, SCORED_LOGITS // model.vocab_size),
        max_kv_read=config.max_kv_read,
    )
    if config.host_kv_memory is not None and model.device.type != "cuda":
        raise UsageError(f"--host-kv-memory is for CUDA devices, not for {model.device}", "raise --kv-memory instead")
    host = parse_memory(config.host_kv_memory) if config.host_kv_memory else 0
    return Sizes(page_size, num_pages, token, limits, int(host or 0) // (page_size * token))


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


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _option(count: int) -> str:
    """The least size, in whole units, that `--kv-memory` takes for so many bytes."""
    unit, name = (2**30, "GiB") if count >= 2**32 else (2**20, "MiB") if count >= 2**22 else (2**10, "KiB")
    return f"{-(-count // unit)}{name}"
