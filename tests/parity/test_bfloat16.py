"""In bfloat16 the logits of a job are as near to those of float32 as transformers' own: we round nothing that it does not round."""

import pytest
import torch

from benchmarks.gpu.device import Bench
from benchmarks.gpu.parity import bfloat16
from support.params import slow_but


@pytest.mark.parametrize(
    "name",
    slow_but({"llama"}, ["llama", "qwen2", "qwen3", "gemma2", "mistral/sliding_window", "olmo2", "phi3", "cohere2"]),
)
@pytest.mark.usefixtures("compiled")
def test_the_rounding_error_is_no_larger_than_that_of_transformers(name):
    found = bfloat16(Bench(torch.device("cpu"), tiny=True), name)
    assert found["attention"] == "packed"
    assert found["no_worse"], found
    assert found["error"] > 0
