"""Forks, cancellations, time-outs and callbacks: the result of a row whose leaves end in different ways."""

import gc
import math
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from batchgen.engine import results as module
from batchgen.errors import OutOfMemory
from batchgen.sampling_params import SamplingParams
from batchgen.scheduling.batch import ScheduledBatch, ScheduledSpan, pack
from support.models import make_requests, plain_llama, run
from support.requests import planned
from support.whole_images import sequence

GROUP = list(range(20))


def test_a_row_with_a_fork_without_numbers_fails_once_and_the_others_go_on(engine_of):
    """The token 90 gives NaN; one of the forks samples it."""
    engine = engine_of(plain_llama(poison=90))
    requests = make_requests([GROUP, [5], [6]], [60, 2, 2], n=8, temperature=1.5)
    clean = run(engine_of(plain_llama()), requests)
    spoiled = {r.row for r in clean if any(90 in c.token_ids[:-1] for c in r.completions)}
    assert 0 in spoiled
    assert len(spoiled) < 3
    results = run(engine, requests)
    assert {r.row for r in results if r.error_type == "numerical_error"} == spoiled
    assert [r for r in results if r.row not in spoiled] == [r for r in clean if r.row not in spoiled]
    assert not engine.sampler.used
    engine.block_manager.evict_all()
    assert engine.block_manager.pool.num_used == 0


def test_a_cancelled_row_keeps_what_it_has_and_the_others_are_as_without_it(engine_of, model):
    engine = engine_of(model, batch_size=3)
    requests = make_requests([GROUP, [*GROUP, 3], [7], [8], [*GROUP, 9]], [30, 30, 30, 30, 30])
    want = run(engine_of(model), requests)
    drawn = []

    def on_token(row, choice, token):
        drawn.append(row)
        if drawn.count(0) == 4 and row == 0:
            engine.cancel(requests[0])  # runs
            engine.cancel(requests[4])  # waits
            engine.cancel(requests[0])  # a second time

    results = {}
    engine.add(*planned(requests), lambda r: results.__setitem__(r.row, r), on_token)
    engine.run()
    assert (results[0].finish_reason, results[0].token_ids) == ("cancelled", want[0].token_ids[:4])
    assert (results[4].finish_reason, results[4].token_ids, results[4].text) == ("cancelled", (), "")
    assert [results[i] for i in (1, 2, 3)] == [want[i] for i in (1, 2, 3)]
    assert not engine.sampler.used
    engine.cancel(requests[1])  # done already
    assert run(engine, requests) == want


def test_a_row_has_its_time_from_its_start_and_keeps_what_it_has(engine_of, model, monkeypatch):
    """The clock advances one second per step. Waiting rows lose none of their time."""
    engine = engine_of(model, batch_size=2, row_timeout=9.5)
    step, now = engine.step, [0]

    def step_of_a_second(**options):
        step(**options)
        now[0] = engine.stats.steps

    monkeypatch.setattr(engine, "step", step_of_a_second)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter))
    requests = make_requests([[1], [2], [3], [4]], [50, 3, 50, 5])
    want = run(engine_of(model), requests)
    results = run(engine, requests)
    ends = [("timeout", 10), ("length", 3), ("timeout", 10), ("length", 5)]
    assert [(r.finish_reason, len(r.token_ids)) for r in results] == ends
    assert all(results[row].token_ids == want[row].token_ids[:10] for row in (0, 2))
    assert all(r.error_type is None for r in results)


