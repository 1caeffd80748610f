"""A model under `torch.compile`: compiled once, for steps of all sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import config
from torch.fx.experimental import _config as shapes

from batchgen.errors import is_out_of_memory


class Compiled:
    """Calls the model's compiled forward, or where it cannot be compiled the model as it is.

    A dimension of 1 (or 0) would be compiled for itself: callers pad token ids and wanted logits to 2. Sizes that happen to be equal
    when it is compiled may differ later; a model's own numbers (scales, epsilons) are constants.
    """

    def __init__(self, module: Any, notes: list[str]) -> None:
        """What the user should know goes into `notes`."""
        self._module = module
        self._compiled: Any = torch.compile(module, fullgraph=True, dynamic=True)
        self._notes = notes

    def __call__(self, **inputs: Any) -> Any:
        if self._compiled is not None:
            try:
                with shapes.patch(use_duck_shape=False), config.patch(specialize_float=True):  # type: ignore[attr-defined]
                    return self._compiled(**inputs)
            except Exception as e:  # whatever a compiler may raise
                if is_out_of_memory(e):
                    raise
                self._compiled = None
                reason = " ".join(str(e).split())[:200]
                self._notes.append(f"--compile on: torch.compile fails on this model, which runs without: {reason}")
        return self._module(**inputs)
