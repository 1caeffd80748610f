"""An unverified architecture runs only if a small model of its kind agrees with transformers."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.model.checks.self_check import self_check
from batchgen.model.loader import load_model
from batchgen.prompts import load_tokenizer
from support.params import slow_but

NEVER_BEFORE = "not on the verified list"
OTHER_LOGITS = "a small model of this type gives other logits here than in transformers"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32768}


def refused(config):
    with pytest.raises(ModelError) as e:
        self_check(config)
    assert "\n" not in str(e.value)
    assert e.value.message.startswith(f"models of type {config.model_type!r} are not supported: ")
    return e.value.message


@pytest.mark.parametrize(
    ("model_type", "settings"),
    slow_but(
        [("llama", {"rope_parameters": LLAMA3}), ("gemma2", {})],
        [
            ("llama", {"rope_parameters": LLAMA3}),
            ("qwen2", {"use_sliding_window": True, "max_window_layers": 20}),
            ("qwen3", {"rope_parameters": YARN}),
            ("gemma2", {}),
            ("gemma3_text", {}),
            ("mistral", {}),
            ("phi3", {"sliding_window": 2047}),
            ("cohere2", {}),
            ("olmo3", {}),
            ("gpt2", {}),
            ("opt", {"word_embed_proj_dim": 512}),
            ("gpt_neox", {}),
            ("granite", {"attention_multiplier": 0.0078125}),
            ("mixtral", {}),
            ("qwen3_moe", {"mlp_only_layers": [0, 5]}),
            ("gpt_oss", {}),
            ("smollm3", {}),
            ("starcoder2", {"sliding_window": 4096}),
        ],
    ),
)
def test_an_architecture_that_is_exact_passes_at_its_real_size(model_type, settings):
    config = AutoConfig.for_model(model_type, **settings)
    before = config.to_dict()
    self_check(config)
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("model_type", "settings"),
    slow_but(
        [("minimax", {}), ("bert", {})],
        [
            ("recurrent_gemma", {}),
            ("minimax", {}),
            ("lfm2", {"layer_types": ["conv", "full_attention"] * 16}),
            ("deepseek_v4", {}),
            ("bert", {}),  # attends to later tokens
        ],
    ),
)
def test_a_state_other_than_keys_and_values_is_refused(model_type, settings):
    assert NEVER_BEFORE in refused(AutoConfig.for_model(model_type, **settings))


class Tampered(LlamaForCausalLM):
    """A Llama with one module of each layer replaced."""

    part = ("", torch.nn.Module)

    def __init__(self, config):
        super().__init__(config)
        name, kind = self.part
        for i, layer in enumerate(self.model.layers):
            if name == "":
                self.model.layers[i] = kind(config, i)
            else:
                setattr(layer, name, kind(config, i) if name == "self_attn" else kind(config))


@pytest.fixture
def tampered(monkeypatch):
    """A function that registers a `Tampered` with transformers and returns its configuration."""

    def make(name, kind):
        config_class = type("OddConfig", (LlamaConfig,), {"model_type": "odd"})
        model_class = type("Odd", (Tampered,), {"part": (name, kind), "config_class": config_class})
        mapping = AutoModelForCausalLM._model_mapping
        monkeypatch.setitem(mapping._extra_content, config_class, model_class)
        return config_class()

    return make


class Same(LlamaAttention):
    """Changes nothing."""


class Forgetful(LlamaAttention):
    """Drops all but the last 16 keys of a call, so that with a cache it sees more."""

    def forward(self, hidden_states, *args, **kwargs):
        size = hidden_states.shape[1]
        if size <= 16:
            return super().forward(hidden_states, *args, **kwargs)
        earlier = torch.zeros_like(hidden_states)
        earlier[:, -16:] = hidden_states[:, -16:]
        return super().forward(earlier, *args, **kwargs)


class Private(LlamaAttention):
    """Computes attention itself instead of calling the attention interface."""

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        values = self.o_proj(self.v_proj(hidden_states).repeat_interleave(self.num_key_value_groups, -1))
        return values.cumsum(1), None


class Mean(LlamaMLP):
    """Mixes in the mean of all tokens of a call."""

    def forward(self, x):
        return super().forward(x) + 0.01 * x.mean(1, keepdim=True)


class Deaf(LlamaDecoderLayer):
    """Computes attention and ignores the result."""

    def forward(self, hidden_states, **kwargs):
        self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(hidden_states)


def test_a_model_of_an_unknown_type_that_deviates_in_nothing_passes(tampered):
    self_check(tampered("self_attn", Same))


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("self_attn", Forgetful, OTHER_LOGITS),
        ("self_attn", Private, "Odd never calls attention"),
        ("mlp", Mean, OTHER_LOGITS),
        ("", Deaf, "a small model of this type hardly depends on what it has read, so that it cannot be checked"),
    ],
)
def test_a_model_that_deviates_is_refused(tampered, name, kind, reason):
    assert reason in refused(tampered(name, kind))


CUSTOM = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "{name}"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        {extra}
        return output
"""


@pytest.mark.parametrize(
    ("name", "extra"), [("own_exact", ""), ("own_inexact", "output.logits = output.logits.cumsum(1)")]
)
def test_a_models_own_code_is_checked_before_its_weights_are_read(name, extra, tiny_model_dir, tmp_path, monkeypatch):
    """The folder is like one on the hub."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(tiny_model_dir, tmp_path / name)
    (folder / "own.py").write_text(CUSTOM.format(name=name, extra=extra))
    settings = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    settings |= {"model_type": name, "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(settings))
    config = ModelConfig(model=str(folder), device="cpu", trust_remote_code=True)
    if extra:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        with pytest.raises(ModelError, match=OTHER_LOGITS):
            load_model(config, load_tokenizer(config))
        return
    model = load_model(config, load_tokenizer(config))
    assert type(model.module).__name__ == "OwnForCausalLM"
    assert model.notes == (
        "models of type 'own_exact' are not on the verified list; a small model of this type was checked against transformers and agreed",
    )


@pytest.mark.parametrize("name", ["clip", "deberta-v2"])
def test_models_that_generate_no_text_are_refused_with_that_reason(name):
    assert refused(AutoConfig.for_model(name)).endswith(
        "they are not on the verified list, and transformers has no class for them that generates text"
    )
