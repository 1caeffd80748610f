"""Attention of image encoders: our kernel in place of torch's."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from batchgen.attention import encoder
from batchgen.attention.encoder import EncoderAttention
from support.params import slow_but

SHAPES = [
    {}, {"kv_heads": 2}, {"kv_heads": 1, "size": 72, "v_size": 72}, {"size": 80, "v_size": 40},
    {"heads": 3, "kv_heads": 3, "size": 7}, {"tiles": 3},
]  # fmt: skip
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(autouse=True)
def no_minimum(monkeypatch):
    monkeypatch.setattr(encoder, "MIN_TOKENS", 1)


@pytest.fixture
def calls(monkeypatch):
    """The number of tokens of each call of our kernel."""
    found = []
    ours = encoder.attend_to_first

    def noted(q_HTD, *rest):
        found.append(q_HTD.shape[1])
        return ours(q_HTD, *rest)

    monkeypatch.setattr(encoder, "attend_to_first", noted)
    return found


def inputs(tokens, heads=4, kv_heads=4, size=24, v_size=24, dtype=torch.float32, tiles=1):
    """Queries, keys and values of an image in tiles, as a projection of all three gives them."""
    numbers = torch.Generator().manual_seed(tokens)
    sizes = heads * size, kv_heads * size, kv_heads * v_size
    all_three = torch.randn((tiles, tokens, sum(sizes)), generator=numbers).to(dtype)
    q, k, v = all_three.split(sizes, dim=2)
    return [x.unflatten(2, (n, -1)).transpose(1, 2) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", slow_but(SHAPES[:2], SHAPES))
@pytest.mark.parametrize("tokens", [1, 17, 64, 577, 1100])
def test_it_gives_what_torch_gives(tokens, shape, dtype, calls):
    given = inputs(tokens, **shape, dtype=dtype)
    several = {"enable_gqa": True} if given[0].shape[1] != given[1].shape[1] else {}
    expected = attend(*given, **several)
    with EncoderAttention():
        got = attend(*given, **several)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert calls == [tokens] * len(given[0])


@pytest.mark.parametrize("count", [1, 33, 99])
def test_keys_that_no_query_sees_change_nothing(count, calls):
    """As those of an image that is padded."""
    q, k, v = inputs(100)
    mask = (torch.arange(100) < count).expand(1, 1, 100, 100)
    expected = attend(q, k, v, attn_mask=mask)
    k[:, :, count:], v[:, :, count:] = 1e30, float("nan")
    with EncoderAttention():
        got = attend(q, k, v, attn_mask=mask)
    torch.testing.assert_close(got, expected)
    assert calls == [100]


@pytest.mark.parametrize(
    "options", [{"scale": 0.9}, {"attn_mask": torch.zeros(1, 1, 100, 100)}], ids=["scale", "zeros"]
)
def test_a_scale_is_kept_and_a_mask_of_zeros_masks_nothing(options, calls):
    given = inputs(100)
    with EncoderAttention():
        got = attend(*given, **options)
    torch.testing.assert_close(got, attend(*given, **options))
    assert calls == [100]


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"attn_mask": torch.ones(100, 100).tril().bool()},
        {"attn_mask": torch.ones(100, 100).tril().log()},
        {"attn_mask": (torch.arange(100) >= 3).expand(100, 100)},
        {"attn_mask": torch.linspace(-1, 1, 100).expand(100, 100)},
    ],
    ids=["causal", "a triangle", "a triangle of numbers", "later keys", "a bias"],
)
def test_what_the_kernel_does_not_cover_is_left_to_torch(options, calls):
    given = inputs(100)
    expected = attend(*given, **options)
    with EncoderAttention():
        got = attend(*given, **options)
    assert torch.equal(got, expected)
    assert calls == []


@pytest.mark.parametrize("what", ["other keys", "few tokens", "float64"])
def test_other_shapes_are_left_to_torch(what, calls, monkeypatch):
    q, k, v = inputs(100)
    if what == "other keys":
        q = q[:, :, :40]
    elif what == "few tokens":
        monkeypatch.setattr(encoder, "MIN_TOKENS", 101)
    else:
        q, k, v = q.double(), k.double(), v.double()
    with EncoderAttention():
        got = attend(q, k, v)
    assert torch.equal(got, attend(q, k, v))
    assert calls == []


def test_the_bits_do_not_depend_on_the_number_of_threads():
    given = inputs(700, size=72, v_size=72)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with EncoderAttention():
                found.append(attend(*given))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
