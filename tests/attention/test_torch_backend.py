import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.attention.base import LayerOptions, with_key_bias
from batchgen.attention.torch_backend import Cascade, merge, partial
from support import simulation as sim
from support.params import examples
from support.reference_attention import OPTIONS, AttentionCase, random_options

CPU = torch.device("cpu")
GARBAGE = 1e4


def compare(step, plan, block_size, blocks, *, limits=None, **options):
    case = AttentionCase(step.spans, blocks, block_size, unread=(GARBAGE, GARBAGE), **options)
    case.check(Cascade(plan, CPU, **(limits or {})).attend(case.q_KTGD, case.keys, case.values, case.options))


def random_steps(seed, check, *, blocks=400, longest=14, steps=6, tokens=40, block_size=4, shared_reads=1, **attention):
    sim.random_steps(
        seed, check, longest=longest, steps=steps, tokens=tokens, attention=attention,
        blocks=blocks, block_size=block_size, batch_size=8, shared_reads=shared_reads,
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shared_reads", [1, 10**9])
def test_the_cascade_is_the_reference_under_every_option(options, shared_reads):
    random_steps(4, lambda step, plan: compare(step, plan, 4, 400, **options), shared_reads=shared_reads)


@settings(max_examples=examples(8, 25))
@given(st.data())
def test_the_cascade_is_the_reference_on_random_trees(data):
    seed = data.draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    block_size, blocks = rng.choice([1, 3, 4, 8]), 500
    options = random_options(rng)

    def check(step, plan):
        compare(step, plan, block_size, blocks, seed=seed % 1000, **options)

    random_steps(
        seed, check, block_size=block_size, blocks=blocks, shared_reads=rng.choice([1, 6, 10**9]),
        tokens=rng.choice([9, 40, 300]), steps=4,
    )  # fmt: skip


@pytest.mark.parametrize("shared_reads", [1, 10**9])
def test_long_slices_are_cut_into_blocks(shared_reads):
    limits = {"max_scores": 64}
    options = {"shared_reads": shared_reads, "longest": 40, "tokens": 90, "causal_chunk": 5, "causal_scores": 100}
    random_steps(5, lambda s, p: compare(s, p, 4, 400, limits=limits), **options)
    random_steps(5, lambda s, p: compare(s, p, 4, 400, sliding_window=7, limits=limits), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_the_reference(dtype):
    random_steps(8, lambda s, p: compare(s, p, 4, 400, dtype=dtype))


# -- pieces


def test_a_query_that_sees_no_key_of_a_part_takes_nothing_from_it():
    q, k = torch.randn(1, 2, 8), torch.randn(1, 4, 8)
    masked = torch.tensor([[True] * 4, [False] * 4])
    out, lse = partial(q, k, k, LayerOptions(1.0), masked)
    assert (lse[0, 0].item(), out[0, 0].tolist()) == (-float("inf"), [0.0] * 8)
    before, before_lse = torch.randn(1, 2, 8), torch.randn(1, 2)
    merged, merged_lse = before.clone(), before_lse.clone()
    merge(merged, merged_lse, out, lse)
    assert torch.equal(merged[0, 0], before[0, 0])
    assert torch.equal(merged_lse[0, 0], before_lse[0, 0])


@pytest.mark.parametrize("size", [300.0, 1e4])
def test_large_scores_neither_overflow_nor_vanish(size):
    q, k, v = size * torch.ones(1, 1, 4), torch.ones(1, 3, 4), torch.randn(1, 3, 4)
    out, lse = partial(q, k, v, LayerOptions(1.0))
    merge(out, lse, *partial(-q, k, v, LayerOptions(1.0)))
    torch.testing.assert_close(out, v.mean(1, keepdim=True))


@pytest.mark.parametrize("shared_reads", [1, 10**9])
def test_what_is_masked_may_be_anything_but_its_values(shared_reads):
    """Keys of freed blocks may be NaN; `KVCache.write` keeps values finite."""

    def check(step, plan):
        case = AttentionCase(step.spans, 400, 4, K=1, G=1, D=4, V=4, unread=(GARBAGE, GARBAGE), sliding_window=9)
        want = Cascade(plan, CPU).attend(case.q_KTGD, case.keys, case.values, case.options)
        case.keys[case.keys == GARBAGE] = float("nan")
        assert torch.equal(Cascade(plan, CPU).attend(case.q_KTGD, case.keys, case.values, case.options), want)

    random_steps(10, check, shared_reads=shared_reads)


# -- biases as wider keys


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
