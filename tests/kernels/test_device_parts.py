"""The kernels for parts of a model on a CUDA device give what transformers' modules give: on Triton's interpreter, under `-m gpu` for real."""

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from batchgen.kernels.device_parts import DeviceMLP, DeviceNorm, fuse_on_device, running
from support.fusing import replaced
from support.models import build
from support.params import in_turn, slow_but
from support.triton_interpreter import skip_unless_interpreted

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""The interpreter cuts bfloat16 off where a GPU rounds to the nearest number."""
DTYPES = tuple(ROUNDING)
PARTS = ["llama", "qwen3", "gemma2", "phi3", "olmo2"]
USUAL = {"norms", "gated MLPs", "rotary embeddings"}
FAMILIES = {
    "llama": {*USUAL, "joint projections"},
    "qwen2": {*USUAL, "joint projections"},  # with biases
    "qwen3": {*USUAL, "joint projections"},  # norms of heads
    "gemma2": {*USUAL, "joint projections"},  # weight + 1, GELU
    "phi3": USUAL,  # gate and up in one layer
    "olmo2": {*USUAL, "joint projections"},  # norms in float32
    "gpt_neox": {"rotary embeddings"},  # of a part of each head
    "gpt_oss": {"norms", "joint projections", "rotary embeddings"},  # cos and sin of halves
    "gpt2": set(),
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        skip_unless_interpreted()
    return torch.device(request.param)


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    largest = float(want.float().abs().max())
    return got.dtype == want.dtype and float((got.float() - want.float()).abs().max()) <= ROUNDING[want.dtype] * largest


def modules(model: Any, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize(
    ("family", "dtype"), slow_but(in_turn(["llama", "gemma2"], DTYPES), product(FAMILIES, DTYPES)), ids=str
)
def test_a_model_gives_the_same_with_them(device, family, dtype):
    model = build(family).to(device, dtype)
    tokens = torch.arange(3, 24, device=device)[None]
    with torch.inference_mode():
        want = model(tokens, use_cache=False).logits
        fuse_on_device(model)
        assert replaced(model).keys() == FAMILIES[family]
        parts = list(model.modules())
        fuse_on_device(model)
        assert list(model.modules()) == parts, "a second time changes nothing"
        assert torch.equal(model(tokens, use_cache=False).logits, want), "outside of `running` nothing changes"
        with running():
            got = model(tokens, use_cache=False).logits
    apart = float((got - want).abs().max() / want.abs().max())
    assert apart <= (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize(("family", "dtype"), slow_but(in_turn(PARTS, DTYPES[::-1]), product(PARTS, DTYPES)), ids=str)
def test_each_part_gives_what_its_module_gives(device, family, dtype):
    model = build(family).to(device, dtype)
    fuse_on_device(model)
    layer = model.model.layers[0]
    parts = [*modules(layer, DeviceNorm), *modules(layer, DeviceMLP)]
    assert {type(part) for part in parts} == {DeviceNorm, DeviceMLP}
    for part in parts:
        size = part.weight.shape[0] if isinstance(part, DeviceNorm) else model.config.hidden_size
        for shape in ((1, 3, size), (1, 5, 4, size)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
            with torch.inference_mode(), running():
                assert near(part(x), part.plain(x))
                assert near(part(x.transpose(1, -2)), part.plain(x.transpose(1, -2)))


def test_a_norm_in_another_type_than_its_weight_runs_as_it_is(device):
    model = build("llama").to(device, torch.bfloat16)
    fuse_on_device(model)
    part = modules(model, DeviceNorm)[0]
    x = torch.randn(1, 3, part.weight.shape[0], device=device)
    with torch.inference_mode(), running():
        assert torch.equal(part(x), part.plain(x))
