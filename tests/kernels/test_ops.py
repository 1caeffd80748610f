"""Linear layers, norms and rotary embeddings of our kernels, each against plain torch."""

from importlib import import_module

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from batchgen.kernels.build import kernel
from batchgen.kernels.codes import IN_16_BITS, PackedTensor
from batchgen.kernels.ops import (
    Activation,
    ActivationArguments,
    Call,
    PackedLinear,
    add_rows,
    norm_after_sum,
    rotate,
    take_rows,
)
from batchgen.kernels.ops import linear as kernel_linear
from support.numbers import ACTS, BFLOAT16, FLOAT32, dtypes, numbers
from support.params import slow_but

pytestmark = pytest.mark.usefixtures("kernels")


def near(got, want, by=1.0):
    """Allows float32 another order of sums, and bfloat16 one rounding more or less."""
    assert got.dtype == want.dtype
    tolerance = by * (2e-5 if got.dtype == FLOAT32 else 2**-7)
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance * float(want.float().abs().max()), rtol=0)


@dtypes
@pytest.mark.parametrize("rows", slow_but([1, 6, 7, 289], [1, 2, 5, 6, 7, 64, 289]))
@pytest.mark.parametrize(
    ("inner", "columns"),
    slow_but(
        [(2, 1), (66, 63), (2048, 900), (5000, 70)],
        [(2, 1), (32, 64), (66, 63), (130, 200), (600, 900), (1026, 65), (2048, 900), (5000, 70)],
    ),
)
def test_a_packed_layer_equals_the_plain_one_and_has_the_bits_of_one_with_an_unpacked_weight(
    dtype, rows, inner, columns, threads
):
    weight, bias = numbers(columns, inner, dtype=dtype), numbers(columns, dtype=dtype, seed=1)
    x = numbers(rows, inner, dtype=dtype, seed=2)
    for b in (None, bias):
        packed = PackedLinear([weight], [b])
        near(packed(x), linear(x, weight, b))
        assert torch.equal(kernel_linear(x, weight, b), packed(x))


@pytest.mark.parametrize(
    ("weights", "dtype"), [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (torch.float16, FLOAT32), (BFLOAT16, BFLOAT16)]
)
def test_a_row_has_the_same_bits_in_every_number_of_rows(weights, dtype, threads):
    """However they are cut into blocks, and whether a block widens weights or all rows of a task do."""
    weight = numbers(70, 1100, dtype=weights)
    held = weight if weights == dtype else PackedTensor(IN_16_BITS, {"plane16": weight})
    layer = PackedLinear([held], [None])
    x = numbers(70, 1100, dtype=dtype, seed=2)
    every = layer(x)
    for count in range(1, 70):
        assert torch.equal(layer(x[70 - count :]), every[70 - count :])


@dtypes
@pytest.mark.parametrize("act", list(ACTS), ids=lambda a: a.name)
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 2, 1), (7, 32, 31), (13, 64, 32), (300, 66, 100)])
def test_a_gated_layer_rounds_where_the_torch_modules_round(dtype, act, rows, inner, columns, threads):
    gate, up = (numbers(columns, inner, dtype=dtype, seed=s) for s in (0, 1))
    biases = [numbers(columns, dtype=dtype, seed=2), None]
    x = numbers(rows, inner, dtype=dtype, seed=3)
    layer = PackedLinear([gate, up], biases, act)
    near(layer(x), ACTS[act](linear(x, gate, biases[0])) * linear(x, up))


def activate(x, act):
    """Changes x [..., N] to its activation."""
    rows = x.numel() // x.shape[-1]
    arguments = ActivationArguments(rows, x.shape[-1], act, torch.get_num_threads(), x.data_ptr())
    Call(kernel("activate", x.dtype), arguments).run()
    return x


EVERY_ACT = ACTS | {
    Activation.GELU: gelu,
    Activation.QUICK_GELU: lambda x: (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype),
}


@dtypes
@pytest.mark.parametrize("act", list(EVERY_ACT), ids=lambda a: a.name)
@pytest.mark.parametrize("shape", [(1, 1), (7, 65), (2, 300, 100), (0, 16)])
def test_an_activation_of_each_number_rounds_once(dtype, act, shape, threads):
    x = numbers(*shape, dtype=dtype, seed=3)
    want = EVERY_ACT[act](x)
    activate(x, act)
    near(x, want) if x.numel() else None


