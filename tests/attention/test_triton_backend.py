"""Attention on a CUDA device against the plain reference, on steps of random prefix trees: on Triton's interpreter, under `-m gpu` for real."""

import math
import random
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.attention.base import LayerOptions
from batchgen.attention.kv_cache import KVCache, LayerShape
from batchgen.attention.triton_backend import DEFAULT_TUNING, DeviceAttention, Tuning, obstacle
from support import simulation as sim
from support.params import examples, in_turn, slow_but
from support.reference_attention import OPTIONS, AttentionCase, random_options

pytest.importorskip("triton")
import triton

from batchgen.attention import triton_kernels as kernels
from support.triton_interpreter import skip_unless_interpreted

BLOCKS = 120
GARBAGE = 1e4
BAD, DTYPES = (math.nan, math.inf), (torch.float32, torch.bfloat16)
# The interpreter runs kernels as numpy's operations: masked values may be anything before they are dropped.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|All-NaN):RuntimeWarning")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu":
        skip_unless_interpreted()
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


FINE = Tuning(shared_reads=1, wide_min_keys=1, narrow_min_keys=1, item_keys=0)
"""Reads are split and shared as finely as possible."""


def compare(device, spans, block_size, *, tuning=DEFAULT_TUNING, padding=0, D=16, V=16, **options):
    """Compares `DeviceAttention` with the reference. Values that no query may read are NaN, or large."""
    case = AttentionCase(
        spans, BLOCKS, block_size, D=D, V=V, unread=(float("nan"), GARBAGE), padding=padding, device=device, **options
    )
    (K, G), T, own = case.heads, len(case.own), case.own.to(device)
    cache = KVCache({0: LayerShape(K, D, V, device)}, BLOCKS, block_size, case.dtype)
    cache.keys[0].copy_(case.keys).index_fill_(1, own, float("nan"))
    cache.values[0].copy_(case.values).index_fill_(1, own, GARBAGE)
    k, v = (
        torch.nn.functional.pad(x[:, own], (0, 0, 0, padding), value=float("nan")) for x in (case.keys, case.values)
    )
    attention = DeviceAttention(cache, 400, device, G, tuning)
    attention.plan(spans, T + padding)
    got = attention(0, case.q_HTD, k, v, case.options)
    assert got.shape == (T + padding, K * G, V)
    assert torch.equal(cache.keys[0].nan_to_num(7.0), case.keys.nan_to_num(7.0))
    assert torch.equal(cache.values[0], case.values)
    case.check(got[:T])
    assert not got[T:].any()


def random_steps(seed, check, *, block_size=16, longest=30, steps=3, tokens=60, **options):
    sim.random_steps(
        seed, lambda step, plan: check(step), longest=longest, steps=steps, tokens=tokens,
        blocks=BLOCKS, block_size=block_size, batch_size=6, **options,
    )  # fmt: skip


# A slice of a prompt, one that fills a tile by itself, and two that are decoding.
MIXED = [
    sim.scheduled([3, 1, 4], 30, 35), sim.scheduled([9, 2, 6], 0, 33), sim.scheduled([8, 7], 17, 18), sim.scheduled([10, 11, 12], 40, 41),
]  # fmt: skip


@pytest.mark.parametrize(
    ("K", "G", "D", "V", "spans"),
    slow_but(
        [(1, 7, 33, 20, MIXED)],
        [
            (1, 1, 16, 16, MIXED), (2, 8, 64, 64, MIXED), (4, 1, 80, 80, MIXED), (1, 7, 33, 20, MIXED), (1, 3, 256, 128, MIXED),
            (1, 20, 16, 72, MIXED[2:]), (1, 71, 16, 16, MIXED[2:]), (1, 2, 512, 8, MIXED[2:]),
        ],
    ),
)  # fmt: skip
def test_it_is_the_reference_for_every_shape_of_heads(device, K, G, D, V, spans):
    compare(device, spans, 16, K=K, G=G, D=D, V=V, tuning=FINE)


TOGETHER, *_ = (options for options in OPTIONS if len(options) > 1)
HALVES = [{"dtype": torch.bfloat16}, {"dtype": torch.float16}]


@pytest.mark.parametrize("options", slow_but([TOGETHER, HALVES[0]], OPTIONS + HALVES), ids=str)
def test_it_is_the_reference_under_every_option(device, options):
    compare(device, MIXED, 16, K=1, tuning=FINE, **options)


