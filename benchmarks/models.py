"""Random-weight Llamas, and hybrids of Qwen3.5's and of Granite 4's shape, with a real byte-level BPE tokenizer, made once per work folder. Nothing is downloaded.

The tokenizer is trained on the text of Python's own standard library. Weights are drawn wide enough that greedy decoding
differs from prompt to prompt; speed does not depend on them.
"""

from __future__ import annotations

import json
import math
import shutil
import sysconfig
from pathlib import Path
from typing import Any

VOCABULARY = 8192
CONTEXT = 16_384
DTYPES = ("float32", "bfloat16")
INT8 = "int8"
"""The bfloat16 checkpoint, in each engine's own form of 8 bits."""
PRECISIONS = (*DTYPES, INT8)
WEIGHT_STD = 0.04

HYBRID = {
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""The settings that hybrids of every size have from Qwen3.5: three of four layers run the gated delta rule, with heads of its size."""

SHAPES: dict[str, dict[str, Any]] = {
    "30m": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1408,
    },
    "0.3b": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2816,
    },
    "hybrid-30m": HYBRID | {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "intermediate_size": 1152,
    },
    "hybrid-0.3b": HYBRID | {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "intermediate_size": 2304,
    },
    "mamba2-30m": {
        "model_type": "granitemoehybrid",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "attention_multiplier": 64**-0.5,
        "position_embedding_type": "nope",
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": 1152,
        "shared_intermediate_size": 1152,
    },
}  # fmt: skip
"""A Llama unless `model_type` says otherwise."""

GPU_CONFIGS: dict[str, dict[str, Any]] = {
    "8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shaped like Llama-3.1-8B and Qwen2.5-0.5B; the tiny one shows that a benchmark runs."""


def train_tokenizer(vocabulary: int = VOCABULARY, files: int = 400) -> Any:
    """A byte-level BPE tokenizer without a chat template, so that prompts are taken as raw text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(
        path for path in library.rglob("*.py") if "site-packages" not in path.parts and "test" not in path.parts
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train([str(path) for path in sources[:files]], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def save_model(folder: Path, shape: dict[str, Any], tokenizer: Any, dtype: str) -> None:
    """Writes a model of this shape. The weights are the same each time, rounded to `dtype`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        **({"model_type": "llama"} | shape),
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:  # filters of convolutions stay as they are
            torch.nn.init.normal_(parameter, std=WEIGHT_STD)
    # Written beside its place and renamed, so that an interrupted run leaves no incomplete model.
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(getattr(torch, dtype)).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def model_folder(work: Path, name: str, dtype: str) -> Path:
    """Returns the model's folder under `work`. Makes the model if it is missing."""
    folder = work / "models" / f"{name}-{dtype}"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_model(folder, SHAPES[name], shared_tokenizer(work), dtype)
    return folder


def random_model(name: str, device: str, dtype: str) -> Any:
    """Returns a model of `GPU_CONFIGS`, made on the device itself: nothing is read from a disk or copied."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**GPU_CONFIGS[name], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=WEIGHT_STD)
    return model.eval()


def gpu_model_folder(work: Path, name: str, device: str) -> Path:
    """Returns the folder of a model of `GPU_CONFIGS` in bfloat16, with a tokenizer whose ids are the first of its vocabulary. Makes the model if it is missing."""
    folder = work / "models" / f"{name}-bfloat16"
    if not (folder / "config.json").exists():
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        random_model(name, device, "bfloat16").save_pretrained(unfinished)
        tokenizer = train_tokenizer(1024, files=40) if name == "tiny" else shared_tokenizer(work)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def shared_tokenizer(work: Path) -> Any:
    """The same tokenizer for every model of a work folder, so that they all run the same workloads."""
    from transformers import PreTrainedTokenizerFast

    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        train_tokenizer().save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def parameters(folder: Path) -> int:
    """Parameters of the checkpoint, from the header of its weights."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                count += math.prod(entry["shape"])
    return count
