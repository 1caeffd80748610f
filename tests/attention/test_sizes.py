"""The KV size of a token, from the configuration alone, is what the layers of the model store."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING

from batchgen.attention.kv_cache import bytes_per_token
from batchgen.attention.sizes import kv_numbers
from batchgen.model.architectures import RECURRENT
from support.models import packed_model
from support.shapes import SHAPES

# transformers 5.17 warns with torch 2.13 when it imports GPTBigCode.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
NO_GROUPS = {
    "biogpt", "bloom", "codegen", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "modernbert-decoder", "mpt", "opt",
    "persimmon",
}  # fmt: skip
"""Families without groups of query heads, whose configurations do not have the number of key heads that the tests' common settings give them."""
QUICK = {"llama", "deepseek_v3", "gemma4_text", "diffllama"}
NAMES = sorted(s for s in SHAPES if s.split("/")[0] not in RECURRENT and s.split("/")[0] in CONFIG_MAPPING)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_the_configuration_tells_what_a_token_takes(name):
    model = packed_model(name, compiled=False)
    config = copy.deepcopy(model.module.config)
    if name.split("/")[0] in NO_GROUPS:
        config.num_key_value_heads = None
    assert 4 * kv_numbers(config) == bytes_per_token(model.layers, model.dtype)


def test_layers_that_see_an_image_alone_keep_nothing_of_a_text():
    kinds = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    assert kv_numbers(SimpleNamespace(**kinds)) == 4 * 2 * 2 * 16
    assert kv_numbers(SimpleNamespace(**kinds, cross_attention_layers=[1, 3])) == 2 * 2 * 2 * 16
