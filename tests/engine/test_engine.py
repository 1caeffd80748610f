from itertools import count

import numpy as np
import pytest

from batchgen.sampling_params import SamplingParams
from support.models import make_requests, plain_llama, run, token_ids
from support.params import FULL
from support.requests import planned, request
from support.shapes import VOCAB

BLOCK = 32
TOKEN = 512  # bytes of KV


GROUP = list(range(20))
PROMPTS = [[*GROUP, i] for i in range(6)] + [[50 + i] * (3 + i) for i in range(4)] + [GROUP, GROUP, [7]]
LENGTHS = [5, 1, 9, 4, 40, 3, 8, 2, 6, 30, 7, 5, 4]


def test_a_request_that_does_not_fit_fails_alone_and_says_what_would(engine_of, model):
    engine = engine_of(model, blocks=128)
    assert (engine.sizes.bytes_per_token, engine.sizes.num_blocks) == (TOKEN, 128)
    results = run(
        engine, make_requests([[1] * 90, [2] * 8000, [3] * 100], [4096 - 89, 9, 4096 - 98]), stop=stop_after(3, "now")
    )
    bad, larger = results
    assert (bad.row, larger.row) == (1, 2)
    assert (bad.finish_reason, bad.error_type, bad.text, bad.prompt_tokens) == ("error", "does_not_fit", None, 8000)
    assert bad.error_message == (
        "prompt (8,000 tokens) and completion (up to 9) need 3.9 MiB of KV memory, there are 2.0 MiB; "
        "give --kv-memory 4016KiB or lower max_tokens"
    )
    assert larger.error_type == "does_not_fit"  # by a single token


def test_pages_of_the_pool_become_huge_when_more_than_a_few_blocks_are_in_use(engine_of, model):
    for few, after in ((2, 2), (1, 128)):
        engine = engine_of(model, blocks=128)
        cache = engine.runner.cache
        cache.max_few_blocks = few
        run(engine, make_requests([[1] * (2 * BLOCK - 2)], [2]))
        assert (cache.max_few_blocks, engine.block_manager.pool.peak_used) == (after, 2)


@pytest.mark.parametrize(("batch_size", "few", "after"), [(4, 3, 3), (4, 2, 128), (2, 1, 1), (2, 0, 128)])
def test_pages_are_huge_before_the_first_step_if_the_prompts_of_a_batch_take_more(
    engine_of, model, batch_size, few, after
):
    engine = engine_of(model, blocks=128, batch_size=batch_size)
    engine.runner.cache.max_few_blocks = few
    engine.add(*planned(make_requests([[i] * (BLOCK - 1) for i in range(4)], [2] * 4)), lambda result: None)
    assert engine.runner.cache.max_few_blocks == after


def test_max_tokens_that_nobody_gave_are_no_more_than_fit(engine_of, model):
    engine = engine_of(model, blocks=4)
    auto = [request(row, [5] * 100, 1024, params=SamplingParams()) for row in (0, 2)]
    given = request(1, [5] * 100, 1024)
    room = engine.sizes.num_blocks * engine.sizes.block_size
    results = {result.row: result for result in run(engine, [*auto, given])}
    for row in (0, 2):
        assert (results[row].finish_reason, results[row].completion_tokens) == ("length", room - 100 + 1)
    assert results[1].error_type == "does_not_fit"
    assert [note for note in engine.notes if "max-tokens auto" in note] == [
        f"the KV memory holds {room} tokens of a row, so --max-tokens auto is less for some rows: "
        f"their prompts and completions have {room} tokens at most (--kv-memory gives more)"
    ]


def test_a_row_whose_max_tokens_are_less_can_be_cancelled(engine_of, model):
    """So can a later one of its number, whatever became of the first."""
    engine = engine_of(model, blocks=4)
    auto, later = request(0, [5] * 100, 1024, params=SamplingParams()), request(0, [5] * 10, 9)
    for asked, cancels, stop in (
        (auto, True, None),
        (later, True, None),
        (auto, False, stop_after(2, "now")),
        (later, True, None),
    ):
        results = []
        engine.add(*planned([asked]), results.append, lambda *_, r=asked, cancels=cancels: cancels and engine.cancel(r))
        engine.run(stop)
        assert [(r.finish_reason, r.completion_tokens) for r in results] == ([] if stop else [("cancelled", 1)])


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_a_row_without_numbers_fails_alone(engine_of, model, batch_size):
    """Its KV is NaN. Blocks that it shares, or that other rows get afterwards, must not spoil these rows."""
    group = list(range(45))
    bad = 90
    prompts = [[*group, 46 + i, bad] if i % 3 == 1 else [*group, 46 + i, 1] for i in range(9)]
    prompts += [[bad] * 40, [bad] * 40 + [1], [3] * 5, [5] * 70]
    lengths = [3] * len(prompts)
    spoiled = {row for row, prompt in enumerate(prompts) if bad in prompt}
    engine = engine_of(plain_llama(poison=bad), batch_size=batch_size, blocks=12)
    want = token_ids(run(engine_of(model, batch_size=batch_size), make_requests(prompts, lengths)))
    for _ in range(2):  # the second time over what the first has left in the pool
        results = run(engine, make_requests(prompts, lengths))
        assert {r.row for r in results if r.error_type == "numerical_error"} == spoiled
        assert {row: t for row, t in token_ids(results).items() if row not in spoiled} == {
            row: t for row, t in want.items() if row not in spoiled
        }


def stop_after(steps, wish):
    calls = iter(range(10_000))
    return lambda: wish if next(calls) >= steps else None


