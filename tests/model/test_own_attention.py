import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

from support.models import packed_model


class OfAStep:
    """Stands in for the attention of a step. It fails if it `fails`."""

    def __init__(self, fails):
        self.fails = fails

    def __call__(self, layer, q_HTD, k_KTD, v_KTV, options):
        if self.fails:
            raise MemoryError
        return q_HTD.new_zeros(q_HTD.shape[1], q_HTD.shape[0], v_KTV.shape[2])


@torch.inference_mode()
def forward(module, attention):
    tokens = torch.tensor([[0, 1]])
    module(input_ids=tokens, position_ids=tokens, use_cache=False, step_attention=attention)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("model_type", ["stablelm", "nemotron", "llama4_text", "gpt_neo"])
def test_a_model_that_gets_the_attention_of_a_step_from_a_hook_does_not_keep_it(model_type, fails):
    module = packed_model(model_type).module
    attention = OfAStep(fails)
    with pytest.raises(MemoryError) if fails else nullcontext() as failure:
        forward(module, attention)
    kept = weakref.ref(attention)
    del attention, failure
    gc.collect()
    assert kept() is None
