"""Our own kernels against the plain reference, on steps of random prefix trees."""

import ctypes
import random
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.attention.base import LayerOptions
from batchgen.attention.cpu_backend import PackedAttention, _Layer, _Plan, storage
from batchgen.attention.kv_cache import KVCache, LayerShape
from batchgen.kernels.build import NoKernels, kernel, library
from batchgen.model.loaded_model import with_blocks
from support import simulation as sim
from support.params import examples, in_turn, slow_but
from support.reference_attention import OPTIONS, AttentionCase, random_options

BLOCKS = 120
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def kernels():
    try:
        return library()
    except NoKernels as e:
        pytest.skip(e.message)


def written(kernels, keys, values, kv_indices, block_size):
    """A packed pool with these keys and values [K, N, size] at these KV indices, and NaN nowhere."""
    K, count, D = keys.shape
    cache = KVCache(storage({0: LayerShape(K, D, values.shape[2])}, keys.dtype), BLOCKS, block_size, keys.dtype)
    at = np.array(kv_indices, dtype=np.int32)
    plan = _Plan(num_tokens=count, block_size=block_size, kv_indices=at.ctypes.data, tile=1)
    what = _Layer(
        heads=K, kv_heads=K, size=D, v_size=values.shape[2], num_blocks=BLOCKS,
        k_head=keys.stride(0), k_token=keys.stride(1), v_head=values.stride(0), v_token=values.stride(1),
        k=keys.data_ptr(), v=values.data_ptr(), keys=cache.keys[0].data_ptr(), values=cache.values[0].data_ptr(),
    )  # fmt: skip
    unwanted = np.full(count, -1, dtype=np.int32)  # of no token, so that nothing is read
    what.rows = unwanted.ctypes.data
    what.plan, what.threads = ctypes.addressof(plan), torch.get_num_threads()
    kernel("attention", keys.dtype)(ctypes.byref(what))
    return cache


def compare(kernels, spans, block_size, **options):
    case = AttentionCase(spans, BLOCKS, block_size, **options)
    cache = written(kernels, case.keys[:, case.read], case.values[:, case.read], case.read.tolist(), block_size)
    inputs = 0, case.q_HTD, case.keys[:, case.own], case.values[:, case.own], case.options
    got = PackedAttention(spans, cache)(*inputs)
    case.check(got)
    wanted = torch.rand(len(case.own), generator=torch.Generator().manual_seed(0)) < 0.3
    narrowed = PackedAttention(spans, cache, (0, wanted.nonzero()[:, 0].numpy()))
    assert torch.equal(narrowed(*inputs)[wanted], got[wanted])
    layer, q, *others = inputs
    if 0 < wanted.sum() < len(wanted):
        assert torch.equal(narrowed(layer, q[:, wanted], *others), got[wanted])


def random_steps(seed, check, *, block_size=16, longest=60, steps=5, tokens=300):
    """Checks the spans of some steps of a random tree."""
    sim.random_steps(
        seed, lambda step, plan: check(step.spans), longest=longest, steps=steps, tokens=tokens,
        blocks=BLOCKS, block_size=block_size, batch_size=8,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("block_size", "dtype"),
    slow_but(in_turn([16, 32], DTYPES), product([16, 32, 48], DTYPES)),
    ids=str,
)
@pytest.mark.parametrize(
    ("K", "G", "D", "V"),
    [(1, 1, 16, 16), (1, 71, 64, 64), (2, 7, 64, 64), (4, 1, 80, 80), (2, 2, 33, 20), (1, 3, 7, 3), (1, 2, 256, 128), (2, 5, 8, 96)],
)  # fmt: skip
def test_the_kernels_are_the_reference_for_every_shape_of_heads(kernels, K, G, D, V, dtype, block_size):
    def check(spans):
        compare(kernels, spans, block_size, K=K, G=G, D=D, V=V, dtype=dtype)

    random_steps(3, check, block_size=block_size, tokens=90, longest=40, steps=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_kernels_are_the_reference_under_every_option(kernels, options, dtype):
    random_steps(4, lambda spans: compare(kernels, spans, 32, dtype=dtype, **options), block_size=32)


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize(
    "options", slow_but([{"softcap": 0.7, "G": 3}], [{}, {"sliding_window": 700}, {"softcap": 0.7, "G": 3}]), ids=str
)
def test_the_kernels_are_the_reference_over_more_keys_than_they_have_in_hand_at_a_time(kernels, options, dtype):
    rng = random.Random(8)
    shared = [rng.randrange(3) for _ in range(1100)]
    s = sim.Simulation(
        blocks=BLOCKS, block_size=32, tokens=600, batch_size=8, prefill=600,
        every_step=lambda step, plan: compare(kernels, step.spans, 32, dtype=dtype, **options),
    )  # fmt: skip
    s.load([shared + [rng.randrange(3) for _ in range(n)] for n in (1, 40, 530)], [3, 3, 3])
    while s.scheduler.unfinished:
        s.step()
    assert s.steps > 5


@settings(max_examples=examples(8, 25))
@given(st.data())
def test_the_kernels_are_the_reference_on_random_trees(kernels, data):
    seed = data.draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    block_size = rng.choice([16, 32, 48, 160])
    options = random_options(rng, [torch.float32, torch.bfloat16])
    tokens = rng.choice([9, 40, 300])
    random_steps(
        seed, lambda spans: compare(kernels, spans, block_size, seed=seed % 1000, **options), block_size=block_size,
        tokens=tokens, steps=4,
    )  # fmt: skip


def test_a_block_is_copied_whatever_its_layout(kernels):
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn((2, 40, 8), generator=generator), torch.randn((2, 40, 20), generator=generator)
    cache = written(kernels, keys, values, range(16, 56), 16)  # blocks 1, 2 and half of 3
    again = written(
        kernels, keys, values, [*range(80, 96), *range(48, 64), *range(16, 24)], 16
    )  # blocks 5, 3, half of 1
    cache.copy([(1, 5)])
    for pool, other in zip(cache.pools, again.pools, strict=True):
        assert torch.equal(cache._paged(pool)[:, 5], again._paged(other)[:, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_reach_those_who_attend_to_them_alone(kernels, dtype, bad):
    keys, values = torch.ones(1, 20, 4, dtype=dtype), torch.ones(1, 20, 4, dtype=dtype)
    values[0, 17, 2] = bad  # the second token of the second block
    cache = written(kernels, keys, values, range(20), 16)
    assert torch.isfinite(cache.values[0]).all()
    attention = PackedAttention([sim.scheduled([0, 1], 15, 19)], cache)
    out = attention(0, torch.ones(1, 4, 4, dtype=dtype), keys[:, 15:19], values[:, 15:19], LayerOptions(1.0))
    assert torch.equal(out[:2], torch.ones(2, 1, 4, dtype=dtype))
    assert out[2:].isnan().all()


@pytest.mark.parametrize(
    ("block_size", "dtype", "device", "packed"),
    [
        (32, torch.float32, "cpu", True), (48, torch.bfloat16, "cpu", True), (40, torch.float32, "cpu", False),
        (32, torch.float16, "cpu", False), (32, torch.float32, "meta", False),
    ],
)  # fmt: skip
def test_other_blocks_types_and_devices_run_without_the_kernels(block_size, dtype, device, packed):
    from batchgen.model.loaded_model import LoadedModel

    layers = {0: LayerShape(2, 7, 20, torch.device(device))}
    model = LoadedModel(None, torch.device(device), dtype, layers, 10, kernels=object())
    got = with_blocks(model, block_size)
    assert (got.kernels is not None) == packed
    assert got.layers[0].v_size == (32 if packed else 20)
