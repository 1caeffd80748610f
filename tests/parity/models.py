"""Tiny random models of every verified architecture, and the two sides that parity compares."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchgen.config import EngineConfig
from batchgen.engine.engine import Engine
from batchgen.engine.loading import prepare_model
from batchgen.prefix import plan_prefixes
from batchgen.prompts import LoadedTokenizer
from batchgen.request import Request, Result, SamplingParams, row_digest, row_key

VOCAB = 199
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WINDOW = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
# By `model_type`; what follows a slash is another shape of the same. Every kind of layer must be among the two.
SHAPES: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "arcee": {},
    "biogpt": {},
    "cohere": {},
    "cohere2": WINDOW,
    "ernie4_5": {},
    "exaone4": WINDOW,
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "glm": {},
    "glm4": {},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_oss": EXPERTS | WINDOW | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0},
    "granitemoe": EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "llama": {},
    "llama/mha": {"num_key_value_heads": 4},
    "llama/mqa": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama/llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "ministral": WINDOW,
    "mistral": {"sliding_window": None},
    "mistral/window": {"sliding_window": 24},
    "mixtral": EXPERTS | {"sliding_window": None},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": None},
    "phi3/window": {"sliding_window": 24},
    "qwen2": {},
    "qwen2/window": {"use_sliding_window": True, "max_window_layers": 1} | WINDOW,
    "qwen2_moe": EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 32},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 24},
}  # fmt: skip


class Numbers:
    """A tokenizer whose text is the token ids."""

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[None]:
        return [None for _ in tokens]

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(token)


def build(model_type: str, **changes: Any) -> Any:
    """A random float32 model; the same for the same arguments."""
    config = AutoConfig.for_model(model_type.split("/")[0], **(COMMON | SHAPES[model_type] | changes))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@cache
def reference_model(model_type: str) -> Any:
    return build(model_type)


@cache
def packed_model(model_type: str) -> Any:
    return prepare_model(build(model_type))


def text(context_length: int = 512, eos: tuple[int, ...] = ()) -> LoadedTokenizer:
    return LoadedTokenizer(
        tokenizer=Numbers(), hf_config=None, context_length=context_length, eos_token_ids=eos, vocab_size=VOCAB
    )


def make_requests(prompts: list[list[int]], max_tokens: list[int], **params: Any) -> list[Request]:
    requests, seen = [], {}
    for row, (prompt, most) in enumerate(zip(prompts, max_tokens, strict=True)):
        sampling = SamplingParams(max_tokens=most, **params)
        tokens = np.array(prompt, dtype=np.int32)
        digest = row_digest(tokens, sampling)
        seen[digest] = seen.get(digest, -1) + 1
        requests.append(
            Request(row=row, tokens=tokens, params=sampling, max_tokens=most, key=row_key(digest, seen[digest]))
        )
    return requests


def engine_for(model: Any, eos: tuple[int, ...] = (), **config: Any) -> Engine:
    options = {"kv_memory": "64MiB", "debug": True} | config
    return Engine(model, text(eos=eos), EngineConfig(**options))


def run(engine: Engine, requests: list[Request], share: bool = True) -> list[Result]:
    """Results in the order of the requests."""
    plan = plan_prefixes([r.tokens for r in requests], engine.config.chunk_size, share=share)
    results: dict[int, Result] = {}
    engine.generate(requests, plan, on_result=lambda r: results.__setitem__(r.row, r))
    return [results[r.row] for r in requests]


@torch.inference_mode()
def generate(model: Any, prompt: list[int], max_tokens: int, eos: tuple[int, ...] = ()) -> list[int]:
    """transformers' greedy `generate` on one prompt, the mask given so that no token passes for padding."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
        eos_token_id=list(eos) or None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()
