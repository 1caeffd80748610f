import pytest
from transformers import AutoConfig, LlamaConfig

from batchgen.model.checks.shrink import Unshrinkable, shrink

FULL, SLIDING = "full_attention", "sliding_attention"


def small(model_type, **settings):
    return shrink(AutoConfig.for_model(model_type, **settings))


def test_widths_and_vocabulary_become_small_and_heads_keep_their_kind():
    config = small("llama", num_key_value_heads=8, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=31_999)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (128, 64, 96)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, 127)
    assert small("llama").num_key_value_heads == 4
    assert small("llama", num_key_value_heads=1).num_key_value_heads == 1


def test_the_original_configuration_is_not_changed():
    config = AutoConfig.for_model("qwen3_moe")
    before = config.to_dict()
    shrink(config)
    assert config.to_dict() == before


def test_head_sizes_that_depend_on_each_other_are_divided_by_the_same_number():
    config = small("deepseek_v3")
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.qk_head_dim, config.v_head_dim) == (16, 8, 24, 16)
    assert (config.q_lora_rank, config.kv_lora_rank) == (16, 16)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_group, config.topk_group) == (8, 2, 2, 1)


def test_lengths_beyond_which_attention_changes_become_short():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32768}
    config = small("mistral", sliding_window=4096, rope_parameters=yarn)
    assert (config.sliding_window, config.max_position_embeddings) == (20, 512)
    assert config.rope_parameters == yarn | {"original_max_position_embeddings": 32}
    assert small("llama4_text").attention_chunk_size == small("llama4_text").floor_scale == 20
    assert small("gemma2").attn_logit_softcapping == 2.0


def test_position_embeddings_keep_the_length_below_which_they_do_not_depend_on_the_batch():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 32.0,
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
    }
    config = small("phi3", rope_parameters=rope, original_max_position_embeddings=4096)
    assert config.original_max_position_embeddings == 512
    assert len(config.rope_parameters["short_factor"]) == config.hidden_size // config.num_attention_heads // 2


@pytest.mark.parametrize(
    ("model_type", "settings", "types"),
    [
        ("gemma2", {}, [SLIDING, FULL]),
        ("gemma3_text", {}, [SLIDING] * 5 + [FULL, SLIDING]),  # its pattern repeats after 6 layers
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 32}, [FULL, FULL]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 20}, [FULL, FULL, SLIDING, SLIDING]),
    ],
)
def test_every_kind_of_layer_is_kept(model_type, settings, types):
    config = small(model_type, **settings)
    assert config.layer_types == types
    assert config.num_hidden_layers == len(types)


def test_a_number_of_layers_is_counted_among_the_kept_layers():
    config = small("qwen2", use_sliding_window=True, max_window_layers=20)
    assert config.max_window_layers == 2
    config = small("deepseek_v3")
    assert (config.num_hidden_layers, config.first_k_dense_replace) == (4, 3)
    config = small("gemma3n_text")
    assert (config.num_hidden_layers, config.num_kv_shared_layers) == (12, 4)
    assert config.layer_types[8:] == [SLIDING, SLIDING, FULL, FULL]


def test_lists_of_layer_indices_get_the_new_indices():
    config = small("qwen3_moe", mlp_only_layers=[2, 5])
    assert (config.num_hidden_layers, config.mlp_only_layers) == (3, [2])
    config = small("qwen3_moe", mlp_only_layers=[20])
    assert (config.num_hidden_layers, config.mlp_only_layers) == (3, [2])


def test_each_kept_layer_keeps_its_own_numbers():
    config = small("laguna", num_hidden_layers=3, num_attention_heads_per_layer=[48, 64, 48])
    assert config.num_attention_heads_per_layer == [4, 8, 4]


def test_quantization_is_left_out():
    config = LlamaConfig()
    config.quantization_config = {"quant_method": "torchao"}
    assert not hasattr(shrink(config), "quantization_config")


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"forget_after": 4096}, "forget_after=4096"),
        ({"per_layer": {"02": {"rank": 3}}}, "per_layer"),
        ({"lengths": [1, 2, 300]}, "lengths=300"),
    ],
)
def test_a_setting_of_unknown_meaning_is_refused(settings, what):
    with pytest.raises(Unshrinkable) as e:
        shrink(LlamaConfig(**settings))
    assert str(e.value) == f"its setting {what} is of an unknown kind"


def test_a_layer_pattern_that_is_too_long_is_refused():
    with pytest.raises(Unshrinkable, match="the pattern of its layers repeats only after 12 layers"):
        shrink(LlamaConfig(full_attn_interval=12))


def test_settings_of_single_layers_follow_their_layers():
    config = small("gemma4_text", layer_types=([SLIDING] * 2 + [FULL]) * 10, num_hidden_layers=30)
    assert config.layer_types == [SLIDING, SLIDING, FULL]
    spec = getattr(config, "_heterogeneity_spec", None)
    if spec is not None:  # transformers 5.17 has none
        assert spec.per_layer_overrides == {2: {"head_dim": 32}}
    assert config.__dict__["head_dim"] == 16
