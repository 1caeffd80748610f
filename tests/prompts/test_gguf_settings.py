"""The settings of a GGUF file's model are those of the file, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.prompts import load_tokenizer
from support.gguf import write_vocabulary

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of each other


def configuration(file: Path, architecture: str = "llama", **parts: Any) -> Any:
    tokens = [("<unk>", 2), ("<s>", 3), ("</s>", 3), "a"]
    write_vocabulary(file, tokens, architecture=architecture, model="llama", scores=[0.0, 0.0, 0.0, 1.0], **parts)
    return load_tokenizer(ModelConfig(model=file)).hf_config


HEADS = {"attention.key_length": 12, "attention.value_length": 12}
DELTA = {"ssm.inner_size": 16, "ssm.time_step_rank": 2, "ssm.group_count": 2, "ssm.state_size": 8}


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        ("bloom", {"context_length": 96}, {"seq_length": 96}),
        ("gemma3", {"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
        ("gemma3", {"attention.sliding_window_pattern": 2, "block_count": 2}, {"layer_types": ["sliding_attention", "full_attention"]}),
        ("gpt2", {"context_length": 96}, {"n_positions": 96}),
        ("llama", HEADS, {"head_dim": 12}),
        ("nemotron", {"attention.layer_norm_epsilon": 0.25, **HEADS}, {"norm_eps": 0.25, "head_dim": 12}),
        ("phi3", {"attention.sliding_window": 0}, {"sliding_window": None}),
        ("qwen2", {"attention.key_length": 12}, {"head_dim": 12}),
        # Heads may be those of each layer or of all.
        *(("lfm2", {"attention.head_count_kv": heads}, {"layer_types": ["full_attention"], "num_key_value_heads": 2}) for heads in (2, [2])),
        # Gemma divides the products of attention by the size of a head, except with 27b: 16 numbers in two heads.
        *(
            (name, {"block_count": layers, "attention.key_length": 4, "attention.value_length": 4}, {"query_pre_attn_scalar": by})
            for name, layers, by in (("gemma2", 26, 4), ("gemma2", 46, 8), ("gemma3", 46, 4), ("gemma3", 62, 8))
        ),
        # What changes nothing is not refused.
        ("llama", {"expert_count": 0, "attention.clamp_kqv": 0.0, "attention.causal": True, "pooling_type": 3}, {}),
        ("llama", {"attention.sliding_window": 64, "expert_gating_func": 1, "vision.block_count": 4, "mm.tokens_per_image": 256}, {}),
    ],
)  # fmt: skip
def test_a_setting_is_that_of_the_file(tmp_path, architecture, settings, expected):
    config = configuration(tmp_path / "m.gguf", architecture, settings=settings)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("architecture", "parts", "expected"),
    [
        # Without dimensions whole heads are rotated.
        *(
            (name, {"rope": {"dimension_count": None}, "settings": DELTA if name == "qwen3next" else {}}, {"partial_rotary_factor": 1.0})
            for name in ("stablelm", "phi2", "glm4", "chatglm", "nemotron", "minimax-m2", "qwen3next")
        ),
        # A factor of 2023 has its old name.
        ("llama", {"rope": {"scale_linear": 4.0}}, {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope": {"scale_linear": 4.0, "scaling.factor": 2.0}}, {"factor": 2.0}),
        # Without a base it is that of llama also where the models have others.
        ("minimax-m2", {}, {"rope_theta": 10000.0}),
        ("lfm2", {"settings": {"attention.head_count_kv": [2]}}, {"rope_theta": 10000.0}),
        ("llama", {"tensors": {"rope_freqs.weight": [1.0] * 4}}, {"rope_type": "default"}),
    ],
)  # fmt: skip
def test_a_setting_of_the_rotary_embedding_is_that_of_the_file(tmp_path, architecture, parts, expected):
    rope = configuration(tmp_path / "m.gguf", architecture, **parts).rope_parameters
    assert {name: rope[name] for name in expected} == expected


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


@pytest.mark.parametrize("architecture", ["bloom", "falcon", "llama"])
def test_a_model_whose_file_has_an_output_head_uses_it(tmp_path, architecture):
    settings = {"attention.head_count_kv": 1 if architecture == "falcon" else 2}
    head = {"output.weight": [[0.0] * 16] * 4}
    untied = configuration(tmp_path / "untied.gguf", architecture, settings=settings, tensors=head)
    tied = configuration(tmp_path / "tied.gguf", architecture, settings=settings)
    assert (untied.tie_word_embeddings, tied.tie_word_embeddings) == (False, True)


NOT_READ = [
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
]
SCALED = "the rotary embedding of {} is scaled in a way that batchgen does not know: "
OF_YARN = SCALED + "'yarn' with attn_factor or yarn_attn_factor or yarn_ext_factor other than 1"
REFUSED = [
    *(
        (architecture, {"settings": {key: value}}, f"{{}} sets {architecture}.{key} to {value}, which batchgen does not read")
        for architecture, settings in NOT_READ for key, value in settings.items()
    ),
    *((name, {}, f"batchgen does not read models of the architecture {name!r} from GGUF files: {{}}") for name in ("deci", "dbrx", "plamo")),
    ("mamba", {}, "{} has no ssm.inner_size, which models of the architecture 'mamba' need"),
    ("qwen35", {}, "{} has no rope.dimension_sections, which models of the architecture 'qwen35' need"),
    ("llama", {"tensors": {"rope_freqs.weight": [1.0, 2.0, 1.0, 8.0]}}, SCALED + "its own (rope_freqs.weight)"),
    ("llama", {"rope": {"scaling.type": "new"}}, SCALED + "'new'"),
    ("llama", {"rope": {"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.yarn_attn_factor": 1.5}}, OF_YARN),
    ("llama", {"rope": {"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.yarn_ext_factor": 0.0}}, OF_YARN),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "parts", "message"), REFUSED)
def test_what_batchgen_does_not_read_of_a_file_is_refused_by_name(tmp_path, architecture, parts, message):
    file = tmp_path / "m.gguf"
    with pytest.raises(ModelError) as e:
        configuration(file, architecture, **parts)
    assert str(e.value) == f"{message.format(file)}; give the model in the format of transformers"


# -- the rotary embedding


LLAMA3 = [1.0, 1.0, 2.6945296878948333, 8.0]
"""Of 8 dimensions and the base 500,000, as llama.cpp's converter computes them."""


