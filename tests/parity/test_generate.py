"""Greedy float32 output equals transformers' `generate` token for token, whatever the batch and the memory."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.prefix import plan_prefixes
from support.models import engine_for, generate, make_requests, packed_model, reference_model, run
from support.params import FULL, examples, slow_but, some_of
from support.shapes import SHAPES, VOCAB

CHUNK = 16  # and a block of 32


def _text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def nested_prompts() -> list[list[int]]:
    """A root with groups and documents below it, and prompts that end at every awkward place: at a chunk, a block or a node, inside it and beyond."""
    rng = random.Random(1)
    root = _text(rng, 40)
    groups = [root + _text(rng, n) for n in (50, 24, 7, 33)]  # the second ends at a block's end
    documents = [groups[0] + _text(rng, n) for n in (20, 38)]
    prompts = [g + _text(rng, rng.randint(1, 30)) for g in groups for _ in range(4)]
    prompts += [d + _text(rng, rng.randint(1, 12)) for d in documents for _ in range(3)]
    prompts += [
        root,
        groups[0],
        groups[0],
        groups[1],
        documents[1],
    ]  # they end at a node; two are equal; some are prefixes of others
    prompts += [root[:CHUNK], root[: 2 * CHUNK], root[:39]]  # prefixes of the root that split it
    prompts += [[5], [5], [6], _text(rng, 1), _text(rng, 70)]  # one token, equal, and nothing in common
    rng.shuffle(prompts)
    return prompts


def lengths_of(count: int) -> list[int]:
    rng = random.Random(2)
    return [rng.randint(1, 12) for _ in range(count)]


QUICK = {"llama"}  # test_every_architecture.py has all of CORE
PROMPTS = nested_prompts()
LENGTHS = lengths_of(len(PROMPTS))

ENGINES = {
    "all at once": {},
    "one at a time": {"batch_size": 1},
    "a few at a time": {"batch_size": 5},
    "chunked prefill": {"max_batch_tokens": 24},
    "prefill in slices of one block": {"max_prefill_tokens": 32, "batch_size": 7},
    "other blocks": {"chunk_size": 5, "batch_size": 9},
}


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> list[list[int]]:
    model = reference_model(request.param)
    return [generate(model, p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]


def _tokens(results: Iterable[object]) -> list[list[int]]:
    return [list(r.token_ids) for r in results]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "expected",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(SHAPES)],
    indirect=True,
    ids=str,
)
def test_output_equals_generate(expected, request):
    name = request.node.callspec.params["expected"]
    requests = make_requests(PROMPTS, LENGTHS)
    prefill_tokens = plan_prefixes([r.tokens for r in requests], CHUNK).prefill_tokens_min
    engines = ENGINES if name == "llama" else some_of(("all at once", "chunked prefill"), ENGINES)
    for how, options in engines.items():
        engine = engine_for(packed_model(name), **options)
        assert _tokens(run(engine, requests)) == expected, how
        assert engine.stats.prefill_tokens == prefill_tokens, how
        assert engine.stats.preemptions == engine.stats.recomputed_tokens == 0, how


@pytest.mark.parametrize("name", slow_but((), ["llama", "gpt2"]))
def test_output_does_not_change_when_memory_is_short(name):
    count = 16 if FULL else 6
    prompts, lengths = PROMPTS[:count], [40 + 3 * i for i in range(16 - count, 16)]
    expected = [generate(reference_model(name), p, n) for p, n in zip(prompts, lengths, strict=True)]
    token = engine_for(packed_model(name)).sizes.bytes_per_token
    preemptions = []
    for blocks in (7, 9, 14, 20) if FULL else (7,):  # the longest needs 7
        engine = engine_for(packed_model(name), kv_memory=f"{blocks * 32 * token}B")
        assert engine.sizes.num_blocks == blocks
        results = run(engine, make_requests(prompts, lengths))
        assert [r.error_message for r in results] == [None] * count
        assert _tokens(results) == expected, f"{blocks} blocks"
        assert engine.block_manager.pool.peak_used <= blocks
        preemptions.append(engine.stats.preemptions)
    assert max(preemptions) > 0, preemptions


@pytest.mark.parametrize("expected", ["llama"], indirect=True, ids=str)
def test_output_does_not_change_without_sharing(expected):
    engine = engine_for(packed_model("llama"))
    assert _tokens(run(engine, make_requests(PROMPTS, LENGTHS), share=False)) == expected
    assert engine.stats.prefill_tokens == sum(map(len, PROMPTS))


@pytest.mark.parametrize("expected", ["llama", "qwen3"], indirect=True, ids=str)
def test_output_does_not_depend_on_the_windows(expected, request):
    engine = engine_for(packed_model(request.node.callspec.params["expected"]))
    requests = make_requests(PROMPTS, LENGTHS)
    results = [r for start in range(0, len(requests), 9) for r in run(engine, requests[start : start + 9])]
    assert _tokens(results) == expected
    whole = sum(map(len, PROMPTS))
    assert engine.stats.prefill_tokens < 0.5 * whole  # nodes of one window serve the next


def test_end_of_text_tokens_end_a_completion_as_in_generate():
    model, prompts = reference_model("llama"), PROMPTS[:12]
    free = [generate(model, p, 12) for p in prompts]
    eos = (free[0][3], free[1][0], free[2][11])
    want = [generate(model, p, 12, eos) for p in prompts]
    assert want != free
    results = run(engine_for(packed_model("llama"), eos), make_requests(prompts, [12] * 12))
    assert _tokens(results) == want
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
    want = [generate(reference_model("llama"), p, n) for p, n in zip(prompts, lengths, strict=True)]
    requests = make_requests(prompts, lengths)
    options = {"chunk_size": chunk, "batch_size": batch, "max_batch_tokens": step}
    engine = engine_for(packed_model("llama"), **options)
    if blocks is not None:
        size = engine.sizes.block_size * engine.sizes.bytes_per_token * blocks
        engine = engine_for(packed_model("llama"), kv_memory=f"{size}B", **options)
    assert _tokens(run(engine, requests)) == want
    if blocks is None:
        assert engine.stats.prefill_tokens == plan_prefixes([r.tokens for r in requests], chunk).prefill_tokens_min
