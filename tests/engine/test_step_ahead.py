"""With a step launched ahead of its tokens, the engine gives the same results as step by step."""

import random

import pytest

from batchgen.config import EngineConfig
from batchgen.llm import LLM
from batchgen.sampling_params import SamplingParams
from batchgen.scheduling.waiting import POLICIES
from support.models import engine_for, make_requests, mixed_requests, rounded
from support.models import run as run_whole
from support.params import slow_but
from support.requests import planned, request

EOS = (11, 60)


def run(engine, requests, after=0, cancelled=()):
    """Returns the results, the tokens in the order of the callbacks, and the figures that must not depend on when an end is noticed."""
    results, told = {}, {}

    def on_token(row, choice, token):
        told.setdefault((row, choice), []).append(token)
        if row == 0 and len(told[row, choice]) == after:
            for request in cancelled:
                engine.cancel(request)

    half = len(requests) * 2 // 3
    for some in (requests[:half], requests[half:]):  # two windows that run together
        engine.add(*planned(some), lambda r: results.__setitem__(r.row, r), on_token)
    engine.run()
    assert not engine.sampler.used
    assert not engine.constraints._rows
    engine.block_manager.evict_all()
    assert engine.block_manager.pool.num_used == 0
    assert engine.block_manager._reserved_blocks == 0
    stats = engine.stats
    return (
        results.values(),
        told,
        (stats.prefill_tokens, stats.completion_tokens, stats.decode_sequences, stats.scored_tokens),
    )


@pytest.mark.parametrize("seed", slow_but((5,), range(16)))
def test_results_tokens_and_figures_are_those_of_a_step_at_a_time(model, seed):
    rng = random.Random(seed)
    requests = mixed_requests(rng, rng.randint(3, 16))
    tokens = rng.choice([4, 64, 2048])
    options = {
        "policy": rng.choice(sorted(POLICIES)), "max_batch_tokens": tokens, "batch_size": min(tokens, rng.choice([2, 5, 64])),
        "blocks": rng.choice([4, 6, 64]),
    }  # fmt: skip
    runs = []
    for ahead in (False, True):
        engine = engine_for(model, EOS, ahead, **options)
        runs.append((*run(engine, requests), engine.stats.preemptions))
    (want, told, figures, preempted), (got, told_ahead, figures_ahead, preempted_ahead) = runs
    assert rounded(got) == rounded(want)
    assert told_ahead == told
    assert figures_ahead[1:3] == figures[1:3]
    if not preempted and not preempted_ahead:
        assert figures_ahead == figures


@pytest.mark.parametrize("after", slow_but((1, 5), [1, 2, 5, 8]))
def test_what_a_callback_cancels_ends_where_it_would_have_ended(model, after):
    """Also rows whose last token is being sampled, that have not begun, or that wait for their scores."""
    lengths = [after, after + 1, 30, after, after + 2, 30]
    requests = make_requests([[1, 2], [1, 2, 3], [5], [6], [7], [8]], lengths)
    requests += [request(n, [n], 1, texts=[[n - 6, 9]], priority=1.0) for n in (6, 7, 8)]
    runs = []
    for ahead in (False, True):
        runs.append(run(engine_for(model, ahead=ahead, batch_size=4), requests, after, [*requests[1:5], *requests[6:]]))
    (want, told, _), (got, told_ahead, _) = runs
    assert rounded(want) == rounded(got)
    want = {r.row: r for r in want}
    assert [want[row].finish_reason for row in (0, 2, 5)] == ["length", "cancelled", "length"]
    assert {want[row].error_type for row in (6, 7, 8)} == {"cancelled"}
    assert told_ahead == told


def launches_and_landings(engine, monkeypatch):
    """The order in which steps are launched and their numbers are asked for, as 0, 1, ... and ~0, ~1, ..."""
    order = []
    launch, wait = engine.executor.launch, engine.executor.wait
    steps = []

    def launched(*args):
        order.append(len(steps))
        steps.append(launch(*args))
        return steps[-1]

    monkeypatch.setattr(engine.executor, "launch", launched)
    monkeypatch.setattr(engine.executor, "wait", lambda step: (order.append(~steps.index(step)), wait(step))[1])
    return order


def test_a_step_is_launched_before_the_one_before_it_is_waited_for(model, monkeypatch):
    requests = make_requests([[1], [2, 3]], [4, 2])
    for ahead, want in (
        (False, [0, ~0, 1, ~1, 2, ~2, 3, ~3]),
        (True, [0, 1, ~0, 2, ~1, 3, ~2, ~3]),  # the length is known, so no step is run in vain
    ):
        engine = engine_for(model, ahead=ahead)
        order = launches_and_landings(engine, monkeypatch)
        run_whole(engine, requests)
        assert order == want


GRAMMARS = [
    {"regex": "[ab]{3,12}"},
    {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'},
    {"regex": "x+y"},
    {},
    {"temperature": 1.0, "regex": "[0-9]{1,40}", "n": 2},
    {"temperature": 1.0},
]


@pytest.mark.parametrize("batch_size", slow_but({3}, [3, 256]))
def test_rows_under_a_grammar_are_the_same_beside_others(tiny_model_dir, batch_size):
    pytest.importorskip("llguidance")
    runs = []
    for ahead in (False, True):
        llm = LLM(str(tiny_model_dir), engine=EngineConfig(batch_size=batch_size, speculate="off"))
        llm.engine.loop.ahead = ahead
        results = []
        for number, kind in enumerate(GRAMMARS):
            for length in (3, 20):
                params = SamplingParams(max_tokens=length, **kind)
                llm.add([f"prompt {number}"], params, on_result=results.append)
        llm.run()
        assert not llm.engine.constraints._rows
        assert not llm.engine.sampler.used
        runs.append({r.row: (r.text, r.finish_reason, r.completions) for r in results})
    assert runs[0] == runs[1]
    assert {"stop", "length"} == {reason for _, reason, _ in runs[0].values()}


def test_what_a_grammar_allows_is_computed_while_the_model_runs(tiny_model_dir, monkeypatch):
    pytest.importorskip("llguidance")
    order = []
    with LLM(str(tiny_model_dir), engine=EngineConfig(speculate="off")) as llm:
        start, forward = llm.engine.constraints.start, llm.engine.runner.run
        monkeypatch.setattr(llm.engine.constraints, "start", lambda *of: (order.append("masks"), start(*of)))
        monkeypatch.setattr(llm.engine.runner, "run", lambda *of: (order.append("model"), forward(*of))[1])
        llm.generate(["a"], SamplingParams(max_tokens=3, regex="[ab]{9}"))
    assert order == ["masks", "model"] * 3
