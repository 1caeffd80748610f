"""The families of GGUF files: what the keys of a file say of its model, and what llama.cpp's converter does to weights.

A family is an entry of `FAMILIES`. Files of other architectures are refused (`gguf.py`).
"""

from __future__ import annotations

import math
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
_GEMMA_LAYERS = _FINAL_SOFTCAP | {
    "attention.shared_kv_layers": "num_kv_shared_layers", "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}  # fmt: skip
_QWEN_MIXTURE = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
_QWEN_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim", "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads", "full_attention_interval": "full_attention_interval",
}  # fmt: skip
_MIXTURE = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_SHARED = {
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "num_shared_experts",
}  # fmt: skip
_DEEPSEEK_MIXTURE = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts", "leading_dense_block_count": "first_k_dense_replace", "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
}  # fmt: skip
_GROUPS = {160: (8, 3), 256: (8, 4)}
"""The groups of experts of DeepSeek V2 and V3, and how many of them a token uses, by their experts."""
_PHI_SCALES = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
"""What Phi 3.5 MoE multiplies its rotary embedding by. No key of a file says it."""
_SIGMOID = 2
"""`expert_gating_func` of DeepSeek V3 and GLM 4."""
_MAVERICK = 128
"""The experts of Llama 4's model that does not norm queries and keys."""
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
_TWO_ROPES = _WINDOW | {"rope.freq_base_swa"}
_QWEN35_KEYS = frozenset({"rope.dimension_count", "rope.dimension_sections", "ssm.inner_size", "attention.recurrent_layers", "nextn_predict_layers"})  # fmt: skip
_SECTIONS = frozenset({"rope.dimension_sections", "n_deepstack_layers"})
"""Keys of models that are shown images: the three positions of a text's token are one, and no layer adds an image's features."""
_WITH_ROPE = {"rope.scaling.finetuned": True}
_LLAMA_ROWS = {"tensor_data_layout": "Meta AI original pth"}
_NO_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
"""The rotary embedding of configurations whose default scales it. `gguf_rope.py` gives it what the file says."""

Values = Mapping[str, Any]
"""The keys of a file without the name of its architecture."""
Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a file's tensors."""


class GgufFamily(NamedTuple):
    """How the models of a type lie in a file."""

    model_type: str
    settings: Mapping[str, str] = {}
    """More names of settings by keys, beside `_COMMON`. The name "" stands for none: the shapes of weights are enough."""
    more: Callable[[Values, Shapes], Mapping[str, Any]] = lambda values, shapes: {}
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


def _of_layers(values: Values, key: str) -> list[Any]:
    """Returns the value of each layer. A file may have one for all."""
    value = values[key]
    return value if isinstance(value, list) else [value] * values["block_count"]


def _with_sliding_window(period: int) -> Callable[[Values, Shapes], dict[str, Any]]:
    """Returns a reader of which layers see a window. Without a pattern in the file, the last of each `period` layers sees everything."""

    def read(values: Values, shapes: Shapes) -> dict[str, Any]:
        pattern = values.get("attention.sliding_window_pattern", period)
        count = _without_next_tokens(values, shapes)["num_hidden_layers"]
        if not values.get("attention.sliding_window"):
            pattern = 1  # every layer sees everything
        slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(count)]
        return {
            "sliding_window": values.get("attention.sliding_window") or None,
            "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides[:count]],
        }

    return read


def _afmoe(values: Values, shapes: Shapes) -> dict[str, Any]:
    """Embeddings are always scaled. Every fourth layer sees everything, without positions."""
    window = values["attention.sliding_window"]
    return {**_with_sliding_window(4)(values, shapes), "sliding_window": window, "mup_enabled": True}


def _gemma(largest: int) -> Callable[[Values, Shapes], dict[str, Any]]:
    """Returns a reader of what attention divides by: the root of a head's size, except in the model of 27B, which has `largest` layers."""

    def read(values: Values, shapes: Shapes) -> dict[str, Any]:
        part = values["embedding_length"] // values["attention.head_count"]
        return {"query_pre_attn_scalar": part if values["block_count"] == largest else head_size(values)}

    return read


def _gemma3(values: Values, shapes: Shapes) -> dict[str, Any]:
    return {**_gemma(62)(values, shapes), **_with_sliding_window(6)(values, shapes)}