def test_the_activations_of_large_numbers_and_of_nan():
    x = torch.tensor([-1e30, -60.0, -5.0, -1e-3, 0.0, 1e-3, 5.0, 60.0, 1e30, torch.nan])[:, None]
    for act, plain in EVERY_ACT.items():
        torch.testing.assert_close(activate(x.clone(), act), plain(x), atol=1e-6, rtol=1e-5, equal_nan=True)


@dtypes
@pytest.mark.parametrize("width", [96, 97])
def test_rows_may_be_strided_and_have_any_shape(dtype, width):
    weight = numbers(40, 32, dtype=dtype)
    layer = PackedLinear([weight], [None])
    wide = numbers(2, 5, width, dtype=dtype, seed=1)[..., width - 96 :]
    near(layer(wide[..., 32:64]), linear(wide[..., 32:64], weight))
    near(layer(wide[..., ::3]), linear(wide[..., ::3], weight))
    near(layer(wide[0, 0, :32]), linear(wide[0, 0, :32], weight))
    assert layer(wide[:0, :, :32]).shape == (0, 5, 40)


@pytest.mark.parametrize(("rows", "size"), [(1, 66), (3, 66), (6, 66), (17, 66), (3, 2)])
def test_float32_weights_that_fit_bfloat16_are_stored_in_16_bits_with_the_same_result(rows, size):
    weight, x = numbers(70, size, dtype=BFLOAT16).float(), numbers(rows, size, seed=1)
    layer = PackedLinear([weight], [None])
    near(layer(x), linear(x, weight))
    assert torch.equal(layer.weight, weight)
    other = PackedLinear([numbers(70, size)], [None])
    assert other.weights.numel() == 2 * layer.weights.numel()


@dtypes
def test_nan_and_inf_stay_in_their_row(dtype):
    weight = numbers(70, 64, dtype=dtype)
    x = numbers(8, 64, dtype=dtype, seed=1)
    x[3, 5], x[5, 0] = torch.nan, torch.inf
    got = PackedLinear([weight], [None])(x)
    gated = PackedLinear([weight, weight], [None, None], Activation.SILU)(x)
    for y in (got, gated):
        assert y[3].isnan().all()
        assert y[[0, 1, 2, 4, 6, 7]].isfinite().all()
    assert got[5].isinf().all()
    assert not gated[5].isfinite().any()
    _, normed = norm_after_sum(x, torch.ones(64), 1e-6, rounds_first=True)
    assert normed[3].isnan().all()
    assert normed[[0, 1, 2, 4, 6, 7]].isfinite().all()


def plain_norm(x, weight, eps, rounds_first):
    h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (weight.to(x.dtype) * h.to(x.dtype)) if rounds_first else (weight * h).to(x.dtype)


@dtypes
@pytest.mark.parametrize("rounds_first", [True, False])
@pytest.mark.parametrize("size", [1, 15, 16, 63, 64, 100, 512])
def test_norms_equal_those_of_transformers(dtype, rounds_first, size, threads):
    weight = numbers(size, dtype=dtype).float()
    for rows in (1, 3, 300):
        x = numbers(rows, size, dtype=dtype, seed=rows)
        near(norm_after_sum(x, weight, 1e-5, rounds_first)[1], plain_norm(x, weight, 1e-5, rounds_first))


@dtypes
@pytest.mark.parametrize("size", [1, 15, 16, 63, 64, 100, 512])
def test_layer_norms_equal_those_of_torch(dtype, size, threads):
    weight, bias = numbers(size, dtype=dtype).float(), numbers(size, dtype=dtype, seed=1).float()
    for rows in (1, 3, 300):
        x = numbers(rows, size, dtype=dtype, seed=rows) + 3
        more = numbers(rows, size, dtype=dtype, seed=rows + 1)
        want = layer_norm(x.float(), (size,), weight, bias, 1e-5).to(dtype)
        near(norm_after_sum(x, weight, 1e-5, False, shift=bias)[1], want)
        total, norm = norm_after_sum(x, weight, 1e-5, False, more, shift=bias)
        assert torch.equal(norm, norm_after_sum(total, weight, 1e-5, False, shift=bias)[1])


@pytest.mark.parametrize("x", [
    numbers(10), numbers(0, 10), numbers(2, 3, 10), numbers(1, 3, 4, 30)[..., 10:20], numbers(1, 4, 3, 10).transpose(1, 2),
    numbers(2, 3, 4, 5, 10).permute(3, 1, 0, 2, 4), numbers(5, 10, 2)[..., 0], numbers(1, 3, 40).view(1, 3, 4, 10)[:, 1:],
    numbers(3, 8, 10)[:, :5].unsqueeze(1),
])  # fmt: skip
def test_norms_take_strided_rows(x):
    weight = numbers(10, seed=1)
    _, got = norm_after_sum(x, weight, 1e-6, rounds_first=True)
    assert got.shape == x.shape
    near(got, plain_norm(x, weight, 1e-6, rounds_first=True)) if x.numel() else None


