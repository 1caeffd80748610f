"""Models with recurrent layers write the tokens of `generate` whatever the tree, the batch and the memory, and keep states only at branches.

Each property holds for every family of `RECURRENT_SHAPES` (`make test` runs one or two of them, `make test-slow` all):

| property | test |
| --- | --- |
| a tree five nodes deep, prompts of many lengths, equal prompts, prompts of one token, prompts that end at a branch, slices of prefill, every policy, a step launched ahead; no token is run twice | `test_a_tree_five_deep_is_prefilled_once_with_every_setting` |
| a quarter of the memory under every policy | `test_output_does_not_change_when_memory_is_short` |
| preemptions | `test_preempted_sequences_continue_from_the_nearest_state` |
| the windows of a file | `test_later_windows_continue_from_the_states_that_are_kept` |
| logits | `test_every_architecture.py`: `test_tokens_and_logits_equal_those_of_generate` |
| several completions of a prompt | `test_policies.py`: `test_every_fork_equals_the_completion_of_the_prompt_alone` |
| scored texts, labels | `test_scores.py`: `test_a_score_equals_that_of_one_forward_over_prompt_and_text`, `test_the_probabilities_of_choices_are_those_of_their_tokens` |
| drafts, right and wrong ones | `test_wrong_drafts_leave_no_trace_in_states` |
| a job from its folder to its rows, resumed, on two devices | `../test_recurrent_job.py`: `test_a_resumed_job_on_two_devices_equals_generate` |
| memory of states | `../state/test_sizes.py`: `test_the_plan_of_a_models_memory_is_exact` |
| multimodal wrappers, such as that of Qwen 3.5 | `test_wrappers.py`: `test_text_equals_that_of_the_wrappers_own_generate` |
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.model.adapter import prepare
from batchgen.prefix import plan_prefixes
from batchgen.request import leaves_of
from batchgen.scheduling.waiting import POLICIES
from batchgen.state.sizes import WITHOUT_ATTENTION
from support.drafters import ForcedDrafter
from support.models import (
    VOCAB,
    engine_for,
    expect,
    generate,
    kernels,
    make_requests,
    memory_for,
    packed_model,
    random_tokens,
    reference_model,
    run,
    watched,
)
from support.params import FULL, slow_but, some_of
from support.shapes import RECURRENT_SHAPES


def deep_tree(rng: random.Random, depth: int, path: tuple[int, ...] = ()) -> list[list[int]]:
    """Prompts of a tree that is `depth` nodes deep: each node has two branches, and at some of them one or two prompts end."""
    path = (*path, *random_tokens(rng, rng.choice([1, 2, 5, 17, 40])))
    ends = [list(path)] * rng.choice([0, 0, 1, 2])
    if depth == 0:
        return [[*path, *random_tokens(rng, rng.randint(1, 20))] for _ in range(2)] + ends
    return ends + deep_tree(rng, depth - 1, path) + deep_tree(rng, depth - 1, path)


DEPTH = 5
PROMPTS = [*deep_tree(random.Random(1), DEPTH - 1), [5], [5], [6], random_tokens(random.Random(2), 150)]
_lengths = random.Random(3)
LENGTHS = [_lengths.choice([1, 2, 6]) for _ in PROMPTS]
TREE_TOKENS = len({tuple(p[: i + 1]) for p in PROMPTS for i in range(len(p))})
ENGINES = {
    "all at once": {},
    "prefill in slices": {"max_batch_tokens": 24, "batch_size": 6},
    "in small slices": {"max_prefill_tokens": 5, "batch_size": 9},
    "prompts first": {"policy": "prefill-first", "batch_size": 7},
    "as they come": {"policy": "fifo", "batch_size": 7},
    "a step ahead": {"batch_size": 7, "ahead": True},
}


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> list[list[int]]:
    model = reference_model(request.param)
    return [generate(model, p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]


each_family = pytest.mark.parametrize("expected", slow_but({"qwen3_5_text"}, RECURRENT_SHAPES), indirect=True, ids=str)


def name_of(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["expected"])


@each_family
def test_a_tree_five_deep_is_prefilled_once_with_every_setting(expected, request):
    engines = some_of(("in small slices", "a step ahead"), ENGINES)
    for how, options in engines.items():
        engine = engine_for(packed_model(name_of(request)), **options)
        results = run(engine, make_requests(PROMPTS, LENGTHS))
        assert [list(r.token_ids) for r in results] == expected, how
        assert engine.stats.prefill_tokens == TREE_TOKENS, how
        assert engine.stats.preemptions == 0, how


@pytest.mark.parametrize("policy", [pytest.param(p, marks=[pytest.mark.slow] * (p != "prefix")) for p in POLICIES])
@each_family
def test_output_does_not_change_when_memory_is_short(expected, policy, request):
    model = packed_model(name_of(request))
    whole = engine_for(model, policy=policy)
    run(whole, make_requests(PROMPTS, LENGTHS))
    engine = engine_for(
        model, policy=policy, kv_memory=memory_for(whole, max(8, whole.block_manager.pool.peak_used // 4))
    )
    results = run(engine, make_requests(PROMPTS, LENGTHS))
    assert [list(r.token_ids) for r in results] == expected
    assert engine.block_manager.state_slots.peak_used <= engine.sizes.num_state_slots
    engine.block_manager.evict_all()
    assert engine.block_manager.state_slots.num_used == engine.block_manager.pool.num_used == 0


@pytest.mark.parametrize("name", slow_but({"lfm2"}, RECURRENT_SHAPES))
def test_preempted_sequences_continue_from_the_nearest_state(name):
    rng, count = random.Random(4), 12 if FULL else 6
    root = random_tokens(rng, 50)
    prompts = [root + random_tokens(rng, rng.randint(1, 20)) for _ in range(count)]
    length = 70 if FULL else 45
    expected = [generate(reference_model(name), p, length) for p in prompts]
    model = packed_model(name)
    whole = engine_for(model, batch_size=12)
    blocks = 16 if FULL else 8
    engine = engine_for(model, batch_size=12, kv_memory=memory_for(whole, blocks))
    results = run(engine, make_requests(prompts, [length] * count))
    assert [list(r.token_ids) for r in results] == expected
    # Without attention, the memory of a sequence does not grow, and nothing is preempted.
    grows = name not in WITHOUT_ATTENTION
    assert (engine.stats.preemptions > 0) == grows
    assert (engine.stats.recomputed_tokens > 0) == grows


@pytest.mark.parametrize("right", slow_but({0.7}, [1.0, 0.7, 0.0]))
@pytest.mark.parametrize("name", slow_but({"qwen3_5_text", "falcon_mamba"}, RECURRENT_SHAPES))
def test_wrong_drafts_leave_no_trace_in_states(name, right):
    prompts = PROMPTS[::5]
    expected = [generate(reference_model(name), p, 20) for p in prompts]
    for options in ({"batch_size": 7, "max_batch_tokens": 16}, {"batch_size": 16}):
        engine = engine_for(packed_model(name), **options)
        engine.scheduler.drafter = drafter = ForcedDrafter(
            lambda seq: expected[seq.request.row][seq.num_sampled :], range(VOCAB), right, longest=5
        )
        results = run(engine, make_requests(prompts, [20] * len(prompts)))
        assert [list(r.token_ids) for r in results] == expected
        assert (drafter.accepted > 50) == (right > 0)
        assert (engine.stats.recomputed_tokens > 0) == (right < 1)
        engine.block_manager.evict_all()
        assert engine.block_manager.state_slots.num_used == 0


@pytest.mark.parametrize("batch_size", slow_but({3}, [1, 3, 8]))
def test_one_state_slot_per_level_of_the_tree_and_per_sequence_is_enough(batch_size):
    """With that many slots, no token is run twice."""
    expected = [generate(reference_model("mamba2"), p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    model = packed_model("mamba2")  # whose memory is for states alone
    slots = DEPTH + batch_size
    engine = engine_for(
        model, batch_size=batch_size, kv_memory=f"{slots * engine_for(model).sizes.bytes_per_state_slot}B"
    )
    assert engine.sizes.num_state_slots == slots
    plan = plan_prefixes([leaf.tokens for leaf in leaves_of(make_requests(PROMPTS, LENGTHS))], 32)
    assert max(node.depth for node in plan.nodes) + 1 == DEPTH
    results = run(engine, make_requests(PROMPTS, LENGTHS))
    assert [list(r.token_ids) for r in results] == expected
    assert engine.stats.prefill_tokens == TREE_TOKENS
    assert engine.block_manager.state_slots.peak_used <= slots
    assert (
        engine.stats.state_bytes_peak == engine.block_manager.state_slots.peak_used * engine.sizes.bytes_per_state_slot
    )


@each_family
def test_later_windows_continue_from_the_states_that_are_kept(expected, request):
    engine = engine_for(packed_model(name_of(request)))
    order = sorted(range(len(PROMPTS)), key=PROMPTS.__getitem__)  # prefix order, as for a whole file
    requests = make_requests(PROMPTS, LENGTHS)
    tokens: dict[int, list[int]] = {}
    for start in range(0, len(order), 20):
        window = [requests[i] for i in order[start : start + 20]]
        tokens |= {r.row: list(r.token_ids) for r in run(engine, window)}
    assert [tokens[row] for row in range(len(PROMPTS))] == expected
    paths = (len(order) // 20) * max(map(len, PROMPTS))
    assert engine.stats.prefill_tokens <= TREE_TOKENS + paths
    assert engine.stats.prefill_tokens < 0.5 * sum(map(len, PROMPTS))


@pytest.mark.parametrize("name", slow_but({"lfm2"}, ["qwen3_5_text", "falcon_h1", "lfm2", "jamba"]))
def test_a_step_that_runs_out_of_memory_after_changing_states_is_split(name, monkeypatch):
    expected = [generate(reference_model(name), p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    model = packed_model(name)
    forward, sizes = model.module.forward, []

    def limited(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)  # changes all states
        size = kwargs["input_ids"].shape[1]
        sizes.append(size)
        if size > 100 or (len(sizes) == 9 and size > 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return output

    monkeypatch.setattr(model.module, "forward", limited)
    engine = engine_for(model, batch_size=9)
    results = run(engine, make_requests(PROMPTS, LENGTHS))
    assert [list(r.token_ids) for r in results] == expected
    assert max(sizes) > 100
    assert max(sizes[9:]) <= engine.scheduler.limits.max_batch_tokens <= 50
    assert engine.runner.max_forward_tokens == engine.scheduler.limits.max_batch_tokens
    engine.block_manager.evict_all()
    assert engine.block_manager.state_slots.num_used == engine.block_manager.pool.num_used == 0


@pytest.mark.parametrize(
    "name", slow_but({"mamba", "qwen3_5_text"}, ["mamba", "mamba2", "jamba", "qwen3_5_text", "minimax"])
)
def test_logits_in_bfloat16_differ_from_float32_only_by_rounding(name):
    """Mamba keeps its residual in float32 beside bfloat16 weights."""
    prompts = [random_tokens(random.Random(6), n) for n in (3, 20, 70)]
    exact = [expect(reference_model(name), p, 1) for p in prompts]
    model = prepare(copy.deepcopy(reference_model(name)).bfloat16(), kernels=kernels())
    with watched(model) as seen:
        results = run(engine_for(model), make_requests(prompts, [1] * 3))
    assert [r.error_message for r in results] == [None] * 3
    last = {(len(e.prompt) - 1, e.prompt[-1]): e.logits[0] for e in exact}
    for place, logits in zip(seen.places, seen.logits, strict=True):
        assert float((last[place] - logits.float()).norm() / last[place].norm()) < 0.1


def test_logits_that_are_not_numbers_fail_only_their_own_row():
    """One sequence after another uses the same state slots, so a NaN must not stay in one."""
    model = packed_model("qwen3_5_text", compiled=False)
    embedding = model.module.get_input_embeddings().weight
    rng = random.Random(5)
    bad = VOCAB - 1
    prompts = [[rng.randrange(bad) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    expected = [generate(reference_model("qwen3_5_text"), p, 5) for p in prompts]
    prompts[3][len(prompts[3]) // 2] = bad
    kept = embedding[bad].clone()
    with np.errstate(all="ignore"):
        embedding.data[bad] = float("nan")
        try:
            results = run(engine_for(model, batch_size=3), make_requests(prompts, [5] * 12))
        finally:
            embedding.data[bad] = kept
    assert results[3].error_type == "numerical_error"
    good = [row for row in range(12) if row != 3 and bad not in expected[row]]
    assert [list(results[row].token_ids) for row in good] == [expected[row] for row in good]
    assert len(good) >= 8