@pytest.mark.parametrize(("wish", "after", "steps", "done"), [("drain", 2, 6, {0: 6, 1: 3}), ("now", 4, 4, {1: 3})])
def test_drain_finishes_what_runs_and_starts_nothing_and_now_returns_at_once(
    engine_of, model, wish, after, steps, done
):
    engine = engine_of(model, batch_size=2)
    results = run(engine, make_requests([[1], [2], [3], [4]], [6, 3, 3, 3]), stop=stop_after(after, wish))
    assert {r.row: len(r.token_ids) for r in results} == done
    assert (engine.unfinished, engine.waiting, engine.under_way(), engine.stats.steps) == (0, 0, {}, steps)


@pytest.mark.parametrize("wish", ["drain", "now"])
def test_after_a_stop_the_engine_can_go_on(engine_of, model, wish):
    engine = engine_of(model, batch_size=3)
    requests = make_requests(PROMPTS, LENGTHS)
    want = token_ids(run(engine_of(model), requests))
    done = run(engine, requests, stop=stop_after(3, wish))
    left = [r for r in requests if r.row not in token_ids(done)]
    assert left
    assert token_ids(done) | token_ids(run(engine, left)) == want


@pytest.mark.parametrize(
    ("prompt", "options"), [([2] * 3, {}), ([2] * 40, {"blocks": 1})], ids=["fits", "does not fit"]
)
def test_a_failing_callback_leaves_an_engine_that_can_go_on(engine_of, model, prompt, options):
    engine = engine_of(model, **options)
    requests = make_requests([[1], prompt], [2, 2])

    def broken(result):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        engine.add(*planned(requests), broken)
        engine.run()
    assert len(run(engine, requests)) == 2


@pytest.mark.parametrize("where", ["before a forward", "between two counts of blocks"])
def test_after_an_interrupt_nothing_of_the_step_under_way_is_used(engine_of, model, where):
    """A node's last block may be a child's already, in which its tokens are not yet."""
    group = [7] * (BLOCK + 9)
    first = make_requests([[*group, i, 1] for i in range(3)] + [group], [4] * 4)
    requests = make_requests([[*group, i, 2, 3] for i in range(4)], [5] * 4)
    want = run(engine_of(model), requests)
    for call in range(1, 6):
        engine, calls = engine_of(model, batch_size=2), count(1)
        runner, pool = engine.runner, engine.block_manager.pool
        forward, share = runner.run, pool.share

        def interrupt(calls=calls, call=call):
            if next(calls) == call:
                raise KeyboardInterrupt

        def interrupted_run(*args, forward=forward, interrupt=interrupt):
            interrupt()
            return forward(*args)

        def interrupted_share(blocks, share=share, interrupt=interrupt):
            share(blocks)
            interrupt()

        if where == "before a forward":
            runner.run = interrupted_run
        else:
            pool.share = interrupted_share
        with pytest.raises(KeyboardInterrupt):
            run(engine, first)
        assert engine.unfinished == 0
        assert run(engine, requests) == want
        assert not engine.sampler.used


def test_with_debug_blocks_that_do_not_add_up_end_the_run(engine_of, model):
    engine = engine_of(model)
    engine.block_manager.pool.allocate(1)
    with pytest.raises(AssertionError, match="block references do not match the block tables"):
        run(engine, make_requests([[1]], [2]))


def test_memory_of_a_group_is_under_an_eighth_of_the_unshared(engine_of, model):
    shared = [int(t) for t in np.random.default_rng(0).integers(0, VOCAB, 1024)]
    engine = engine_of(model, kv_memory="256MiB", debug=False)
    results = run(engine, make_requests([[*shared, i] for i in range(64)], [3] * 64))
    assert len(results) == 64
    assert engine.stats.prefill_tokens == 1024 + 64
    assert engine.stats.kv_bytes_peak == (32 + 64) * BLOCK * TOKEN
    assert engine.stats.kv_bytes_unshared >= 64 * 1025 * TOKEN
    assert engine.stats.kv_bytes_peak * 8 < engine.stats.kv_bytes_unshared


def test_figures_of_a_small_case_are_exact(engine_of, model):
    """Two prompts under 4 shared tokens, one of which ends there, and one alone."""
    engine = engine_of(model, batch_size=2)
    run(engine, make_requests([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [9, 9]], [3, 2, 2]))
    s = engine.stats
    # node, row 2 | row 0 draws, row 2 ends | row 0, row 1 | row 0 ends, row 1 ends
    assert s.prefill_tokens == 4 + 2 + 2
    assert (s.completion_tokens, s.decode_sequences) == (7, 7)
    assert (s.preemptions, s.recomputed_tokens) == (0, 0)
    assert s.kv_bytes_peak % (BLOCK * TOKEN) == 0
    assert s.forward_seconds > 0
    assert s.steps == 4
    assert s.kv_bytes_peak == 2 * BLOCK * TOKEN


SAMPLED = {"temperature": 1.0, "seed": 5}


def test_draws_do_not_depend_on_the_batch_the_order_the_window_or_preemption(engine_of, model):
    requests = make_requests(PROMPTS, LENGTHS, **SAMPLED)
    want = token_ids(run(engine_of(model), requests))
    assert len(set(want.values())) > 8
    quick = ({"batch_size": 4, "max_batch_tokens": 6}, {"blocks": 3}, {"share": False})
    for how in (*quick, {"batch_size": 1}, {"blocks": 2}) if FULL else quick:
        engine = engine_of(model, **how)
        assert token_ids(run(engine, requests)) == want, how
        assert engine.stats.preemptions > 0 or how != {"blocks": 3}
    assert token_ids(run(engine_of(model), requests[::-1])) == want
    engine = engine_of(model)
    got = {}
    for start in range(0, len(requests), 5):
        got |= token_ids(run(engine, requests[start : start + 5]))
    assert got == want
