"""The configurations of the parity tests: tiny, with every kind of layer that the architecture has.

They are listed by `model_type`. A name after a slash is another shape of the same type. Sliding windows are shorter than the tests' prompts.
"""

import copy
import random
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import SkipTest

from transformers import CONFIG_MAPPING, AutoConfig, __version__

from batchgen.model.architectures import INNER, RECURRENT
from support.params import FULL

VOCAB = 199
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,  # with tied embeddings, such a model repeats its last token whatever its attention returns
}  # fmt: skip
TOKENS = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}  # for types that do not allow None; `generate` gets its own
LAYERS = ["sliding_attention", "full_attention"]
SLIDING_WINDOW = {"sliding_window": 24, "layer_types": LAYERS}
FOUR = {"num_hidden_layers": 4}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_group": 2, "topk_group": 1}
MIXED = {"mlp_layer_types": ["dense", "sparse"]}
FIRST_DENSE = {"first_k_dense_replace": 1}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "head_dim": 8,
}  # fmt: skip
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 256}  # more than the keys of any test prompt
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TWO_ROPES = {
    "rope_parameters": {
        "sliding_attention": PLAIN_ROPE,
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    }
}
SCALED_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "dynamic": {"factor": 4.0},
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 192,
}  # fmt: skip
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
DELTA = {
    "num_hidden_layers": 4, "layer_types": LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
MAMBA = {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 6}
KDA = {
    "num_hidden_layers": 4, "layer_types": LINEAR, "mlp_layer_types": ["dense", *["sparse"] * 3], "linear_head_dim": 16,
    "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QSA = {
    "shared_expert_intermediate_size": 32, "hc_lowrank": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
    "indexer_budget": 256, "indexer_compress_ratio": 8,
}  # fmt: skip
CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
GEMMA4 = SLIDING_WINDOW | {"num_hidden_layers": 6, "layer_types": LAYERS * 3, "global_head_dim": 32}


def _rope(kind: str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | SCALED_ROPES[kind]}


SHAPES: dict[str, dict[str, Any]] = {
    "afmoe": EXPERTS | SLIDING_WINDOW | {"num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True},
    "apertus": {"rope_parameters": PLAIN_ROPE},
    "apertus1p5_text": _rope("llama3"),
    "apertus1p5_text/pruned": _rope("llama3") | {"output_vocab_size": 180},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": MLA | ROUTED | GROUPS | MIXED,
    "axk2": MLA | ROUTED | GROUPS | MIXED | INDEXER,
    "bailing_hybrid": MLA | ROUTED | GROUPS | KDA | {"q_lora_rank": None, "head_dim": 16, "num_local_experts": 4},
    "bamba": MAMBA2 | FOUR | {"attn_layer_indices": [1, 3]},
    "beam": EXPERTS | SLIDING_WINDOW | MIXED | GROUPS,
    "biogpt": {},
    "bitnet": {},
    "bloom": {"num_attention_heads": 6, "hidden_size": 96},
    "codegen": GPT2 | {"rotary_dim": 8},
    "cohere": {"logit_scale": 1.0},
    "cohere/qk-norm": {"logit_scale": 1.0, "use_qk_norm": True},
    "cohere2": SLIDING_WINDOW | {"logit_scale": 1.0},
    "cohere2_moe": EXPERTS | SLIDING_WINDOW | MIXED | {"num_shared_experts": 1, "logit_scale": 1.0},
    "cohere_compass_text": SLIDING_WINDOW | {"rope_parameters": dict.fromkeys(LAYERS, PLAIN_ROPE | {"mrope_section": [3, 3, 2]})},
    "ctrl": GPT2 | {"dff": 96},
    "cwm": SLIDING_WINDOW | TOKENS | _rope("llama3"),
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": MLA | ROUTED | FIRST_DENSE,
    "deepseek_v2/groups": MLA | ROUTED | GROUPS | {"topk_method": "group_limited_greedy", "q_lora_rank": None},
    "deepseek_v2/yarn": MLA | ROUTED | _rope("yarn"),
    "deepseek_v3": MLA | ROUTED | GROUPS | FIRST_DENSE,
    "deepseek_v32": MLA | ROUTED | GROUPS | INDEXER,
    "deepseek_v32/yarn": MLA | ROUTED | GROUPS | INDEXER | _rope("yarn"),
    "deepseek_v3/yarn": MLA | ROUTED | GROUPS | FIRST_DENSE | {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.8}
        | SCALED_ROPES["yarn"],
    },
    "diffllama": {},
    "doge": {"keep_window_size": 256, "attention_bias": True},
    "dots3_note_text": MLA | ROUTED | INDEXER | {
        "num_hidden_layers": 3, "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "sliding_window": 24,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "per_layer_config": {1: {
            "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 24, "head_dim": 24,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        }}, "shared_experts_intermediate_size": 32, "head_dim": 24,
    },
    "dots1": ROUTED | FIRST_DENSE | SLIDING_WINDOW | {"n_group": 1, "topk_group": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
    },
    "exaone": {},
    "exaone4": SLIDING_WINDOW,
    "exaone_moe": EXPERTS | SLIDING_WINDOW | MIXED | {"num_shared_experts": 1},
    "falcon": {"num_kv_heads": 1, "alibi": False, "bias": False},
    "falcon/alibi": {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    "falcon/alibi-groups": {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": True},
    "falcon/alibi-mqa": {"multi_query": True, "alibi": True, "num_attention_heads": 2},
    "falcon/groups": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon_h1": MAMBA2 | {
        "mamba_d_ssm": 128, "ssm_in_multiplier": 1.5, "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9], "key_multiplier": 1.3,
    },
    "falcon_h1/norm": MAMBA2 | {"mamba_d_ssm": 128, "mamba_rms_norm": True},
    "falcon_mamba": MAMBA,
    "flex_olmo": EXPERTS,
    "flint": EXPERTS | SLIDING_WINDOW | {"shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    "gemma": {},
    "gemma2": SLIDING_WINDOW | {"attn_logit_softcapping": 1.0},
    "gemma3_text": SLIDING_WINDOW,
    "gemma3_text/ropes": SLIDING_WINDOW | TWO_ROPES,
    "gemma3n_text": SLIDING_WINDOW | {
        "num_hidden_layers": 6, "layer_types": LAYERS * 3, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.5, 0.0] * 3,
    },
    "gemma4_text": GEMMA4 | {
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
    },
    "gemma4_text/experts": GEMMA4 | EXPERTS | {
        "enable_moe_block": True, "top_k_experts": 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 0,
    },
    "gemma4_unified_text": GEMMA4 | {"num_kv_shared_layers": 2},
    "glm": {},
    "glm4": {},
    "glm4_moe": ROUTED | FIRST_DENSE | GROUPS | {"use_qk_norm": True},
    "glm_moe_dsa": MLA | ROUTED | GROUPS | MIXED | FOUR | INDEXER | {
        "mlp_layer_types": ["dense", *["sparse"] * 3], "indexer_types": ["full", "full", "shared", "shared"],
    },
    "glm4_moe_lite": MLA | ROUTED | GROUPS | MIXED,
    "gpt-sw3": GPT2,
    "gpt2": GPT2,
    "gpt2/scaled": GPT2 | {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": GPT2,
    "gpt_bigcode/mha": GPT2 | {"multi_query": False},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 24},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_neox/plain": {"num_key_value_heads": 4, "use_parallel_residual": False},
    "gpt_oss": EXPERTS | SLIDING_WINDOW | {"rope_parameters": PLAIN_ROPE},
    "gpt_oss/yarn": EXPERTS | SLIDING_WINDOW | _rope("yarn"),
    "gptj": GPT2 | {"rotary_dim": 8},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0},
    "granite_swa": SLIDING_WINDOW | {"attention_multiplier": 0.3, "layer_rope_theta": [10000.0, 0]},
    "granitemoe": EXPERTS,
    "granitemoe_swa": EXPERTS | SLIDING_WINDOW | {"shared_intermediate_size": 32, "layer_rope_theta": [10000.0, 0]},
    "granitemoehybrid": EXPERTS | {
        "layer_types": ["attention"] * 2, "shared_intermediate_size": 32, "position_embedding_type": "rope",
        "mamba_n_heads": 8, "attention_multiplier": 0.3,
    },
    "granitemoehybrid/recurrent": EXPERTS | MAMBA2 | FOUR | {
        "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32, "position_embedding_type": None,
        "attention_multiplier": 0.3,
    },
    "granitemoeshared": EXPERTS | {"shared_intermediate_size": 32},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_dense/dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
    },
    "hunyuan_v1_moe": EXPERTS | {"moe_topk": 2},
    "hy_v3": EXPERTS | MIXED,
    "hy_v4": MLA | ROUTED | FOUR | INDEXER | {"indexer_types": ["full", "shared"] * 2},
    "hyperclovax": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0},
    "internlm3": {"qkv_bias": True, "bias": True},
    "iquestcoder": {},
    "jais2": {},
    "jamba": EXPERTS | FOUR | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 6,
    },
    "jetmoe": EXPERTS | {"kv_channels": 16, "num_key_value_heads": 2},
    "kimi_linear": MLA | ROUTED | GROUPS | KDA | {"q_lora_rank": None, "num_local_experts": 4},
    "kolibri1": EXPERTS | SLIDING_WINDOW | {"shared_expert_intermediate_size": 32},
    "laguna": EXPERTS | SLIDING_WINDOW | MIXED | {
        "shared_expert_intermediate_size": 32, "num_attention_heads_per_layer": [4, 8],
        "moe_router_logit_softcapping": 5.0,
    },
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1},
    "lfm3": FOUR | {
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "sliding_window": 24, "conv_L_cache": 7,
    },
    "llama": {},
    "llama/dynamic": _rope("dynamic"),
    "llama/linear": _rope("linear"),
    "llama/llama3": _rope("llama3"),
    "llama/longrope": {"rope_parameters": LONGROPE},
    "llama/mha": {"num_key_value_heads": 4},
    "llama/mqa": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama/yarn": _rope("yarn"),
    "llama4_text": EXPERTS | FOUR | {
        "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0], "floor_scale": 24,
        "attn_scale": 0.5, "attention_chunk_size": 512, "rope_parameters": PLAIN_ROPE,
    },
    "longcat_flash": MLA | {
        "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96, "moe_topk": 2, "n_routed_experts": 4,
        "zero_expert_num": 2, "expert_ffn_hidden_size": 32,
    },
    "mamba": MAMBA,
    "mamba2": {
        "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "conv_kernel": 4, "chunk_size": 16,
    },
    "mellum": EXPERTS | SLIDING_WINDOW | MIXED | TWO_ROPES,
    "mimo_v2_flash": ROUTED | SLIDING_WINDOW | MIXED | GROUPS | {"v_head_dim": 12},
    "minicpm3": MLA,
    "minimax": EXPERTS | FOUR | {
        "layer_types": LINEAR, "block_size": 16, "linear_attn_alpha_factor": 1.2, "linear_attn_beta_factor": 0.8,
    },
    "minimax_m3_vl_text": EXPERTS | {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"], "rotary_dim": 8,
        "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16, "index_topk_blocks": 16, "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
    },
    "minimax_m2": EXPERTS | {"rotary_dim": 8},
    "ministral": SLIDING_WINDOW,
    "ministral3": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5}
        | SCALED_ROPES["yarn"] | {"original_max_position_embeddings": 32},
    },
    "mistral": {"sliding_window": None},
    "mistral/sliding_window": {"sliding_window": 24},
    "mixtral": EXPERTS | {"sliding_window": None},
    "mixtral/sliding_window": EXPERTS | {"sliding_window": 24},
    "modernbert-decoder": SLIDING_WINDOW | TOKENS | {"local_attention": 48},
    "mpt": {"hidden_size": 96, "num_attention_heads": 6, "max_seq_len": 512, "attn_config": {"clip_qkv": 1.0}},
    "nanochat": {},
    "nemotron_h": ROUTED | {
        "layers_block_type": ["mamba", "attention", "mamba", "moe", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
        "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 16, "expand": 2, "moe_shared_expert_intermediate_size": 32,
        "num_hidden_layers": 5,
    },
    "nemotron": {},
    "olmo": {"clip_qkv": 1.0},
    "olmo2": {},
    "olmo3": SLIDING_WINDOW,
    "olmo_hybrid": DELTA | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "opt/projected": {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "persimmon": {},
    "phi": {},
    "phi/qk-norm": {"qk_layernorm": True},
    "phi3": {"sliding_window": None},
    "phi3/longrope": {
        "sliding_window": None, "original_max_position_embeddings": 192, "rope_parameters": LONGROPE,
    },
    "phi3/sliding_window": {"sliding_window": 24},
    "phimoe": EXPERTS,
    "phimoe/longrope": EXPERTS | {"rope_parameters": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.5}},
    "qwen2": {},
    "qwen2/sliding_window": {"use_sliding_window": True, "max_window_layers": 1} | SLIDING_WINDOW,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    "qwen3": {},
    "qwen3_5_moe_text": DELTA | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA,
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [0]},
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
    "qwen4_exp_text": DELTA | EXPERTS | TOKENS | QSA | {"hc_count": 2},
    "qwen4_exp_text/n-grams": DELTA | EXPERTS | TOKENS | QSA | {
        "num_hidden_layers": 5, "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"], "hc_count": 2,
        "ple_layer_ids": [1, 3], "ple_conv_kernel_size": 3, "ngram_vocab_size_base": 50, "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2, "output_gate_type": "sigmoid",
        "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
    "recurrent_gemma": {
        "num_hidden_layers": 6, "lru_width": 64, "attention_window_size": 24, "conv1d_width": 4, "logits_soft_cap": 30.0,
    },
    "sarvam_mla": MLA | ROUTED | GROUPS | FIRST_DENSE | {"q_lora_rank": None},
    "sarvam_moe": ROUTED | GROUPS | FIRST_DENSE,
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "solar_open": ROUTED | GROUPS,
    "stablelm": {},
    "stablelm/qk-norm": {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
    "starcoder2": {"sliding_window": 24},
    "vaultgemma": SLIDING_WINDOW | {"attn_logit_softcapping": 1.0},
    "youtu": MLA,
    "zamba": {
        "num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["hybrid"], "n_mamba_heads": 2, "mamba_d_state": 8,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 6, "num_key_value_heads": 4, "attention_head_dim": 32,
    },
    "zamba2": MAMBA2 | {
        "num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "mamba_ngroups": 2, "n_mamba_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "chunk_size": 16, "num_mem_blocks": 2, "adapter_rank": 8,
        "use_shared_attention_adapter": True, "use_mem_rope": True,
    },
    "zaya": TOKENS | {
        "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "router_hidden_size": 16, "num_hidden_layers": 3,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 24, "attention_bias": True, "lm_head_bias": True,
    },
}  # fmt: skip