def test_a_row_that_is_done_is_forgotten_before_its_time_is_up(engine_of, model):
    engine = engine_of(model, batch_size=2, row_timeout=3600)
    requests = make_requests([[1], [2], [3], [4]], [3] * 4)
    prompts = [weakref.ref(request.tokens) for request in requests]
    engine.add(*planned(requests), lambda _: None)
    engine.run()
    del requests
    gc.collect()
    assert [ref() for ref in prompts] == [None] * 4


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: you tried")]
)
def test_after_out_of_memory_the_steps_are_smaller_and_no_row_is_lost(engine_of, error):
    requests = make_requests([[*GROUP * 3, i] for i in range(6)] + [[50 + i] * 9 for i in range(8)], [7] * 14)
    model = plain_llama()
    want = run(engine_of(model), requests)
    engine = engine_of(model)
    forward, sizes = engine.runner.model.module.forward, []

    def limited(*args, **kwargs):
        size = kwargs["input_ids"].shape[1]
        sizes.append(size)
        if size > 20:
            raise error
        return forward(*args, **kwargs)

    model.module.forward = limited
    assert run(engine, requests) == want
    assert max(sizes) > 20
    assert engine.scheduler.limits.max_batch_tokens <= 20
    assert [s for s in sizes if s > 20] == [132, 66, 33]  # in one step; none after it
    assert engine.stats.prefill_tokens == 60 + 6 + 8 * 9
    assert engine.notes == [
        f"cpu ran out of memory in a step of more than {engine.runner.max_forward_tokens} tokens; from now on, a step "
        f"has at most {engine.runner.max_forward_tokens} (--max-batch-tokens {engine.runner.max_forward_tokens} avoids the attempt)"
    ]


def test_a_device_without_the_memory_for_one_token_ends_the_job(engine_of):
    model = plain_llama()

    def never(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = engine_of(model)
    model.module.forward = never
    with pytest.raises(
        OutOfMemory, match="cpu does not have enough memory for a forward of one token; lower --kv-memory"
    ):
        run(engine, make_requests([GROUP, [1]], [3, 3]))


def test_halves_of_a_step_keep_its_order_and_its_logits():
    a, b, c = (
        SimpleNamespace(images=(), tokens=lambda start, stop, of=of: range(of + start, of + stop)) for of in (0, 10, 20)
    )
    first, second = pack([ScheduledSpan(a, 0, 7, 6), ScheduledSpan(b, 3, 4, 3), ScheduledSpan(c, 0, 2, 2)]).halves()
    assert first.spans == (ScheduledSpan(a, 0, 5, 5),)
    assert second.spans == (ScheduledSpan(a, 5, 7, 6), ScheduledSpan(b, 3, 4, 3), ScheduledSpan(c, 0, 2, 2))
    assert [half.tokens.tolist() for half in (first, second)] == [[0, 1, 2, 3, 4], [5, 6, 13, 20, 21]]
    assert [half.logits_places.tolist() for half in (first, second)] == [[], [1, 2]]


def test_after_out_of_memory_an_image_that_is_larger_than_a_step_may_be_runs_whole(engine_of, monkeypatch):
    runner, sizes = engine_of(plain_llama()).runner, []

    def forward(packed, *_):
        sizes.append(len(packed.tokens))
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [torch.zeros(len(packed.logits_places), 1)]

    monkeypatch.setattr(runner, "_forward", forward)
    batch = ScheduledBatch.of([ScheduledSpan(sequence(), 1, 5, 5)])  # a token, and an image of three
    runner.run(batch)
    assert (sizes, runner.max_forward_tokens) == ([4, 1, 3], 2)
    with pytest.raises(OutOfMemory, match="a forward of 11 tokens"):
        runner.run(ScheduledBatch.of([ScheduledSpan(sequence(prompt=7), 0, 11, 10)]))


def test_choices_that_are_all_impossible_are_equally_likely():
    assert module._normalised([-math.inf, -math.inf]) == [0.5, 0.5]
    assert module._normalised([-math.inf, 0.0]) == [0.0, 1.0]


def test_a_row_fails_if_one_of_its_labels_has_no_number(engine_of):
    bad = 90
    labels = make_requests([[1, 2]], texts=[[[3], [bad, 5]]], params=[SamplingParams(choices=("a", "b"))])
    (result,) = run(engine_of(plain_llama(poison=bad)), labels)
    assert (result.error_type, result.choice_probs) == ("numerical_error", None)
