from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from batchgen.attention.base import attention_forward
from batchgen.errors import ModelError
from batchgen.model.architectures import refusal


@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_models_with_an_encoder_and_a_decoder_are_refused(name):
    assert refusal(AutoConfig.for_model(name)) == "they have an encoder and a decoder"


ENCODER = "this one is an encoder ({}), in which a token also sees the tokens after it"
TAIL = {"model_type": "glm5_next_text", "index_kpool_always_select_tail": True}
SPIRAL = {"full_attention": {"type": "spiral"}, "sliding_attention": {"type": "yarn"}}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "doge", "is_moe": True}, "the experts of a token depend on the other tokens of the batch"),
        ({"layer_types": ["attention", "mamba"]}, "this one has layers of type mamba"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "this one has layers of type chunked_attention"),
        ({"use_bidirectional_attention": True}, ENCODER.format("use_bidirectional_attention is true")),
        ({"use_bidirectional_attention": "all"}, ENCODER.format('use_bidirectional_attention is "all"')),
        ({"is_causal": False}, ENCODER.format("is_causal is false")),
        ({"rope_parameters": {"rope_type": "spiral"}}, "this one has rotary embeddings of type spiral"),
        ({"rope_parameters": SPIRAL}, "this one has rotary embeddings of type spiral"),
        (
            {"model_type": "llava", "text_config": SimpleNamespace(model_type="xlstm")},
            "their recurrence (mLSTM) is not implemented",
        ),
        (
            TAIL | {"index_kpool_always_select_tail": False},
            "this one has an indexer that leaves out the newest tokens, whatever the length of the text",
        ),
        (TAIL, None),
        ({"use_bidirectional_attention": "vision"}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"rope_parameters": {"rope_type": "longrope"}}, None),  # the factors are chosen for each request
    ],
)
def test_settings_that_cannot_be_exact_are_refused(settings, reason):
    assert refusal(SimpleNamespace(**({"model_type": "llama"} | settings))) == reason


class Layer(torch.nn.Module):
    """A module that calls attention; its settings are attributes."""

    def __init__(self, **settings):
        super().__init__()
        self.layer_idx = 0
        for name, value in settings.items():
            setattr(self, name, value)


def attend(module, mask=None, **options):
    q, kv = torch.zeros((1, 4, 3, 8)), torch.zeros((1, 2, 3, 8))

    def step(layer, q_HTD, k_KTD, v_KTV, asked):
        return q_HTD.transpose(0, 1)

    return attention_forward(module, q, kv, kv, mask, **({"step_attention": step} | options))


SLIDING = SimpleNamespace(layer_types=["sliding_attention"], sliding_window=2)


@pytest.mark.parametrize(
    ("settings", "options", "what"),
    [
        ({}, {"position_bias": torch.zeros(1)}, "position_bias"),
        ({}, {"mask": torch.zeros(1)}, "a mask"),
        ({}, {"is_causal": False}, "no causal mask"),
        ({"is_causal": False}, {}, "no causal mask"),
        ({}, {"dropout": 0.1}, "dropout"),
        ({"config": SLIDING}, {}, "a sliding window in its mask"),
        ({"sinks": torch.zeros(4)}, {}, "sinks of its own"),
    ],
)
def test_attention_refuses_options_that_it_would_ignore(settings, options, what):
    with pytest.raises(ModelError) as e:
        attend(Layer(**settings), **options)
    assert e.value.message == f"Layer asks attention for {what}, which is not supported"


def test_a_layer_that_passes_no_options_on_is_refused():
    with pytest.raises(ModelError, match=r"^Layer does not pass keyword arguments on to attention$"):
        attend(Layer(), step_attention=None)
