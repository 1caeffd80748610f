"""What `plan` says of memory, from the configuration alone, is what the model's layers take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING

from batchgen.attention.kv_cache import bytes_per_token
from batchgen.dry_run import kv_bytes_per_token, state_bytes_per_sequence
from batchgen.model.architectures import RECURRENT
from batchgen.state.cache import bytes_per_state_slot
from batchgen.state.sizes import attention_layers, recurrent_layers
from support.models import packed_model
from support.shapes import SHAPES

# With attention alone, the states of granitemoehybrid are nothing. Older transformers do not have every family.
HYBRID = sorted(s for s in SHAPES if s.split("/")[0] in RECURRENT & set(CONFIG_MAPPING) and s != "granitemoehybrid")


@pytest.mark.parametrize("name", HYBRID)
def test_the_plan_of_a_models_memory_is_exact(name):
    model = packed_model(name, compiled=False)
    config = model.module.config
    assert state_bytes_per_sequence(config, "float32") == bytes_per_state_slot(model.states, model.dtype)
    assert kv_bytes_per_token(config, "float32") == bytes_per_token(model.layers, model.dtype)


def test_a_model_without_recurrent_layers_has_no_states():
    assert state_bytes_per_sequence(packed_model("llama").module.config, "float32") == 0
    assert state_bytes_per_sequence(packed_model("granitemoehybrid").module.config, "float32") == 0


def test_layers_are_counted_under_the_names_of_older_transformers_too():
    kinds = ["recurrent", "recurrent", "attention"]
    config = SimpleNamespace(model_type="recurrent_gemma", num_hidden_layers=3, layers_block_type=kinds)
    assert (recurrent_layers(config), attention_layers(config)) == (2, 1)
