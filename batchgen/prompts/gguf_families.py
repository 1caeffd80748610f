"""The families of GGUF files: what the keys of a file say of its model, and what llama.cpp's converter does to weights.

A family is an entry of `FAMILIES`. Files of other architectures are refused (`gguf_settings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_COMMON = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
"""The settings of configurations, by the keys that every family has."""
_OFF_AT_0 = frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"})
"""Keys whose value 0 means that there is no such thing."""
_NO_HEAD_SIZE = {"attention.key_length": ""}
_OLDER = _NO_HEAD_SIZE | {
    "attention.head_count_kv": "", "feed_forward_length": "", "attention.layer_norm_epsilon": "layer_norm_epsilon",
}  # fmt: skip
"""Of model types whose MLPs are four times as wide as the model, with keys and values in each head or in one."""
_MAMBA_1 = _NO_HEAD_SIZE | {
    "attention.head_count": "", "attention.head_count_kv": "", "feed_forward_length": "", "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size",
    "ssm.time_step_rank": "time_step_rank",
}  # fmt: skip
_SLIDING = {"attention.sliding_window": "sliding_window"}
_FINAL_SOFTCAP = {"final_logit_softcapping": "final_logit_softcapping"}
_QWEN_MIXTURE = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
_QWEN_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim", "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads", "full_attention_interval": "full_attention_interval",
}  # fmt: skip
_MIXTURE = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_DEEPSEEK_MIXTURE = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts", "leading_dense_block_count": "first_k_dense_replace", "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
}  # fmt: skip
_GROUPS = {160: (8, 3), 256: (8, 4)}
"""The groups of experts of DeepSeek V2 and V3, and how many of them a token uses, by their experts."""
_SIGMOID = 2
"""`expert_gating_func` of DeepSeek V3 and GLM 4."""
_GRANITE = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}  # fmt: skip
_ATTENTION_BIAS = {"attention_bias": ".attn_q.bias"}
_LLAMA_BIASES = {"attention_bias": ".attn_q.bias", "mlp_bias": ".ffn_up.bias"}
_MAMBA = frozenset({"ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"})
"""Keys that files of Granite 4 also have if no layer is recurrent."""
_PART = frozenset({"rope.dimension_count"})
_TEMPERATURE = frozenset({"rope.scaling.yarn_log_multiplier", "attention.temperature_scale"})
_WINDOW = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
_QWEN35_KEYS = frozenset({"rope.dimension_count", "rope.dimension_sections", "ssm.inner_size", "attention.recurrent_layers", "nextn_predict_layers"})  # fmt: skip
_WITH_ROPE = {"rope.scaling.finetuned": True}
_LLAMA_ROWS = {"tensor_data_layout": "Meta AI original pth"}
_NO_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
"""The rotary embedding of configurations whose default scales it. `gguf_rope.py` gives it what the file says."""

Values = Mapping[str, Any]
"""The keys of a file without the name of its architecture."""
Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a file's tensors."""


def _nothing(values: Values, shapes: Shapes) -> Mapping[str, Any]:
    return {}


class GgufFamily(NamedTuple):
    """How the models of a type lie in a file."""

    model_type: str
    settings: Mapping[str, str] = {}
    """More names of settings by keys, beside `_COMMON`. The name "" stands for none: the shapes of weights are enough."""
    more: Callable[[Values, Shapes], Mapping[str, Any]] = _nothing
    """Returns the settings that no single key holds."""
    read: frozenset[str] = frozenset()
    """The keys that `more` and `gguf_rope.py` read, beside those that have a name."""
    must: Mapping[str, Any] = {}
    """Keys with the only value that the model type can have."""
    biases: Mapping[str, str] = {}
    """Settings that say whether the file has tensors, by the ends of their names."""
    rows: str = ""
    """Which rows the converter moves. `pairs`: the two numbers of a rotary pair lie side by side in queries and keys, where transformers has them half a head
    apart. `parts`: the queries of all heads lie before all keys, not beside those of their head. `tiled`: heads of values with the same keys lie apart."""
    shift: float = 0.0
    """What the converter adds to the weights of norms."""
    interleaved: bool = False
    """Whether the outputs of the experts' gates alternate with the others in the model."""
    columns: tuple[str, ...] = ()
    """Parts of the names of weights whose rows are columns in the model."""

    def known(self) -> frozenset[str]:
        """The keys that are read, beside those that must have a value."""
        return frozenset({*_COMMON, *self.settings, *self.read, "vocab_size", "attention.layer_norm_epsilon"})


