"""`LLM`: a model in a Python program."""

import gc
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen import LLM, BatchgenError, Result, SamplingParams
from batchgen.config import INPUT_LIMITS
from batchgen.kernels.memory import mapped_files

SHARED = "A shared prefix that is long enough for several chunks of sixteen tokens. "


@pytest.fixture
def llm(tiny_model_dir: Path, loaded_once: None) -> LLM:
    return LLM(tiny_model_dir)


def in_a_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_a_prefix_of_an_earlier_call_is_not_run_again(llm):
    params = SamplingParams(max_tokens=2)
    llm.generate([f"{SHARED}a", f"{SHARED}b"], params)
    before = llm.engine.stats.prefill_tokens
    llm.generate([f"{SHARED}c", f"{SHARED}d"], params)
    assert before == 1 + len(SHARED) + 2
    assert llm.engine.stats.prefill_tokens - before == 2


def test_equal_prompts_of_a_call_run_once_unless_they_are_sampled(llm):
    greedy, sampled = (SamplingParams(max_tokens=4, ignore_eos=True, temperature=t) for t in (0.0, 5.0))
    first, second, third = llm.generate(["a", "b", "a"], greedy)
    assert first == replace(third, row=0) != replace(second, row=0)
    assert ([first.row, second.row, third.row], llm.stats.completion_tokens) == ([0, 1, 2], 8)
    assert len({result.text for result in llm.generate(["a"] * 3, sampled)}) == 3
    assert llm.stats.completion_tokens == 8 + 3 * 4
    results: list[Result] = []
    llm.add(["a"] * 3, greedy, on_result=results.append)
    llm.run()
    assert {result.text for result in results} == {first.text}
    assert llm.stats.completion_tokens == 8 + 3 * 4 + 3 * 4


PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.mark.skipif(not mapped_files(), reason="streamed weights need Linux")
def test_streamed_weights_give_the_results_of_weights_in_memory(tiny_model_dir):
    with pytest.raises(BatchgenError, match="weight-memory"):
        LLM(tiny_model_dir, weight_memory="1B")
    streamed = LLM(tiny_model_dir, weights="streamed")
    assert streamed.generate(["a", "b"], PARAMS) == LLM(tiny_model_dir).generate(["a", "b"], PARAMS)
    assert streamed.stats.weight_bytes_read > 0


def test_prompts_can_be_added_while_the_model_runs_and_share_prefixes(llm, tiny_model_dir):
    results, tokens = {}, []

    def more(result: Result) -> None:
        results[result.row] = result
        if len(results) == 1:
            llm.add([f"{SHARED}c", f"{SHARED}d"], PARAMS, on_result=lambda r: results.__setitem__(r.row, r))

    numbers = llm.add(
        [f"{SHARED}a", f"{SHARED}b"], PARAMS, on_result=more, on_token=lambda *sampled: tokens.append(sampled)
    )
    assert llm.unfinished == 2
    llm.run()
    assert numbers == [0, 1]
    assert sorted(results) == [0, 1, 2, 3]
    assert llm.unfinished == 0
    assert llm.stats.prefill_tokens == 1 + len(SHARED) + 4
    assert [token for row, completion, token in tokens if row == 0] == list(results[0].token_ids)
    alone = LLM(str(tiny_model_dir)).generate([f"{SHARED}{x}" for x in "abcd"], PARAMS)
    assert [results[i].text for i in range(4)] == [r.text for r in alone]


def test_another_thread_may_add_and_cancel(llm):
    results = {}
    begun, added = threading.Event(), threading.Event()
    endless = SamplingParams(max_tokens=400, ignore_eos=True)

    def keep(result: Result) -> None:
        results[result.row] = result

    (first,) = llm.add(["one"], endless, on_result=keep, on_token=lambda *_: (begun.set(), added.wait(60)))

    def other() -> None:
        begun.wait(60)
        llm.add(["two"], PARAMS, on_result=lambda r: (keep(r), llm.cancel(first)))
        added.set()

    thread = threading.Thread(target=other)
    thread.start()
    llm.run()
    thread.join()
    assert results[1].completion_tokens == 6
    assert results[first].finish_reason == "cancelled"
    assert 6 < results[first].completion_tokens < 400


def test_a_prompt_that_is_done_while_another_thread_cancels_it_leaves_nothing_behind(llm):

    class DoneMeanwhile(dict):
        def get(self, number):
            request = super().get(number)
            in_a_thread(llm.run)
            return request

    (number,) = llm.add(["one"], PARAMS, on_result=lambda result: None)
    llm._requests = DoneMeanwhile(llm._requests)
    llm.cancel(number)
    assert (llm.unfinished, llm._cancelled) == (0, set())


