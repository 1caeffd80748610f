"""Every architecture gives the same logits with our kernels in its modules as without them."""

import copy
from functools import cache
from itertools import product

import pytest
import torch

from batchgen.kernels.replacing import AdaptedLinear
from support.fusing import fuse, with_adapters
from support.models import build
from support.params import slow_but
from support.shapes import CORE, SHAPES, VOCAB

# Importing GPTBigCode from transformers 5.17 with torch 2.13 gives this warning.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("compiled"),
]

TOLERANCE = 2e-5
"""Largest difference of a logit, relative to the largest logit. Measured: below 4e-6; 1.2e-5 for Gemma 4 with experts."""


@cache
def _ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, 50), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def _logits(model: torch.nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=_ids(), use_cache=False).logits
    return logits.float()


@pytest.mark.parametrize(
    ("name", "adapters"),
    slow_but([*((name, False) for name in CORE), ("llama", True)], [*product(sorted(SHAPES), (False, True))]),
)
def test_logits_in_float32_differ_only_by_rounding(name, adapters):
    model = with_adapters(build(name)) if adapters else build(name)
    plain = _logits(model)
    fuse(model)
    assert not any(isinstance(part, AdaptedLinear) for part in model.modules())
    assert float((_logits(model) - plain).abs().max()) < TOLERANCE * float(plain.abs().max())


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "granite", "gpt_neox/plain", "cohere2"]
)
def test_logits_in_bfloat16_differ_by_no_more_than_their_rounding_error(name):
    model = build(name).bfloat16()
    exact = _logits(copy.deepcopy(model).float())
    plain = _logits(model)
    fuse(model)
    fused = _logits(model)
    spread = float((plain - exact).abs().max())
    assert float((fused - exact).abs().max()) <= 1.5 * spread  # at most 1.3 on any processor that was tried
    assert float((fused - plain).abs().max()) <= 1.5 * spread


def test_the_parts_of_common_models_are_found():
    """Fails when a change in transformers hides a part from us, which would only make the model slower."""
    parts = {
        "embeddings": 1,
        "rotary embeddings": 2,
        "tables of cos and sin": 1,
        "norms": 5,
        "gated MLPs": 2,
        "linear layers": 9,
    }
    whole = parts | {"decoder layers": 2}

    def without(*names: str) -> dict[str, int]:
        return {name: count for name, count in parts.items() if name not in names}

    assert {
        name: dict(fuse(build(name))) for name in ("llama", "qwen3", "gemma2", "phi3", "olmo2", "gpt_neox/plain")
    } == {
        "llama": whole,
        "qwen3": whole | {"norms": 9},
        "gemma2": without("embeddings") | {"norms": 9},
        "phi3": parts | {"linear layers": 5},
        "olmo2": without("tables of cos and sin") | {"norms": 9},
        "gpt_neox/plain": without("norms", "gated MLPs"),
    }
