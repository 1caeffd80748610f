"""Loads a transformers model with our attention in it, and learns the shape of its KV by running two tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from batchgen.config import ModelConfig
from batchgen.engine.architectures import check_architecture
from batchgen.engine.attention.base import NAME, LayerOptions, register
from batchgen.engine.kv_cache import LayerShape
from batchgen.errors import ModelError
from batchgen.prompts.tokenizer import LoadedTokenizer, quiet


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run packed steps."""

    module: Any
    """The transformers model."""
    device: torch.device
    dtype: torch.dtype
    layers: dict[int, LayerShape]
    """KV of each attention layer, by layer index."""
    vocab_size: int
    """Width of the logits."""


def load_model(config: ModelConfig, text: LoadedTokenizer) -> LoadedModel:
    """Loads the weights. Raises `ModelError` for a model that cannot be loaded or is not supported."""
    check_architecture(text.hf_config)
    register()
    device = pick_device(config.device)
    dtype: Any = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        with quiet():
            module, found = AutoModelForCausalLM.from_pretrained(
                config.model,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                dtype=dtype,
                attn_implementation=NAME,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as e:
        reason = " ".join(str(e).split())
        raise ModelError(f"the model {config.model!r} cannot be loaded: {reason[:300]}") from e
    missing = sorted(found["missing_keys"])
    if missing:  # transformers would go on with random numbers there
        raise ModelError(f"the weights of {config.model!r} lack {len(missing)} tensors, {missing[0]} the first")
    return prepare_model(module.to(device))


def prepare_model(module: Any) -> LoadedModel:
    """A transformers model already in memory, its attention switched to ours."""
    check_architecture(module.config)
    register()
    if module.config._attn_implementation != NAME:
        module.set_attn_implementation(NAME)
    module.eval()
    parameter = next(module.parameters())
    layers, vocab_size = _probe(module, parameter.device)
    return LoadedModel(module, parameter.device, parameter.dtype, layers, vocab_size)


def pick_device(name: str) -> torch.device:
    """The device of `--device`. Raises `ModelError` for one that this machine does not have."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} CUDA device(s)"
        raise ModelError(f"--device {name}: this machine has {found}", "use --device auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(f"--device {name}: this machine has no MPS device", "use --device auto or cpu")
    return device


class _Probe:
    """Stands in for a step's attention: notes each layer's shapes, and attends plainly."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def __call__(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTV: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        if layer in self.layers:
            raise ModelError(f"the model runs attention twice in layer {layer}, which is not supported")
        self.layers[layer] = LayerShape(k_KTD.shape[0], k_KTD.shape[2], v_KTV.shape[2])
        group = q_HTD.shape[0] // k_KTD.shape[0]
        k, v = k_KTD.repeat_interleave(group, 0), v_KTV.repeat_interleave(group, 0)
        out = torch.nn.functional.scaled_dot_product_attention(q_HTD, k, v, is_causal=True, scale=options.scale)
        return out.transpose(0, 1)


@torch.inference_mode()
def _probe(module: Any, device: torch.device) -> tuple[dict[int, LayerShape], int]:
    probe = _Probe()
    tokens = torch.tensor([[0, 1]], device=device)
    output = module(
        input_ids=tokens, position_ids=torch.tensor([[0, 1]], device=device), use_cache=False, step_attention=probe,
        logits_to_keep=torch.tensor([1], device=device),
    )  # fmt: skip
    if not probe.layers:
        raise ModelError(f"{type(module).__name__} never calls attention")
    if output.logits.shape[:2] != (1, 1):
        raise ModelError(f"{type(module).__name__} cannot give the logits of chosen tokens alone")
    return probe.layers, output.logits.shape[-1]