@pytest.mark.parametrize("block_size", [1, 3, 80])
def test_it_is_the_reference_for_every_block_size(device, block_size):
    tables = [list(range(i, BLOCKS, 3)) for i in range(3)]
    spans = [sim.scheduled(tables[0], 20, 23), sim.scheduled(tables[1], 0, 35), sim.scheduled(tables[2], 39, 40)]
    compare(device, spans, block_size, K=1)


def random_case(device, seed, steps, longest):
    rng = random.Random(seed)
    block_size = rng.choice([16, 32, 48])
    options = random_options(rng, [torch.float32, torch.float32, torch.bfloat16]) | {"padding": rng.choice([0, 3])}
    tokens = rng.choice([9, 40])
    options["tuning"] = Tuning(*(rng.choice([1, 16, 10**9]) for _ in range(3)), item_keys=rng.choice([0, 64]))
    random_steps(
        seed, lambda step: compare(device, step.spans, block_size, seed=seed % 1000, **options), block_size=block_size,
        tokens=tokens, steps=steps, longest=longest, sliding_window=options["sliding_window"] if rng.random() < 0.5 else None,
    )  # fmt: skip


@settings(max_examples=examples(1, 4))
@given(seed=st.integers(0, 2**32))
def test_it_is_the_reference_on_random_trees(device, seed):
    random_case(device, seed, steps=2, longest=12)


@pytest.mark.nightly
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_it_is_the_reference_on_many_random_trees(device, seed):
    random_case(device, seed, steps=5, longest=60)


@pytest.mark.parametrize(("bad", "dtype"), slow_but(in_turn(BAD, DTYPES), product(BAD, DTYPES)), ids=str)
def test_values_that_are_no_numbers_reach_those_who_attend_to_them_alone(device, dtype, bad):
    cache = KVCache({0: LayerShape(1, 4, 4, device)}, 3, 16, dtype)
    keys, values = (torch.ones(1, 20, 4, dtype=dtype, device=device) for _ in range(2))
    values[0, 17, 2] = bad  # the second token of the second block
    attention = DeviceAttention(cache, 20, device)
    out = []
    for start, stop in ((0, 15), (15, 19)):
        attention.plan([sim.scheduled([0, 1], start, stop)])
        q = torch.ones(1, stop - start, 4, dtype=dtype, device=device)
        out.append(attention(0, q, keys[:, start:stop], values[:, start:stop], LayerOptions(1.0)))
    assert torch.isfinite(cache.values[0]).all()
    assert cache.values[0][0, 17].tolist() == [1, 1, 0, 1]
    assert cache.keys[0][0, 17].isnan().all()
    ones = torch.cat(out)
    assert torch.equal(ones[:17], torch.ones(17, 1, 4, dtype=dtype, device=device))
    assert ones[17:].isnan().all()
    attention.plan([sim.scheduled([2], 0, 1), sim.scheduled([0, 1], 16, 17)])  # the same block, before the bad token
    q = torch.ones(1, 2, 4, dtype=dtype, device=device)
    assert torch.equal(attention(0, q, keys[:, :2], values[:, :2], LayerOptions(1.0)), torch.ones_like(out[1][:2]))


def test_queries_of_another_type_than_the_pool_are_taken_in_its_own(device):
    cache = KVCache({0: LayerShape(1, 16, 16, device)}, 2, 16, torch.bfloat16)
    q, k, v = (torch.randn(1, 20, 16, device=device).to(torch.bfloat16) for _ in range(3))
    attention = DeviceAttention(cache, 20, device)
    attention.plan([sim.scheduled([0, 1], 0, 20)])
    want = attention(0, q, k, v, LayerOptions(0.25))
    found = attention(0, q.float(), k, v, LayerOptions(0.25))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.to(torch.bfloat16), want)


@pytest.mark.parametrize(
    ("size", "kilobytes", "rows", "keys"),
    [
        (128, 227, 128, 128),
        (128, 163, 128, 128),
        (128, 99, 128, 64),
        (128, 64, 128, 16),
        (256, 163, 128, 32),
        (256, 99, 128, 16),
        (512, 99, 32, 16),
    ],
)
def test_tiles_are_made_to_fit_a_smaller_device(size, kilobytes, rows, keys):
    tile = kernels.tiles(size, 8, torch.bfloat16, 1, torch.device("cpu"))[0]
    got = kernels._fitting(tile, size, 2, kilobytes << 10)
    assert got == tile._replace(rows=rows, keys=keys)
    assert (rows + 4 * keys) * size * 2 + 1024 <= kilobytes << 10


