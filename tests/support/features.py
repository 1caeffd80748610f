"""The features that the tested shapes of an architecture use, found by running two tokens."""

from contextlib import nullcontext
from inspect import unwrap
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from batchgen.attention.base import LayerOptions
from batchgen.kernels.renaming import names_in
from batchgen.model.architectures import INDEXED
from batchgen.state.mixers import StateProbe
from support.models import packed_model
from support.shapes import SHAPES

MIXERS = {
    "gated delta rule": {"torch_chunk_gated_delta_rule"},
    "Kimi delta attention": {"chunk_kimi_delta_attention"},
    "Mamba2": {"mamba2_chunk_scan"},
    "Mamba": {"MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"},
    "RG-LRU": {"RecurrentGemmaRglru"},
    "lightning attention": {"MiniMaxLightningAttention"},
    "compressed convolutional attention": {"ZayaCCAProjection"},
}
"""The mixers by the names of their classes, or of the functions that their forwards call. They have forwards of batchgen."""
ROPES = {
    "dynamic": "dynamic NTK", "linear": "linear rope", "llama3": "Llama 3 rope", "longrope": "LongRoPE",
    "proportional": "proportional rope", "yarn": "YaRN",
}  # fmt: skip


class _Asked:
    """Replaces the attention of a step and records the options of each layer."""

    def __init__(self) -> None:
        self.options: list[LayerOptions] = []
        self.widths: set[tuple[int, int]] = set()

    def __call__(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTV: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        self.options.append(options)
        self.widths.add((k_KTD.shape[2], v_KTV.shape[2]))
        return q_HTD.new_zeros((q_HTD.shape[1], q_HTD.shape[0], v_KTV.shape[2]))


@torch.inference_mode()
def features_of(shape: str) -> set[str]:
    model = packed_model(shape).module
    asked = _Asked()
    tokens = torch.tensor([[0, 1]])
    recurrent = packed_model(shape).recurrent
    with recurrent.running(StateProbe()) if recurrent else nullcontext():
        model(
            input_ids=tokens, position_ids=tokens, use_cache=False, step_attention=asked,
            logits_to_keep=torch.tensor([1]),
        )  # fmt: skip
    config = model.config
    alibi = config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False)
    biased = alibi or config.model_type == "doge"  # their bias is part of wider keys
    ours = [type(part) for part in model.modules() if "forward" in vars(part)]
    names = set().union(*({kind.__name__} | names_in(unwrap(kind.forward)) for kind in ours))
    mixers = {name: not names.isdisjoint(marks) for name, marks in MIXERS.items()}
    sliding = [o.sliding_window is not None for o in asked.options]
    found = {
        "alternating sliding windows": any(sliding) and not all(sliding),
        "sliding window": bool(sliding) and all(sliding),
        "soft cap": any(o.softcap is not None for o in asked.options),
        "sinks": any(o.sinks is not None for o in asked.options),
        "MLA": "kv_lora_rank" in vars(config),
        "K and V of different widths": not biased and any(k != v for k, v in asked.widths),
        "ALiBi": alibi,
        "a dynamic mask": config.model_type == "doge",
        "shared KV": bool(getattr(config, "num_kv_shared_layers", 0)),
        **mixers,
        "short convolution": "causal_conv1d_fn" in names and not any(mixers.values()),
        "an indexer": config.model_type in INDEXED - {"doge"},
        "n-gram embeddings": bool(getattr(config, "ple_layer_ids", None)),
        "attention twice in a layer": config.model_type == "diffllama",
        "no attention": not asked.options,
        "experts": any("expert" in name for name, _ in model.named_modules()),
    }
    return {name for name, there in found.items() if there} | (set() if alibi else _positions(config))


def _positions(config: Any) -> set[str]:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return {"partial rope" if getattr(config, "rotary_dim", None) else "absolute positions"}
    parts = [p for p in (rope, *rope.values()) if isinstance(p, dict)]
    kinds = {ROPES[p["rope_type"]] for p in parts if p.get("rope_type", "default") != "default"}
    if any(p.get("partial_rotary_factor", 1.0) != 1.0 for p in parts):
        kinds.add("partial rope")
    return kinds


def features_of_all() -> dict[str, list[str]]:
    """By `model_type`, the features of all its shapes, sorted."""
    found: dict[str, set[str]] = {}
    for shape in sorted(SHAPES):
        found.setdefault(shape.split("/")[0], set()).update(features_of(shape))
    return {name: sorted(features, key=str.lower) for name, features in found.items()}


def candidates() -> set[str]:
    """The text architectures of the installed transformers that declare `_supports_attention_backend`."""
    return {name for name in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if _declares_support(name) and _is_text(name)}


def _declares_support(name: str) -> bool:
    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]], "_supports_attention_backend", False))


def _is_text(name: str) -> bool:
    parts = set(CONFIG_MAPPING[name].sub_configs) - {"text_config", "attn_config", "ffn_config"}
    return not parts and name != "fuyu"  # fuyu reads images without an encoder
