"""`LLM.generate` over an iterator of prompts: results as they come, with a bounded look-ahead."""

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import get_overloads, get_type_hints

import pytest

from batchgen import LLM, EngineConfig, Result, SamplingParams
from batchgen.llm import Prompt
from support.fakes import threads_as_processes

pytestmark = pytest.mark.usefixtures("loaded_once")

SHARED = "A shared prefix that is long enough for several chunks of sixteen tokens. "
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.9, seed=3)


@pytest.fixture
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_model_dir, dtype="float32", device="cpu", engine=EngineConfig(batch_size=4, debug=True)) as llm:
        yield llm


def prompts(count: int, taken: list[int] | None = None) -> Iterator[str]:
    """Prompts of which some are equal and some cannot be run. Notes those that are taken."""
    for i in range(count):
        if taken is not None:
            taken.append(i)
        yield "x" * 600 if i % 7 == 6 else f"{SHARED}{i % 5}"


@pytest.mark.parametrize("look_ahead", [1, 2, 8, 100])
def test_results_are_those_of_a_list_and_no_more_prompts_are_taken_than_the_look_ahead(llm, look_ahead):
    wanted, taken = llm.generate(list(prompts(20)), PARAMS), []
    found = []
    for result in llm.generate(prompts(20, taken), PARAMS, look_ahead=look_ahead):
        assert len(taken) <= len(found) + look_ahead
        found.append(result)
    assert found == wanted
    assert llm.unfinished == 0


def test_type_checkers_know_what_a_list_and_an_iterator_give():
    ways = [get_type_hints(way) for way in get_overloads(LLM.generate)]
    assert [(hints["prompts"], hints["return"]) for hints in ways] == [
        (Iterator[Prompt], Generator[Result, None, None]),
        (Prompt | Sequence[Prompt], list[Result]),
    ]


def test_results_of_several_devices_are_those_of_one(llm, tiny_model_dir):
    with threads_as_processes(), LLM(tiny_model_dir, dtype="float32", device="cpu:0,1") as two:
        found = list(two.generate(prompts(30), PARAMS, look_ahead=6))
    assert found == llm.generate(list(prompts(30)), PARAMS)


def test_nothing_runs_before_a_result_is_asked_for_and_an_empty_iterator_has_none(llm):
    taken: list[int] = []
    results = llm.generate(prompts(3, taken), PARAMS)
    assert (taken, llm.stats.steps) == ([], 0)
    next(results)
    assert taken == [0, 1, 2]
    assert list(llm.generate(iter([]), PARAMS)) == []


def test_other_calls_may_run_between_two_results(llm):
    alone = llm.generate(["another"], PARAMS)
    wanted = llm.generate(list(prompts(9)), PARAMS)
    found = []
    for result in llm.generate(prompts(9), PARAMS, look_ahead=3):
        assert llm.generate(["another"], PARAMS) == alone
        found.append(result)
    assert found == wanted


def test_closing_the_iterator_cancels_the_prompts_that_were_taken(llm):
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    results = llm.generate((f"{SHARED}{i}" for i in range(50)), long, look_ahead=8)
    next(results)
    results.close()
    tokens = llm.stats.completion_tokens
    assert llm.unfinished > 0  # their results come in the next call
    llm.generate(["another"], PARAMS)
    assert llm.unfinished == 0
    assert llm.stats.completion_tokens - tokens < 50


def test_a_wrong_prompt_is_refused_when_it_is_taken(llm):
    results = llm.generate(iter(["a", "b", 5]), PARAMS, look_ahead=2)  # type: ignore[list-item]
    assert next(results).row == 0
    with pytest.raises(TypeError, match=r"^prompts\[2\] must be text, .*, not 5$"):
        list(results)
    assert llm.generate(["a"], PARAMS)[0].error_type is None


def test_a_model_of_text_alone_says_so_where_a_prompt_has_an_image_beside_it(llm):
    why = "^prompts have 'image', which the model is not shown: it sees text alone, no images, sound or video$"
    with pytest.warns(UserWarning, match=why):
        llm.generate([{"prompt": "a", "image": "a.png"}], PARAMS)


def test_an_exception_of_the_prompts_comes_after_the_results_of_those_before_it(llm):
    def broken() -> Iterator[str]:
        yield from prompts(10)
        raise OSError("the file breaks off")

    found = []
    with pytest.raises(OSError, match="the file breaks off"):
        for result in llm.generate(broken(), PARAMS, look_ahead=4):
            found.append(result)
    assert found == llm.generate(list(prompts(10)), PARAMS)
    assert llm.unfinished == 0


@pytest.mark.parametrize(
    "prompt", ["b", "much too long " * 100], ids=["a prompt that runs", "a prompt that cannot run"]
)
def test_prompts_that_another_call_has_dropped_end_the_iterator(llm, prompt):
    results = llm.generate(prompts(5), SamplingParams(max_tokens=50, ignore_eos=True), look_ahead=5)
    next(results)
    llm.add(prompt, on_result=lambda result: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.run()
    assert llm.unfinished == llm.engine.unfinished == 0
    with pytest.raises(RuntimeError, match="the prompts of this iterator were dropped by an exception in another call"):
        list(results)