def test_frequencies_that_a_file_has_divided_are_those_of_llama_3_1(tmp_path):
    config = configuration(tmp_path / "m.gguf", rope={"freq_base": 500000.0}, tensors={"rope_freqs.weight": LLAMA3})
    assert config.rope_parameters == {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(scaled, plain / torch.tensor(LLAMA3))


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 0.0}, {"rope_type": "default"}),
        ({"type": "yarn", "factor": 2.0, "original_context_length": 32}, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}),
        ({"type": "yarn", "factor": 2.0, "yarn_beta_fast": 16.0, "yarn_ext_factor": 1.0}, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}),
        ({"type": "yarn", "factor": 2.0, "yarn_attn_factor": 1.0693147180559945}, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}),
        ({"type": "yarn", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}),
    ],
)  # fmt: skip
def test_the_scaling_of_a_file_is_used(tmp_path, scaling, expected):
    rope = {"freq_base": 5000.0} | {f"scaling.{name}": value for name, value in scaling.items()}
    config = configuration(tmp_path / "m.gguf", rope=rope)
    assert config.rope_parameters == {"rope_theta": 5000.0} | expected
    layers = configuration(tmp_path / "g.gguf", "gemma3", rope=rope).rope_parameters
    assert layers["full_attention"] == {"rope_theta": 5000.0} | expected
    assert layers["sliding_attention"] == {"rope_theta": 10000.0, "rope_type": "default"}
    local = configuration(tmp_path / "l.gguf", "gemma3", rope=rope | {"freq_base_swa": 2500.0}).rope_parameters
    assert local == layers | {"sliding_attention": {"rope_theta": 2500.0, "rope_type": "default"}}


def test_frequencies_of_llama_4_are_divided_wholly_or_not_at_all(tmp_path):
    factors = {"rope_freqs.weight": [1.0, 1.0, 1.0, 16.0]}
    config = configuration(tmp_path / "m.gguf", rope={"freq_base": 500000.0}, tensors=factors)
    assert (config.rope_parameters["factor"], config.rope_parameters["high_freq_factor"]) == (16.0, 1.0)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(4) / 4)
    assert torch.allclose(plain / scaled, torch.tensor(factors["rope_freqs.weight"]))


def test_factors_for_long_texts_are_those_of_phi_3(tmp_path):
    factors = {"rope_factors_long.weight": [1.5, 2.0, 4.0, 8.0], "rope_factors_short.weight": [1.0, 1.0, 1.25, 1.5]}
    rope = {"freq_base": 5000.0, "scaling.original_context_length": 32, "scaling.attn_factor": 1.25}
    config = configuration(tmp_path / "m.gguf", "phi3", rope=rope, tensors=factors)
    assert config.original_max_position_embeddings == 32
    assert config.rope_parameters == {
        "rope_type": "longrope", "rope_theta": 5000.0, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 32, "attention_factor": 1.25,
        "long_factor": [1.5, 2.0, 4.0, 8.0], "short_factor": [1.0, 1.0, 1.25, 1.5],
    }  # fmt: skip
