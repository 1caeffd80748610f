"""A model ready to run packed steps: the module, and what the engine knows of its attention, its KV and its states."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.attention.base import LayerOptions
from batchgen.attention.cpu_backend import VECTOR, storage
from batchgen.attention.kv_cache import LayerShape, devices_of
from batchgen.kernels.build import DTYPES
from batchgen.kernels.transfer import put
from batchgen.model.checks.device_check import Verdict
from batchgen.model.long_rope import LongRope
from batchgen.model.vision import Vision
from batchgen.model.weights.streamed import StreamedWeights
from batchgen.state.cache import StateShape
from batchgen.state.mixers import RecurrentLayers


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """How a layer attends. Attention kernels are compiled for this."""

    heads: int
    """Key/value heads."""
    group: int
    """Query heads per key/value head."""
    k_size: int
    v_size: int
    dtype: torch.dtype
    """The type of the queries."""
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.dtype | None
    """The type of the sinks; None without sinks."""

    def options(self, sinks: torch.Tensor | None) -> LayerOptions:
        return LayerOptions(self.scale, self.sliding_window, self.softcap, sinks)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run packed steps."""

    module: Any
    """The transformers model."""
    device: torch.device
    """Where token ids go in and logits come out; each layer says where its KV lies."""
    dtype: torch.dtype
    """Of keys and values: what the model computes in, also where its weights are quantized."""
    layers: dict[int, LayerShape]
    """KV of each attention layer as it is stored, by layer index."""
    vocab_size: int
    """Width of the logits."""
    states: dict[int, StateShape] = field(default_factory=dict)
    """What each recurrent layer keeps of a sequence, by layer index."""
    recurrent: RecurrentLayers | None = None
    """The recurrent layers, if there are any. Each step gives them its states."""
    group: int = 1
    """The largest number of query heads per key/value head."""
    kinds: tuple[AttentionKind, ...] = ()
    """The ways in which its layers attend, each once."""
    sliding_window: int | None = None
    """The widest sliding window if every layer has one: positions behind it are never read again."""
    spread: bool = False
    """Whether the parameters lie on several devices."""
    kernels: ctypes.CDLL | None = None
    """batchgen's kernels for the CPU; None if they are switched off or cannot be compiled."""
    narrowed_from: int | None = None
    """The layer from which on all tokens whose logits are not wanted can be left out; None if no layer can."""
    long_rope: LongRope | None = None
    """Changes the frequencies of LongRoPE; None without it."""
    compile: str = "auto"
    """On one CUDA device: off, steps run without graphs; auto, as CUDA graphs if that pays; on, always as graphs, with `torch.compile`."""
    attention: str = "auto"
    """torch: plain torch; triton: batchgen's kernels for CUDA, or an error; auto: batchgen's kernels if the device has some."""
    vision: Vision | None = None
    """Shows images to the model; None if it is not shown any."""
    verdict: Verdict = field(default_factory=Verdict)
    """The parts that are switched off on this device."""
    notes: tuple[str, ...] = ()
    """Messages for the user about the loading, a sentence each."""
    weight_bytes: int = 0
    """Bytes of all weights, also of those that are streamed."""
    streamed: StreamedWeights | None = None
    """What reads the weights again in every step; None if they stay in memory."""
    quantization: dict[str, Any] | None = None
    """What `--quantize` did, for the figures of a run; None without."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters in memory, without those that are packed."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where KV and states lie, the first layer's device first."""
        return tuple(dict.fromkeys([*devices_of(self.layers), *(s.device for s in self.states.values())]))


def with_blocks(model: LoadedModel, block_size: int) -> LoadedModel:
    """Returns the model for an engine with this block size: with its KV in the layout of the kernels, or without kernels if they cannot run."""
    on_cpu = all(shape.device.type == "cpu" for shape in model.layers.values())
    if (
        model.kernels is None
        or model.attention == "torch"
        or not on_cpu
        or model.dtype not in DTYPES
        or block_size % VECTOR
    ):
        return replace(model, kernels=None)
    return replace(model, layers=storage(model.layers, model.dtype))


def logits_at(places: NDArray[np.int64], device: torch.device, spread: bool) -> torch.Tensor | list[int]:
    """Returns the argument `logits_to_keep` for the logits after these tokens of the packed batch.

    It is a list if the model is spread over devices, because hooks move tensors to the first device and the head may be on the last.
    """
    return places.tolist() if spread else put(places, device)
