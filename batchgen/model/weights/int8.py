"""`--quantize int8`: packs a loaded model's linear layers in 8 bits, and measures on some texts what that changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from batchgen.attention.kv_cache import KVCache
from batchgen.config import EngineConfig, ModelConfig
from batchgen.errors import ModelError
from batchgen.kernels.decoder_layers import narrow_layers
from batchgen.kernels.ops import KernelLinear
from batchgen.kernels.quantization import Int8Packing, from_layers, quantize_linear
from batchgen.model.loaded_model import LoadedModel, with_blocks
from batchgen.model.runner import Runner
from batchgen.model.weights.quantized import bytes_of, is_int8
from batchgen.model.weights.variants import quant_method
from batchgen.request import TokenArray
from batchgen.scheduling.batch import Limits, ScheduledBatch, ScheduledSpan
from batchgen.scheduling.rehearsal import sequences_of
from batchgen.state.cache import StateCache
from batchgen.stats import counted

TEXTS = 4
"""Number of a job's rows on which the change is measured."""
PROMPT_TOKENS = 64
"""Only the last tokens of each prompt run."""
COMPARED_TOKENS = 16
"""Logits are compared after the last tokens of each prompt, and after as many tokens that greedy decoding adds."""


def check_int8(config: ModelConfig, hf_config: Any, device: torch.device) -> None:
    """Raises `ModelError` if the weights cannot be packed in 8 bits."""
    if config.quantize == "none":
        return
    if device.type != "cpu" or config.device_map is not None:
        raise ModelError("--quantize int8 is for the CPU so far", "leave it out, or use --device cpu")
    if quant_method(hf_config) == "torchao":
        raise ModelError(f"the model {config.model!r} is quantized already (torchao)", "leave --quantize out")


def no_kernels(notes: Sequence[str]) -> ModelError:
    """Returns the error for a model that is to be quantized without batchgen's kernels. `notes` say why they are missing."""
    return ModelError(
        f"--quantize int8 needs batchgen's own kernels: {notes[0].partition(';')[0]}", "leave --quantize out"
    )


@torch.inference_mode()
def quantize(model: LoadedModel, texts: Sequence[TokenArray], scales: dict[str, torch.Tensor]) -> LoadedModel:
    """Packs the linear layers of a model, in place, and compares it with the unquantized one on the texts. `scales`: see `checkpoint_scales`.

    Raises `ModelError` if nothing can be packed.
    """
    began = time.perf_counter()
    texts = [text[-PROMPT_TOKENS:] for text in texts if len(text)][:TEXTS]
    whole, before = _continued(model, texts) if texts else ([], [])
    packing = quantize_linear(model.module, scales)
    if not packing.layers:
        raise ModelError("--quantize int8: none of the model's linear layers can be packed in 8 bits", "leave it out")
    # Layers that could not run in one call before can now.
    narrowed = narrow_layers(model.module, model.layers, model.states)
    after = _logits(model, whole) if whole else []
    found = _compared(model.module, packing, before, after, time.perf_counter() - began)
    return replace(model, notes=(*model.notes, _note(found)), quantization=found, narrowed_from=narrowed)


def _continued(model: LoadedModel, texts: Sequence[TokenArray]) -> tuple[list[TokenArray], list[torch.Tensor]]:
    """Returns the texts, each with the likeliest `COMPARED_TOKENS` tokens after it, and for each the logits [N, V] at the compared positions."""
    steps = _Steps(model, [len(text) + COMPARED_TOKENS for text in texts])
    first = [max(0, len(text) - COMPARED_TOKENS) for text in texts]
    found = [[rows] for rows in steps.run(texts, [0] * len(texts), first)]
    for _ in range(COMPARED_TOKENS):
        starts = [len(text) for text in texts]
        tokens = [int(rows[-1][-1].argmax()) for rows in found]
        texts = [np.append(text, np.int32(token)) for text, token in zip(texts, tokens, strict=True)]
        for rows, more in zip(found, steps.run(texts, starts, starts), strict=True):
            rows.append(more)
    return list(texts), [torch.cat(rows) for rows in found]


