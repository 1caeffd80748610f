import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchgen.attention.kv_cache import KVCache, LayerShape
from batchgen.config import EngineConfig
from batchgen.errors import OutOfMemory, UsageError
from batchgen.model import memory_budget
from batchgen.model.adapter import prepare
from batchgen.model.loaded_model import LoadedModel
from batchgen.model.memory_budget import (
    GRAPHS_BYTES,
    MIN_STEP,
    halved,
    largest_spans,
    room_for_blocks,
    size_engine,
    step_bytes,
)
from batchgen.model.runner import Runner
from batchgen.request import leaves_of
from batchgen.scheduling.batch import Limits, ScheduledBatch
from batchgen.scheduling.pool_size import BATCH_SIZE
from batchgen.state.cache import StateShape
from support.models import build, engine_for, make_requests, packed_model, run
from support.requests import request

HIDDEN = 64
# 4 KiB of KV a token, 128 KiB a block of 32.
LAYERS = {i: LayerShape(4, 64, 64) for i in range(2)}


def model_with(layers, device="cpu", states=()):
    return LoadedModel(
        module=SimpleNamespace(config=SimpleNamespace(hidden_size=HIDDEN, intermediate_size=HIDDEN)),
        device=torch.device(device),
        dtype=torch.float32,
        layers=layers,
        vocab_size=2**15,
        states=dict(states),
    )


STATES = {2: StateShape(0, 1, (4, 64, 64))}  # 64 KiB of state for each state slot
ATTENTION, BOTH, RECURRENT = model_with(LAYERS), model_with(LAYERS, states=STATES), model_with({}, states=STATES)


@pytest.mark.parametrize(
    ("model", "config", "found"),
    [
        (ATTENTION, {"kv_memory": "128KiB"}, (1, 4096, 0)),
        (ATTENTION, {"kv_memory": "1MiB"}, (8, 4096, 0)),
        (ATTENTION, {"kv_memory": "1MB"}, (7, 4096, 0)),
        (ATTENTION, {"kv_memory": "1GiB"}, (8192, 4096, 0)),
        (ATTENTION, {"kv_memory": "30%"}, (30, 4096, 0)),  # of the free memory
        (ATTENTION, {"kv_memory": "auto"}, (50, 4096, 0)),
        # State slots hold a full batch and 32 nodes, and at most half of the memory. Blocks get the rest.
        (BOTH, {"kv_memory": "16MiB", "batch_size": 8}, ((16 * 1024 - 40 * 64) // 128, 4096, 40)),
        (BOTH, {"kv_memory": "1MiB", "batch_size": 8}, (4, 4096, 8)),
        # Without attention they get all of it, and blocks cost nothing.
        (RECURRENT, {"kv_memory": "1MiB", "batch_size": 100}, (2 * 100 * 4, 0, 16)),
    ],
)
def test_memory_is_divided_into_whole_blocks_and_state_slots(model, config, found, monkeypatch):
    monkeypatch.setattr(memory_budget, "free_memory", lambda device: 100 * 128 * 1024)
    got = size_engine(model, EngineConfig(**config), 1024 if model.layers else 100)
    assert (got.num_blocks, got.bytes_per_token, got.num_state_slots) == found
    assert (got.block_size, got.bytes_per_state_slot) == (32, 64 * 1024 if model.states else 0)


@pytest.mark.parametrize(
    ("free", "tokens", "rows"),
    [(8 << 30, 2048, 256), (160 << 20, 2048, 256), (140 << 20, 2048, 128), (18 << 20, 128, 32), (10 << 20, 32, 32)],
)
def test_steps_are_smaller_where_little_memory_is_free(free, tokens, rows, monkeypatch):
    """A step of 2,048 tokens holds 5 MiB, and logits of 256 rows 32 MiB: at most a quarter of what is free."""
    monkeypatch.setattr(memory_budget, "free_memory", lambda device: free)
    limits = size_engine(ATTENTION, EngineConfig(), 256).limits
    assert (limits.max_batch_tokens, limits.max_prefill_tokens, limits.batch_size) == (tokens, tokens, rows)
    assert size_engine(ATTENTION, EngineConfig(kv_memory="50%"), 256).limits.max_batch_tokens == 2048  # as is asked


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (ATTENTION, {"kv_memory": "100KiB"}, "--kv-memory 100KiB does not hold a block of 32 tokens (128.0 KiB); give 128KiB or more, or lower --chunk-size"),
        (BOTH, {"kv_memory": "192KiB"}, "--kv-memory 192KiB does not hold a block of 32 tokens (128.0 KiB) and two recurrent states (64.0 KiB each); give 256KiB or more, or lower --chunk-size"),
        (RECURRENT, {"kv_memory": "100KiB"}, "--kv-memory 100KiB does not hold two recurrent states (64.0 KiB each); give 128KiB or more"),
    ],
)  # fmt: skip
def test_memory_that_is_too_little_is_refused(model, config, message):
    with pytest.raises(UsageError) as refused:
        size_engine(model, EngineConfig(**config), 1024)
    assert str(refused.value) == message


