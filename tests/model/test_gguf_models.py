"""Models of GGUF files have the settings and weights of the originals, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchgen import LLM, EngineConfig
from batchgen.config import ModelConfig, PromptConfig
from batchgen.errors import ModelError
from batchgen.kernels.codes import PackedTensor
from batchgen.model.loader import load_model
from batchgen.model.weights import packed
from batchgen.prompts import load_tokenizer
from support.gguf import write_whole_model
from support.params import slow_but

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of each other
COMMON = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2, "rms_norm_eps": 0.01, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 24.0, "beta_slow": 2.0,
}  # fmt: skip
YARN_KEYS = {
    "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16, "rope__scaling__yarn_beta_fast": 24.0,
    "rope__scaling__yarn_beta_slow": 2.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 3e5, "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
BASE = {"rope_type": "default", "rope_theta": 5000.0}
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5}
GRANITE_KEYS = {"attention__scale": 0.3, "embedding_scale": 2.0, "logit_scale": 3.0, "residual_scale": 0.5}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURE_KEYS = {"expert_count": 4, "expert_used_count": 2}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT_KEYS = {
    **MIXTURE_KEYS, "attention__kv_lora_rank": 16, "expert_feed_forward_length": 32, "leading_dense_block_count": 1, "rope__dimension_count": 4,
}  # fmt: skip
HEADS = {"attention__key_length": 16, "attention__value_length": 16}
DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 3, "rope_parameters": BASE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
DELTA_KEYS = {
    **HEADS, "ssm__conv_kernel": 3, "ssm__state_size": 8, "ssm__group_count": 2, "ssm__time_step_rank": 4, "ssm__inner_size": 256,
    "full_attention_interval": 4, "rope__dimension_count": 8, "rope__dimension_sections": [2, 1, 1, 0],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 3, "layer_norm_epsilon": 0.01, "head_dim": 16,
    "num_hidden_layers": 4,
}  # fmt: skip
MAMBA_KEYS = {
    **HEADS, "ssm__conv_kernel": 3, "ssm__state_size": 8, "ssm__group_count": 2, "ssm__inner_size": 64, "ssm__time_step_rank": 4,
    "rope__scaling__finetuned": False,
}  # fmt: skip
DENSE_FIRST = {
    "head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "rope_parameters": BASE,
}  # fmt: skip
DENSE_FIRST_KEYS = {
    **HEADS, **MIXTURE_KEYS, "expert_feed_forward_length": 32, "leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
    "expert_gating_func": 2,
}  # fmt: skip
UNPACKED = (
    "router.weight",
    "gate.weight",
    "conv1d.weight",
    "coefs.weight",
    "linear_right.weight",
    "per_layer_projection.weight",
)
"""Routers, a weight whose columns are in another order in a file, and those whose rows are shorter than a block."""
IDS = [3, 40, 5, 77, 9, 12, 64, 3, 40, 5]
CASES = [
    ("llama", {"attention_bias": True, "mlp_bias": True}, "llama", {}),
    ("qwen3", {"head_dim": 24}, "qwen3", {"attention__key_length": 24, "attention__value_length": 24}),
    (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "tie_word_embeddings": True},
        "gemma2",
        {"attention__key_length": 16, "attention__value_length": 16, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        "qwen2moe",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True},
        "qwen3moe",
        {**MIXTURE_KEYS, **HEADS, "expert_feed_forward_length": 24},
    ),
    (
        "qwen3_5_text",
        DELTA | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        "qwen35",
        {**DELTA_KEYS, "attention__recurrent_layers": [True, False, False], "nextn_predict_layers": 1, "block_count": 3},
    ),
    (
        "qwen3_5_moe_text",
        DELTA | {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        "qwen35moe",
        {**DELTA_KEYS, **MIXTURE_KEYS, "feed_forward_length": 64, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
    ),
    (
        "gemma3_text",
        {
            "head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "sliding_window": 5, "tie_word_embeddings": True,
            "rope_parameters": {"sliding_attention": BASE, "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 8.0}},
        },
        "gemma3",
        {
            **HEADS, "attention__sliding_window": 5, "rope__freq_base_swa": 5000.0, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0,
        },
    ),
    ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": ["full_attention"] * 2}, "gemma3", HEADS | {"attention__sliding_window": 0}),
    ("bloom", {"layer_norm_epsilon": 0.01, "num_key_value_heads": 4}, "bloom", {"attention__layer_norm_epsilon": 0.01, "feed_forward_length": 128}),
    (
        "falcon", {"layer_norm_epsilon": 0.01, "bias": True, "rope_parameters": BASE}, "falcon",
        {"attention__layer_norm_epsilon": 0.01, "attention__head_count_kv": 1, "feed_forward_length": 128, "tensor_data_layout": "jploski"},
    ),
    (
        "gpt2", {"layer_norm_epsilon": 0.01, "intermediate_size": 128, "num_key_value_heads": 4}, "gpt2",
        {"attention__layer_norm_epsilon": 0.01, "feed_forward_length": 128},
    ),
    (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "norm_eps": 0.01, "conv_L_cache": 5, "conv_bias": True, "block_auto_adjust_ff_dim": False},
        "lfm2",
        {"attention__head_count_kv": [0, 2], "attention__layer_norm_rms_epsilon": 0.01, "shortconv__l_cache": 5},
    ),
    (
        "mamba",
        {"intermediate_size": 64, "state_size": 8, "conv_kernel": 3, "time_step_rank": 6, "layer_norm_epsilon": 0.01},
        "mamba",
        {
            "attention__layer_norm_rms_epsilon": 0.01, "attention__head_count": 0, "ssm__conv_kernel": 3, "ssm__inner_size": 64, "ssm__state_size": 8,
            "ssm__time_step_rank": 6,
        },
    ),
    (
        "minimax_m2", MIXTURE | {"head_dim": 16, "rope_parameters": BASE | {"partial_rotary_factor": 0.5}}, "minimax-m2",
        {**MIXTURE_KEYS, **HEADS, "expert_feed_forward_length": 64, "expert_gating_func": 2, "rope__dimension_count": 8},
    ),
    (
        "nemotron", {"norm_eps": 0.01, "head_dim": 8, "attention_bias": True, "mlp_bias": True, "rope_parameters": BASE | {"partial_rotary_factor": 0.5}},
        "nemotron", {"attention__layer_norm_epsilon": 0.01, "rope__dimension_count": 4},
    ),
    (
        "phi3", {"sliding_window": 5, "pad_token_id": 0, "rope_parameters": BASE | {"partial_rotary_factor": 0.5}}, "phi3",
        {"attention__sliding_window": 5, "rope__dimension_count": 4},
    ),
    (
        "stablelm", {"layer_norm_eps": 0.01, "use_parallel_residual": True, "use_qkv_bias": True, "rope_parameters": BASE | {"partial_rotary_factor": 0.5}},
        "stablelm", {"attention__layer_norm_epsilon": 0.01, "rope__dimension_count": 4, "use_parallel_residual": True},
    ),
    (
        "starcoder2", {"norm_epsilon": 0.01, "sliding_window": 5, "use_bias": False, "rope_parameters": BASE}, "starcoder2",
        {"attention__layer_norm_epsilon": 0.01, "attention__sliding_window": 5},
    ),
    (
        "gpt_oss",
        {**MIXTURE, "head_dim": 16, "sliding_window": 5, "rope_parameters": YARN | {"truncate": False}},
        "gpt-oss",
        {**MIXTURE_KEYS, "expert_feed_forward_length": 64, "attention__sliding_window": 5, **HEADS, **YARN_KEYS},
    ),
    ("gemma", {"head_dim": 16, "tie_word_embeddings": True}, "gemma", HEADS),
    (
        "gemma4_text",
        {
            "num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"], "head_dim": 16, "global_head_dim": 24,
            "sliding_window": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
            "final_logit_softcapping": 3.0, "tie_word_embeddings": True, "rms_norm_eps": 0.01,
            "rope_parameters": {"sliding_attention": BASE, "full_attention": {"rope_type": "proportional", "rope_theta": 20000.0, "partial_rotary_factor": 0.25}},
        },
        "gemma4",
        {
            "attention__key_length": 24, "attention__value_length": 24, "attention__key_length_swa": 16, "attention__value_length_swa": 16,
            "attention__sliding_window": 5, "attention__sliding_window_pattern": [True, False, True, False, False], "attention__shared_kv_layers": 2,
            "feed_forward_length": [64, 64, 64, 128, 128], "embedding_length_per_layer_input": 8, "final_logit_softcapping": 3.0,
            "rope__freq_base_swa": 5000.0, "rope__dimension_count": 24, "rope__dimension_count_swa": 16,
        },
    ),
    (
        "gemma4_text",
        {
            "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16, "global_head_dim": 16, "sliding_window": 5, "num_global_key_value_heads": 1,
            "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
            "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
            "rope_parameters": {"sliding_attention": BASE, "full_attention": {"rope_type": "proportional", "rope_theta": 20000.0, "partial_rotary_factor": 1.0}},
        },
        "gemma4",
        {
            **HEADS, "attention__key_length_swa": 16, "attention__value_length_swa": 16, "attention__sliding_window": 5,
            "attention__sliding_window_pattern": [True, False], "attention__head_count_kv": [2, 1], "embedding_length_per_layer_input": 0,
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "rope__freq_base_swa": 5000.0,
        },
    ),
    ("granite", GRANITE | {"attention_bias": True, "mlp_bias": True}, "granite", {**GRANITE_KEYS, "rope__scaling__finetuned": True}),
    (
        "granitemoeshared", GRANITE | MIXTURE | {"shared_intermediate_size": 48}, "granitemoe",
        {**GRANITE_KEYS, **MIXTURE_KEYS, "expert_shared_feed_forward_length": 48},
    ),
    (
        "granitemoehybrid",
        GRANITE | MIXTURE | {
            "layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 48, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
            "mamba_d_conv": 3, "position_embedding_type": None,
        },
        "granitehybrid",
        {
            **GRANITE_KEYS, **MIXTURE_KEYS, "expert_shared_feed_forward_length": 48, "attention__head_count_kv": [0, 2], "rope__scaling__finetuned": False,
            "ssm__conv_kernel": 3, "ssm__state_size": 8, "ssm__group_count": 1, "ssm__inner_size": 64, "ssm__time_step_rank": 4,
        },
    ),
    ("mistral", {"head_dim": 16, "sliding_window": None}, "mistral3", HEADS),
    (
        "ministral3", {"head_dim": 16, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4}},
        "mistral3", {
            **HEADS, **YARN_KEYS, "rope__scaling__original_context_length": 4, "rope__scaling__yarn_log_multiplier": 1.0, "attention__temperature_scale": 0.5,
        },
    ),
    (
        "glm4", {"head_dim": 16, "attention_bias": True, "rope_parameters": BASE | {"partial_rotary_factor": 0.25}}, "glm4",
        {**HEADS, "rope__dimension_count": 4},
    ),
    (
        "glm4_moe",
        {
            "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5, "use_qk_norm": True, "rope_parameters": BASE | {"partial_rotary_factor": 0.5},
        },
        "glm4moe",
        {
            **HEADS, **MIXTURE_KEYS, "expert_shared_count": 1, "expert_feed_forward_length": 32, "leading_dense_block_count": 1, "expert_weights_scale": 1.5,
            "expert_weights_norm": True, "expert_gating_func": 2, "rope__dimension_count": 8, "nextn_predict_layers": 1, "block_count": 3,
        },
    ),
    ("smollm3", {"num_hidden_layers": 5, "attention_bias": True}, "smollm3", {}),
    ("olmo2", {}, "olmo2", {}),
    (
        "olmo3",
        {
            "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"sliding_attention": BASE, "full_attention": YARN},
        },
        "olmo2",
        {
            "attention__sliding_window": 5, "attention__sliding_window_pattern": [False, True], **YARN_KEYS,
            "rope__scaling__yarn_attn_factor": 1.138629436111989,
        },
    ),
    ("mixtral", MIXTURE, "llama", MIXTURE_KEYS),
    (
        "deepseek_v2",
        LATENT | {
            "q_lora_rank": None, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0,
            "rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 0.5},
        },
        "deepseek2",
        {
            **LATENT_KEYS, **YARN_KEYS, "attention__key_length": 12, "attention__value_length": 6, "attention__head_count_kv": 4, "expert_shared_count": 2,
            "expert_group_count": 2, "expert_group_used_count": 1, "expert_weights_scale": 4.0, "rope__scaling__yarn_log_multiplier": 0.05,
        },
    ),
    (
        "deepseek_v3",
        LATENT | {"q_lora_rank": 12, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
        "deepseek2",
        {
            **LATENT_KEYS, "attention__key_length": 20, "attention__value_length": 16, "attention__key_length_mla": 12, "attention__value_length_mla": 6,
            "attention__head_count_kv": 1, "attention__q_lora_rank": 12, "expert_shared_count": 1, "expert_group_count": 2, "expert_group_used_count": 1,
            "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2,
        },
    ),
    ("seed_oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": True}, "seed_oss", HEADS),
    ("ernie4_5", {"head_dim": 16, "use_bias": True}, "ernie4_5", HEADS),
    (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1,
            "moe_layer_end_index": 1,
        },
        "ernie4_5-moe",
        {
            **MIXTURE_KEYS, "expert_feed_forward_length": 32, "expert_shared_count": 2, "interleave_moe_layer_step": 1, "leading_dense_block_count": 1,
            "expert_shared_feed_forward_length": 32,
        },
    ),
    (
        "phi", {"num_key_value_heads": 4, "layer_norm_eps": 0.01, "rope_parameters": BASE | {"partial_rotary_factor": 0.5}}, "phi2",
        {"rope__dimension_count": 4, "attention__layer_norm_epsilon": 0.01},
    ),
    ("hunyuan_v1_dense", {"head_dim": 16, "attention_bias": True, "rope_parameters": BASE}, "hunyuan-dense", HEADS),
    (
        "exaone4", {"num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": 2, "rope_parameters": BASE}, "exaone4",
        {"attention__sliding_window": 5, "attention__sliding_window_pattern": [True, False, True]},
    ),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": BASE}, "exaone4", {}),
    (
        "cohere2",
        {"num_hidden_layers": 4, "head_dim": 8, "logit_scale": 0.5, "sliding_window": 5, "layer_norm_eps": 0.01, "tie_word_embeddings": True, "rope_parameters": BASE},
        "cohere2", {"logit_scale": 0.5, "attention__sliding_window": 5, "attention__layer_norm_epsilon": 0.01, "rope__scaling__type": "none"},
    ),
    (
        "qwen3_next",
        DELTA | EXPERTS | {
            "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 64, "rope_parameters": BASE | {"partial_rotary_factor": 0.5},
        },
        "qwen3next",
        {
            **{key: value for key, value in DELTA_KEYS.items() if key != "rope__dimension_sections"}, **MIXTURE_KEYS, "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64, "attention__recurrent_layers": [True, False],
        },
    ),
    ("qwen2", {"rope_parameters": BASE}, "qwen2vl", {"rope__dimension_sections": [2, 1, 1, 0]}),
    ("qwen3", {"head_dim": 16, "rope_parameters": BASE}, "qwen3vl", HEADS | {"rope__dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}),
    (
        "qwen3_moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "rope_parameters": BASE}, "qwen3vlmoe",
        {**MIXTURE_KEYS, **HEADS, "expert_feed_forward_length": 32, "rope__dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
    ),
    (
        "nemotron_h", MAMBA | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mlp_bias": True}, "nemotron_h",
        {**MAMBA_KEYS, "attention__layer_norm_epsilon": 0.01, "attention__head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 64, 0, 64], "block_count": 4},
    ),
    (
        "nemotron_h",
        MAMBA | {
            "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5, "moe_latent_size": 16,
        },
        "nemotron_h_moe",
        {
            **MAMBA_KEYS, **MIXTURE_KEYS, "attention__layer_norm_epsilon": 0.01, "attention__head_count_kv": [0, 0, 2, 0, 2], "feed_forward_length": [32, 0, 0, 32, 32], "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48, "expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 1,
            "expert_group_used_count": 1, "moe_latent_size": 16, "block_count": 5, "nextn_predict_layers": 1,
        },
    ),
    (
        "llama4_text",
        {
            "head_dim": 16, "num_hidden_layers": 5, "num_local_experts": 4, "intermediate_size": 32, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
            "rope_parameters": BASE,
        },
        "llama4",
        {**HEADS, "expert_count": 4, "expert_used_count": 1, "feed_forward_length": 64, "expert_feed_forward_length": 32, "interleave_moe_layer_step": 2},
    ),
    (
        "gemma3n_text",
        {
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "sliding_window": 5, "head_dim": 16,
            "hidden_size_per_layer_input": 8, "laurel_rank": 4, "vocab_size_per_layer_input": 96, "intermediate_size": [64] * 4, "final_logit_softcapping": 2.0,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0], "tie_word_embeddings": True,
            "rope_parameters": {"sliding_attention": BASE, "full_attention": {"rope_type": "default", "rope_theta": 20000.0}},
        },
        "gemma3n",
        {
            **HEADS, "attention__sliding_window": 5, "attention__sliding_window_pattern": [True, False] * 2, "attention__shared_kv_layers": 2,
            "embedding_length_per_layer_input": 8, "altup__num_inputs": 4, "altup__active_idx": 0, "final_logit_softcapping": 2.0, "rope__freq_base_swa": 5000.0,
            "activation_sparsity_scale": [1.2815516, 0.0, float("-inf"), float("-inf")],
        },
    ),
    (
        "lfm2_moe",
        EXPERTS | {"layer_types": ["conv", "full_attention"], "norm_eps": 0.01, "conv_L_cache": 5, "num_dense_layers": 1, "use_expert_bias": True, "tie_word_embeddings": True, "rope_parameters": BASE},
        "lfm2moe",
        {
            **MIXTURE_KEYS, "attention__head_count_kv": [0, 2], "attention__layer_norm_rms_epsilon": 0.01, "shortconv__l_cache": 5, "expert_feed_forward_length": 32,
            "leading_dense_block_count": 1, "expert_gating_func": 2,
        },
    ),
    (
        "cohere", {"logit_scale": 0.5, "layer_norm_eps": 0.01, "use_qk_norm": True, "tie_word_embeddings": True, "rope_parameters": BASE}, "command-r",
        {"logit_scale": 0.5, "attention__layer_norm_epsilon": 0.01, "rope__scaling__type": "none"},
    ),
    ("olmoe", EXPERTS | {"norm_topk_prob": False, "rope_parameters": BASE}, "olmoe", MIXTURE_KEYS),
    ("olmo", {"clip_qkv": 0.5, "rope_parameters": BASE}, "olmo", {"attention__layer_norm_epsilon": 1e-5, "attention__clamp_kqv": 0.5}),
    (
        "phimoe", MIXTURE | {"attention_bias": True, "lm_head_bias": True, "sliding_window": None, "rope_parameters": BASE}, "phimoe",
        {**MIXTURE_KEYS, "attention__sliding_window": 0},
    ),
    (
        "hunyuan_v1_moe", {"head_dim": 16, "num_experts": 4, "moe_topk": 2, "attention_bias": True, "rope_parameters": BASE}, "hunyuan-moe",
        {**HEADS, **MIXTURE_KEYS, "expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 64, "expert_shared_count": 1},
    ),
    ("arcee", {"head_dim": 16, "mlp_bias": True, "rope_parameters": YARN}, "arcee", HEADS | YARN_KEYS),
    ("dots1", DENSE_FIRST | {"n_routed_experts": 4, "n_shared_experts": 2, "sliding_window": None}, "dots1", DENSE_FIRST_KEYS | {"expert_shared_count": 2}),
    (
        "exaone_moe", DENSE_FIRST | {"num_experts": 4, "num_shared_experts": 1, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}, "exaone-moe",
        {
            **DENSE_FIRST_KEYS, "expert_shared_count": 1, "expert_shared_feed_forward_length": 32, "attention__sliding_window": 5, "nextn_predict_layers": 1,
            "attention__sliding_window_pattern": [True, False, True], "block_count": 3,
        },
    ),
    ("llama", {"rope_parameters": BASE}, "exaone", {"attention__layer_norm_epsilon": 0.01}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": BASE}, "pangu-embedded", {}),
    ("llama", {"rope_parameters": BASE}, "internlm2", {}),
    ("llama", {"rope_parameters": BASE}, "xverse", {}),
    (
        "granite", {"attention_multiplier": 8**-0.5, "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5}, "minicpm",
        {key: value for key, value in GRANITE_KEYS.items() if key != "attention__scale"},
    ),
    ("glm", {"attention_bias": True, "head_dim": 8, "rope_parameters": BASE | {"partial_rotary_factor": 0.5}}, "chatglm", {"rope__dimension_count": 4}),
    (
        "gpt_neox", {"layer_norm_eps": 0.01, "use_parallel_residual": False, "rope_parameters": BASE | {"partial_rotary_factor": 0.5}}, "gptneox",
        {"attention__layer_norm_epsilon": 0.01, "rope__dimension_count": 4, "use_parallel_residual": False},
    ),
    (
        "gpt_bigcode", {"layer_norm_epsilon": 0.01, "n_inner": 128, "num_key_value_heads": 1}, "starcoder",
        {"attention__layer_norm_epsilon": 0.01, "attention__head_count_kv": 1, "feed_forward_length": 128},
    ),
    (
        "mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "tie_word_embeddings": True}, "mpt",
        {"attention__layer_norm_epsilon": 1e-5, "attention__max_alibi_bias": 8.0, "feed_forward_length": 128},
    ),
    (
        "minicpm3",
        {
            "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
            "tie_word_embeddings": True, "rope_parameters": BASE,
        },
        "minicpm3",
        {"attention__q_lora_rank": 12, "attention__kv_lora_rank": 16, "attention__key_length": 12, "attention__value_length": 12, "rope__dimension_count": 4},
    ),
    (
        "jamba",
        {
            "num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4,
            "mamba_d_state": 8, "mamba_dt_rank": 6, "mamba_d_conv": 3,
        },
        "jamba",
        {
            **MIXTURE_KEYS, "attention__head_count_kv": [0, 2, 0, 2], "ssm__conv_kernel": 3, "ssm__inner_size": 64, "ssm__state_size": 8, "ssm__time_step_rank": 6,
        },
    ),
    (
        "mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "conv_kernel": 3, "layer_norm_epsilon": 0.01}, "mamba2",
        {**MAMBA_KEYS, "attention__layer_norm_rms_epsilon": 0.01, "attention__head_count": 0},
    ),
    ("apertus", {"attention_bias": True, "rope_parameters": LLAMA3}, "apertus", {}),
    (
        "afmoe",
        EXPERTS | {
            "num_hidden_layers": 5, "head_dim": 16, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 2.5, "sliding_window": 5, "mup_enabled": True,
            "rope_parameters": BASE,
        },
        "afmoe",
        {
            **HEADS, **MIXTURE_KEYS, "expert_feed_forward_length": 32, "expert_shared_count": 2, "leading_dense_block_count": 1, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "expert_gating_func": 2, "attention__sliding_window": 5, "expert_group_count": 1, "expert_group_used_count": 1,
        },
    ),
    ("jais2", {"head_dim": 16, "layer_norm_eps": 0.01, "rope_parameters": BASE}, "jais2", HEADS | {"attention__layer_norm_epsilon": 0.01}),
]  # fmt: skip


def case_of(model_type: str, **more: Any) -> tuple[Any, str, dict[str, Any]]:
    """The original with the settings of the first case of a type, and `more`; the architecture and the keys of its file."""
    _, settings, architecture, keys = next(case for case in CASES if case[0] == model_type)
    return original(model_type, **settings | more), architecture, keys


def original(model_type: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **COMMON | settings)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1 or "norm" in name or not parameter.any():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize(("model_type", "settings", "architecture", "keys"), CASES, ids=[case[0] for case in CASES])
@torch.inference_mode()
def test_log_probabilities_are_those_of_the_original(tmp_path, model_type, settings, architecture, keys):
    module = original(model_type, **settings)
    file = write_whole_model(module, tmp_path / "m.gguf", architecture, **keys)
    expected = module(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])
    # Kernels would take half of the time, and come after the weights. `rel`: four units in the last place.
    got = log_probabilities(file, compile="off")
    assert got == pytest.approx(expected[:, 0].tolist(), abs=1e-5, rel=5e-7)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("gpt_oss", "MXFP4"),
        ("mixtral", "Q8_0"),
        ("qwen3_5_text", "Q8_0"),
        ("bloom", "Q4_0"),
        ("gpt2", "Q4_0"),
        ("qwen3_next", "Q8_0"),
        ("gemma3n_text", "Q8_0"),
        ("llama4_text", "Q4_0"),
        ("afmoe", "Q8_0"),
        ("mixtral", "IQ2_XS"),
        ("mixtral", "IQ3_S"),
    ],
)
@torch.inference_mode()
def test_weights_stay_packed_and_give_what_their_numbers_give(tmp_path, monkeypatch, model_type, kind):
    monkeypatch.setattr("batchgen.model.loader.free_memory", lambda _: 0)  # so that they stay packed
    whole_blocks = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 256} if kind.startswith("IQ") else {}
    module, architecture, keys = case_of(model_type, **whole_blocks)
    held = write_whole_model(module, tmp_path / "packed.gguf", architecture, kind=kind, **keys)
    plain = write_whole_model(module, tmp_path / "plain.gguf", architecture, kind=kind, unpacked=True, **keys)
    assert log_probabilities(held) == log_probabilities(plain)
    config = ModelConfig(model=held, device="cpu", dtype="bfloat16", compile="off")
    parameters = load_model(config, load_tokenizer(config)).module.named_parameters()
    plain_ones = [
        name for name, x in parameters if x.dim() > 1 and not isinstance(x, PackedTensor) and not name.endswith("bias")
    ]
    assert all(name.endswith(UNPACKED) for name in plain_ones)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("model_type", slow_but(["mixtral", "qwen3_5_text", "gpt2"], {case[0]: None for case in CASES}))
@pytest.mark.usefixtures("compiled")
@torch.inference_mode()
def test_weights_of_16_bits_stay_so_and_give_what_their_numbers_give(tmp_path, monkeypatch, model_type, kind):
    module, architecture, keys = case_of(model_type)
    plain = write_whole_model(module, tmp_path / "plain.gguf", architecture, kind=kind, unpacked=True, **keys)
    monkeypatch.setattr(packed, "SMALL", 1)
    halves = write_whole_model(module, tmp_path / "halves.gguf", architecture, kind=kind, **keys)
    assert log_probabilities(halves) == log_probabilities(plain)
    config = ModelConfig(model=halves, device="cpu", dtype="float32")
    table = load_model(config, load_tokenizer(config)).module.get_input_embeddings().weight
    assert isinstance(table, PackedTensor)


def log_probabilities(file: Path, **options: Any) -> list[float]:
    llm = LLM(file, dtype="float32", engine=EngineConfig(kv_memory="1MiB"), **options)
    (result,) = llm.score([IDS[:1]], [IDS[1:]], prompt_options=PromptConfig(prompt_logprobs=True))
    return [token.logprob for token in result.prompt_logprobs]


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_5_text", "granitemoehybrid", "bloom", "mamba"])
@torch.inference_mode()
def test_embeddings_are_those_of_the_original(tmp_path, model_type):
    module, architecture, keys = case_of(model_type)
    file = write_whole_model(module, tmp_path / "m.gguf", architecture, **keys)
    expected = module.base_model(torch.tensor([IDS])).last_hidden_state[0].mean(0)
    (result,) = LLM(file, dtype="float32", task="embed", pooling="mean", normalize=False).embed([IDS])
    assert result.embedding == pytest.approx(expected.tolist(), abs=1e-4)


@torch.inference_mode()
def test_layers_that_guess_further_tokens_and_keys_that_no_layer_uses_are_left_out(tmp_path):
    for model_type, names in (("glm4_moe", ["blk.2.nextn.eh_proj.weight", "blk.2.attn_q.weight"]), ("gemma4_text", ["blk.3.attn_k.weight", "blk.4.attn_v.weight"])):  # fmt: skip
        module, architecture, keys = case_of(model_type)
        file = write_whole_model(module, tmp_path / "m.gguf", architecture, more=names, **keys)
        assert len(log_probabilities(file)) == len(IDS) - 1


def refusal(module: Any, file: Path, architecture: str) -> str:
    with torch.no_grad():
        write_whole_model(module, file, architecture)
    with pytest.raises(ModelError) as e:
        LLM(file, dtype="float32")
    return str(e.value)


def test_a_file_of_apertus_without_the_parameters_of_its_activation_is_refused(tmp_path):
    module = original("apertus", rope_parameters=LLAMA3)
    del module.model.layers[1].mlp.act_fn
    assert "model.layers.1.mlp.act_fn.alpha_n" in refusal(module, tmp_path / "m.gguf", "apertus")


def test_a_weight_that_the_model_does_not_have_is_refused(tmp_path):
    module = original("qwen2")
    module.model.layers[1].self_attn.o_proj = torch.nn.Linear(32, 32)
    assert refusal(module, tmp_path / "m.gguf", "qwen2") == (
        f"{tmp_path}/m.gguf has a weight that batchgen does not use: blk.1.attn_output.bias; give the model in the format of transformers"
    )