def prompts_and_lengths() -> tuple[list[list[int]], list[int]]:
    """A root of 40 tokens, two groups and a document below it, prompts that end at a node, and unrelated prompts. Some completions span two blocks."""
    rng = random.Random(3)

    def text(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    root = text(40)
    groups = [root + text(n) for n in (50, 24)]
    document = groups[0] + text(38)
    prompts = [g + text(rng.randint(1, 12)) for g in groups for _ in range(3)]
    prompts += [document, document + text(5), groups[1], root[:39], [5], text(70)]
    lengths = [rng.randint(2, 9) for _ in prompts]
    lengths[1] = lengths[4] = lengths[-1] = 36
    return prompts, lengths


def deep_tree(rng: random.Random, depth: int, path: tuple[int, ...] = ()) -> list[list[int]]:
    """Prompts of a tree that is `depth` nodes deep: each node has two branches, and at some of them one or two prompts end."""

    def text(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(count))

    path = (*path, *text(rng.choice([1, 2, 5, 17, 40])))
    ends = [list(path)] * rng.choice([0, 0, 1, 2])
    if depth == 0:
        return [[*path, *text(rng.randint(1, 20))] for _ in range(2)] + ends
    return ends + deep_tree(rng, depth - 1, path) + deep_tree(rng, depth - 1, path)


def tree_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """The number of tokens of the trie of the prompts: what has to be prefilled at least."""
    return len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))})