def _with_sliding_window(period: int) -> Callable[[Values, Shapes], dict[str, Any]]:
    """Returns a reader of which layers see a window. Without a pattern in the file, the last of each `period` layers sees everything."""

    def read(values: Values, shapes: Shapes) -> dict[str, Any]:
        pattern, count = values.get("attention.sliding_window_pattern", period), values["block_count"]
        if not values.get("attention.sliding_window"):
            pattern = 1  # every layer sees everything
        slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(count)]
        return {
            "sliding_window": values.get("attention.sliding_window") or None,
            "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides[:count]],
        }

    return read


def _gemma(largest: int) -> Callable[[Values, Shapes], dict[str, Any]]:
    """Returns a reader of what attention divides by: the root of a head's size, except in the model of 27B, which has `largest` layers."""

    def read(values: Values, shapes: Shapes) -> dict[str, Any]:
        part = values["embedding_length"] // values["attention.head_count"]
        return {"query_pre_attn_scalar": part if values["block_count"] == largest else head_size(values)}

    return read


def _gemma3(values: Values, shapes: Shapes) -> dict[str, Any]:
    return {**_gemma(62)(values, shapes), **_with_sliding_window(6)(values, shapes)}


def _gpt_oss(values: Values, shapes: Shapes) -> dict[str, Any]:
    rope = {**_NO_ROPE, "truncate": False}  # no key says that YaRN's limits are not rounded
    return {**_with_sliding_window(2)(values, shapes), "rope_parameters": rope}


def _gemma4(values: Values, shapes: Shapes) -> dict[str, Any]:
    count = values["block_count"]
    window = _with_sliding_window(6)(values, shapes)
    slides = [kind == "sliding_attention" for kind in window["layer_types"]]

    def of_layers(key: str) -> dict[bool, Any]:
        """Returns the value for the layers with a window (True) and for those that see everything."""
        found = values[key] if isinstance(values[key], list) else [values[key]] * count
        return dict(zip(slides, found, strict=True))

    heads, widths = of_layers("attention.head_count_kv"), values["feed_forward_length"]
    full = [i for i in range(count - values.get("attention.shared_kv_layers", 0)) if not slides[i]]
    return {
        **window, "num_key_value_heads": heads[True], "num_global_key_value_heads": heads.get(False),
        "intermediate_size": widths[0] if isinstance(widths, list) else widths, "use_double_wide_mlp": isinstance(widths, list) and widths[0] != widths[-1],
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in shapes for i in full), "enable_moe_block": bool(values.get("expert_count")),
        "vocab_size_per_layer_input": shapes.get("per_layer_token_embd.weight", shapes["token_embd.weight"])[0],
    }  # fmt: skip


