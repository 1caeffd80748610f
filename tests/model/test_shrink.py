import pytest
from transformers import AutoConfig, LlamaConfig

from batchgen.model.checks.shrink import Unshrinkable, shrink

FULL, SLIDING = "full_attention", "sliding_attention"


def small(model_type, **settings):
    return shrink(AutoConfig.for_model(model_type, **settings))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32768}
MROPE = {"rope_type": "default", "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 32.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}


@pytest.mark.parametrize(
    ("model_type", "settings", "found"),
    [
        # Widths and the vocabulary become small, and heads keep their kind.
        ("llama", {"num_key_value_heads": 8, "eos_token_id": [2, 3], "pad_token_id": 31_999}, {
            "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "eos_token_id": None, "pad_token_id": 127,
        }),
        ("llama", {}, {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}, {"num_key_value_heads": 1}),
        # Head sizes that depend on each other are divided by the same number.
        ("deepseek_v3", {}, {
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24, "v_head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "num_hidden_layers": 4, "first_k_dense_replace": 3,
        }),
        ("qwen2_vl_text", {"rope_parameters": MROPE | {"mrope_section": [17, 24, 23]}}, {"rope_parameters": MROPE | {"mrope_section": [3, 3, 2]}}),
        # Lengths beyond which attention changes become short; those of position embeddings stay longer than the check's prompts.
        ("mistral", {"sliding_window": 4096, "rope_parameters": YARN}, {
            "sliding_window": 20, "max_position_embeddings": 512, "rope_parameters": YARN | {"original_max_position_embeddings": 32},
        }),
        ("llama4_text", {}, {"attention_chunk_size": 20, "floor_scale": 20}),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 4096}, {"original_max_position_embeddings": 512}),
        # Every kind of layer is kept, and what counts or names layers follows them.
        ("gemma2", {}, {"layer_types": [SLIDING, FULL], "num_hidden_layers": 2, "attn_logit_softcapping": 2.0}),
        ("gemma3_text", {}, {"layer_types": [SLIDING] * 5 + [FULL, SLIDING]}),  # its pattern repeats after 6 layers
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 32}, {"layer_types": [FULL, FULL]}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 20}, {
            "layer_types": [FULL, FULL, SLIDING, SLIDING], "num_hidden_layers": 4, "max_window_layers": 2,
        }),
        ("gemma3n_text", {}, {"num_kv_shared_layers": 4, "layer_types": [SLIDING, SLIDING, FULL, FULL] * 3}),
        ("qwen3_moe", {"mlp_only_layers": [2, 5]}, {"num_hidden_layers": 3, "mlp_only_layers": [2]}),
        ("qwen3_moe", {"mlp_only_layers": [20]}, {"num_hidden_layers": 3, "mlp_only_layers": [2]}),
        ("laguna", {"num_hidden_layers": 3, "num_attention_heads_per_layer": [48, 64, 48]}, {"num_attention_heads_per_layer": [4, 8, 4]}),
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_becomes_small_and_stays_of_its_kind(model_type, settings, found):
    config = small(model_type, **settings)
    assert {name: getattr(config, name) for name in found} == found


def test_quantization_is_left_out():
    config = LlamaConfig()
    config.quantization_config = {"quant_method": "torchao"}
    assert not hasattr(shrink(config), "quantization_config")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"forget_after": 4096}, "its setting forget_after=4096 is of an unknown kind"),
        ({"per_layer": {"02": {"rank": 3}}}, "its setting per_layer is of an unknown kind"),
        ({"lengths": [1, 2, 300]}, "its setting lengths=300 is of an unknown kind"),
        ({"full_attn_interval": 12}, "the pattern of its layers repeats only after 12 layers"),
    ],
)
def test_a_setting_of_unknown_meaning_and_a_pattern_that_is_too_long_are_refused(settings, said):
    with pytest.raises(Unshrinkable) as e:
        shrink(LlamaConfig(**settings))
    assert str(e.value) == said


def test_settings_of_single_layers_follow_their_layers():
    config = small("gemma4_text", layer_types=([SLIDING] * 2 + [FULL]) * 10, num_hidden_layers=30)
    assert config.layer_types == [SLIDING, SLIDING, FULL]
    spec = getattr(config, "_heterogeneity_spec", None)
    if spec is not None:  # transformers 5.17 has none
        assert spec.per_layer_overrides == {2: {"head_dim": 32}}
    assert config.__dict__["head_dim"] == 16
