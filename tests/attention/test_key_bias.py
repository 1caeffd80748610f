"""A bias of keys, such as ALiBi's, is stored as a part of the keys."""

import pytest
import torch

from batchgen.attention.base import LayerOptions, with_key_bias
from batchgen.attention.torch_backend import partial


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 112])
def test_the_bias_of_far_positions_is_exact_in_every_type(dtype, size):
    slopes_K, positions = torch.tensor([0.5, 1.0]), torch.arange(9_990, 10_000)
    bias_KT = slopes_K[:, None] * positions
    query, key = torch.zeros(1, 4, 10, size, dtype=dtype), torch.zeros(1, 2, 10, size, dtype=dtype)
    query, key = with_key_bias(query, key, bias_KT, size**-0.5)
    last = query[0, :, -1].view(2, 2, -1)  # of the last token: two heads to a key
    out, _ = partial(last, key[0], torch.eye(10).expand(2, -1, -1).to(dtype), LayerOptions(size**-0.5))
    expected = torch.softmax(bias_KT, -1)[:, None].expand(-1, 2, -1)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=1e-3)


def test_keys_so_far_away_that_float16_has_no_number_for_their_score_have_no_weight():
    zeros = torch.zeros((1, 1, 40_000, 64), dtype=torch.float16)
    q, k = with_key_bias(zeros, zeros, torch.arange(40_000)[None], 64**-0.5)
    values = torch.ones((1, 16, 4), dtype=torch.float16)
    far, far_lse = partial(q[0, :, -1:], k[0, :, :16], values, LayerOptions(64**-0.5))
    near, near_lse = partial(q[0, :, -1:], k[0, :, -16:], values, LayerOptions(64**-0.5))
    assert (far.tolist(), far_lse.tolist()) == ([[[0.0] * 4]], [[-torch.inf]])
    torch.testing.assert_close(near, torch.ones((1, 1, 4)), atol=1e-3, rtol=0)
    assert round(near_lse.item(), 3) == 0.459