@pytest.mark.parametrize("kinds", [(FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32)])
@pytest.mark.parametrize(("size", "turned"), [(2, 2), (8, 8), (64, 64), (80, 80), (96, 20), (100, 32)])
def test_rotary_embeddings_equal_those_of_transformers(kinds, size, turned, threads):
    dtype, cos_dtype = kinds
    for tokens in (1, 130):
        q = numbers(1, tokens, 4, size, dtype=dtype).transpose(1, 2)
        both = numbers(1, tokens, 2, 2 * size, dtype=dtype, seed=1)
        k = both[..., :size].transpose(1, 2)  # a slice of a wider product
        angle = numbers(1, tokens, turned, seed=2)
        cos, sin = angle.cos().to(cos_dtype), angle.sin().to(cos_dtype)
        got = rotate(q, k, cos, sin)
        want = [y.to(dtype) for y in apply_rotary_pos_emb(q.to(cos_dtype), k.to(cos_dtype), cos, sin)]
        for g, w, before in zip(got, want, (q, k), strict=True):
            assert g.shape == before.shape
            near(g, w)
            assert torch.equal(g[..., turned:], before[..., turned:])


@pytest.mark.parametrize("kinds", [(FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32)])
@pytest.mark.parametrize(("family", "pairs"), [("glm4", 1), ("cohere", 2)])
@pytest.mark.parametrize(("size", "turned"), [(2, 2), (64, 64), (96, 20), (100, 34)])
def test_rotary_embeddings_of_pairs_equal_those_of_transformers(kinds, family, pairs, size, turned, threads):
    dtype, cos_dtype = kinds
    plain = import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    q, k = (numbers(1, heads, 9, size, dtype=dtype, seed=heads) for heads in (4, 2))
    angle = numbers(1, 9, turned // 2, seed=2)
    of_pairs = angle.repeat(1, 1, 2) if pairs == 1 else angle.repeat_interleave(2, 2)
    cos, sin = of_pairs.cos().to(cos_dtype), of_pairs.sin().to(cos_dtype)
    got = rotate(q, k, cos, sin, pairs)
    want = plain(*(x[..., :turned].to(cos_dtype) for x in (q, k)), cos, sin)
    for g, w, before in zip(got, want, (q, k), strict=True):
        near(g[..., :turned], w.to(dtype))
        assert torch.equal(g[..., turned:], before[..., turned:])


def test_the_rotary_kernel_refuses_what_it_cannot_compute():
    q, k, cos = numbers(1, 4, 3, 8), numbers(1, 2, 3, 8), numbers(1, 3, 8)
    assert rotate(q, k, cos, cos) is not None
    assert rotate(q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), cos, cos) is None
    assert rotate(q.double(), k.double(), cos.double(), cos.double()) is None
    assert rotate(q, k, cos.bfloat16(), cos.bfloat16()) is None
    assert rotate(q, k, cos[..., :7], cos[..., :7]) is None
    assert rotate(q[..., :4], k[..., :4], cos, cos) is None


@dtypes
@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("shape", [(1, 3, 97), (1, 300, 512), (2, 7, 16), (1, 0, 16)])
def test_the_fused_sum_and_norm_equal_the_separate_ones(dtype, shape, scale, threads):
    x, more, weight = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1), numbers(shape[-1], seed=2)
    total, norm = norm_after_sum(x, weight, 1e-5, True, more, scale)
    if scale == 1:
        assert torch.equal(total, x + more)
    elif x.numel():
        near(total, x + more * scale)
    assert torch.equal(total, add_rows(x, more, scale))
    assert torch.equal(norm, norm_after_sum(total, weight, 1e-5, True)[1])


@dtypes
def test_rows_of_a_table_are_copied_and_indices_beyond_it_are_refused(dtype, threads):
    table = numbers(50, 130, dtype=dtype)
    places = torch.arange(1000).view(4, 250) * 7 % 50
    assert torch.equal(take_rows(table, places), table[places])
    assert torch.equal(take_rows(table, places[:, ::2]), table[places[:, ::2]])
    assert take_rows(table, places[:0]).shape == (0, 250, 130)
    for wrong in (-1, 50):
        with pytest.raises(IndexError, match="the table has 50 rows"):
            take_rows(table, torch.tensor([3, wrong]))