# -- the plan


def test_a_plan_that_needs_more_room_gets_it_and_says_so(device):
    cache = KVCache({0: LayerShape(1, 16, 16, device)}, BLOCKS, 1, torch.float32)
    attention = DeviceAttention(cache, 1, device, tuning=Tuning(narrow_min_keys=1, partials=2))
    words = len(attention._plan)
    attention.plan([sim.scheduled([0], 0, 1)])
    assert (attention.generation, attention._partials) == (0, 2)
    attention.plan([sim.scheduled(list(range(100)), 99, 100)])
    assert (attention.generation, len(attention._plan)) == (1, words)
    assert attention._partials >= 4
    table = list(range(BLOCKS)) * (words // BLOCKS + 1)
    attention.plan([sim.scheduled(table, len(table) - 1, len(table))])
    assert (attention.generation, len(attention._plan)) == (2, 2 * words)
    assert attention.positions.tolist() == [len(table) - 1]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Returns a cache that claims to be on a GPU, and its device. Triton does not interpret."""
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    gpu = torch.device("cuda", 0)

    def cache(dtype=torch.bfloat16, size=128, tokens=64):
        return SimpleNamespace(keys={0: SimpleNamespace(device=gpu, dtype=dtype, shape=(1, tokens, size))}, values={})

    return cache, gpu


def test_a_triton_that_does_not_work_is_the_reason(on_a_gpu, monkeypatch):
    cache, gpu = on_a_gpu

    def no_compiler():
        raise RuntimeError("Failed to find\nC compiler.")

    active = SimpleNamespace(get_current_device=no_compiler)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    assert obstacle(cache(), gpu) == (
        "Triton, which needs a C compiler, Python's headers (python3-dev on Debian) and the driver's libcuda, fails here: "
        "RuntimeError: Failed to find C compiler."
    )


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({}, ""),
        ({"dtype": torch.float32, "size": 512}, ""),
        ({"dtype": torch.float16, "size": 513}, "the kernels do not have heads of 513 numbers in float16"),
        ({"dtype": torch.float64}, "the kernels do not have heads of 128 numbers in float64"),
        ({"tokens": 1 << 31}, "the kernels do not have pools of 2147483648 tokens"),
    ],
)
def test_caches_that_the_kernels_do_not_serve_are_named(on_a_gpu, monkeypatch, shape, why):
    cache, gpu = on_a_gpu
    monkeypatch.setattr(kernels, "why_not_here", lambda: "")
    assert obstacle(cache(**shape), gpu) == why


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "size", "block_size", "served"),
    [
        (torch.bfloat16, 128, 32, True), (torch.float32, 512, 1, True), (torch.float16, 513, 32, False),
        (torch.float64, 64, 32, False),
    ],
)  # fmt: skip
def test_a_cache_on_one_cuda_device_is_served(dtype, size, block_size, served):
    on = torch.device("cuda", 0)
    assert (obstacle(KVCache({0: LayerShape(1, size, 16, on)}, 2, block_size, dtype), on) == "") == served
    assert obstacle(KVCache({0: LayerShape(1, size, 16)}, 2, block_size, dtype), on)


# -- the operator


def operands(device, T=5):
    cache = KVCache({0: LayerShape(1, 16, 16, device)}, 4, 16, torch.float32)
    attention = DeviceAttention(cache, 8, device, 2)
    attention.plan([sim.scheduled([0, 1], 16, 16 + T)])
    q, k, v = (torch.randn(heads, T, 16, device=device) for heads in (2, 1, 1))
    return (
        q, k, v, cache.keys[0], cache.values[0], attention._plan, None, 0.25, None, None, 16, 8, 64,
        attention._wide.tokens, attention._narrow.tokens,
    )  # fmt: skip


def test_the_operator_says_what_it_does(device):
    """Its schema names what it writes to, its fake implementation gives the shapes, and it compiles."""
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.batchgen.attend.default, operands(device), test_utils=tests)