def test_after_a_failed_callback_the_other_prompts_are_dropped_and_the_model_is_usable(llm):

    def broken(result: Result) -> None:
        raise OSError("disk full")

    llm.add(["a", "b"], PARAMS, on_result=broken)
    with pytest.raises(OSError, match="disk full"):
        llm.run()
    assert llm.unfinished == 0
    assert len(llm.generate(["a", "b"], PARAMS)) == 2


def test_an_interrupt_of_run_cancels_the_prompts_and_their_callbacks_are_called(llm):
    results: dict[int, Result] = {}
    tokens: list[tuple[int, int, int]] = []

    def interrupt_once(*sampled: int) -> None:
        tokens.append(sampled)
        if len(tokens) == 5:
            signal.raise_signal(signal.SIGINT)

    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    keep = lambda result: results.__setitem__(result.row, result)  # noqa: E731
    llm.add(["a", "b"], endless, on_result=keep, on_token=interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        llm.run()
    assert [results[i].finish_reason for i in range(2)] == ["cancelled"] * 2
    assert sum(r.completion_tokens for r in results.values()) == len(tokens)
    assert llm.unfinished == 0
    assert len(llm.generate(["a", "b"], PARAMS)) == 2


def test_a_model_is_refused_in_a_forked_process_and_not_sent_to_one(llm, monkeypatch):
    want = llm.generate(["a"], PARAMS)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        for call in (lambda: llm.generate(["a"]), lambda: llm.add(["a"], on_result=print), llm.run, llm.close):
            with pytest.raises(
                RuntimeError, match=r"^this model belongs to process \d+, from which this one was forked: "
            ):
                call()
    with pytest.raises(TypeError, match=r"^a model cannot be sent to another process: create a new LLM there, "):
        pickle.dumps(llm)
    assert llm.generate(["a"], PARAMS) == want


def test_callbacks_and_second_threads_are_refused_and_add_no_prompts(llm):
    want = llm.generate(["a"], PARAMS)
    before = llm.stats.completion_tokens
    refused: list[str] = []

    def call_again() -> None:
        for call in (lambda: llm.generate(["b"], PARAMS), lambda: llm.score("b", "c"), llm.run, llm.close):
            with pytest.raises(RuntimeError, match=r"^this model is running in another call: ") as error:
                call()
            refused.append(str(error.value).partition(": ")[2])

    def on_result(result: Result) -> None:
        call_again()
        in_a_thread(call_again)

    llm.add(["a"], PARAMS, on_result=on_result)
    llm.run()
    whole = "add prompts to it with add(), or call this when that call has returned"
    assert refused == [whole, whole, "add prompts to it with add()", "close it when that call has returned"] * 2
    assert (llm.stats.completion_tokens - before, llm.unfinished) == (want[0].completion_tokens, 0)
    assert llm.generate(["a"], PARAMS) == want


def test_a_closed_model_is_freed_at_once(tiny_model_dir):
    llm = LLM(tiny_model_dir)
    llm.generate(["a"], SamplingParams(max_tokens=1))
    parts = {name: weakref.ref(part) for name, part in llm.engine.runner.model.module.named_modules()}
    gc.disable()  # a collection could free it otherwise
    try:
        llm.close()
    finally:
        gc.enable()
    assert [name for name, part in parts.items() if part() is not None] == []


LABELS = {"choices": [f"{a}{b}" for a in "abcdefgh" for b in "abcde"]}


def test_labels_of_many_prompts_are_planned_window_by_window(tiny_model_dir, monkeypatch):
    monkeypatch.setattr("batchgen.llm.INPUT_LIMITS", replace(INPUT_LIMITS, window_leaves=1_000, batch_rows=2))
    llm = LLM(str(tiny_model_dir))
    prompts = [f"row {i}" for i in range(100)]
    waiting = []
    numbers = llm.add(prompts, LABELS, on_result=lambda r: waiting.append((r.row, llm.engine.waiting, r.text)))
    llm.run()
    assert sorted(row for row, *_ in waiting) == numbers
    assert max(count for _, count, _ in waiting) <= 1_525 < 100 * 40
    texts = {row: text for row, _, text in waiting}
    assert [texts[n] for n in numbers[::25]] == [r.text for r in llm.generate(prompts[::25], LABELS)]


def test_a_prompt_is_cancelled_before_its_window_is_planned(llm):
    results = {}

    def done(result):
        results[result.row] = result
        if len(results) == 1:
            for number in numbers:
                llm.cancel(number)

    numbers = llm.add([f"row {i}" for i in range(800)], LABELS, on_result=done)
    llm.run()
    assert [results[n].error_type for n in numbers].count("cancelled") > 600
    assert llm.unfinished == 0
    assert llm.generate(["row 0"], LABELS)[0].text is not None
