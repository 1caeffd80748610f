"""The experts of a mixture: which modules the kernels replace, codes that give the same bits as numbers, and rows that do not depend on others."""

from itertools import product
from typing import Any

import pytest
import torch

from batchgen.kernels.codes import PackedTensor
from batchgen.kernels.experts import FusedExperts, LinearOfExperts
from batchgen.kernels.ops import Activation
from batchgen.kernels.whole_vectors import fill_activations
from support.codings import CODINGS, SIZE, bits_of, weight_of
from support.fusing import fuse
from support.models import build
from support.numbers import numbers
from support.params import in_turn, slow_but

EXPERTS = 3
DTYPES = (torch.float32, torch.bfloat16)  # test_coded.py has the other one first
IDS = torch.arange(3, 40)[None]


pytestmark = pytest.mark.usefixtures("compiled")


def experts_of(name: str, dtype: torch.dtype) -> list[PackedTensor]:
    """Returns gate, up and down [E, N, K]; the rows of an expert do not fill its last panel. The inner size is that of the codes."""
    weights = [weight_of(name, dtype, seed) for seed in range(3 * EXPERTS)]
    for weight in weights:
        if "groups" in weight.parts:
            weight.parts["groups"] = weights[0].parts["groups"]
    stacked: Any = [torch.stack(weights[i::3]) for i in range(3)]  # type: ignore[arg-type]
    return stacked


@pytest.mark.parametrize(("name", "dtype"), slow_but(in_turn(CODINGS, DTYPES[::-1]), product(CODINGS, DTYPES)))
def test_experts_of_codes_compute_what_those_of_their_numbers_do_to_the_last_bit(name, dtype):
    from batchgen.kernels.ops import PackedLinear

    weights = experts_of(name, dtype)
    for some, activation in ((weights[:1], Activation.NONE), (weights[:2], Activation.SILU)):
        coded = PackedLinear(list(some), [None] * len(some), activation)
        whole = PackedLinear([weight.unpacked() for weight in some], [None] * len(some), activation)
        alone = [PackedLinear([weight.unpacked()[e] for weight in some], [None] * len(some), activation) for e in range(EXPERTS)]  # fmt: skip
        assert coded.codes is not None
        for counts in ([1, 0, 0], [3, 0, 8], [70, 200, 1], [0, 600, 5]):
            starts = torch.tensor([0, *counts]).cumsum(0)
            x = torch.randn(int(starts[-1]), SIZE, generator=torch.Generator().manual_seed(len(counts))).to(dtype)
            expected = torch.cat([layer(part) for layer, part in zip(alone, x.split(counts), strict=True)])
            assert torch.equal(bits_of(coded(x, starts)), bits_of(expected))
            assert torch.equal(bits_of(whole(x, starts)), bits_of(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_many_columns_compute_what_layers_of_their_own_do(dtype, threads):
    """Tasks of several panels, and inputs longer than what is summed at a time."""
    from batchgen.kernels.ops import PackedLinear

    weights = numbers(EXPERTS, 900, 1100, dtype=dtype)
    layer, alone = PackedLinear([weights], [None]), [PackedLinear([weight], [None]) for weight in weights]
    for counts in ([70, 0, 1], [0, 600, 33]):
        x = numbers(sum(counts), 1100, dtype=dtype, seed=1)
        expected = torch.cat([layer(part) for layer, part in zip(alone, x.split(counts), strict=True)])
        assert torch.equal(layer(x, torch.tensor([0, *counts]).cumsum(0)), expected)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("qwen3_moe", Activation.SILU),
        ("gpt_oss", Activation.CLAMPED),
        ("minimax_m3_vl_text", Activation.CLAMPED),
        ("gemma4_text/experts", Activation.GELU_TANH),
        ("dbrx", Activation.SILU),
        ("longcat_flash", Activation.SILU),  # with experts that return their input
        ("llama4_text", Activation.SILU),  # whose inputs are scaled
        ("nemotron_h", Activation.NONE),  # without a gate
        ("hy_v4", Activation.NONE),  # with a gate that torch computes
    ],
)
@torch.inference_mode()
def test_experts_are_replaced_and_the_logits_stay_the_same(name, activation):
    model = build(name)
    plain = model(input_ids=IDS, use_cache=False).logits
    fuse(model)
    fused = [part for part in model.modules() if isinstance(part, FusedExperts)]
    assert fused
    assert {part.up.activation for part in fused} == {activation}
    assert not any("experts" in name.split(".") for name, _ in model.named_parameters())
    torch.testing.assert_close(model(input_ids=IDS, use_cache=False).logits, plain, atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def test_linear_layers_of_experts_are_replaced_and_the_logits_stay_the_same():
    model = build("jetmoe")
    plain = model(input_ids=IDS, use_cache=False).logits
    fuse(model)
    fused = [part for part in model.modules() if isinstance(part, LinearOfExperts)]
    assert len(fused) == 8
    torch.testing.assert_close(model(input_ids=IDS, use_cache=False).logits, plain, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_what_experts_give_for_a_token_does_not_depend_on_other_tokens(dtype):
    model = build("gpt_oss").to(dtype)
    fuse(model)
    fill_activations(model)
    mlp: Any = next(part for part in model.modules() if isinstance(getattr(part, "experts", None), FusedExperts))
    x = torch.randn(1, 40, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = mlp(x)[0]
    for i in (0, 7, 39):
        assert torch.equal(mlp(x[:, i : i + 1])[0], together[:, i : i + 1])


@torch.inference_mode()
def test_an_expert_that_does_not_exist_is_an_error():
    model = build("qwen3_moe")
    fuse(model)
    fused = next(part for part in model.modules() if isinstance(part, FusedExperts))
    x = torch.zeros(1, fused.up.in_features)
    for number in (-1, fused.up.experts):
        with pytest.raises(IndexError, match=f"there are {fused.up.experts}$"):
            fused(x, torch.tensor([[0, number]]), torch.ones(1, 2))


@pytest.mark.parametrize("name", ["phimoe", "llama4_text", "mixtral", "gpt_oss"])
def test_the_logits_of_a_router_depend_on_no_other_row(name):
    model = build(name)
    fuse(model)
    fill_activations(model)
    router: Any = next(module for module in model.modules() if "Router" in type(module).__name__)
    x = torch.randn(9, router.weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = [router(rows)[-1 if name == "llama4_text" else 0] for rows in (x, *x.clone().split(1))]
    assert torch.equal(logits[0], torch.cat(logits[1:]))
