"""Opens what generates: here, or in processes. Torch is imported only where the engine is in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices.base import AnyEngine
from batchgen.prompts import LoadedTokenizer
from batchgen.prompts.tokenizer import quiet

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine


def open_engine(model: ModelConfig, text: LoadedTokenizer, config: EngineConfig) -> AnyEngine:
    """Loads the model on its devices. Raises `BatchgenError`."""
    if len(model.devices) == 1:
        return engine_here(model, text, config)
    from batchgen.devices.processes import start_process
    from batchgen.devices.workers import Workers

    return Workers(model, config, start_process)


def engine_here(model: ModelConfig, text: LoadedTokenizer, config: EngineConfig) -> Engine:
    """The engine of one device, in this process."""
    with quiet():  # torchao, where it is installed, has much to say
        from batchgen.engine.engine import Engine  # imports torch
        from batchgen.engine.loading import load_model

    return Engine(load_model(model, text, config.processes), text, config)
