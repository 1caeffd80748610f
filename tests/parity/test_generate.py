"""Greedy float32 output equals transformers' `generate` token for token, whatever the tree, the batch, the order and the windows.

`test_every_architecture.py` compares the logits too, and lets every architecture run out of memory; `test_short_memory.py` does that with
random jobs. Models with recurrent layers have more to lose: `test_recurrent.py`.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.scheduling.waiting import POLICIES
from support.models import (
    before_near_ties,
    beginnings,
    engine_for,
    generate_all,
    make_requests,
    packed_model,
    random_tokens,
    reference_model,
    run,
    tokens_of,
)
from support.params import examples, slow_but, some_of
from support.shapes import DEEP_LENGTHS as LENGTHS
from support.shapes import DEEP_PROMPTS as PROMPTS
from support.shapes import RECURRENT_SHAPES, SHAPES, tree_tokens

ENGINES = {
    "all at once": {},
    "one at a time": {"batch_size": 1},
    "chunked prefill": {"max_batch_tokens": 24, "batch_size": 6},
    "prefill in slices of one block": {"max_prefill_tokens": 32, "batch_size": 7},
    "in small slices": {"max_prefill_tokens": 5, "batch_size": 9},
    "other blocks": {"chunk_size": 5, "batch_size": 9},
    **{
        f"{policy}, {'a step ahead' if ahead else 'step by step'}": {
            "policy": policy, "ahead": ahead, "max_batch_tokens": 16, "batch_size": 9,
        }
        for policy in sorted(POLICIES)
        for ahead in (False, True)
    },
}  # fmt: skip
QUICK = {
    "llama": (
        "one at a time", "prefill in slices of one block", "in small slices", "other blocks", "fifo, a step ahead",
        "prefill-first, step by step", "prefix, a step ahead",
    ),
    "qwen3_5_text": ("in small slices", "prefix, a step ahead"),
}  # fmt: skip
"""The engines of `make test`. test_every_architecture.py has all of CORE, all at once and in chunks."""


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> list[list[int]]:
    found = generate_all(reference_model(request.param), PROMPTS, LENGTHS, of=before_near_ties)
    assert sum(len(tokens) < length for tokens, length in zip(found, LENGTHS, strict=True)) <= 2
    return found


def each_of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("expected", slow_but(QUICK.keys() & names, names), indirect=True, ids=str)


def name_of(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["expected"])


@each_of(*sorted(SHAPES))
def test_output_equals_generate_and_no_token_is_prefilled_twice(expected, request):
    name = name_of(request)
    for how, options in some_of(QUICK.get(name, ()), ENGINES).items():
        engine = engine_for(packed_model(name), **options)
        assert beginnings(tokens_of(engine, PROMPTS, LENGTHS), expected) == expected, how
        assert engine.stats.prefill_tokens == tree_tokens(PROMPTS), how
        assert engine.stats.preemptions == engine.stats.recomputed_tokens == 0, how


@each_of("llama", *RECURRENT_SHAPES)
def test_later_windows_continue_from_the_nodes_and_states_of_earlier_ones(expected, request):
    engine = engine_for(packed_model(name_of(request)))
    order = sorted(range(len(PROMPTS)), key=PROMPTS.__getitem__)  # prefix order, as for a whole file
    requests = make_requests(PROMPTS, LENGTHS)
    tokens: dict[int, list[int]] = {}
    for start in range(0, len(order), 20):
        window = [requests[i] for i in order[start : start + 20]]
        tokens |= {r.row: list(r.token_ids) for r in run(engine, window)}
    assert beginnings([tokens[row] for row in range(len(PROMPTS))], expected) == expected
    paths = (len(order) // 20) * max(map(len, PROMPTS))
    assert engine.stats.prefill_tokens <= tree_tokens(PROMPTS) + paths
    assert engine.stats.prefill_tokens < 0.5 * sum(map(len, PROMPTS))


def test_end_of_text_tokens_end_a_completion_as_in_generate():
    model, prompts = reference_model("llama"), PROMPTS[:12]
    free = generate_all(model, prompts, [12] * 12)
    eos = (free[0][3], free[1][0], free[2][11])
    want = generate_all(model, prompts, [12] * 12, eos)
    assert want != free
    results = run(engine_for(packed_model("llama"), eos), make_requests(prompts, [12] * 12))
    assert [list(r.token_ids) for r in results] == want
    assert [r.finish_reason for r in results] == ["stop" if w[-1] in eos else "length" for w in want]


tokens = st.integers(0, 2)  # few different tokens, so that prompts share and contain one another


@settings(max_examples=examples(6, 30))
@given(
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=20), min_size=1, max_size=12),
    lengths=st.lists(st.integers(1, 6), min_size=12, max_size=12),
    chunk=st.sampled_from([1, 3, 32]),
    batch=st.sampled_from([1, 3, None]),
    step=st.sampled_from([4, 11, None]),
    blocks=st.sampled_from([None, 2, 4]),
)
def test_output_equals_generate_on_random_trees(prompts, lengths, chunk, batch, step, blocks):
    lengths = lengths[: len(prompts)]
    want = generate_all(reference_model("llama"), prompts, lengths)
    options = {"chunk_size": chunk, "batch_size": batch, "max_batch_tokens": step}
    engine = engine_for(packed_model("llama"), **options)
    if blocks is not None:
        size = engine.sizes.block_size * engine.sizes.bytes_per_token * blocks
        engine = engine_for(packed_model("llama"), kv_memory=f"{size}B", **options)
    assert tokens_of(engine, prompts, lengths) == want
    if blocks is None:
        assert engine.stats.prefill_tokens == tree_tokens(prompts)


@pytest.mark.parametrize(
    "name",
    slow_but({"llama", "lfm2"}, ["llama", "gpt2", "gemma3_text", "mistral/sliding_window", *RECURRENT_SHAPES]),
)
def test_every_fork_equals_the_completion_of_the_prompt_alone(name):
    rng = random.Random(7)
    root = random_tokens(rng, 45)
    prompts = [root, root + random_tokens(rng, 5), root + random_tokens(rng, 20), random_tokens(rng, 3)]
    want = generate_all(reference_model(name), prompts, [9] * 4)
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
    want = generate_all(reference_model(name), prompts, [100] * 3)
    engine = engine_for(packed_model(name), ahead=ahead)
    assert engine.block_manager.sliding_window == 24
    held = []
    counted = engine._update_stats

    def count():
        counted()
        held.append(engine.block_manager.pool.num_used)

    engine._update_stats = count
    assert tokens_of(engine, prompts, [100] * 3) == want
    assert max(held) <= 7 + 3 * 4
    assert held[-10] <= 1 + 3 * 2  # each sequence keeps the blocks of its last 24 tokens
    later = [[*root, 1, 2], [*root[:90], 3]]
    assert tokens_of(engine, later, [20, 20]) == generate_all(reference_model(name), later, [20, 20])
    assert engine_for(packed_model("gemma3_text")).block_manager.sliding_window is None  # some layers see everything
