"""Runs steps on one CUDA device. The inputs lie in a static buffer that one asynchronous copy fills; the forward is a CUDA graph if that pays.

Nothing here waits for the device, except the capture of a graph. Tests run this code on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.fx.experimental import _config as shapes

from batchgen.attention.kv_cache import KVCache
from batchgen.errors import in_one_line, is_out_of_memory
from batchgen.kernels.device_parts import running
from batchgen.kernels.transfer import staged
from batchgen.model.cuda_graphs import CAPTURE_AFTER, Capture, CudaCapture, Graphs, Shape, full_steps_pay
from batchgen.model.loaded_model import LoadedModel
from batchgen.scheduling.batch import Limits, PackedSpans

if TYPE_CHECKING:
    from batchgen.attention.triton_backend import DeviceAttention


class Compiled:
    """Calls the model's compiled forward, or, if it cannot be compiled, the model as it is.

    torch would compile sizes of 0 and 1 as constants, so callers pad token ids and wanted logits to 2. Sizes that happen to be equal
    at the compilation may differ later; the model's own numbers (scales, epsilons) are compiled as constants.
    """

    def __init__(self, module: Any, notes: list[str]) -> None:
        """Messages for the user are added to `notes`."""
        self._module = module
        self._compiled: Any = torch.compile(module, fullgraph=True, dynamic=True)
        self._notes = notes

    def __call__(self, **inputs: Any) -> Any:
        if self._compiled is not None:
            from torch._dynamo import config  # not at the top: this import takes as long as that of torch

            try:
                with shapes.patch(use_duck_shape=False), config.patch(specialize_float=True):  # type: ignore[attr-defined]
                    return self._compiled(**inputs)
            except Exception as e:  # whatever a compiler may raise
                if is_out_of_memory(e):
                    raise
                self._compiled = None
                self._notes.append(
                    f"--compile on: torch.compile fails on this model, which runs without: {in_one_line(e)}"
                )
        return self._module(**inputs)


OLDEST = (8, 0)
"""Lowest compute capability that batchgen's kernels run on."""


def device_step(model: LoadedModel, cache: KVCache, limits: Limits, notes: list[str]) -> DeviceStep | None:
    """Returns what runs the model's steps on one CUDA device with Triton's kernels; None if plain torch attends instead."""
    if model.device.type != "cuda" or model.spread or model.attention == "torch" or not model.verdict.uses("triton"):
        return None
    if model.recurrent is not None:
        notes.append(f"{model.device} runs plain torch, which is slower: the kernels do not have recurrent layers yet")
        return None
    from batchgen.attention.triton_backend import DeviceAttention, obstacle

    if torch.cuda.get_device_capability(model.device) < OLDEST:
        why = "the kernels need a GPU like the A100 or newer"
    else:
        why = obstacle(cache, model.device)
    if why:
        notes.append(f"{model.device} runs plain torch, which is slower: {why}")
        return None
    attention = DeviceAttention(cache, limits.max_batch_tokens, model.device, model.group)
    return DeviceStep(model, attention, limits, notes, partial(CudaCapture, model.device))


class DeviceStep:
    """Runs the packed spans of a step. Steps of one shape have their inputs at the same addresses."""

    def __init__(
        self,
        model: LoadedModel,
        attention: DeviceAttention,
        limits: Limits,
        notes: list[str],
        new_capture: Callable[[], Capture],
    ) -> None:
        """`new_capture`: see `Graphs`. Messages for the user are added to `notes`."""
        self.attention = attention
        self._device = model.device
        compiled = model.compile == "on" and limits.max_batch_tokens > 1
        self._model = Compiled(model.module, notes) if compiled else model.module
        self._smallest = 2 if compiled else 0
        self._graphs: Graphs | None = None
        if model.compile != "off" and model.verdict.uses("graphs"):
            max_logits, after = max(self._smallest, limits.batch_size), 0 if compiled else CAPTURE_AFTER
            full = full_steps_pay(model.num_parameters, len(model.layers), limits.max_batch_tokens)
            self._graphs = Graphs(new_capture, limits.max_batch_tokens, max_logits, notes, after=after, full_steps=full)
        # A step's token ids, the places of its wanted logits, and, of tokens that only the device knows, their places and sampler indices.
        self._inputs = torch.zeros(4 * limits.max_batch_tokens + 1, dtype=torch.int64, device=model.device)
        self._logits: torch.Tensor | None = None
        self._generation = attention.generation

    def __call__(self, packed: PackedSpans, last: torch.Tensor | None) -> list[torch.Tensor]:
        """The wanted logits [N, vocabulary], if any, valid until the next call. `last`: see `Runner.run`."""
        wanted = len(packed.logits_places)
        needed = Shape(max(len(packed.tokens), self._smallest), max(wanted, self._smallest))
        graphs = self._graphs
        shape = graphs.shape_of(*needed) if graphs is not None else None
        if graphs is None or shape is None:
            self._fill(needed, packed, last)
            logits = self._forward(needed)
        else:
            if not graphs.captured and shape.tokens < graphs.largest.tokens:
                # The largest comes first, because the others can use its memory.
                self._fill(graphs.largest, packed, last)
                graphs.capture(graphs.largest, partial(self._keep, graphs.largest))
            self._fill(shape, packed, last)
            graphs.run(shape, partial(self._keep, shape))
            assert self._logits is not None
            logits = self._logits
        return [logits[:wanted]] if wanted else []

    def _fill(self, shape: Shape, packed: PackedSpans, last: torch.Tensor | None) -> None:
        """Sends the step's plan and inputs to the device, padded to the shape with tokens 0, which write no KV, and logits that nobody reads."""
        self.attention.plan(packed.spans, shape.tokens)
        if self._graphs is not None and self.attention.generation != self._generation:
            self._graphs.void()
        self._generation = self.attention.generation
        first = _logits_at(shape)
        tokens, wanted = packed.tokens, packed.logits_places
        places, indices = (
            (packed.pending_places, packed.pending_sampler_indices) if last is not None else (_NONE, _NONE)
        )
        values = np.zeros(first + shape.logits + 2 * len(places), dtype=np.int64)
        values[: len(tokens)] = tokens
        values[first : first + len(wanted)] = wanted
        values[first + shape.logits :] = np.concatenate([places, indices])
        inputs = self._inputs[: len(values)]
        inputs.copy_(staged(values, self._device), non_blocking=True)
        if last is not None and len(places):
            to, of = inputs[first + shape.logits :].chunk(2)
            inputs[: shape.tokens].index_copy_(0, to, last.index_select(0, of))

    def _forward(self, shape: Shape) -> torch.Tensor:
        first = _logits_at(shape)
        with running():
            output = self._model(
                input_ids=self._inputs[: shape.tokens].unsqueeze(0),
                position_ids=self.attention.positions[: shape.tokens].unsqueeze(0),
                use_cache=False,
                step_attention=self.attention,
                logits_to_keep=self._inputs[first : first + shape.logits],
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _keep(self, shape: Shape) -> None:
        """Runs the forward and copies the logits to a buffer that all graphs share, so that the next graph can reuse this graph's private memory."""
        logits = self._forward(shape)
        if self._logits is None:
            assert self._graphs is not None
            self._logits = logits.new_empty((self._graphs.largest.logits, logits.shape[1]))
        self._logits[: shape.logits].copy_(logits)


def _logits_at(shape: Shape) -> int:
    """Returns where the places of logits begin in the inputs: after the token ids, at a multiple of 16 bytes, which compiled code requires."""
    return shape.tokens + shape.tokens % 2


_NONE = np.zeros(0, dtype=np.int64)
