"""Reports on a model without its weights: `batchgen models`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchgen.config import ModelConfig
from batchgen.dry_run import computed_dtype, kv_bytes_per_token
from batchgen.model.architectures import (
    REFUSED,
    VERIFIED,
    VERIFIED_ON,
    WRAPPERS,
    check_architecture,
    context_note,
    is_verified,
)
from batchgen.model.weights.variants import check_quantization
from batchgen.model.weights.weight_size import MemoryTable, memory_table
from batchgen.model_files import check_weight_files, has_tokenizer
from batchgen.prompts import load_tokenizer
from batchgen.prompts.images import FAMILIES, unshown
from batchgen.prompts.tokenizer import checkpoint_dtype, context_length_of, load_config, text_config


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Whether a model would run, judged by its configuration and tokenizer only."""

    model: str
    model_type: str
    verified: bool
    """Whether its architecture is on the verified list; another one is checked against transformers when it is loaded."""
    context_length: int
    context_note: str | None
    """Why the context is shorter than the configuration says; None if it is not."""
    dtype: str
    """The dtype of the checkpoint."""
    computed_dtype: str
    """The dtype that a run on this machine computes in."""
    layers: int
    vocab_size: int
    chat_template: bool | None
    """None for a folder without tokenizer files."""
    kv_bytes_per_token: int
    """Bytes of KV per token in `computed_dtype`; 0 if the configuration does not say."""
    images: bool
    """Whether the model is shown the images of rows."""
    memory: MemoryTable | None = None
    """What the weights would take in `computed_dtype`, and what fits this machine; None if the files are not known."""


def report_model(config: ModelConfig) -> ModelReport:
    """Reads a model's configuration and tokenizer, never its weights. A folder may lack the tokenizer. Raises `ModelError` if the model would be refused."""
    whole = has_tokenizer(config)
    check_weight_files(config, needed=False, tokenizer=whole)
    tokenizer = load_tokenizer(config) if whole else None
    hf_config = load_config(config) if tokenizer is None else tokenizer.hf_config
    check_quantization(config.model, hf_config)
    check_architecture(hf_config)
    text = text_config(hf_config)
    computed = computed_dtype(config, hf_config)
    return ModelReport(
        model=config.model,
        model_type=str(getattr(hf_config, "model_type", "unknown")),
        verified=is_verified(hf_config),
        context_length=tokenizer.context_length if tokenizer else context_length_of(config, hf_config, None),
        context_note=context_note(hf_config),
        dtype=checkpoint_dtype(hf_config),
        computed_dtype=computed,
        layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        vocab_size=tokenizer.vocab_size if tokenizer else int(getattr(text, "vocab_size", 0) or 0),
        chat_template=None if tokenizer is None else tokenizer.hf_tokenizer.chat_template is not None,
        kv_bytes_per_token=kv_bytes_per_token(hf_config, computed),
        images=unshown(hf_config) is None,
        memory=memory_table(config, hf_config, computed),
    )


def known_models() -> dict[str, Any]:
    """The model types that are verified, with the versions of transformers, those that are shown images, and those that are refused, with the reason."""
    return {
        "verified": sorted(VERIFIED),
        "multimodal": sorted(WRAPPERS),
        "images": sorted(FAMILIES),
        "refused": dict(sorted(REFUSED.items())),
        "transformers": list(VERIFIED_ON),
    }
