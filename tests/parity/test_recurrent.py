"""Models with recurrent layers write the tokens of `generate` whatever the tree, the batch and the memory, and keep states only at branches.

Each property holds for every family of `RECURRENT_SHAPES` (`make test` runs one or two of them, `make test-slow` all):

| property | test |
| --- | --- |
| a tree five nodes deep, prompts of many lengths, equal prompts, prompts of one token, prompts that end at a branch, slices of prefill, every policy, a step launched ahead; no token is run twice | `test_generate.py`: `test_output_equals_generate_and_no_token_is_prefilled_twice` |
| a quarter of the memory under every policy | `test_short_memory.py`: `test_every_row_is_exact_with_few_blocks_and_few_state_slots` |
| preemptions | `test_preempted_sequences_continue_from_the_nearest_state` |
| the windows of a file | `test_generate.py`: `test_later_windows_continue_from_the_nodes_and_states_of_earlier_ones` |
| logits | `test_every_architecture.py`: `test_tokens_and_logits_equal_those_of_generate` |
| several completions of a prompt | `test_generate.py`: `test_every_fork_equals_the_completion_of_the_prompt_alone` |
| scored texts, labels | `test_scores.py`: `test_a_score_equals_that_of_one_forward_over_prompt_and_text`, `test_the_probabilities_of_choices_are_those_of_their_tokens` |
| drafts, right and wrong ones | `test_wrong_drafts_leave_no_trace_in_states` |
| a job from its folder to its rows, resumed, on two devices | `../test_recurrent_job.py`: `test_a_resumed_job_on_two_devices_equals_generate` |
| memory of states | `../attention/test_kv_size.py`: `test_the_configuration_tells_what_a_token_and_a_state_take` |
| multimodal wrappers, such as that of Qwen 3.5 | `test_wrappers.py`: `test_text_equals_that_of_the_wrappers_own_generate` |
"""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.model.adapter import prepare
from batchgen.prefix import plan_requests
from batchgen.state.state_size import WITHOUT_ATTENTION
from support.drafters import ForcedDrafter
from support.models import (
    before_near_ties,
    beginnings,
    engine_for,
    expect,
    generate_all,
    kernels,
    make_requests,
    packed_model,
    random_tokens,
    reference_model,
    run,
    tokens_of,
    watched,
)
from support.params import FULL, slow_but
from support.shapes import DEEP, RECURRENT_SHAPES, VOCAB, tree_tokens
from support.shapes import DEEP_LENGTHS as LENGTHS
from support.shapes import DEEP_PROMPTS as PROMPTS


@pytest.mark.parametrize("name", slow_but({"lfm2"}, RECURRENT_SHAPES))
def test_preempted_sequences_continue_from_the_nearest_state(name):
    rng, count = random.Random(4), 12 if FULL else 6
    root = random_tokens(rng, 50)
    prompts = [root + random_tokens(rng, rng.randint(1, 20)) for _ in range(count)]
    length = 70 if FULL else 45
    reference = reference_model(name)
    expected = [before_near_ties(expect(reference, prompt, length)) for prompt in prompts]
    assert sum(len(tokens) < length for tokens in expected) <= 1
    model = packed_model(name)
    engine = engine_for(model, batch_size=12, blocks=16 if FULL else 8)
    found = tokens_of(engine, prompts, [length] * count)
    assert beginnings(found, expected) == expected
    # Without attention, the memory of a sequence does not grow, and nothing is preempted.
    grows = name not in WITHOUT_ATTENTION
    assert (engine.stats.preemptions > 0) == grows
    assert (engine.stats.recomputed_tokens > 0) == grows


@pytest.mark.parametrize("right", slow_but({0.7}, [1.0, 0.7, 0.0]))
@pytest.mark.parametrize("name", slow_but({"qwen3_5_text", "falcon_mamba"}, RECURRENT_SHAPES))
def test_wrong_drafts_leave_no_trace_in_states(name, right):
    prompts = PROMPTS[::5]
    expected = generate_all(reference_model(name), prompts, [20] * len(prompts))
    for options in ({"batch_size": 7, "max_batch_tokens": 16}, {"batch_size": 16}):
        engine = engine_for(packed_model(name), **options)
        engine.scheduler.drafter = drafter = ForcedDrafter(
            lambda seq: expected[seq.request.row][seq.num_sampled :], range(VOCAB), right, longest=5
        )
        assert tokens_of(engine, prompts, [20] * len(prompts)) == expected
        assert (drafter.accepted > 20) == (right > 0)
        assert (engine.stats.recomputed_tokens > 0) == (right < 1)
        engine.block_manager.evict_all()
        assert engine.block_manager.state_slots.num_used == 0


@pytest.mark.parametrize("batch_size", slow_but({3}, [1, 3, 8]))
def test_one_state_slot_per_level_of_the_tree_and_per_sequence_is_enough(batch_size):
    """With that many slots, no token is run twice."""
    expected = generate_all(reference_model("mamba2"), PROMPTS, LENGTHS)
    model = packed_model("mamba2")  # whose memory is for states alone
    slots = DEEP + batch_size
    engine = engine_for(
        model, batch_size=batch_size, kv_memory=f"{slots * engine_for(model).sizes.bytes_per_state_slot}B"
    )
    assert engine.sizes.num_state_slots == slots
    _, plan = plan_requests(make_requests(PROMPTS, LENGTHS), 32)
    assert max(node.depth for node in plan.nodes) + 1 == DEEP
    assert tokens_of(engine, PROMPTS, LENGTHS) == expected
    assert engine.stats.prefill_tokens == tree_tokens(PROMPTS)
    assert engine.block_manager.state_slots.peak_used <= slots
    assert (
        engine.stats.state_bytes_peak == engine.block_manager.state_slots.peak_used * engine.sizes.bytes_per_state_slot
    )


@pytest.mark.parametrize("name", slow_but({"lfm2"}, ["qwen3_5_text", "falcon_h1", "lfm2", "jamba"]))
def test_a_step_that_runs_out_of_memory_after_changing_states_is_split(name, monkeypatch):
    prompts, lengths = PROMPTS[::2], LENGTHS[::2]
    expected = generate_all(reference_model(name), prompts, lengths)
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
    assert tokens_of(engine, prompts, lengths) == expected
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
    expected = generate_all(reference_model("qwen3_5_text"), prompts, [5] * 12)
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
