"""The Python API accepts the types that people write without looking them up. Anything else is one clear error at the call."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen import LLM, EngineConfig, JobConfig, ModelConfig, PromptConfig, SamplingParams, plan_job, run_job
from batchgen.errors import ModelError

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> LLM:
    return LLM(tiny_model_dir)  # a path


@pytest.fixture(scope="module")
def chat(tiny_chat_model_dir: Path) -> LLM:
    return LLM(tiny_chat_model_dir)


def test_one_string_is_one_prompt(llm):
    (result,) = llm.generate("Hello", FOUR)
    assert result == llm.generate(["Hello"], FOUR)[0]
    assert result.prompt_tokens == 1 + len("Hello")


@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [
        (("a", "bcd"), [2, 4]),
        ((text for text in ("a", "bcd")), [2, 4]),
        ({"a": None, "bcd": None}.keys(), [2, 4]),
        ([5, 6, 7], [3]),
        ([[5, 6, 7]], [3]),
        ((5, 6), [2]),
        (np.array([5, 6, 7]), [3]),
        ([np.array([5, 6, 7], dtype=np.int32), "a"], [3, 2]),
        ({"prompt": "abc", "other": 1}, [4]),
        ([{"prompt": "abc"}, "a"], [4, 2]),
        ([], []),
    ],
)
def test_prompts_may_be_texts_token_ids_or_rows_in_any_iterable(llm, prompts, lengths):
    results = llm.generate(prompts, FOUR)
    assert [(r.error_type, r.prompt_tokens) for r in results] == [(None, length) for length in lengths]


@pytest.mark.parametrize("prompts", [[USER], (USER,), [[USER]], [(USER,)], {"messages": [USER]}, {"messages": (USER,)}])
def test_messages_may_be_one_conversation_or_a_list_of_them(chat, prompts):
    (result,) = chat.generate(prompts, FOUR)
    assert result == chat.generate("hi", FOUR)[0]


def test_token_ids_are_sent_unchanged_even_with_a_chat_template(chat):
    (result,) = chat.generate([5, 6, 7], FOUR)
    assert (result.error_type, result.prompt_tokens) == (None, 3)


def test_a_text_becomes_the_column_that_the_options_name(llm):
    options = PromptConfig(prompt_column="question")
    (result,) = llm.generate("Hello", FOUR, prompt_options=options)
    assert result.prompt_tokens == 1 + len("Hello")
    (result,) = llm.generate([{"name": "Ada"}], FOUR, prompt_options=PromptConfig(template="I am {{ name }}"))
    assert result.prompt_tokens == 1 + len("I am Ada")


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [FOUR, {"max_tokens": 2, "ignore_eos": True}, None, SamplingParams(max_tokens=3, ignore_eos=True)]
    long = "c" * 490  # with None, the defaults, it generates up to the context of 512 tokens
    results = llm.generate(["a", "b", long, "d"], params)
    counts = [r.completion_tokens for r in results]
    assert (counts[0], counts[1], counts[3]) == (4, 2, 3)
    assert results[2] == llm.generate(["x" * 490, "y" * 490, long])[2]
    alone = llm.generate("d", params[3])[0]
    assert results[3].text == alone.text


def test_parameters_may_be_a_dict_with_names_of_openai_and_vllm(llm):
    (result,) = llm.generate("a", {"max_completion_tokens": 3, "ignore_eos": True, "top_k": -1, "stop_token_ids": [5]})
    assert result.completion_tokens <= 3
    (label,) = llm.generate("a", {"guided_choice": ["yes", "no"]})
    assert label.text in ("yes", "no")


def test_parameters_may_contain_lists(llm):
    llm.generate("a", SamplingParams(max_tokens=2, stop=["0"], stop_token_ids=[22]))
    (label,) = llm.generate("a", SamplingParams(choices=["yes", "no"]))
    assert set(label.choice_probs or {}) == {"yes", "no"}


def test_a_single_pair_can_be_scored(llm):
    (result,) = llm.score("a", "xyz")
    assert result.score is not None
    assert result.score.tokens == 3


def test_a_completion_given_as_token_ids_has_the_score_of_its_text(llm):
    ids = llm.tokenizer.hf_tokenizer.encode("xyz", add_special_tokens=False)
    text, listed, array = llm.score(["a"] * 3, ["xyz", ids, np.array(ids)])
    assert text.score == listed.score == array.score
    assert text.score is not None
    assert text.score.tokens == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "prompts must be a prompt or a list of prompts, not 5"),
        ((None,), "prompts must be a prompt or a list of prompts, not None"),
        ((b"Hello",), "prompts must be a prompt or a list of prompts, not b'Hello'"),
        (({"a", "b"},), "prompts must be in an order, and a set has none: give a list, such as sorted(prompts)"),
        ((frozenset("ab"),), "prompts must be in an order, and a set has none: give a list, such as sorted(prompts)"),
        (([5.5],), "a prompt must be text, a list of messages (objects with role and content), a list of token ids, or an object with prompt or messages, not 5.5"),
        ((["a", None],), "a prompt must be text, a list of messages (objects with role and content), a list of token ids, or an object with prompt or messages, not None"),
        (([{"text": "a"}],), "a prompt must be text, a list of messages (objects with role and content), a list of token ids, or an object with prompt or messages, not {'text': 'a'}"),
        ((["a"], 5), "params must be SamplingParams, a dict, or a list of them, not 5"),
        ((["a"], ["x"]), "params[0] must be SamplingParams or a dict, not 'x'"),
    ],
)  # fmt: skip
def test_other_types_raise_a_type_error_at_the_call(llm, arguments, message):
    with pytest.raises(TypeError) as caught:
        llm.generate(*arguments)
    assert str(caught.value) == message
    assert llm.unfinished == 0


def test_an_unordered_set_of_completions_is_refused(llm):
    with pytest.raises(TypeError, match=r"^completions must be in an order, and a set has none: "):
        llm.score(["a", "b"], {"x", "y"})  # type: ignore[arg-type]


def test_lists_of_different_lengths_and_wrong_types_are_refused(llm):
    with pytest.raises(
        ValueError, match=r"^there are 2 prompts and 1 params; give one for each prompt, or one for all$"
    ):
        llm.generate(["a", "b"], [FOUR])
    with pytest.raises(
        ValueError, match=r"^there are 2 prompts and 1 completions; give one completion for each prompt$"
    ):
        llm.score(["a", "b"], ["x"])
    with pytest.raises(TypeError, match=r"^a completion must be text or a list of token ids, not 5$"):
        llm.score(["a"], [5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"^prompt_options must be a PromptConfig, not \{\}$"):
        llm.generate("a", prompt_options={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^unknown parameter 'temprature'$"):
        llm.generate("a", {"temprature": 1})
    with pytest.raises(ValueError, match=r"^params\[1\]: temperature must be at least 0, not -1\.0$"):
        llm.generate(["a", "b"], [None, {"temperature": -1}])


@pytest.mark.parametrize("given", [None, 5, {"a": 1}, b"a"])
def test_completions_that_are_not_a_list_raise_a_type_error(llm, given):
    with pytest.raises(TypeError, match=r"^completions must be a text or a list of completions, not "):
        llm.score("a", given)


def test_a_callback_that_cannot_be_called_is_refused_before_its_prompts_are_added(llm):
    with pytest.raises(TypeError, match=r"^on_result must be a function, not None$"):
        llm.add("a", on_result=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^on_token must be a function, not 5$"):
        llm.add("a", on_result=print, on_token=5)  # type: ignore[arg-type]
    assert llm.unfinished == 0


def test_a_model_is_closed_after_its_with_block_and_later_calls_say_so(tiny_model_dir):
    with LLM(tiny_model_dir) as llm:
        llm.generate("a", FOUR)
    for call in (lambda: llm.generate("a"), lambda: llm.score("a", "b"), llm.run, lambda: llm.engine):
        with pytest.raises(RuntimeError, match=r"^this model is closed: create a new LLM$"):
            call()
    assert llm.stats.completion_tokens == 4
    llm.close()


def test_a_job_config_accepts_texts_paths_and_lists(tiny_model_dir, tmp_path):
    source, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    whole = JobConfig(inputs=source, output=output, model=tiny_model_dir, sampling={"max_tokens": 2}, keep=["prompt"])
    assert (whole.inputs, whole.output, whole.keep) == ((str(source),), str(output), ("prompt",))
    assert (whole.model, whole.sampling) == (ModelConfig(model=str(tiny_model_dir)), SamplingParams(max_tokens=2))
    assert run_job(whole).exit_code == 0
    for inputs in (str(source), [source], (source,), [str(source)]):
        assert JobConfig(inputs=inputs, output=str(output), model=str(tiny_model_dir)).inputs == (str(source),)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inputs": 5}, "inputs must be a file name, a path or a list of them, not 5"),
        ({"inputs": [5]}, "inputs must be a file name, a path or a list of them, not [5]"),
        ({"inputs": [b"a"]}, "inputs must be a file name, a path or a list of them, not [b'a']"),
        ({"output": 5}, "output must be text or a path, not 5"),
        ({"model": 5}, "model must be ModelConfig, not 5"),
        ({"sampling": 5}, "sampling must be SamplingParams, not 5"),
        ({"prompts": {}}, "prompts must be PromptConfig, not {}"),
        ({"engine": "fast"}, "engine must be EngineConfig, not 'fast'"),
        ({"keep": 5}, "keep must be text or a list of texts, not 5"),
        ({"keep": [5]}, "keep must be text or a list of texts, not [5]"),
    ],
)
def test_a_wrong_type_in_a_job_config_is_named(values, message):
    with pytest.raises(TypeError) as caught:
        JobConfig(**{"inputs": "a.jsonl", "model": "m"} | values)
    assert str(caught.value) == message


def test_options_of_prompts_must_be_text(tiny_model_dir):
    assert PromptConfig(row_params="seed").row_params == PromptConfig(row_params=["seed"]).row_params == ("seed",)
    with pytest.raises(TypeError, match=r"^template must be text, not PosixPath\('a.jinja'\)$"):
        PromptConfig(template=Path("a.jinja"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^model must be text or a path, not 5$"):
        LLM(5)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_program_sees_no_progress_bar_of_transformers(tiny_model_dir):
    program = (
        f"from batchgen import LLM\nLLM({str(tiny_model_dir)!r}, compile='off').generate('a', {{'max_tokens': 2}})\n"
    )
    program += "from transformers.utils import logging\nprint(logging.is_progress_bar_enabled())"
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "True\n", "")


def test_an_engine_of_a_wrong_type_is_refused(tiny_model_dir):
    with pytest.raises(TypeError, match=r"^engine must be an EngineConfig, not 'fast'$"):
        LLM(tiny_model_dir, engine="fast")  # type: ignore[arg-type]
    assert LLM(tiny_model_dir, engine=EngineConfig(batch_size=2)).config.batch_size == 2


@pytest.mark.parametrize("call", [run_job, plan_job])
@pytest.mark.parametrize("given", [None, {"inputs": "x.jsonl"}, "x.jsonl"])
def test_run_job_and_plan_job_take_only_a_job_config(call, given):
    with pytest.raises(TypeError, match=r"^config must be a JobConfig, not "):
        call(given)


def test_threads_that_load_models_take_turns(tiny_model_dir, monkeypatch):
    loading, at_once = [], []

    def load(*given: Any) -> Any:
        loading.append(given)
        at_once.append(len(loading))
        time.sleep(0.05)
        loading.pop()
        raise ModelError("not loaded", "in this test")

    def make() -> None:
        with suppress(ModelError):
            LLM(tiny_model_dir)

    monkeypatch.setattr("batchgen.model.loader.load_model", load)
    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [1, 1, 1]


def test_a_pydantic_class_is_accepted_as_json_schema():
    class Answer:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "object", "title": "Answer"}

    assert SamplingParams(json_schema=Answer).json_schema == '{"type": "object", "title": "Answer"}'
    with pytest.raises(TypeError, match="json_schema must be an object, or its JSON as text"):
        SamplingParams(json_schema=dict)
