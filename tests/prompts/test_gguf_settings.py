"""The settings of a GGUF file's model are those of the file, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.prompts import load_tokenizer
from support.gguf import write_vocabulary

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of each other
HINT = "; give the model in the format of transformers"


def configuration(file: Path, architecture: str, **parts: Any) -> Any:
    tokens = [("<unk>", 2), ("<s>", 3), ("</s>", 3), "a"]
    write_vocabulary(file, tokens, architecture=architecture, model="llama", scores=[0.0, 0.0, 0.0, 1.0], **parts)
    return load_tokenizer(ModelConfig(model=file)).hf_config


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        ("bloom", {"context_length": 96}, {"seq_length": 96}),
        ("falcon", {"attention.head_count_kv": 1, "attention.layer_norm_epsilon": 0.25}, {"layer_norm_epsilon": 0.25}),
        ("gemma2", {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 3.0}, {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 3.0}),
        ("gemma3", {"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
        ("gemma3", {"attention.sliding_window": 0}, {"sliding_window": None, "layer_types": ["full_attention"]}),
        ("gemma3", {"attention.sliding_window_pattern": 2, "block_count": 2}, {"layer_types": ["sliding_attention", "full_attention"]}),
        ("gpt2", {"context_length": 96}, {"n_positions": 96}),
        ("llama", {"attention.key_length": 12, "attention.value_length": 12}, {"head_dim": 12}),
        ("nemotron", {"attention.layer_norm_epsilon": 0.25, "attention.key_length": 12, "attention.value_length": 12}, {"norm_eps": 0.25, "head_dim": 12}),
        ("phi3", {"attention.sliding_window": 48}, {"sliding_window": 48}),
        ("phi3", {"attention.sliding_window": 0}, {"sliding_window": None}),
        ("qwen2", {"attention.key_length": 12}, {"head_dim": 12}),
        ("qwen2moe", {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40}, {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
        ("qwen3", {"attention.key_length": 12}, {"head_dim": 12}),
        ("qwen3moe", {"expert_feed_forward_length": 24}, {"moe_intermediate_size": 24}),
        ("starcoder2", {"attention.sliding_window": 48}, {"sliding_window": 48}),
    ],
)  # fmt: skip
def test_a_setting_is_that_of_the_file(tmp_path, architecture, settings, expected):
    config = configuration(tmp_path / "m.gguf", architecture, settings=settings)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("architecture", "period", "settings"),
    [
        ("afmoe", 4, {"expert_gating_func": 2}),
        ("cohere2", 4, {"logit_scale": 1.0}),
        ("exaone-moe", 4, {"expert_gating_func": 2, "expert_shared_feed_forward_length": 24, "expert_shared_count": 1}),
        ("exaone4", 4, {}),
        ("gemma3", 6, {}),
        ("gemma4", 6, {}),
        ("gpt-oss", 2, {}),
        ("olmo2", 4, {}),
    ],
)
def test_a_file_that_does_not_say_which_layers_see_everything_has_the_pattern_of_its_architecture(
    tmp_path, architecture, period, settings
):
    settings = {"attention.sliding_window": 5, "block_count": 12, **settings}
    config = configuration(tmp_path / "m.gguf", architecture, settings=settings)
    assert (config.sliding_window, len(config.layer_types)) == (5, 12)
    assert [i for i, kind in enumerate(config.layer_types, 1) if kind == "full_attention"] == [
        *range(period, 13, period)
    ]


@pytest.mark.parametrize(
    ("architecture", "tensor", "name"),
    [
        ("falcon", "attn_qkv", "bias"),
        ("llama", "attn_q", "attention_bias"),
        ("llama", "ffn_up", "mlp_bias"),
        ("nemotron", "ffn_up", "mlp_bias"),
        ("qwen3", "attn_q", "attention_bias"),
        ("starcoder2", "ffn_up", "use_bias"),
    ],
)
def test_layers_have_biases_if_the_file_has_them(tmp_path, architecture, tensor, name):
    keys = {"settings": {"attention.head_count_kv": 1 if architecture == "falcon" else 2}}
    with_biases = configuration(tmp_path / "with.gguf", architecture, tensors={f"blk.0.{tensor}.bias": [1.0]}, **keys)
    without = configuration(tmp_path / "without.gguf", architecture, **keys)
    assert (getattr(with_biases, name), getattr(without, name)) == (True, False)


@pytest.mark.parametrize("architecture", ["bloom", "falcon", "llama"])
def test_a_model_whose_file_has_an_output_head_uses_it(tmp_path, architecture):
    settings = {"attention.head_count_kv": 1 if architecture == "falcon" else 2}
    head = {"output.weight": [[0.0] * 16] * 4}
    untied = configuration(tmp_path / "untied.gguf", architecture, settings=settings, tensors=head)
    tied = configuration(tmp_path / "tied.gguf", architecture, settings=settings)
    assert (untied.tie_word_embeddings, tied.tie_word_embeddings) == (False, True)


@pytest.mark.parametrize(
    ("architecture", "layers", "expected"), [("gemma2", 26, 4), ("gemma2", 46, 8), ("gemma3", 46, 4), ("gemma3", 62, 8)]
)
def test_gemma_divides_the_products_of_attention_by_the_size_of_a_head_except_with_27b(
    tmp_path, architecture, layers, expected
):
    settings = {"block_count": layers, "attention.key_length": 4, "attention.value_length": 4}
    config = configuration(tmp_path / "m.gguf", architecture, settings=settings)
    assert config.query_pre_attn_scalar == expected  # 8: 16 numbers in two heads


def test_the_recurrent_layers_of_qwen_3_5_are_those_of_the_file(tmp_path):
    settings = {
        "attention.recurrent_layers": [True, False, True], "block_count": 3, "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 4,
        "ssm.group_count": 2, "ssm.time_step_rank": 2, "ssm.inner_size": 8,
    }  # fmt: skip
    rope = {"freq_base": 10000.0, "dimension_sections": [2, 1, 1, 0]}
    config = configuration(tmp_path / "m.gguf", "qwen35", settings=settings, rope=rope)
    assert config.layer_types == ["linear_attention", "full_attention", "linear_attention"]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("afmoe", {"expert_weights_norm": False}),
        ("falcon", {"attention.head_count_kv": 2}),
        ("glm4moe", {"expert_gating_func": 1}),
        ("gpt-oss", {"rope.dimension_sections": [1, 1, 1]}),
        ("granite", {"rope.scaling.finetuned": False}),
        ("llama", {"attention.scale": 0.5}),
        ("llama", {"attention.value_length": 4}),
        ("llama", {"attention.sliding_window": 32}),
        ("llama", {"expert_shared_count": 1}),
        ("llama", {"rope.dimension_count": 4}),
        ("mamba", {"ssm.dt_b_c_rms": True}),
        ("minimax-m2", {"expert_gating_func": 1}),
        ("qwen2", {"attention.causal": False}),
        ("qwen2", {"logit_scale": 0.5}),
        ("qwen3", {"pooling_type": 1}),
        ("qwen3moe", {"expert_gating_func": 2}),
        ("seed_oss", {"rope.dimension_count": 4}),
        ("smollm3", {"attention.clamp_kqv": 4.0}),
        ("starcoder2", {"rope.freq_base_swa": 5000.0}),
    ],
)
def test_a_setting_that_is_not_read_is_refused(tmp_path, architecture, settings):
    file = tmp_path / "m.gguf"
    ((key, value),) = settings.items()
    with pytest.raises(ModelError) as e:
        configuration(file, architecture, settings=settings)
    assert str(e.value) == f"{file} sets {architecture}.{key} to {value}, which batchgen does not read{HINT}"


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_count": 0, "attention.clamp_kqv": 0.0, "attention.causal": True, "pooling_type": 3},
        {"attention.sliding_window": 64, "expert_gating_func": 1, "vision.block_count": 4, "mm.tokens_per_image": 256},
    ],
)
def test_a_setting_that_changes_nothing_is_not_refused(tmp_path, settings):
    assert configuration(tmp_path / "m.gguf", "llama", settings=settings).model_type == "llama"


@pytest.mark.parametrize("heads", [2, [2]])
def test_heads_of_a_file_may_be_those_of_each_layer_or_of_all(tmp_path, heads):
    config = configuration(tmp_path / "m.gguf", "lfm2", settings={"attention.head_count_kv": heads})
    assert (config.layer_types, config.num_key_value_heads) == (["full_attention"], 2)


@pytest.mark.parametrize("architecture", ["deci", "dbrx", "plamo"])
def test_an_architecture_that_is_not_known_is_refused(tmp_path, architecture):
    file = tmp_path / "m.gguf"
    with pytest.raises(ModelError) as e:
        configuration(file, architecture)
    assert str(e.value) == f"batchgen does not read models of the architecture {architecture!r} from GGUF files: {file}{HINT}"  # fmt: skip


@pytest.mark.parametrize(("architecture", "key"), [("mamba", "ssm.inner_size"), ("qwen35", "rope.dimension_sections")])
def test_a_file_without_a_key_that_its_model_needs_is_refused_by_that_key(tmp_path, architecture, key):
    file = tmp_path / "m.gguf"
    with pytest.raises(ModelError) as e:
        configuration(file, architecture)
    assert str(e.value) == f"{file} has no {key}, which models of the architecture {architecture!r} need{HINT}"
