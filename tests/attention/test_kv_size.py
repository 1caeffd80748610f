"""The memory of a token and of a state, from the configuration alone, is what the layers of the model take."""

import copy
from types import SimpleNamespace

import pytest

from batchgen.attention.kv_cache import bytes_per_token
from batchgen.attention.kv_size import kv_numbers
from batchgen.dry_run import kv_bytes_per_token, state_bytes_per_sequence
from batchgen.model.architectures import RECURRENT
from batchgen.state.cache import bytes_per_state_slot
from batchgen.state.state_size import attention_layers, recurrent_layers
from support.models import packed_model
from support.shapes import SHAPES

# transformers 5.17 warns with torch 2.13 when it imports GPTBigCode.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
NO_GROUPS = {
    "biogpt", "bloom", "codegen", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "modernbert-decoder", "mpt", "opt",
    "persimmon",
}  # fmt: skip
"""Families without groups of query heads, whose configurations do not have the number of key heads that the tests' common settings give them."""
QUICK = {
    "llama", "deepseek_v3", "gemma4_text", "diffllama", "bloom", "falcon", "gpt_bigcode", "jetmoe", "mimo_v2_flash", *RECURRENT,
}  # fmt: skip
"""Families that are counted each in a way of its own."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n.split("/")[0] in QUICK else pytest.mark.slow) for n in sorted(SHAPES)]
)
def test_the_configuration_tells_what_a_token_and_a_state_take(name):
    model = packed_model(name, compiled=False)
    config = copy.deepcopy(model.module.config)
    if name.split("/")[0] in NO_GROUPS:
        config.num_key_value_heads = None
    assert kv_bytes_per_token(config, "float32") == bytes_per_token(model.layers, model.dtype)
    # With attention alone, the states of granitemoehybrid are nothing.
    assert state_bytes_per_sequence(config, "float32") == bytes_per_state_slot(model.states, model.dtype)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text", "gemma4_unified_text"])
def test_keys_and_values_that_several_layers_read_are_kept_once(name, compiled):
    layers = packed_model(name, compiled=compiled).layers
    assert [layers[i].same_as for i in range(6)] == [None, None, None, None, 2, 3]


def test_layers_that_see_an_image_alone_keep_nothing_of_a_text():
    kinds = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    assert kv_numbers(SimpleNamespace(**kinds)) == 4 * 2 * 2 * 16
    assert kv_numbers(SimpleNamespace(**kinds, cross_attention_layers=[1, 3])) == 2 * 2 * 2 * 16


def test_the_layers_of_gemma_4_differ_in_older_transformers_too():
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "hidden_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
    config = SimpleNamespace(**kinds, **heads, attention_k_eq_v=False, num_global_key_value_heads=1)
    assert kv_numbers(config) == 2 * (16 + 16) + 2 * (32 + 32)
    config.attention_k_eq_v = True
    assert kv_numbers(config) == 2 * (16 + 16) + 1 * (32 + 32)
    config.num_global_key_value_heads = None
    assert kv_numbers(config) == 2 * (16 + 16) + 2 * (32 + 32)


def test_layers_are_counted_under_the_names_of_older_transformers_too():
    kinds = ["recurrent", "recurrent", "attention"]
    config = SimpleNamespace(model_type="recurrent_gemma", num_hidden_layers=3, layers_block_type=kinds)
    assert (recurrent_layers(config), attention_layers(config)) == (2, 1)
