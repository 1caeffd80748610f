"""Under every policy, with forks, short memory and small steps, greedy output equals `generate`, and no token is prefilled twice."""

import random

import pytest

from batchgen.scheduling.waiting import POLICIES
from support.models import engine_for, generate, make_requests, packed_model, random_tokens, reference_model, run
from support.params import FULL, slow_but
from support.shapes import RECURRENT_SHAPES


def deep_tree(rng, depth, path=()):
    """Prompts of a tree that is `depth` nodes deep: each node has two branches, and at some of them a prompt ends."""
    path = [*path, *random_tokens(rng, rng.randint(3, 20))]
    ends = [path] if rng.random() < 0.4 else []
    if depth == 0:
        return [path + random_tokens(rng, rng.randint(1, 9)) for _ in range(2)] + ends
    return ends + deep_tree(rng, depth - 1, path) + deep_tree(rng, depth - 1, path)


PROMPTS = deep_tree(random.Random(1), 4)
_lengths = random.Random(2)
LENGTHS = [_lengths.randint(1, 30 if FULL else 15) for _ in PROMPTS]
TREE_TOKENS = len({tuple(p[: i + 1]) for p in PROMPTS for i in range(len(p))})


@pytest.fixture(scope="module")
def expected():
    return [generate(reference_model("llama"), p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(
    "options",
    slow_but(
        [{"ahead": True, "max_batch_tokens": 16, "batch_size": 9}],
        [
            {},
            {"batch_size": 4},
            {"max_batch_tokens": 16, "batch_size": 9},
            {"ahead": True},
            {"ahead": True, "max_batch_tokens": 16, "batch_size": 9},
        ],
    ),
)
def test_a_tree_five_deep_is_prefilled_once_under_every_policy(expected, policy, options):
    engine = engine_for(packed_model("llama"), policy=policy, **options)
    results = run(engine, make_requests(PROMPTS, LENGTHS))
    assert [list(r.token_ids) for r in results] == expected
    assert engine.stats.prefill_tokens == TREE_TOKENS
    assert engine.stats.preemptions == 0


@pytest.mark.parametrize(
    "name",
    slow_but({"llama", "lfm2"}, ["llama", "gpt2", "gemma3_text", "mistral/sliding_window", *RECURRENT_SHAPES]),
)
def test_every_fork_equals_the_completion_of_the_prompt_alone(name):
    rng = random.Random(7)
    root = random_tokens(rng, 45)
    prompts = [root, root + random_tokens(rng, 5), root + random_tokens(rng, 20), random_tokens(rng, 3)]
    want = [generate(reference_model(name), p, 9) for p in prompts]
    for options in ({}, {"batch_size": 3}, {"max_batch_tokens": 8, "batch_size": 5}, {"policy": "fifo", "ahead": True}):
        engine = engine_for(packed_model(name), **options)
        results = run(engine, make_requests(prompts, [9] * 4, n=3))
        for result, tokens in zip(results, want, strict=True):
            assert [list(c.token_ids) for c in result.completions] == [tokens] * 3
            assert (result.token_ids, result.completion_tokens) == (tuple(tokens), 27)
        assert engine.stats.prefill_tokens == 45 + 5 + 20 + 3


@pytest.mark.parametrize("ahead", slow_but([True], [False, True]))
def test_blocks_behind_all_sliding_windows_are_freed(ahead):
    rng = random.Random(8)
    root = random_tokens(rng, 200)
    prompts = [root + random_tokens(rng, n) for n in (9, 60, 3)]
    name = "mistral/sliding_window"  # 24 tokens in every layer
    want = [generate(reference_model(name), p, 100) for p in prompts]
    engine = engine_for(packed_model(name), ahead=ahead)
    assert engine.block_manager.sliding_window == 24
    held = []
    counted = engine._update_stats

    def count():
        counted()
        held.append(engine.block_manager.pool.num_used)

    engine._update_stats = count
    results = run(engine, make_requests(prompts, [100] * 3))
    assert [list(r.token_ids) for r in results] == want
    assert max(held) <= 7 + 3 * 4
    assert held[-10] <= 1 + 3 * 2  # each sequence keeps the blocks of its last 24 tokens
    later = [[*root, 1, 2], [*root[:90], 3]]
    again = run(engine, make_requests(later, [20, 20]))
    assert [list(r.token_ids) for r in again] == [generate(reference_model(name), p, 20) for p in later]
    assert engine_for(packed_model("gemma3_text")).block_manager.sliding_window is None  # some layers see everything
