"""Int8 linear layers against plain torch with the same rounding."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from batchgen.kernels import isa
from batchgen.kernels.codes import PackedTensor, dequantize
from batchgen.kernels.int8 import STEP, Int8Linear, Int8Weight, Rounding, quantize_weight, rotate_blocks
from batchgen.kernels.ops import Activation, PackedLinear
from batchgen.kernels.quantization import in_8_bits
from batchgen.kernels.replacing import adapter_of, linear_of
from support.codings import ROWS, SIZE, weight_of
from support.fusing import adapted
from support.int8 import largest_whole, rotated, rounded_inputs
from support.numbers import ACTS, FLOAT32, dtypes, numbers

pytestmark = pytest.mark.usefixtures("kernels")


def whole_numbers(*shape, seed=0):
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed))


def plain(x, weight, bias=None):
    """Computes the layer of the rounded x and weight."""
    values, scales = (part.double() for part in quantize_weight(weight)[:2])
    y = (linear(rounded_inputs(x), values) * scales).float()
    return y if bias is None else y + bias.float()


def near(got, want):
    tolerance = 1e-6 if got.dtype == FLOAT32 else 2**-8
    torch.testing.assert_close(got.float(), want, atol=tolerance * float(want.abs().max()), rtol=2 * tolerance)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 23, 24, 33, 64, 289])
@pytest.mark.parametrize(("inner", "columns"), [(1, 1), (64, 64), (66, 63), (130, 200), (1028, 65), (2048, 900)])
def test_sums_are_exact(rows, inner, columns, threads):
    values, x = whole_numbers(columns, inner), whole_numbers(rows, inner, seed=1)
    x[:, 0] = largest_whole(inner)  # so that the scale is 1
    layer = Int8Linear([Int8Weight(values.to(torch.int8), torch.ones(columns))], [None], FLOAT32)
    assert torch.equal(layer(x.float()), (x @ values.T).float())


@pytest.mark.parametrize("rows", [1, 40])
def test_sums_of_the_largest_values_are_exact(rows):
    inner = 2048
    for sign in (127, -127):
        most = float(largest_whole(inner))
        weight, x = torch.full((70, inner), sign, dtype=torch.int8), torch.full((rows, inner), most)
        layer = Int8Linear([Int8Weight(weight, torch.ones(70))], [None], FLOAT32)
        assert torch.equal(layer(x), torch.full((rows, 70), most * sign * inner))


@dtypes
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 64, 64), (7, 100, 63), (33, 200, 130), (300, 2100, 70)])
def test_a_layer_equals_plain_torch_on_the_rounded_values(dtype, rows, inner, columns, threads):
    weight, bias = numbers(columns, inner, dtype=dtype), numbers(columns, dtype=dtype, seed=1)
    x = numbers(rows, inner, dtype=dtype, seed=2)
    for b in (None, bias):
        near(Int8Linear([quantize_weight(weight)], [b], dtype)(x), plain(x, weight, b))


@dtypes
@pytest.mark.parametrize("act", list(ACTS), ids=lambda a: a.name)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_gated_layer_rounds_where_the_torch_modules_round(dtype, act, rows):
    gate, up = (numbers(100, 66, dtype=dtype, seed=s) for s in (0, 1))
    bias, x = numbers(100, dtype=dtype, seed=2), numbers(rows, 66, dtype=dtype, seed=3)
    layer = Int8Linear([quantize_weight(gate), quantize_weight(up)], [bias, None], dtype, act)
    want = ACTS[act](plain(x, gate, bias).to(dtype)) * plain(x, up).to(dtype)
    torch.testing.assert_close(
        layer(x).float(), want.float(), atol=(2e-5 if dtype == FLOAT32 else 2**-6) * float(want.abs().max()), rtol=0
    )


@dtypes
def test_a_row_has_the_same_bits_in_every_batch(dtype, threads):
    weight, x = numbers(200, 700, dtype=dtype), numbers(300, 700, dtype=dtype, seed=1)
    layer = Int8Linear([quantize_weight(weight)], [numbers(200, dtype=dtype, seed=2)], dtype)
    whole = layer(x)
    for count in (1, 2, 6, 7, 16, 24, 31, 32, 33, 100):
        assert torch.equal(layer(x[:count]), whole[:count])
        assert torch.equal(layer(x[-count:]), whole[-count:])


@pytest.mark.parametrize("size", [64, 130, 576])
def test_rows_are_rotated_by_a_hadamard_matrix_which_is_its_own_inverse(size):
    x = numbers(5, size)
    made, signs = x.clone(), torch.ones(1, 1)
    rotate_blocks(made)
    assert torch.equal(made, rotated(x))
    while len(signs) < 64:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    whole = size // 64 * 64
    want = torch.cat(((x[:, :whole].view(5, -1, 64) @ (signs / 8)).view(5, whole), x[:, whole:]), 1)
    torch.testing.assert_close(made, want)
    rotate_blocks(made)
    torch.testing.assert_close(made, x)


def test_a_large_input_hardly_costs_the_others_precision():
    if largest_whole(256) == 127:
        pytest.skip("a row has 8 bits and one scale")
    x = numbers(3, 256)
    x[:, 100] = 1000
    layer = Int8Linear([Int8Weight(torch.eye(256, dtype=torch.int8), torch.ones(256))], [None], FLOAT32)
    wrong = (layer(x) - x).abs()
    assert 0 < wrong[:, STEP * 2 :].max() < 0.02


def test_a_large_input_costs_the_others_less_precision_if_rows_are_rotated():
    x, weight = numbers(50, 256), numbers(200, 256, seed=1)
    x[:, 100] = 100
    exact = linear(x.double(), weight.double())
    layers = (Int8Linear([w], [None], FLOAT32) for w in (quantize_weight(weight), _not_rotated(weight)))
    wrong, wrong_as_it_is = ((layer(x) - exact).square().mean().sqrt() for layer in layers)
    most = largest_whole(256)
    assert wrong < wrong_as_it_is / (2 if most == 127 else 1)


def _not_rotated(weight):
    scales = weight.abs().amax(1) / 127
    return Int8Weight((weight / scales[:, None]).round().to(torch.int8), scales)


def test_the_weights_of_a_layer_are_read_as_they_were():
    for weight in (numbers(70, 130), numbers(2, 70, 64)):
        made = Int8Linear([quantize_weight(weight)], [None], FLOAT32).plain()[0]
        torch.testing.assert_close(made, weight, atol=0.02 * float(weight.abs().max()), rtol=0)


WHOLE = ("Q4_0", "AWQ", "NVFP4", "MXFP4", "W4A16", "NF4")


@dtypes
@pytest.mark.parametrize(("name", "size"), [*((name, SIZE) for name in WHOLE), ("AWQ", SIZE - 32)])
def test_whole_codes_are_multiplied_as_they_are(name, size, dtype, threads):
    """The last group of inputs may be cut."""
    weight = weight_of(name, dtype)
    weight = PackedTensor(weight.coding, weight.parts | {"plane4": weight.parts["plane4"][:, : size // 2]}, dtype)
    layer = PackedLinear([weight], [numbers(ROWS)])
    packed = Int8Linear.of_codes(layer)
    assert packed.codes is layer.codes
    x = numbers(100, size, dtype=dtype, seed=2)
    plain = dequantize(replace(weight.coding, rounds=None), weight.parts)
    got = packed(x)
    torch.testing.assert_close(
        got.float(),
        rounded_inputs(x, Rounding.GROUPS).float() @ plain.T + numbers(ROWS),
        atol=(1e-4 if dtype == FLOAT32 else 2**-7) * float(got.abs().max()),
        rtol=0,
    )
    for count in (1, 2, 3, 7, 23, 50):
        assert torch.equal(packed(x[:count]), got[:count])
        assert torch.equal(packed(x[-count:]), got[-count:])


@pytest.mark.parametrize(
    ("instruction_set", "multiplied"), [("avx2", ["AWQ"]), ("avx512_vnni", ["AWQ", "Q4_0"]), ("amx", [])]
)
def test_codes_are_multiplied_as_they_are_where_that_is_faster_than_in_16_bits(
    instruction_set, multiplied, monkeypatch
):
    """AWQ's groups have 128 inputs, those of Q4_0 32."""
    monkeypatch.setattr(isa, "instruction_set", lambda: instruction_set)
    layers = {name: in_8_bits(PackedLinear([weight_of(name, FLOAT32)], [None])) for name in ("AWQ", "Q4_0", "Q4_1")}
    assert [name for name, layer in layers.items() if layer.codes is not None] == multiplied


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0", "FP8", "GPTQ in 8 bits, desc_act", "IQ3_S", "IQ1_M"])
def test_other_codes_become_weights_of_8_bits(name):
    weights = [weight_of(name, FLOAT32), weight_of(name, FLOAT32, seed=1)]
    if "groups" in weights[0].parts:
        weights[1].parts["groups"] = weights[0].parts["groups"]
    layer = PackedLinear(weights, [None, None], Activation.SILU)
    made, x = in_8_bits(layer), numbers(5, SIZE)
    assert made.codes is None
    want = Int8Linear([quantize_weight(w.unpacked()) for w in weights], [None, None], FLOAT32, Activation.SILU)
    assert torch.equal(made(x), want(x))