@pytest.mark.parametrize(("chunk", "block"), [(1, 32), (5, 35), (16, 32), (31, 62), (32, 32), (100, 100)])
def test_a_block_is_the_smallest_multiple_of_the_chunk_with_32_tokens(chunk, block):
    assert EngineConfig(chunk_size=chunk).block_size == block


def test_with_several_devices_the_one_with_the_fewest_blocks_decides(monkeypatch):
    """One device has two of the three layers, so a block takes twice as much memory there."""
    other = torch.device("meta")
    layers = {0: LayerShape(4, 64, 64), 1: LayerShape(4, 64, 64), 2: LayerShape(4, 64, 64, other)}
    model = model_with(layers)
    free = {"cpu": 100 * 128 * 1024, "meta": 49 * 64 * 1024}
    monkeypatch.setattr(memory_budget, "free_memory", lambda device: free[device.type])
    got = size_engine(model, EngineConfig(kv_memory="100%"), 1024)
    assert (got.num_blocks, got.bytes_per_token) == (49, 6144)
    free["meta"] *= 10
    assert size_engine(model, EngineConfig(kv_memory="100%"), 1024).num_blocks == 100
    assert size_engine(model, EngineConfig(kv_memory="192KiB"), 1024).num_blocks == 1


@pytest.mark.parametrize("batch_size", [1, 8, 100])
@pytest.mark.parametrize("state", [1, 7, 64, 150])
def test_a_request_fits_the_memory_that_its_error_asks_for(batch_size, state):
    model = model_with(LAYERS, states={2: StateShape(0, 1, (4, 64, state))})

    def given(memory: str) -> Any:
        return size_engine(model, EngineConfig(kv_memory=memory, batch_size=batch_size), 1024)

    (leaf,) = leaves_of([request(0, [0] * 300, 20)])
    few = given("1MiB")
    assert few.blocks_for(leaf) == 10
    message = few.does_not_fit(leaf).message
    asked = re.search(r"give --kv-memory (\w+), which recurrent states share, or lower max_tokens$", message)
    assert given(asked[1]).num_blocks >= 10


GIB = 2**30


def test_blocks_get_the_memory_that_steps_sampling_and_graphs_leave():
    assert GRAPHS_BYTES == GIB // 2
    assert room_for_blocks(100 * GIB, 4 * GIB, GIB) == int(100 * GIB - 6 * GIB - GIB - GIB / 2 - 2 * GIB)
    assert room_for_blocks(100 * GIB, 0, 0) == int(98 * GIB - GIB / 2)
    assert room_for_blocks(3 * GIB, 2 * GIB, 0) == 0


def test_halving_a_step_halves_every_limit_above_half():
    assert halved(Limits(256, 8192, 8192, 100, 7)) == Limits(256, 4096, 4096, 100, 7)
    assert halved(Limits(256, 400, 100, 100)) == Limits(200, 200, 100, 100)
    assert halved(Limits(1, 1, 1)) == Limits(1, 1, 1)