def _deepseek(values: Values, shapes: Shapes) -> dict[str, Any]:
    """Keys and values are compressed. Newer files have the weights that unpack them in halves, and call the sizes of heads by other keys."""
    rotary, scale = values["rope.dimension_count"], values.get("rope.scaling.yarn_log_multiplier")
    groups, chosen = _GROUPS.get(values.get("expert_count", 0), (1, 1))  # older files do not say
    groups, chosen = values.get("expert_group_count", groups), values.get("expert_group_used_count", chosen)
    v2 = {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return {
        **_without_next_tokens(values, shapes), "num_key_value_heads": values["attention.head_count"], "q_lora_rank": values.get("attention.q_lora_rank"),
        "head_dim": rotary, "qk_nope_head_dim": values.get("attention.key_length_mla", values["attention.key_length"]) - rotary,
        "v_head_dim": values.get("attention.value_length_mla", values["attention.value_length"]),
        "n_group": groups, "topk_group": chosen, "norm_topk_prob": values.get("expert_weights_norm", False),
        "rope_parameters": dict(_NO_ROPE) | ({"mscale": 10 * scale, "mscale_all_dim": 10 * scale} if scale else {}),
        **({} if values.get("expert_gating_func") == _SIGMOID else v2),
    }  # fmt: skip


def _olmo3(values: Values, shapes: Shapes) -> dict[str, Any]:
    base = values.get("rope.freq_base", _NO_ROPE["rope_theta"])
    bases = {"full_attention": base, "sliding_attention": values.get("rope.freq_base_swa", base)}
    rope = {kind: {**_NO_ROPE, "rope_theta": base} for kind, base in bases.items()}
    return {**_with_sliding_window(4)(values, shapes), "rope_parameters": rope}


def _granite(values: Values, shapes: Shapes) -> dict[str, Any]:
    heads = values["attention.head_count_kv"]
    return {"num_key_value_heads": max(heads) if isinstance(heads, list) else heads}


def _granite_hybrid(values: Values, shapes: Shapes) -> dict[str, Any]:
    heads, inner = values["attention.head_count_kv"], values["ssm.inner_size"]
    return {
        **_granite(values, shapes), "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "mamba_d_head": inner // values["ssm.time_step_rank"], "mamba_expand": inner // values["embedding_length"],
        "num_local_experts": values.get("expert_count", 0), "position_embedding_type": None,
    }  # fmt: skip


def _lfm2(values: Values, shapes: Shapes) -> dict[str, Any]:
    """Layers without heads of keys are convolutions. The width of the MLPs is the final one."""
    types = ["full_attention" if heads else "conv" for heads in values["attention.head_count_kv"]]
    return {**_granite(values, shapes), "layer_types": types, "block_auto_adjust_ff_dim": False}


def _mistral(values: Values, shapes: Shapes) -> dict[str, Any]:
    scale, beta = values.get("rope.scaling.yarn_log_multiplier"), values.get("attention.temperature_scale")
    rope = dict(_NO_ROPE)
    if scale:
        rope |= {"mscale": 1.0, "mscale_all_dim": scale}
    if beta:
        rope |= {
            "llama_4_scaling_beta": beta,
            "original_max_position_embeddings": values["rope.scaling.original_context_length"],
        }
    return {"sliding_window": None, "rope_parameters": rope}


def _without_next_tokens(values: Values, shapes: Shapes) -> dict[str, Any]:
    return {"num_hidden_layers": values["block_count"] - values.get("nextn_predict_layers", 0)}


def _qwen35(values: Values, shapes: Shapes) -> dict[str, Any]:
    sections = [n for n in values["rope.dimension_sections"] if n]
    rope = {**_NO_ROPE, "mrope_section": sections, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    count = _without_next_tokens(values, shapes)
    recurrent = values.get("attention.recurrent_layers", ())[: count["num_hidden_layers"]]
    return {
        **count, "linear_value_head_dim": values["ssm.inner_size"] // values["ssm.time_step_rank"], "rope_parameters": rope,
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent] or None,
    }  # fmt: skip


FAMILIES: Mapping[str, Mapping[str, GgufFamily]] = {
    "bloom": {"": GgufFamily("bloom", _OLDER | {"context_length": "seq_length"}, rows="parts")},
    "cohere2": {
        "": GgufFamily(
            "cohere2", {"logit_scale": "logit_scale", "attention.layer_norm_epsilon": "layer_norm_eps"},
            _with_sliding_window(4), read=_WINDOW, biases=_ATTENTION_BIAS,
        )
    },
    "deepseek2": {
        "": GgufFamily(
            "deepseek_v3",
            {key: name for key, name in _DEEPSEEK_MIXTURE.items() if "group" not in key} | {
                "attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim",
            },
            _deepseek,
            read=frozenset({
                "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length", "attention.value_length_mla", "expert_gating_func",
                "expert_group_count", "expert_group_used_count", "nextn_predict_layers", "rope.scaling.yarn_log_multiplier",
            }),
        )
    },
    "ernie4_5": {"": GgufFamily("ernie4_5", biases={"use_bias": ".attn_q.bias"})},
    "ernie4_5-moe": {
        "": GgufFamily(
            "ernie4_5_moe",
            {
                "expert_count": "moe_num_experts", "expert_used_count": "moe_k", "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_count": "moe_num_shared_experts", "interleave_moe_layer_step": "moe_layer_interval",
                "leading_dense_block_count": "moe_layer_start_index",
            },
            lambda values, shapes: {"moe_layer_end_index": values["block_count"] - 1},
            read=frozenset({"expert_shared_feed_forward_length"}), biases={"use_bias": ".attn_q.bias"},
        )
    },
    "exaone4": {"": GgufFamily("exaone4", more=_with_sliding_window(4), read=_WINDOW)},
    "falcon": {
        "": GgufFamily("falcon", _OLDER, must={"attention.head_count_kv": 1, "tensor_data_layout": "jploski"}, biases={"bias": ".attn_qkv.bias"})
    },
    "gemma": {"": GgufFamily("gemma", shift=1.0)},
    "gemma2": {
        "": GgufFamily(
            "gemma2", _SLIDING | _FINAL_SOFTCAP | {"attn_logit_softcapping": "attn_logit_softcapping"}, _gemma(46), shift=1.0
        )
    },
    "gemma3": {"": GgufFamily("gemma3_text", _FINAL_SOFTCAP, _gemma3, read=_WINDOW | {"rope.freq_base_swa"}, shift=1.0)},
    "gemma4": {
        "": GgufFamily(
            "gemma4_text",
            _FINAL_SOFTCAP | {
                "attention.key_length": "global_head_dim", "attention.key_length_swa": "head_dim",
                "attention.shared_kv_layers": "num_kv_shared_layers", "embedding_length_per_layer_input": "hidden_size_per_layer_input",
                "expert_count": "num_experts", "expert_used_count": "top_k_experts", "expert_feed_forward_length": "moe_intermediate_size",
            },
            _gemma4, read=_WINDOW | {"rope.freq_base_swa"},
        )
    },
    "glm4": {"": GgufFamily("glm4", read=_PART, biases=_ATTENTION_BIAS)},
    "glm4moe": {
        "": GgufFamily(
            "glm4_moe", _DEEPSEEK_MIXTURE, _without_next_tokens, read=_PART | {"nextn_predict_layers"}, must={"expert_gating_func": _SIGMOID},
            biases=_ATTENTION_BIAS | {"use_qk_norm": ".attn_q_norm.weight"},
        )
    },
    "gpt-oss": {
        "": GgufFamily(
            "gpt_oss", _MIXTURE | {"expert_feed_forward_length": "intermediate_size"},
            _gpt_oss, read=_WINDOW, biases=_ATTENTION_BIAS, interleaved=True, columns=("_exps.",),
        )
    },
    "gpt2": {
        "": GgufFamily(
            "gpt2", _OLDER | {"context_length": "n_positions"}, columns=(".attn_qkv.", ".attn_output.", ".ffn_up.", ".ffn_down.")
        )
    },
    "granite": {
        "": GgufFamily(
            "granite", _GRANITE | {"expert_shared_feed_forward_length": "intermediate_size"}, _granite, read=_MAMBA, must=_WITH_ROPE, biases=_LLAMA_BIASES, rows="pairs"
        )
    },
    "granitehybrid": {
        "": GgufFamily(
            "granitemoehybrid",
            _GRANITE | _MIXTURE | {
                "expert_shared_feed_forward_length": "shared_intermediate_size", "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
                "ssm.group_count": "mamba_n_groups", "ssm.time_step_rank": "mamba_n_heads",
            },
            _granite_hybrid, read=frozenset({"ssm.inner_size"}), must={"rope.scaling.finetuned": False}, rows="pairs",
            biases=_ATTENTION_BIAS | {"mamba_conv_bias": ".ssm_conv1d.bias", "mamba_proj_bias": ".ssm_in.bias"},
        )
    },
    "granitemoe": {
        "expert_shared_feed_forward_length": GgufFamily(
            "granitemoeshared", _GRANITE | _MIXTURE | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
            _granite, read=_MAMBA, must=_WITH_ROPE, biases=_ATTENTION_BIAS, rows="pairs",
        ),
        "": GgufFamily("granitemoe", _GRANITE | _MIXTURE, _granite, read=_MAMBA, must=_WITH_ROPE, biases=_ATTENTION_BIAS, rows="pairs"),
    },
    "hunyuan-dense": {"": GgufFamily("hunyuan_v1_dense", biases=_ATTENTION_BIAS)},
    "lfm2": {
        "": GgufFamily(
            "lfm2", _NO_HEAD_SIZE | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}, _lfm2,
            biases={"conv_bias": ".shortconv.in_proj.bias"},
        )
    },
    "llama": {
        "expert_count": GgufFamily("mixtral", _MIXTURE, must=_LLAMA_ROWS, rows="pairs"),
        "": GgufFamily("llama", must=_LLAMA_ROWS, biases=_LLAMA_BIASES, rows="pairs"),
    },
    "mamba": {
        "": GgufFamily(
            "mamba", _MAMBA_1, lambda values, shapes: {"expand": values["ssm.inner_size"] // values["embedding_length"]}, read=frozenset({"ssm.inner_size"})
        )
    },
    "minimax-m2": {
        "": GgufFamily(
            "minimax_m2", _MIXTURE | {"expert_feed_forward_length": "intermediate_size"},
            lambda values, shapes: {"rope_parameters": {**_NO_ROPE, "partial_rotary_factor": 1.0}}, read=_PART, must={"expert_gating_func": _SIGMOID},
        )
    },
    "mistral3": {
        "attention.temperature_scale": GgufFamily("ministral3", more=_mistral, read=_TEMPERATURE, rows="pairs"),
        "": GgufFamily("mistral", more=_mistral, read=_TEMPERATURE, rows="pairs"),
    },
    "nemotron": {"": GgufFamily("nemotron", {"attention.layer_norm_epsilon": "norm_eps"}, read=_PART, biases=_LLAMA_BIASES, shift=1.0)},
    "olmo2": {
        "attention.sliding_window": GgufFamily("olmo3", more=_olmo3, read=_WINDOW | {"rope.freq_base_swa"}, biases=_ATTENTION_BIAS),
        "": GgufFamily("olmo2", biases=_ATTENTION_BIAS),
    },
    "phi2": {"": GgufFamily("phi", {"attention.layer_norm_epsilon": "layer_norm_eps"}, read=_PART)},
    "phi3": {"": GgufFamily("phi3", _SLIDING, read=_PART)},
    "qwen2": {"": GgufFamily("qwen2")},
    "qwen2moe": {"": GgufFamily("qwen2_moe", _QWEN_MIXTURE)},
    "qwen3": {"": GgufFamily("qwen3", biases=_ATTENTION_BIAS)},
    "qwen35": {"": GgufFamily("qwen3_5_text", _QWEN_DELTA, _qwen35, read=_QWEN35_KEYS, rows="tiled", shift=1.0)},
    "qwen35moe": {"": GgufFamily("qwen3_5_moe_text", _QWEN_DELTA | _QWEN_MIXTURE, _qwen35, read=_QWEN35_KEYS, rows="tiled", shift=1.0)},
    "qwen3moe": {"": GgufFamily("qwen3_moe", _QWEN_MIXTURE, lambda values, shapes: {"norm_topk_prob": True}, biases=_ATTENTION_BIAS)},
    "seed_oss": {"": GgufFamily("seed_oss", biases=_LLAMA_BIASES | {"attention_out_bias": ".attn_output.bias"})},
    "smollm3": {"": GgufFamily("smollm3", biases=_LLAMA_BIASES, rows="pairs")},
    "stablelm": {
        "": GgufFamily(
            "stablelm", _NO_HEAD_SIZE | {"attention.layer_norm_epsilon": "layer_norm_eps"},
            lambda values, shapes: {"use_parallel_residual": not any(".ffn_norm." in name for name in shapes)},
            read=_PART | {"use_parallel_residual"}, biases={"use_qkv_bias": ".attn_q.bias"},
        )
    },
    "starcoder2": {"": GgufFamily("starcoder2", _SLIDING | {"attention.layer_norm_epsilon": "norm_epsilon"}, biases={"use_bias": ".ffn_up.bias"})},
}  # fmt: skip
"""The families of an architecture. The first applies whose key the file has, with a value that is not 0; the key "" stands for every file."""


def head_size(values: Values) -> int:
    """Returns how many numbers a head's keys have."""
    return int(
        values.get("attention.key_length") or values["embedding_length"] // max(1, values["attention.head_count"])
    )


def family_config(family: GgufFamily, values: Values, shapes: Shapes) -> Any:
    """Returns the configuration of a file's model, with the rotary embedding that its model type has by default."""
    from transformers import AutoConfig

    values = {
        "attention.head_count_kv": values["attention.head_count"],
        **values,
        "attention.key_length": head_size(values),
    }
    names = _COMMON | dict(family.settings)
    settings = {
        name: None if key in _OFF_AT_0 and not values[key] else values[key]
        for key, name in names.items()
        if name and key in values
    }
    settings |= {name: any(tensor.endswith(end) for tensor in shapes) for name, end in family.biases.items()}
    settings |= {
        "model_type": family.model_type, "vocab_size": shapes["token_embd.weight"][0], "tie_word_embeddings": "output.weight" not in shapes, "bos_token_id": None, "pad_token_id": None,
        **family.more(values, shapes),
    }  # fmt: skip
    return AutoConfig.for_model(**settings)