def _deep_prompts() -> list[list[int]]:
    rng = random.Random(1)
    tree = deep_tree(rng, DEEP - 1)
    whole, long = [rng.randrange(VOCAB) for _ in range(64)], [rng.randrange(VOCAB) for _ in range(150)]
    # A node that ends at a block's end, prefixes that end at a chunk, at a block and beside them, one token, equal, nothing in common.
    ends = [[*whole, i] for i in range(4)] + [whole[:16], whole[:32], whole[:39], whole]
    return [*tree, *ends, [5], [5], [6], long]


DEEP = 5 if FULL else 4
DEEP_PROMPTS = _deep_prompts()
_lengths = random.Random(3)
DEEP_LENGTHS = [_lengths.choice([1, 2, 6, 12]) for _ in DEEP_PROMPTS]

CORE = {"deepseek_v3", "gemma2", "gpt2", "gpt_oss", "llama"}
"""Shapes that together have every kind of layer. They run in `make test`; the others are slow tests."""

FULLEST = {"granitemoehybrid": "granitemoehybrid/recurrent", "qwen4_exp_text": "qwen4_exp_text/n-grams"}
"""For families with several shapes, the shape that has every kind of state."""

RECURRENT_SHAPES = sorted(FULLEST.get(name, name) for name in RECURRENT - INNER)
"""One shape for each family with recurrent layers."""


def family_config(name: str, **settings: Any) -> Any:
    """The configuration of a shape or a `model_type`. Skips the test if the installed transformers does not have its family."""
    model_type = name.partition("/")[0]
    if model_type not in CONFIG_MAPPING:
        raise SkipTest(f"transformers {__version__} does not have {model_type}")
    return AutoConfig.for_model(model_type, **copy.deepcopy(settings))  # transformers changes dicts of a configuration
