from types import SimpleNamespace

import pytest
import torch

from batchgen.config import EngineConfig
from batchgen.engine import sizing
from batchgen.engine.kv_cache import LayerShape
from batchgen.engine.sizing import page_size_of, size_engine
from batchgen.engine.steps import Limits
from batchgen.errors import UsageError

# 4 KiB of KV a token, 128 KiB a page of 32.
MODEL = SimpleNamespace(
    vocab_size=2**15,
    layers={i: LayerShape(4, 64, 64) for i in range(2)},
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def sizes(context=1024, **config):
    return size_engine(MODEL, EngineConfig(**config), context)


@pytest.mark.parametrize(("chunk", "page"), [(1, 32), (5, 35), (16, 32), (31, 62), (32, 32), (100, 100)])
def test_a_page_is_the_smallest_multiple_of_the_chunk_with_32_tokens(chunk, page):
    assert page_size_of(chunk) == page


@pytest.mark.parametrize(("memory", "pages"), [("128KiB", 1), ("1MiB", 8), ("1MB", 7), ("1GiB", 8192)])
def test_a_size_is_taken_to_the_letter_in_whole_pages(memory, pages):
    got = sizes(kv_memory=memory)
    assert (got.num_pages, got.page_size, got.bytes_per_token) == (pages, 32, 4096)


def test_a_share_is_of_what_is_free(monkeypatch):
    monkeypatch.setattr(sizing, "free_memory", lambda device: 100 * 128 * 1024)
    assert sizes(kv_memory="30%").num_pages == 30
    assert sizes(kv_memory="auto").num_pages == 50


def test_a_share_is_of_the_device_with_the_least_room_for_its_layers(monkeypatch):
    """Two of three layers lie on one device; a page there is twice as large as on the other."""
    other = torch.device("meta")
    layers = {0: LayerShape(4, 64, 64), 1: LayerShape(4, 64, 64), 2: LayerShape(4, 64, 64, other)}
    model = SimpleNamespace(vocab_size=2**15, layers=layers, dtype=torch.float32, device=torch.device("cpu"))
    free = {"cpu": 100 * 128 * 1024, "meta": 49 * 64 * 1024}
    monkeypatch.setattr(sizing, "free_memory", lambda device: free[device.type])
    got = size_engine(model, EngineConfig(kv_memory="100%"), 1024)
    assert (got.num_pages, got.bytes_per_token) == (49, 6144)
    free["meta"] *= 10
    assert size_engine(model, EngineConfig(kv_memory="100%"), 1024).num_pages == 100
    assert size_engine(model, EngineConfig(kv_memory="192KiB"), 1024).num_pages == 1


def test_auto_takes_no_more_than_two_full_batches_can_use(monkeypatch):
    monkeypatch.setattr(sizing, "free_memory", lambda device: 2**50)
    assert sizes(batch_size=10, context=100).num_pages == 2 * 10 * 4


def test_memory_without_room_for_a_page_is_refused():
    with pytest.raises(UsageError) as e:
        sizes(kv_memory="100KiB")
    assert e.value.message == "--kv-memory 100KiB holds no page of 32 tokens (131072 bytes)"
    assert e.value.hint == "give more, or lower --chunk-size"


def test_budgets_have_defaults_for_the_device():
    assert sizes(kv_memory="1MiB").limits == Limits(256, 2048, 2048, 1024)


def test_budgets_are_what_the_user_says_as_far_as_they_fit_into_one_another():
    assert sizes(kv_memory="1MiB", batch_size=7, max_batch_tokens=50, max_prefill_tokens=20).limits == Limits(
        7, 50, 20, 1024
    )
    assert sizes(kv_memory="1MiB", batch_size=70, max_batch_tokens=50, max_prefill_tokens=90).limits == Limits(
        50, 50, 50, 1024
    )


def test_free_memory_of_this_machine_is_a_sensible_number():
    assert 2**24 < sizing.free_memory(torch.device("cpu")) < 2**50


def test_host_memory_for_kv_is_for_cuda_alone():
    with pytest.raises(
        UsageError, match=r"^--host-kv-memory is for CUDA devices, not for cpu; raise --kv-memory instead$"
    ):
        sizes(host_kv_memory="1GiB")