def two_layers_on(device, parameters):
    """4 KiB of KV a token."""
    weights = torch.nn.Linear(parameters // 8, 8, bias=False, device="meta")
    return replace(model_with({i: LayerShape(4, 64, 64, device) for i in range(2)}, device), module=weights)


def test_the_largest_step_of_small_layers_is_held_twice_because_it_becomes_a_graph(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(memory_budget, "step_bytes", lambda *_: {device: GIB})
    monkeypatch.setattr(memory_budget, "free_memory", lambda on: 20 * GIB)
    small, large = (size_engine(two_layers_on(device, n), EngineConfig(), 10**6).num_blocks for n in (2**24, 2**30))
    assert (large - small) * 128 * 1024 == int(1.5 * GIB)


@pytest.mark.parametrize(
    ("each", "most", "options", "tried", "step"),
    [
        (2**20, 1 << 30, {}, [8192], 8 * GIB),
        (2**22, 1 << 30, {}, [8192, 4096, 2048], 8 * GIB),  # halved until it leaves room
        (12 * GIB // MIN_STEP, 1 << 30, {"batch_size": 16}, [8192, 4096, 2048, 1024, 512, 256], 12 * GIB),  # small steps may take more
        (2**20, 100, {"batch_size": 300}, [8192, 4096, 2048, 1024, 512, 256, 128, 64], None),  # however small it is
        (2**20, 1 << 30, {"kv_memory": "1GiB"}, [], None),  # what the user gives is not measured
        (2**20, 1 << 30, {"kv_memory": "50%"}, [], None),
        (2**20, 0, {}, None, None),
    ],
)  # fmt: skip
def test_on_cuda_blocks_get_the_memory_that_the_largest_step_leaves(monkeypatch, each, most, options, tried, step):
    """20 GiB are free. Steps take `each` bytes a token and run out of memory above `most` tokens."""
    device, seen = torch.device("cuda", 0), []
    model = two_layers_on(device, parameters=2**40)

    def step_bytes(model, limits, block_size):
        seen.append(limits.max_batch_tokens)
        return None if limits.max_batch_tokens > most else {device: limits.max_batch_tokens * each}

    monkeypatch.setattr(memory_budget, "step_bytes", step_bytes)
    monkeypatch.setattr(memory_budget, "free_memory", lambda on: 20 * GIB)
    if tried is None:
        said = r"^cuda:0 does not have enough memory for a forward of one token; use a smaller --dtype$"
        with pytest.raises(OutOfMemory, match=said):
            size_engine(model, EngineConfig(**options), 10**6)
        return
    got = size_engine(model, EngineConfig(**options), 10**6)
    assert seen == tried
    if tried:
        rows = min(options.get("batch_size", 1024), tried[-1])
        assert got.limits == Limits(rows, tried[-1], tried[-1], got.limits.max_scored_tokens)
    if step:
        assert got.num_blocks == room_for_blocks(20 * GIB, step, 12 * 4 * min(rows * 2**15, 1 << 24)) // (128 * 1024)
    if not tried:
        assert got.num_blocks == {"1GiB": 8192, "50%": 81920}[options["kv_memory"]]


# -- the largest step


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 70), (4, 70), (5, 5), (3, 100)])
def test_the_largest_step_has_all_tokens_and_all_logits_that_a_step_may_have(rows, tokens):
    spans = largest_spans(Limits(rows, tokens, tokens), 32)
    assert [len(spans), ScheduledBatch.of(spans).num_tokens] == [rows, tokens]
    assert all(scheduled.stop - scheduled.logits == 1 for scheduled in spans)
    assert max(w.stop for w in spans) - min(w.stop for w in spans) <= 1
    blocks = [block for scheduled in spans for block in scheduled.span.table]
    assert blocks == list(range(len(blocks)))
    assert all(len(scheduled.span.table) == -(-scheduled.stop // 32) for scheduled in spans)


def test_the_largest_step_runs_on_the_smallest_pool_that_holds_it():
    model = packed_model("llama")
    limits = Limits(4, 150, 150)
    spans = largest_spans(limits, 32)
    cache = KVCache(model.layers, 8, 32, torch.float32)
    logits = Runner(model, cache, limits, []).run(ScheduledBatch.of(spans))
    assert logits.shape == (4, model.vocab_size)
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_the_bytes_of_a_step_are_its_peak_memory_and_one_that_does_not_fit_has_no_figure(name, monkeypatch):
    counts = {"held": 1000, "peak": 0}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: counts["held"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: counts.update(peak=counts["held"]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counts["peak"])

    def forward(self, packed, last, wanted):
        counts["peak"] += 7 * len(packed.tokens)
        if len(packed.tokens) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return []

    monkeypatch.setattr(Runner, "_forward", forward)
    model = packed_model(name, compiled=False)
    assert step_bytes(model, Limits(4, 8, 8), 32) == {model.device: 56}
    assert step_bytes(model, Limits(4, 16, 16), 32) is None
    monkeypatch.setattr(Runner, "_forward", lambda *_: {}["a mistake"])
    with pytest.raises(KeyError, match="a mistake"):
        step_bytes(model, Limits(4, 8, 8), 32)


@pytest.mark.gpu
def test_on_a_gpu_the_pool_and_the_largest_step_fit_together():
    model = prepare(build("llama").to("cuda"))
    engine = engine_for(model, kv_memory="auto", max_batch_tokens=4096)
    assert engine.notes == []
    assert engine.sizes.limits.max_batch_tokens == 4096
    assert (
        engine.sizes.num_blocks == 2 * BATCH_SIZE["cuda"] * 64
    )  # twice a full batch of the longest sequences, which is little for a tiny model
    assert len(run(engine, make_requests([[i] * 500 for i in range(40)], [3] * 40))) == 40
    assert engine.runner.max_forward_tokens is None