@dtypes
@pytest.mark.parametrize("name", ["AWQ", "MXFP4", ""])
def test_experts_in_8_bits_compute_what_layers_of_their_own_do(name, dtype):
    """`name`: the codes; empty for numbers."""
    each = [weight_of(name, dtype, seed) if name else numbers(ROWS, SIZE, dtype=dtype, seed=seed) for seed in range(6)]
    bias = numbers(3, ROWS)
    stacked = [torch.stack(each[:3]), torch.stack(each[3:])]
    whole = in_8_bits(PackedLinear(stacked, [bias, None], Activation.SILU))
    alone = [in_8_bits(PackedLinear([each[e], each[3 + e]], [None, None], Activation.SILU)) for e in range(3)]
    plain = in_8_bits(PackedLinear(stacked, [None, None], Activation.SILU))
    for counts in ([1, 0, 0], [3, 0, 8], [70, 200, 1]):
        starts = torch.tensor([0, *counts]).cumsum(0)
        x = numbers(int(starts[-1]), SIZE, dtype=dtype)
        expected = torch.cat([layer(part) for layer, part in zip(alone, x.split(counts), strict=True)])
        assert torch.equal(plain(x, starts), expected)
        assert not torch.equal(whole(x, starts), expected)  # with a bias


def test_an_adapter_in_float16_runs_beside_a_layer_in_8_bits():
    part = adapted(linear_of(numbers(70, 64, dtype=torch.float16)))
    layer, x = (
        Int8Linear([quantize_weight(part.weight)], [None], torch.float16),
        numbers(5, 64, dtype=torch.float16, seed=1),
    )
    bare = layer(x)
    layer.adapter = adapter_of([part], 1)
    got = layer(x)
    assert got.dtype == torch.float16
    near(got, bare.float() + part.added(x).float())


@dtypes
def test_zeros_stay_zeros_and_nan_and_inf_stay_in_their_row(dtype):
    weight, x = numbers(70, 64, dtype=dtype), numbers(40, 64, dtype=dtype, seed=1)
    x[1], x[3, 5], x[5, 0] = 0, torch.nan, torch.inf
    weight[7] = 0
    y = Int8Linear([quantize_weight(weight)], [None], dtype)(x)
    assert not y[1].any()
    assert not y[0, 7]
    assert y[3].isnan().all()
    assert not y[5].isfinite().any()
    assert y[[0, 1, 2, 4, *range(6, 40)]].isfinite().all()