def _logits(model: LoadedModel, texts: Sequence[TokenArray]) -> list[torch.Tensor]:
    """Returns the logits [N, V] at the compared positions of texts that `_continued` has made, from one step."""
    steps = _Steps(model, [len(text) for text in texts])
    return steps.run(texts, [0] * len(texts), [max(0, len(text) - 2 * COMPARED_TOKENS) for text in texts])


class _Steps:
    """Runs steps of a few texts, with a small KV cache of their own."""

    def __init__(self, model: LoadedModel, sizes: Sequence[int]) -> None:
        self._block = EngineConfig().block_size
        self._sizes = sizes
        self._model = with_blocks(model, self._block)
        blocks = sum(-(-size // self._block) for size in sizes)
        cache = KVCache(self._model.layers, blocks, self._block, model.dtype)
        states = StateCache(model.states, len(sizes), model.dtype) if model.states else None
        limits = Limits(batch_size=len(sizes), max_batch_tokens=sum(sizes), max_prefill_tokens=sum(sizes))
        self._runner = Runner(self._model, cache, limits, [], states)

    def run(self, texts: Sequence[TokenArray], starts: Sequence[int], first: Sequence[int]) -> list[torch.Tensor]:
        """Runs each text from position `start` to its end. Returns the logits [N, V] after its tokens from `first` on, in float32."""
        spans = sequences_of(texts, self._sizes, self._block)
        scheduled = [
            ScheduledSpan(span, start, len(text), begin, read=span.state_slot if start else -1)
            for span, text, start, begin in zip(spans, texts, starts, first, strict=True)
        ]
        logits = self._runner.run(ScheduledBatch.of(scheduled))
        assert logits is not None
        counts = [len(text) - begin for text, begin in zip(texts, first, strict=True)]
        return list(torch.split(logits.float(), counts))


def _compared(
    module: Any, packing: Int8Packing, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], seconds: float
) -> dict[str, Any]:
    """Returns the figures of a run about what `--quantize` did (docs/reference/results.md)."""
    kl, equal, tokens = 0.0, 0, 0
    for plain, packed in zip(before, after, strict=True):
        p, q = plain.log_softmax(-1), packed.log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum(-1).double().sum())
        equal += int((plain.argmax(-1) == packed.argmax(-1)).sum())
        tokens += len(plain)
    held = sum(part.bytes for part in module.modules() if isinstance(part, KernelLinear))
    return {
        "method": "int8",
        "layers": packing.layers,
        "weights": round(packing.weights / packing.all_weights, 6),
        "weight_bytes": held + sum(map(bytes_of, module.parameters())),
        "rows": len(before),
        "tokens": tokens,
        "mean_kl": max(0.0, round(kl / tokens, 6)) if tokens else None,  # rounding can make the sum negative
        "equal_tokens": round(equal / tokens, 6) if tokens else None,
        "seconds": round(seconds, 4),
    }


def _note(found: dict[str, Any]) -> str:
    """Returns the sentence for the user about these figures."""
    layers = f"int8: {counted(found['layers'], 'linear layer')}"
    if found["mean_kl"] is None:
        return f"{layers}; what that changes was not measured, because there was no text"
    return (
        f"{layers}; against the unquantized model, on {counted(found['tokens'], 'token')} of {counted(found['rows'], 'row')}: "
        f"mean KL divergence {found['mean_kl']:.4f} nats, {found['equal_tokens']:.1%} of the likeliest tokens are the same "
        f"({found['seconds']:.1f} s)"
    )


def checkpoint_scales(hf_config: Any, files: Sequence[Path] | None) -> dict[str, torch.Tensor]:
    """Returns the scales [out, 1] of a W8A8 checkpoint's output columns, by `from_layers` of the layers' names; empty for other checkpoints."""
    if files is None or not is_int8(hf_config):
        return {}
    found = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name.endswith(".weight_scale"):
                    found[from_layers(name.removesuffix(".weight_scale"))] = file.get_tensor(name)
    return found