def _gemma3n(values: Values, shapes: Shapes) -> dict[str, Any]:
    scales = values["activation_sparsity_scale"]  # in standard deviations
    return {
        **_with_sliding_window(5)(values, shapes), "activation_sparsity_pattern": [(1 + math.erf(x / math.sqrt(2))) / 2 for x in scales],
        "vocab_size_per_layer_input": shapes["per_layer_token_embd.weight"][0], "laurel_rank": shapes["blk.0.laurel_l.weight"][0],
    }  # fmt: skip


def _gpt_oss(values: Values, shapes: Shapes) -> dict[str, Any]:
    rope = {**_NO_ROPE, "truncate": False}  # no key says that YaRN's limits are not rounded
    return {**_with_sliding_window(2)(values, shapes), "rope_parameters": rope}


def _gemma4(values: Values, shapes: Shapes) -> dict[str, Any]:
    count = values["block_count"]
    window = _with_sliding_window(6)(values, shapes)
    slides = [kind == "sliding_attention" for kind in window["layer_types"]]
    heads = dict(zip(slides, _of_layers(values, "attention.head_count_kv"), strict=True))  # True: with a window
    widths = values["feed_forward_length"]
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
    heads, inner = _of_layers(values, "attention.head_count_kv"), values["ssm.inner_size"]
    return {
        **_granite(values, shapes), "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "mamba_d_head": inner // values["ssm.time_step_rank"], "mamba_expand": inner // values["embedding_length"],
        "num_local_experts": values.get("expert_count", 0), "position_embedding_type": None,
    }  # fmt: skip


def _jamba(values: Values, shapes: Shapes) -> dict[str, Any]:
    """Which layers attend and which are mixtures follows a period."""
    attend = [i for i, heads in enumerate(_of_layers(values, "attention.head_count_kv")) if heads]
    mixtures = [i for i in range(values["block_count"]) if f"blk.{i}.ffn_gate_inp.weight" in shapes]

    def period(layers: list[int]) -> int:
        return layers[1] - layers[0] if len(layers) > 1 else int(values["block_count"])

    return {
        **_granite(values, shapes), "mamba_expand": values["ssm.inner_size"] // values["embedding_length"],
        "attn_layer_offset": attend[0], "attn_layer_period": period(attend),
        "expert_layer_offset": mixtures[0] if mixtures else 1, "expert_layer_period": period(mixtures) if mixtures else 2,
        **({} if mixtures else {"num_experts": 1}),
    }  # fmt: skip


def _lfm2(values: Values, shapes: Shapes) -> dict[str, Any]:
    """Layers without heads of keys are convolutions. The width of the MLPs is the final one."""
    types = ["full_attention" if heads else "conv" for heads in _of_layers(values, "attention.head_count_kv")]
    return {**_granite(values, shapes), "layer_types": types, "block_auto_adjust_ff_dim": False}


def _nemotron_h(values: Values, shapes: Shapes) -> dict[str, Any]:
    """A layer is attention if it has heads of keys, an MLP or a mixture if it has a width, and recurrent otherwise."""
    heads, widths = _of_layers(values, "attention.head_count_kv"), _of_layers(values, "feed_forward_length")
    other = "moe" if values.get("expert_count") else "mlp"
    kinds = [
        "full_attention" if head else other if width else "linear_attention"
        for head, width in zip(heads, widths, strict=True)
    ]
    return {
        **_granite(values, shapes), "intermediate_size": max(widths), "mamba_head_dim": values["ssm.inner_size"] // values["ssm.time_step_rank"],
        "layers_block_type": kinds[: _without_next_tokens(values, shapes)["num_hidden_layers"]],
    }  # fmt: skip


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


def _partial(values: Values, shapes: Shapes) -> dict[str, Any]:
    """The part of a head that is rotated is known by `gguf_rope.py`."""
    return {"rope_parameters": {**_NO_ROPE, "partial_rotary_factor": 1.0}}


def _without_next_tokens(values: Values, shapes: Shapes) -> dict[str, Any]:
    return {"num_hidden_layers": values["block_count"] - values.get("nextn_predict_layers", 0)}


def _delta_net(values: Values, shapes: Shapes) -> dict[str, Any]:
    count = _without_next_tokens(values, shapes)
    recurrent = values.get("attention.recurrent_layers", ())[: count["num_hidden_layers"]]
    return {
        **count, "linear_value_head_dim": values["ssm.inner_size"] // values["ssm.time_step_rank"],
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent] or None,
    }  # fmt: skip


