"""The rotary embedding of a GGUF file's model is that of the file."""

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
LLAMA3 = [
    1.0,
    1.0,
    2.6945296878948333,
    8.0,
]  # of 8 dimensions and the base 500,000, as llama.cpp's converter computes them


def configuration(file: Path, architecture: str = "llama", **parts: Any) -> Any:
    keys = {"model": "llama", "scores": [0.0, 0.0, 0.0, 1.0]}
    tokens = [("<unk>", 2), ("<s>", 3), ("</s>", 3), "a"]
    write_vocabulary(file, tokens, architecture=architecture, **keys, **parts)
    return load_tokenizer(ModelConfig(model=file)).hf_config


def test_frequencies_that_a_file_has_divided_are_those_of_llama_3_1(tmp_path):
    config = configuration(tmp_path / "m.gguf", rope={"freq_base": 500000.0}, tensors={"rope_freqs.weight": LLAMA3})
    assert config.rope_parameters == {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(scaled, plain / torch.tensor(LLAMA3))
    whole = configuration(tmp_path / "whole.gguf", tensors={"rope_freqs.weight": [1.0] * 4})
    assert whole.rope_parameters["rope_type"] == "default"


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


def test_the_base_and_the_dimensions_are_those_of_the_file(tmp_path):
    for architecture, size in (("starcoder2", 8), ("stablelm", 4), ("phi3", 4), ("minimax-m2", 4), ("llama", 8)):
        file = tmp_path / f"{architecture}.gguf"
        rope = configuration(file, architecture, rope={"freq_base": 5000.0, "dimension_count": size}).rope_parameters
        assert rope["rope_theta"] == 5000.0
        assert rope.get("partial_rotary_factor", 1.0) == size / 8


@pytest.mark.parametrize("architecture", ["stablelm", "phi2", "glm4", "chatglm", "nemotron", "minimax-m2", "qwen3next"])
def test_a_file_without_dimensions_rotates_whole_heads(tmp_path, architecture):
    settings = {"ssm.inner_size": 16, "ssm.time_step_rank": 2, "ssm.group_count": 2, "ssm.state_size": 8}
    settings = settings if architecture == "qwen3next" else {}
    config = configuration(tmp_path / "m.gguf", architecture, rope={"dimension_count": None}, settings=settings)
    assert config.rope_parameters["partial_rotary_factor"] == 1.0


def test_a_factor_of_2023_is_used_under_its_old_name(tmp_path):
    old = configuration(tmp_path / "old.gguf", rope={"scale_linear": 4.0}).rope_parameters
    assert (old["rope_type"], old["factor"]) == ("linear", 4.0)
    both = configuration(tmp_path / "both.gguf", rope={"scale_linear": 4.0, "scaling.factor": 2.0}).rope_parameters
    assert both["factor"] == 2.0


def test_a_file_without_a_base_has_the_one_of_llama(tmp_path):
    for architecture in ("minimax-m2", "lfm2"):  # whose models have others
        settings = {"attention.head_count_kv": [2]} if architecture == "lfm2" else {}
        config = configuration(tmp_path / f"{architecture}.gguf", architecture, settings=settings)
        assert config.rope_parameters["rope_theta"] == 10000.0


def test_factors_for_long_texts_are_those_of_phi_3(tmp_path):
    factors = {"rope_factors_long.weight": [1.5, 2.0, 4.0, 8.0], "rope_factors_short.weight": [1.0, 1.0, 1.25, 1.5]}
    rope = {"freq_base": 5000.0, "scaling.original_context_length": 32, "scaling.attn_factor": 1.25}
    config = configuration(tmp_path / "m.gguf", "phi3", rope=rope, tensors=factors)
    assert config.original_max_position_embeddings == 32
    assert config.rope_parameters == {
        "rope_type": "longrope", "rope_theta": 5000.0, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 32, "attention_factor": 1.25,
        "long_factor": [1.5, 2.0, 4.0, 8.0], "short_factor": [1.0, 1.0, 1.25, 1.5],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"tensors": {"rope_freqs.weight": [1.0, 2.0, 1.0, 8.0]}}, "its own (rope_freqs.weight)"),
        ({"rope": {"scaling.type": "new"}}, "'new'"),
        (
            {"rope": {"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.yarn_attn_factor": 1.5}},
            "'yarn' with attn_factor or yarn_attn_factor or yarn_ext_factor other than 1",
        ),
        (
            {"rope": {"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.yarn_ext_factor": 0.0}},
            "'yarn' with attn_factor or yarn_attn_factor or yarn_ext_factor other than 1",
        ),
    ],
)
def test_a_scaling_that_is_not_known_is_refused(tmp_path, parts, kind):
    file = tmp_path / "m.gguf"
    with pytest.raises(ModelError) as e:
        configuration(file, **parts)
    assert str(e.value) == (
        f"the rotary embedding of {file} is scaled in a way that batchgen does not know: {kind}; give the model in the format of transformers"
    )
