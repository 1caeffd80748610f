"""Packed weights: what a code means, what keeps a weight packed, and that the kernels unpack exactly the same numbers."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from batchgen.kernels import codes
from batchgen.kernels.codes import Coding, PackedTensor
from batchgen.kernels.fusion import fuse_linear
from batchgen.kernels.ops import Activation, PackedLinear
from batchgen.kernels.quantization import in_8_bits
from batchgen.kernels.replacing import Packing, linear_of
from batchgen.model.weights.streamed import bytes_held
from support.codings import CODINGS, ROWS, SIZE, bits_of, weight_of
from support.fusing import adapted
from support.params import in_turn, slow_but

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("name", "dtype"), slow_but(in_turn(CODINGS, DTYPES), product(CODINGS, DTYPES)))
def test_a_layer_of_codes_computes_what_the_layer_of_their_numbers_does_to_the_last_bit(name, dtype):
    weights = [weight_of(name, dtype), weight_of(name, dtype, seed=1)]
    if "groups" in weights[0].parts:
        weights[1].parts["groups"] = weights[0].parts["groups"]
    plain = [weight.unpacked() for weight in weights]
    for count, activation in ((1, Activation.NONE), (2, Activation.SILU)):
        coded = PackedLinear(list(weights[:count]), [None] * count, activation)
        whole = PackedLinear(plain[:count], [None] * count, activation)
        assert coded.codes is not None
        assert coded.bytes < 0.6 * whole.bytes * (2 if whole.kind else 1)
        if count == 1:
            assert torch.equal(bits_of(coded.weight), bits_of(plain[0]))
        for rows in (1, 2, 3, 4, 8, 70, 600):
            x = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows)).to(dtype)
            assert torch.equal(bits_of(coded(x)), bits_of(whole(x)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["numbers", "numbers of 16 bits", "codes", "numbers in 8 bits", "codes in 8 bits"])
def test_an_adapter_is_added_before_the_activation_whatever_the_weights_are(name, dtype):
    def layer(seed):
        weight = weight_of("AWQ", dtype, seed=seed)
        if "codes" not in name:
            weight = weight.unpacked() * (1.0 if "16 bits" in name else 1.0001)
        return linear_of(weight, torch.arange(float(ROWS)).to(dtype) / ROWS)

    def packed(layers, activation=Activation.NONE):
        weights, biases = [each.weight for each in layers], [each.bias for each in layers]
        made = Packing().pack(weights, biases, activation, layers)
        return in_8_bits(made) if "8 bits" in name else made

    plain = [layer(0), layer(1)]
    x = torch.randn(3000, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    adapters = adapted(plain[0], 4), adapted(plain[1], 10, seed=1)
    near = 1e-5 if dtype == torch.float32 else 0.02
    with torch.inference_mode():
        both = [(packed([bare])(x), each.added(x)) for bare, each in zip(plain, adapters, strict=True)]
        gate, up = (y.float() + added.float() for y, added in both)
        bare_gate = both[0][0].float()
        for layers, want in (
            ([adapters[0]], gate),
            ([*adapters], torch.nn.functional.silu(gate) * up),
            ([plain[0], adapters[1]], torch.nn.functional.silu(bare_gate) * up),
        ):
            fused = packed(layers, Activation.NONE if len(layers) == 1 else Activation.SILU)
            got = fused(x)
            assert float((got.float() - want).abs().max()) < near * float(want.abs().max())
            for rows in (1, 2, 5, 70):
                assert torch.equal(bits_of(fused(x[:rows])), bits_of(got[:rows]))


@pytest.mark.parametrize(("name", "dtype"), slow_but(in_turn(CODINGS, DTYPES[::-1]), product(CODINGS, DTYPES)))
def test_an_embedding_whose_codes_are_those_of_the_head_is_held_once_and_gives_the_same_rows(name, dtype):
    model = torch.nn.ModuleDict(
        {"table": torch.nn.Embedding(ROWS, SIZE), "head": torch.nn.Linear(SIZE, ROWS, bias=False)}
    )
    weight = torch.nn.Parameter(weight_of(name, dtype), requires_grad=False)
    plain = weight.unpacked()
    model["table"].weight = model["head"].weight = weight
    fuse_linear(model, Packing())
    ids = torch.tensor([[5, 0, 199], [17, 64, 63]])
    with torch.inference_mode():
        for some in (ids, ids.int()):
            assert torch.equal(bits_of(model["table"](some)), bits_of(plain[ids]))
        with pytest.raises(IndexError):
            model["table"](torch.tensor([ROWS]))
    assert bytes_held(model) == model["head"].bytes
    assert torch.equal(bits_of(model["table"].weight.unpacked()), bits_of(plain))


def test_weights_that_the_kernels_cannot_unpack_exactly_are_packed_as_numbers():
    tiny, odd, rounded = (weight_of("Q4_0", torch.float32) for _ in range(3))
    shifted = weight_of("Q4_1", torch.float32)
    tiny.parts["scales"] = tiny.parts["scales"].float() * 1e-30
    odd.coding = Coding(4, zero=8, group=4)
    odd.parts["scales"] = torch.ones(ROWS, SIZE // 4)
    rounded.coding = Coding(4, zero=8, group=32, rounds=torch.float16)
    shifted.coding = Coding(4, zero=8, group=32)  # a zero and an offset
    for weight in (tiny, odd, rounded, shifted):
        layer = PackedLinear([weight], [None])
        assert layer.codes is None
        assert torch.equal(layer.weight, weight.unpacked())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_moving_rows_keeps_a_weight_packed_and_everything_else_unpacks_it(mode):
    weight = torch.nn.Parameter(weight_of("Q6_K", torch.bfloat16))
    assert isinstance(weight, PackedTensor)
    plain = weight.unpacked().detach()
    x, ids = torch.randn(3, SIZE).bfloat16(), torch.tensor([[5, 0, 199]])
    kept = [
        lambda w: w.view(2, 50, 2, SIZE).transpose(1, 2).reshape(ROWS, SIZE),
        lambda w: torch.stack([w, w])[1],
        lambda w: torch.cat([w, w[3:7]]),
        lambda w: w.chunk(2)[1],
        lambda w: w[torch.tensor([4, 2])],
        lambda w: torch.stack([w, w]).transpose(1, 2)[0],
        lambda w: w.unsqueeze(1),
    ]
    unpacked = [
        lambda w: torch.nn.functional.linear(x, w),
        lambda w: x @ w.T,
        lambda w: torch.nn.functional.embedding(ids, w),
        lambda w: w.view(ROWS, 2, -1),
        lambda w: torch.cat([w, weight_of("Q4_0", torch.bfloat16)]),
        lambda w: w + 1,
    ]
    with mode():
        for change in kept:
            found = change(weight)
            assert isinstance(found, PackedTensor)
            assert found.packed_bytes < 0.5 * found.nbytes
            assert torch.equal(found.unpacked(), change(plain))
        for change in unpacked:
            found = change(weight)
            assert not isinstance(found, PackedTensor)
            assert torch.equal(found, change(plain))


def test_products_of_several_threads_unpack_their_weights_one_after_the_other():
    x = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))

    def are_right(seed):
        weight = weight_of("Q8_0", torch.float32, seed=seed)
        expected = torch.nn.functional.linear(x, weight.unpacked())
        return all(torch.equal(torch.nn.functional.linear(x, weight), expected) for _ in range(100))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(are_right, range(2))) == [True, True]


def test_an_embedding_unpacks_only_the_rows_that_are_asked_for(monkeypatch):
    unpacked, dequantize = [], codes.dequantize
    weight = weight_of("Q6_K", torch.float32)

    def counted(coding, parts):
        unpacked.append(len(parts["scales"]))
        return dequantize(coding, parts)

    monkeypatch.setattr(codes, "dequantize", counted)
    torch.nn.functional.embedding(torch.tensor([[5, 0, 199]]), weight)
    assert unpacked == [3]


def test_the_sign_of_a_zero_level_does_not_depend_on_what_was_unpacked_before():
    parts = {"plane8": torch.tensor([[0, 1]], dtype=torch.uint8), "scales": torch.ones(1, 1)}
    for zero in (0.0, -0.0, 0.0):
        numbers = codes.dequantize(Coding(8, (zero, 1.0)), parts)
        assert numbers.signbit().tolist() == [[str(zero) == "-0.0", False]]
