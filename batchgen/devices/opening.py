"""What generates: an engine in this process, or one in a process for each of several devices.

A caller need not know which. With several devices neither torch nor a model is in this process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices.threads import cpu_quota, share_of_threads, usable_cores
from batchgen.devices.transport import Processes
from batchgen.devices.workers import Workers
from batchgen.prefix import PrefixPlan
from batchgen.prompts import LoadedTokenizer
from batchgen.prompts.tokenizer import quiet
from batchgen.request import Leaf, Request, TokenArray
from batchgen.result import Completion, OnResult, OnToken
from batchgen.stats import EngineStats

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine

_logger = logging.getLogger("batchgen")
_LOADING = threading.Lock()
"""Held while a model is loaded. transformers changes torch's default dtype and device meanwhile, for all threads of the process."""


class AnyEngine(Protocol):
    """Requests and their plan in, results out as the rows finish (`Engine`)."""

    notes: list[str]
    """What the user should hear; grows."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def attention(self) -> str: ...
    @property
    def waiting(self) -> int:
        """Number of leaves that are neither done nor running."""
        ...

    @property
    def unfinished(self) -> int:
        """Rows that have no result yet."""
        ...

    def add(
        self, leaves: Sequence[Leaf], plan: PrefixPlan, on_result: OnResult, on_token: OnToken | None = None
    ) -> None: ...
    def run(self, stop: Callable[[], str | None] | None = None) -> None: ...
    def under_way(self) -> dict[int, dict[int, Completion]]:
        """Returns the unfinished completions, by row and number. Those of devices in other processes are a moment old."""
        ...

    def cancel(self, request: Request) -> None: ...
    def close(self) -> None:
        """Gives processes back, if it has any; it cannot be used any more."""
        ...


def open_engine(
    model: ModelConfig, tokenizer: LoadedTokenizer, config: EngineConfig, texts: Sequence[TokenArray] = ()
) -> AnyEngine:
    """Loads the model on its devices. `texts`: prompts on which `--quantize` is measured. Raises `BatchgenError`."""
    if model.ray is not None:
        from batchgen.devices.ray_cluster import RayCluster

        return Workers(model, config, RayCluster(model), texts)
    if config.threads is not None and config.threads > (cores := usable_cores()):
        _logger.info(
            f"--threads {config.threads} is more than the cores that this process may use ({cores}): the job is slower for it"
        )
    if len(model.devices) == 1:
        use_threads(config)
        return engine_here(model, tokenizer, config, texts)
    from batchgen.devices.transport import start_process

    return Workers(model, config, Processes(model.devices, model.device, start_process), texts)


def use_threads(config: EngineConfig, place: int = 0, processes: int = 1) -> None:
    """Gives torch and our kernels, for all of this process, its part of the threads: `--threads`, or the cores that it may use."""
    with quiet():  # torchao, where it is installed, has much to say
        import torch

    total = config.threads
    if total is None:  # torch knows affinity and OMP_NUM_THREADS, but no quota
        total = min(torch.get_num_threads(), cpu_quota() or torch.get_num_threads())
    torch.set_num_threads(share_of_threads(total, place, processes))


def engine_here(
    model: ModelConfig, tokenizer: LoadedTokenizer, config: EngineConfig, texts: Sequence[TokenArray] = ()
) -> Engine:
    """The engine of one device, in this process."""
    with quiet():  # torchao, where it is installed, has much to say
        from batchgen.engine.engine import Engine  # imports torch
        from batchgen.model.device_check import check_device
        from batchgen.model.loader import load_model, pick_device

    with _LOADING:
        verdict = check_device(model, pick_device(model.device), tokenizer.hf_config, config.block_size)
        loaded = load_model(model, tokenizer, config.processes, texts)
    return Engine(replace(loaded, verdict=verdict), tokenizer, config)