def _qwen35(values: Values, shapes: Shapes) -> dict[str, Any]:
    sections = [n for n in values["rope.dimension_sections"] if n]
    rope = {**_NO_ROPE, "mrope_section": sections, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    return {**_delta_net(values, shapes), "rope_parameters": rope}


_NEMOTRON_H = GgufFamily(
    "nemotron_h",
    _DEEPSEEK_MIXTURE | {
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "attention.layer_norm_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size", "ssm.group_count": "n_groups", "ssm.time_step_rank": "mamba_num_heads",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size", "moe_latent_size": "moe_latent_size",
    },
    _nemotron_h, read=_PART | {"ssm.inner_size", "nextn_predict_layers"}, must={"rope.scaling.finetuned": False, "expert_gating_func": _SIGMOID},
    biases=_LLAMA_BIASES | {"use_conv_bias": ".ssm_conv1d.bias", "use_bias": ".ssm_in.bias", "mamba_proj_bias": ".ssm_in.bias"},
)  # fmt: skip
FAMILIES: Mapping[str, GgufFamily] = {
    "afmoe": GgufFamily(
        "afmoe",
        _SHARED | {
            "expert_count": "num_experts", "leading_dense_block_count": "num_dense_layers", "expert_weights_scale": "route_scale",
        },
        _afmoe, read=_WINDOW,
        must={"expert_gating_func": _SIGMOID, "expert_weights_norm": True, "expert_group_count": 1, "expert_group_used_count": 1},
    ),
    "apertus": GgufFamily("apertus", more=lambda values, shapes: {"rope_parameters": dict(_NO_ROPE)}, biases=_ATTENTION_BIAS),
    "arcee": GgufFamily("arcee", biases=_LLAMA_BIASES, rows="pairs"),
    "bloom": GgufFamily("bloom", _OLDER | {"context_length": "seq_length"}, rows="parts"),
    "chatglm": GgufFamily("glm", read=_PART, biases=_ATTENTION_BIAS),
    "command-r": GgufFamily(
        "cohere", _NO_HEAD_SIZE | {"logit_scale": "logit_scale", "attention.layer_norm_epsilon": "layer_norm_eps"},
        biases=_ATTENTION_BIAS | {"use_qk_norm": ".attn_q_norm.weight"},
    ),
    "cohere2": GgufFamily(
        "cohere2", {"logit_scale": "logit_scale", "attention.layer_norm_epsilon": "layer_norm_eps"},
        _with_sliding_window(4), read=_WINDOW, biases=_ATTENTION_BIAS,
    ),
    "deepseek2": GgufFamily(
        "deepseek_v3",
        {key: name for key, name in _DEEPSEEK_MIXTURE.items() if "group" not in key} | {
            "attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim",
        },
        _deepseek,
        read=frozenset({
            "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length", "attention.value_length_mla", "expert_gating_func",
            "expert_group_count", "expert_group_used_count", "nextn_predict_layers", "rope.scaling.yarn_log_multiplier",
        }),
    ),
    "dots1": GgufFamily(
        "dots1", _DEEPSEEK_MIXTURE,
        lambda values, shapes: {"sliding_window": None, "layer_types": ["full_attention"] * values["block_count"]},
        must={"expert_gating_func": _SIGMOID}, biases=_ATTENTION_BIAS,
    ),
    "ernie4_5": GgufFamily("ernie4_5", biases={"use_bias": ".attn_q.bias"}),
    "ernie4_5-moe": GgufFamily(
        "ernie4_5_moe",
        {
            "expert_count": "moe_num_experts", "expert_used_count": "moe_k", "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts", "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        lambda values, shapes: {"moe_layer_end_index": values["block_count"] - 1},
        read=frozenset({"expert_shared_feed_forward_length"}), biases={"use_bias": ".attn_q.bias"},
    ),
    "exaone": GgufFamily("llama", {"attention.layer_norm_epsilon": "rms_norm_eps"}),
    "exaone-moe": GgufFamily(
        "exaone_moe", _DEEPSEEK_MIXTURE | {"expert_count": "num_experts", "expert_shared_count": "num_shared_experts"},
        lambda values, shapes: {**_with_sliding_window(4)(values, shapes), **_without_next_tokens(values, shapes)},
        read=_WINDOW | {"nextn_predict_layers", "expert_shared_feed_forward_length"}, must={"expert_gating_func": _SIGMOID},
    ),
    "exaone4": GgufFamily("exaone4", more=_with_sliding_window(4), read=_WINDOW),
    "falcon": GgufFamily("falcon", _OLDER, must={"attention.head_count_kv": 1, "tensor_data_layout": "jploski"}, biases={"bias": ".attn_qkv.bias"}),
    "gemma": GgufFamily("gemma", shift=1.0),
    "gemma2": GgufFamily(
        "gemma2", _SLIDING | _FINAL_SOFTCAP | {"attn_logit_softcapping": "attn_logit_softcapping"}, _gemma(46), shift=1.0
    ),
    "gemma3": GgufFamily("gemma3_text", _FINAL_SOFTCAP, _gemma3, read=_TWO_ROPES, shift=1.0),
    "gemma3n": GgufFamily(
        "gemma3n_text",
        _GEMMA_LAYERS | {"altup.num_inputs": "altup_num_inputs", "altup.active_idx": "altup_active_idx"},
        _gemma3n, read=_TWO_ROPES | {"activation_sparsity_scale"},
    ),
    "gemma4": GgufFamily(
        "gemma4_text",
        _GEMMA_LAYERS | {
            "attention.key_length": "global_head_dim", "attention.key_length_swa": "head_dim",
            "expert_count": "num_experts", "expert_used_count": "top_k_experts", "expert_feed_forward_length": "moe_intermediate_size",
        },
        _gemma4, read=_TWO_ROPES,
    ),
    "glm4": GgufFamily("glm4", read=_PART, biases=_ATTENTION_BIAS),
    "glm4moe": GgufFamily(
        "glm4_moe", _DEEPSEEK_MIXTURE, _without_next_tokens, read=_PART | {"nextn_predict_layers"}, must={"expert_gating_func": _SIGMOID},
        biases=_ATTENTION_BIAS | {"use_qk_norm": ".attn_q_norm.weight"},
    ),
    "gpt-oss": GgufFamily(
        "gpt_oss", _MIXTURE | {"expert_feed_forward_length": "intermediate_size"},
        _gpt_oss, read=_WINDOW, biases=_ATTENTION_BIAS, interleaved=True, columns=("_exps.",),
    ),
    "gptneox": GgufFamily(
        "gpt_neox",
        _NO_HEAD_SIZE | {
            "attention.head_count_kv": "", "attention.layer_norm_epsilon": "layer_norm_eps", "use_parallel_residual": "use_parallel_residual",
        },
        read=_PART, biases={"attention_bias": ".attn_qkv.bias"}, rows="parts",
    ),
    "gpt2": GgufFamily(
        "gpt2", _OLDER | {"context_length": "n_positions"}, columns=(".attn_qkv.", ".attn_output.", ".ffn_up.", ".ffn_down.")
    ),
    "granite": GgufFamily(
        "granite", _GRANITE | {"expert_shared_feed_forward_length": "intermediate_size"}, _granite, read=_MAMBA, must=_WITH_ROPE, biases=_LLAMA_BIASES, rows="pairs"
    ),
    "granitehybrid": GgufFamily(
        "granitemoehybrid",
        _GRANITE | _MIXTURE | {
            "expert_shared_feed_forward_length": "shared_intermediate_size", "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups", "ssm.time_step_rank": "mamba_n_heads",
        },
        _granite_hybrid, read=frozenset({"ssm.inner_size"}), must={"rope.scaling.finetuned": False}, rows="pairs",
        biases=_ATTENTION_BIAS | {"mamba_conv_bias": ".ssm_conv1d.bias", "mamba_proj_bias": ".ssm_in.bias"},
    ),
    "granitemoe": GgufFamily("granitemoe", _GRANITE | _MIXTURE, _granite, read=_MAMBA, must=_WITH_ROPE, biases=_ATTENTION_BIAS, rows="pairs"),
    "hunyuan-dense": GgufFamily("hunyuan_v1_dense", biases=_ATTENTION_BIAS),
    "hunyuan-moe": GgufFamily(
        "hunyuan_v1_moe",
        {
            "expert_count": "num_experts", "expert_used_count": "moe_topk", "expert_feed_forward_length": "intermediate_size", "feed_forward_length": "",
        },
        read=frozenset({"expert_shared_feed_forward_length"}), must={"expert_shared_count": 1}, biases=_ATTENTION_BIAS,
    ),
    "internlm2": GgufFamily("llama", biases=_LLAMA_BIASES, rows="pairs"),
    "jais2": GgufFamily("jais2", {"attention.layer_norm_epsilon": "layer_norm_eps"}, biases=_LLAMA_BIASES),
    "jamba": GgufFamily(
        "jamba",
        _NO_HEAD_SIZE | {
            "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
        },
        _jamba, read=frozenset({"ssm.inner_size"}), biases={"mamba_conv_bias": ".ssm_conv1d.bias", "mamba_proj_bias": ".ssm_in.bias"},
    ),
    "lfm2": GgufFamily(
        "lfm2", _NO_HEAD_SIZE | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}, _lfm2,
        biases={"conv_bias": ".shortconv.in_proj.bias"},
    ),
    "lfm2moe": GgufFamily(
        "lfm2_moe",
        _NO_HEAD_SIZE | _SHARED | {
            "attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache", "expert_count": "num_experts",
            "leading_dense_block_count": "num_dense_layers", "expert_weights_scale": "routed_scaling_factor",
        },
        _lfm2, must={"expert_gating_func": _SIGMOID}, biases={"conv_bias": ".shortconv.in_proj.bias", "use_expert_bias": ".exp_probs_b.bias"},
    ),
    "llama": GgufFamily("llama", must=_LLAMA_ROWS, biases=_LLAMA_BIASES, rows="pairs"),
    "llama4": GgufFamily(
        "llama4_text",
        _MIXTURE | {
            "feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        lambda values, shapes: {"use_qk_norm": values.get("expert_count") != _MAVERICK}, must={"attention.sliding_window": 8192},
        biases=_ATTENTION_BIAS, columns=("_exps.",),
    ),
    "mamba": GgufFamily(
        "mamba", _MAMBA_1, lambda values, shapes: {"expand": values["ssm.inner_size"] // values["embedding_length"]}, read=frozenset({"ssm.inner_size"})
    ),
    "mamba2": GgufFamily(
        "mamba2",
        _NO_HEAD_SIZE | {
            "attention.head_count": "", "attention.head_count_kv": "", "feed_forward_length": "", "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.group_count": "n_groups", "ssm.time_step_rank": "num_heads",
        },
        lambda values, shapes: {
            "head_dim": values["ssm.inner_size"] // values["ssm.time_step_rank"], "expand": values["ssm.inner_size"] // values["embedding_length"],
        },
        read=frozenset({"ssm.inner_size"}), biases={"use_bias": ".ssm_in.bias", "use_conv_bias": ".ssm_conv1d.bias"},
    ),
    "minicpm": GgufFamily(
        "granite", {key: name for key, name in _GRANITE.items() if key != "attention.scale"},
        # Files without its scales are older than the keys.
        lambda values, shapes: {
            "attention_multiplier": head_size(values) ** -0.5, "embedding_multiplier": values["embedding_scale"],
            "residual_multiplier": values["residual_scale"], "logits_scaling": values["logit_scale"],
        }, rows="pairs",
    ),
    "minicpm3": GgufFamily(
        "minicpm3", {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim"},
        lambda values, shapes: {
            "head_dim": values["rope.dimension_count"], "qk_nope_head_dim": head_size(values) - values["rope.dimension_count"],
            "v_head_dim": values["embedding_length"] // values["attention.head_count"],
        },
    ),
    "minimax-m2": GgufFamily(
        "minimax_m2", _MIXTURE | {"expert_feed_forward_length": "intermediate_size"},
        _partial, read=_PART, must={"expert_gating_func": _SIGMOID},
    ),
    "mistral3": GgufFamily("mistral", more=_mistral, read=_TEMPERATURE, rows="pairs"),
    "mpt": GgufFamily(
        "mpt",
        _OLDER | {
            "context_length": "max_seq_len", "embedding_length": "d_model", "block_count": "n_layers", "attention.head_count": "n_heads",
        },
        must={"attention.max_alibi_bias": 8.0},
    ),
    "nemotron": GgufFamily("nemotron", {"attention.layer_norm_epsilon": "norm_eps"}, read=_PART, biases=_LLAMA_BIASES, shift=1.0),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "olmo": GgufFamily("olmo", _NO_HEAD_SIZE | {"attention.clamp_kqv": "clip_qkv"}, rows="pairs"),
    "olmo2": GgufFamily("olmo2", biases=_ATTENTION_BIAS),
    "olmoe": GgufFamily(
        "olmoe", _NO_HEAD_SIZE | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        lambda values, shapes: {"norm_topk_prob": False}, biases=_ATTENTION_BIAS,
    ),
    "pangu-embedded": GgufFamily("llama", biases=_LLAMA_BIASES),
    "phi2": GgufFamily("phi", {"attention.layer_norm_epsilon": "layer_norm_eps"}, read=_PART),
    "phi3": GgufFamily("phi3", _SLIDING, read=_PART),
    "phimoe": GgufFamily(
        "phimoe", _NO_HEAD_SIZE | _MIXTURE, lambda values, shapes: {"sliding_window": None, "rope_parameters": {**_NO_ROPE, **_PHI_SCALES}},
        biases=_ATTENTION_BIAS | {"lm_head_bias": "output.bias"},
    ),
    "qwen2": GgufFamily("qwen2"),
    "qwen2moe": GgufFamily("qwen2_moe", _QWEN_MIXTURE),
    "qwen2vl": GgufFamily("qwen2", read=_SECTIONS),
    "qwen3": GgufFamily("qwen3", biases=_ATTENTION_BIAS),
    "qwen35": GgufFamily("qwen3_5_text", _QWEN_DELTA, _qwen35, read=_QWEN35_KEYS, rows="tiled", shift=1.0),
    "qwen35moe": GgufFamily("qwen3_5_moe_text", _QWEN_DELTA | _QWEN_MIXTURE, _qwen35, read=_QWEN35_KEYS, rows="tiled", shift=1.0),
    "qwen3moe": GgufFamily("qwen3_moe", _QWEN_MIXTURE, lambda values, shapes: {"norm_topk_prob": True}, biases=_ATTENTION_BIAS),
    "qwen3next": GgufFamily(
        "qwen3_next", _QWEN_DELTA | _QWEN_MIXTURE, lambda values, shapes: {**_delta_net(values, shapes), "norm_topk_prob": True},
        read=_QWEN35_KEYS, shift=1.0,
    ),
    "qwen3vl": GgufFamily("qwen3", read=_SECTIONS, biases=_ATTENTION_BIAS),
    "qwen3vlmoe": GgufFamily("qwen3_moe", _QWEN_MIXTURE, lambda values, shapes: {"norm_topk_prob": True}, read=_SECTIONS, biases=_ATTENTION_BIAS),
    "seed_oss": GgufFamily("seed_oss", biases=_LLAMA_BIASES | {"attention_out_bias": ".attn_output.bias"}),
    "smollm3": GgufFamily("smollm3", biases=_LLAMA_BIASES, rows="pairs"),
    "stablelm": GgufFamily(
        "stablelm", _NO_HEAD_SIZE | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        lambda values, shapes: {"use_parallel_residual": not any(".ffn_norm." in name for name in shapes)},
        read=_PART | {"use_parallel_residual"}, biases={"use_qkv_bias": ".attn_q.bias"},
    ),
    "starcoder": GgufFamily("gpt_bigcode", _OLDER | {"context_length": "n_positions"}, must={"attention.head_count_kv": 1}),
    "starcoder2": GgufFamily("starcoder2", _SLIDING | {"attention.layer_norm_epsilon": "norm_epsilon"}, biases={"use_bias": ".ffn_up.bias"}),
    "xverse": GgufFamily("llama", must=_LLAMA_ROWS, rows="pairs"),
}  # fmt: skip
"""By architecture."""
VARIANTS: Mapping[str, tuple[str, GgufFamily]] = {
    "granitemoe": (
        "expert_shared_feed_forward_length",
        GgufFamily(
            "granitemoeshared", _GRANITE | _MIXTURE | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
            _granite, read=_MAMBA, must=_WITH_ROPE, biases=_ATTENTION_BIAS, rows="pairs",
        ),
    ),
    "llama": ("expert_count", GgufFamily("mixtral", _MIXTURE, must=_LLAMA_ROWS, rows="pairs")),
    "mistral3": ("attention.temperature_scale", GgufFamily("ministral3", more=_mistral, read=_TEMPERATURE, rows="pairs")),
    "olmo2": ("attention.sliding_window", GgufFamily("olmo3", more=_olmo3, read=_TWO_ROPES, biases=_ATTENTION_BIAS)),
}  # fmt: skip
"""By architecture: a key, and the family of files that have it with a value that is not 0."""


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
