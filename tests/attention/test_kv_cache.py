import mmap

import pytest
import torch

from batchgen.attention.kv_cache import KVCache, LayerShape, bytes_per_token, devices_of
from batchgen.kernels.memory import keep_pages_small
from batchgen.process.machine import memory_bytes

CPU = torch.device("cpu")


def cache_of(num_blocks=6, block_size=2, layers=None):
    return KVCache(layers or {0: LayerShape(1, 1, 1)}, num_blocks, block_size, torch.float32)


def numbered(cache):
    for pool in (*cache.keys.values(), *cache.values.values()):
        pool.copy_(torch.arange(pool.numel(), dtype=pool.dtype).view(pool.shape))
    return cache


@pytest.mark.parametrize(
    ("copies", "blocks"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        ([(0, 3), (0, 4)], [0, 1, 2, 0, 0, 5]),
        ([(0, 1), (1, 2)], [0, 0, 0, 3, 4, 5]),  # a copy of a copy
        ([(1, 2), (0, 1)], [0, 0, 1, 3, 4, 5]),  # the source is overwritten after it was read
        ([(0, 1), (1, 2), (2, 3), (5, 0), (0, 4)], [5, 0, 0, 0, 5, 5]),
    ],
)
def test_copies_are_made_as_if_one_after_the_other(copies, blocks):
    cache = numbered(cache_of())
    cache.copy(copies)
    assert cache.keys[0].view(6, 2).tolist() == [[2 * p, 2 * p + 1] for p in blocks]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_no_number_spoils_only_those_that_attend_to_it(bad):
    """Masked keys have weight 0, and 0 times NaN is NaN. So values in the pool are always finite, and the key of such a token is NaN."""
    cache = cache_of(2, 2, {0: LayerShape(1, 2, 2)})
    keys = torch.tensor([[[1.0, -0.0], [3.0, 4.0]]])
    values = torch.tensor([[[5.0, bad], [7.0, 8.0]]])
    cache.write(0, torch.tensor([0, 1]), keys, values)
    assert cache.values[0].isfinite().all()
    assert cache.keys[0][0, 0].isnan().all()
    assert cache.keys[0][0, 1].tolist() == [3, 4]
    assert cache.values[0][0, 1].tolist() == [7, 8]


META = torch.device("meta")
SPREAD = {0: LayerShape(1, 1, 1), 1: LayerShape(2, 4, 2, META), 2: LayerShape(1, 1, 1)}


def test_each_layer_s_kv_lies_on_its_layer_s_device():
    cache = cache_of(4, 2, SPREAD)
    assert cache.devices == devices_of(SPREAD) == (CPU, META)
    assert {i: k.device for i, k in cache.keys.items()} == {0: CPU, 1: META, 2: CPU}
    assert {i: v.device for i, v in cache.values.items()} == {0: CPU, 1: META, 2: CPU}


def test_layers_of_one_shape_lie_in_one_tensor_and_none_is_a_view():
    """A block is moved in all layers at once. torch.compile would take views of one tensor that is written to for a single tensor."""
    cache = cache_of(4, 2, {0: LayerShape(2, 3, 3), 1: LayerShape(2, 3, 5), 2: LayerShape(1, 3, 3)})
    assert [tuple(pool.shape) for pool in cache.pools] == [(2 * 3, 8, 3), (2, 8, 5), (1 * 2, 8, 3)]
    tensors = [*cache.keys.values(), *cache.values.values()]
    assert not any(tensor._is_view() for tensor in tensors)
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == 6
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    assert [int(tensor.min()) for tensor in tensors] == [int(tensor.max()) for tensor in tensors] == [*range(6)]


def test_pools_begin_at_a_page_so_that_no_vector_lies_in_two_lines_of_the_cache():
    for blocks in (1, 7, 5000):
        pools = cache_of(blocks, 32, {0: LayerShape(2, 64, 64), 1: LayerShape(1, 48, 80)}).pools
        assert [pool.data_ptr() % mmap.PAGESIZE for pool in pools] == [0, 0, 0]


def test_layers_that_read_the_keys_and_values_of_another_take_no_memory():
    alone = {0: LayerShape(2, 3, 5)}
    layers = alone | {1: LayerShape(2, 3, 5, same_as=0)}
    cache = cache_of(4, 2, layers)
    assert cache.keys[1] is cache.keys[0]
    assert cache.values[1] is cache.values[0]
    assert [pool.shape for pool in cache.pools] == [pool.shape for pool in cache_of(4, 2, alone).pools]
    assert bytes_per_token(layers, torch.float32) == bytes_per_token(alone, torch.float32)


@pytest.mark.skipif(not keep_pages_small(torch.zeros(1)), reason="the system cannot make pages huge later")
def test_the_first_blocks_take_only_their_own_memory_and_stay_what_they_are_when_pages_become_huge():
    cache = KVCache({i: LayerShape(8, 64, 64) for i in range(8)}, 1024, 16, torch.bfloat16)  # 256 MiB
    before = memory_bytes()
    kv = torch.randn(8, 2, 64).bfloat16()
    for i in cache.keys:
        cache.write(i, torch.tensor([0, 1024 * 16 - 1]), kv + i, kv - i)
    assert memory_bytes() - before < 32 << 20
    assert cache.max_few_blocks == 128  # an eighth
    cache.make_pages_huge()
    assert cache.max_few_blocks == 1024
    for i in cache.keys:
        assert torch.equal(cache.keys[i][:, [0, -1]], kv + i)
        assert torch.equal(cache.values[i][:, [0, -1]], kv - i)
        assert not cache.keys[i][:, 1:-1].any()
