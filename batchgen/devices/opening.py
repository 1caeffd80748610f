"""Opens what generates: an engine in this process, or, for several devices, an engine in a process for each.

The caller need not know which. With several devices, this process has neither torch nor a model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices.transport import Processes, start_process
from batchgen.devices.workers import Workers
from batchgen.errors import UsageError
from batchgen.kernels import isa
from batchgen.model_files import gguf_file
from batchgen.process.machine import cpu_quota, usable_cores, watch_memory
from batchgen.process.user_cache import cache_folder
from batchgen.prompts import LoadedTokenizer
from batchgen.prompts.tokenizer import quiet
from batchgen.request import TokenArray
from batchgen.version import __version__

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine

_logger = logging.getLogger("batchgen")
_LOADING = threading.Lock()
"""Held while a model is loaded, because transformers then changes torch's default dtype and device for all threads of the process."""
_THREADED: list[int] = []
"""The process that has first loaded a model with several threads; empty before."""


AnyEngine: TypeAlias = "Engine | Workers"
"""Takes requests with their plan, and gives each row's result when it is finished. Both have the methods that their callers use."""


def open_engine(
    model: ModelConfig, tokenizer: LoadedTokenizer, config: EngineConfig, texts: Sequence[TokenArray] = ()
) -> AnyEngine:
    """Loads the model on its devices. `texts`: prompts on which `--quantize` is measured. Raises `BatchgenError`."""
    if model.ray is not None:
        from batchgen.devices.ray_cluster import RayCluster

        return Workers(model, config, RayCluster(model), texts)
    if config.threads is not None and config.threads > (cores := usable_cores()):
        _logger.info(
            f"--threads {config.threads} is more than the cores that this process may use ({cores}), which makes the job slower"
        )
    if len(model.devices) == 1:
        use_threads(config)
        _check_forked()
        return engine_here(model, tokenizer, config, texts)
    return Workers(model, config, Processes(model.devices, model.device, start_process), texts)


def _check_forked() -> None:
    """Raises `UsageError` in a process that was forked from one with threads that compute: GNU's OpenMP would wait for them forever."""
    import torch

    if torch.get_num_threads() == 1 or sys.platform != "linux":
        return
    if not _THREADED:
        _THREADED.append(os.getpid())
    if _THREADED[0] != os.getpid():
        raise UsageError(
            f"this process was forked from process {_THREADED[0]}, which has loaded a model, and its threads are missing here",
            "start it with the start method spawn of multiprocessing",
        )


def use_threads(config: EngineConfig, place: int = 0, processes: int = 1) -> None:
    """Sets the number of threads of torch and of batchgen's kernels in this process: its share of `--threads`, or of the usable cores; at least one."""
    with quiet():  # torchao writes warnings when it is imported
        import torch

    torch.set_num_threads(num_threads(config, place, processes))


def num_threads(config: EngineConfig, place: int = 0, processes: int = 1) -> int:
    """Returns the number of threads that `use_threads` sets, if it was not called before."""
    import torch

    total = config.threads
    if total is None:  # torch follows affinity and OMP_NUM_THREADS, but not quotas
        total = min(torch.get_num_threads(), cpu_quota() or torch.get_num_threads())
    # An actor of a Ray cluster shares its threads with none, whatever its number.
    return max(1, (total + place % processes) // processes)


def engine_here(
    model: ModelConfig, tokenizer: LoadedTokenizer, config: EngineConfig, texts: Sequence[TokenArray] = ()
) -> Engine:
    """Loads a model on one device. Returns its engine, in this process. Raises `BatchgenError`."""
    with quiet():  # torchao writes warnings when it is imported
        import torch

        from batchgen.engine.engine import Engine  # imports torch
        from batchgen.kernels.build import compiling
        from batchgen.model.checks.device_check import check_device
        from batchgen.model.loader import load_model, pick_device

    watch_memory()
    with _LOADING, compiling():
        verdict = check_device(model, pick_device(model.device), tokenizer.hf_config, config.block_size)
        loaded = load_model(model, tokenizer, config.processes, texts)
    costs = costs_file(model, tokenizer.hf_config, config, torch.get_num_threads())
    return Engine(replace(loaded, verdict=verdict), tokenizer, config, costs)


def costs_file(model: ModelConfig, hf_config: Any, config: EngineConfig, threads: int) -> Path | None:
    """Returns the file of the user's cache that holds the costs of steps of this model on this machine (`StepCosts`); None if there is no cache.

    Its name depends on the shape of the model, not on its weights, and on what decides how a step is computed.
    """
    from batchgen.model.checks.device_check import NO_SETTINGS, device_identity
    from batchgen.model.loader import pick_device

    device = pick_device(model.devices[0])
    packed = gguf_file(model)
    key = {
        "batchgen": __version__,
        "model": {name: value for name, value in hf_config.to_dict().items() if name not in NO_SETTINGS},
        "type": [
            model.dtype,
            str(getattr(hf_config, "dtype", None)),
            model.quantize,
            packed.name if packed else "",
        ],
        "task": [model.embed, model.classify],
        "device": [device_identity(device)[0], model.device_map],
        "processor": [isa.processor(), isa.instruction_set(), threads] if device.type == "cpu" else [],
        "engine": [model.compile, model.attention, model.weights, model.weight_memory, config.block_size, config.share],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
    try:
        return cache_folder() / "step-costs" / f"{digest}.json"
    except OSError:
        return None
