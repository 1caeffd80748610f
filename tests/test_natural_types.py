"""The Python API accepts the types that people write without looking them up. Anything else is one clear error at the call."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from batchgen import LLM, JobConfig, ModelConfig, PromptConfig, SamplingParams, run_job
from batchgen.errors import ModelError, UsageError

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> LLM:
    return LLM(tiny_model_dir)  # a path


@pytest.fixture(scope="module")
def chat(tiny_chat_model_dir: Path) -> LLM:
    return LLM(tiny_chat_model_dir)


@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [
        ("Hello", [6]),
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
        (pa.chunked_array([["a"], ["bcd"]]), [2, 4]),
        (pd.Series(["a", "bcd"], index=[7, 3]), [2, 4]),
        (pl.Series([[5, 6, 7], [5, 6]]), [3, 2]),
        ({"prompt": np.array([5, 6, 7])}, [3]),
        ([], []),
    ],
)
def test_prompts_may_be_texts_token_ids_or_rows_in_any_iterable(llm, prompts, lengths):
    results = llm.generate(prompts, FOUR)
    assert [(r.error_type, r.prompt_tokens) for r in results] == [(None, length) for length in lengths]


AN_ARRAY = np.array([{"role": "user", "content": np.array([{"type": "text", "text": "hi"}])}])
"""A conversation of a Parquet file as pandas reads it."""


@pytest.mark.parametrize(
    "prompts",
    [
        [USER], (USER,), [[USER]], [(USER,)], {"messages": [USER]}, {"messages": (USER,)},
        AN_ARRAY, [AN_ARRAY], pd.Series([AN_ARRAY]), {"messages": AN_ARRAY}, pl.Series([[USER]]), pa.array([[USER]]),
    ],
)  # fmt: skip
def test_messages_may_be_one_conversation_or_a_list_of_them(chat, prompts):
    (result,) = chat.generate(prompts, FOUR)
    assert result == chat.generate("hi", FOUR)[0]


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


@pytest.mark.parametrize("own", [{"max_tokens": 2}, SamplingParams(max_tokens=2)])
def test_a_prompt_that_is_an_object_may_have_its_own_parameters(llm, own):
    (result,) = llm.generate({"prompt": "a", "sampling_params": own}, {"ignore_eos": True, "max_tokens": 5})
    assert result.completion_tokens == 2


def test_parameters_may_be_a_dict_with_names_of_openai_and_vllm(llm):
    (result,) = llm.generate("a", {"max_completion_tokens": 3, "ignore_eos": True, "top_k": -1, "stop_token_ids": [5]})
    assert result.completion_tokens <= 3
    (label,) = llm.generate("a", {"guided_choice": ["yes", "no"]})
    assert label.text in ("yes", "no")


def test_a_completion_given_as_token_ids_has_the_score_of_its_text(llm):
    ids = llm.tokenizer.hf_tokenizer.encode("xyz", add_special_tokens=False)
    text, listed, array = llm.score(["a"] * 3, ["xyz", ids, np.array(ids)])
    assert text.score == listed.score == array.score
    assert text.score.tokens == 3


def test_a_model_is_closed_after_its_with_block_and_later_calls_say_so(tiny_model_dir):
    with LLM(tiny_model_dir) as llm:
        llm.generate("a", FOUR)
    calls = (
        lambda: llm.generate("a"),
        lambda: llm.generate(iter("a")),
        lambda: llm.score("a", "b"),
        llm.run,
        lambda: llm.engine,
    )
    for call in calls:
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


A_PROMPT = "must be text, a list of messages (objects with role and content), a list of token ids, or an object with prompt or messages, not "
A_LIST = "prompts must be a prompt or a list of prompts"
WRONG: list[tuple[Callable[[LLM], Any], type[Exception], str]] = [
    (lambda llm: llm.generate(5), TypeError, "prompts must be a prompt or a list of prompts, not 5"),
    (lambda llm: llm.generate({"a", "b"}), TypeError, "prompts must be in an order, and a set has none: give a list, such as sorted(prompts)"),
    (lambda llm: llm.generate(pd.DataFrame({"prompt": ["a"]})), TypeError, f"{A_LIST}, not a DataFrame: give one of its columns, or use generate_table"),
    (lambda llm: llm.generate(pl.DataFrame({"prompt": ["a"]})), TypeError, f"{A_LIST}, not a DataFrame: give one of its columns, or use generate_table"),
    (lambda llm: llm.generate(pa.table({"prompt": ["a"]})), TypeError, f"{A_LIST}, not a Table: give one of its columns, or use generate_table"),
    (lambda llm: llm.generate([5.5]), TypeError, f"prompts[0] {A_PROMPT}5.5"),
    (lambda llm: llm.generate(pd.Series(["a", None])), TypeError, f"prompts[1] {A_PROMPT}nan"),
    (lambda llm: llm.generate([{"text": "a"}]), TypeError, f"prompts[0] {A_PROMPT}{{'text': 'a'}}"),
    (lambda llm: llm.generate(["a"], 5), TypeError, "params must be SamplingParams, a dict, or, for a list of prompts, a list of them, not 5"),
    (lambda llm: llm.generate(["a"], ["x"]), TypeError, "params[0] must be SamplingParams or a dict, not 'x'"),
    (lambda llm: llm.generate("a", prompt_options={}), TypeError, "prompt_options must be a PromptConfig, not {}"),
    (lambda llm: llm.generate("a", {"temprature": 1}), ValueError, "unknown parameter 'temprature'"),
    (lambda llm: llm.generate(["a", "b"], [None, {"temperature": -1}]), ValueError, "params[1]: temperature must be at least 0, not -1.0"),
    (lambda llm: llm.generate(["a", "b"], [FOUR]), ValueError, "there are 2 prompts and 1 params; give one for each prompt, or one for all"),
    (lambda llm: llm.score(["a", "b"], ["x"]), ValueError, "there are 2 prompts and 1 completions; give one completion for each prompt"),
    (lambda llm: llm.score(["a", "b"], ["x", 5]), TypeError, "completions[1] must be text or a list of token ids, not 5"),
    (lambda llm: llm.score("a", {"a": 1}), TypeError, "completions must be a text or a list of completions, not {'a': 1}"),
    (lambda llm: llm.add("a", on_result=None), TypeError, "on_result must be a function, not None"),
    (lambda llm: llm.add("a", on_result=print, on_token=5), TypeError, "on_token must be a function, not 5"),
    (lambda llm: llm.generate(iter("a"), [FOUR]), TypeError, "params must be SamplingParams"),
    (lambda llm: llm.generate(iter("a"), look_ahead=0), ValueError, "look_ahead must be at least 1, not 0"),
    *((lambda llm, n=n: llm.generate(iter("a"), look_ahead=n), TypeError, f"look_ahead must be a whole number, not {n!r}") for n in (2.5, "5", None, True)),
    (lambda llm: llm.generate_table([{"prompt": "a"}]), TypeError, "table must be a pyarrow.Table, a DataFrame of pandas or polars, or a datasets.Dataset, not builtins.list"),
    (lambda _: LLM(5), TypeError, "model must be text or a path, not 5"),
    (lambda _: LLM("m", engine="fast"), TypeError, "engine must be an EngineConfig, not 'fast'"),
    (lambda _: PromptConfig(template=Path("a.jinja")), TypeError, "template must be text, not PosixPath('a.jinja')"),
    (lambda _: PromptConfig(template="prompts/a.jinja"), UsageError, "--template must be the text of a template (the name of a file would be the prompt of all rows), not 'prompts/a.jinja'"),
    (lambda _: PromptConfig(chat_template="chat.j2"), UsageError, "--chat-template must be the text of a template (the name of a file would be the prompt of all rows), not 'chat.j2'"),
    (lambda _: run_job("x.jsonl"), TypeError, "config must be a JobConfig, not 'x.jsonl'"),
    (lambda _: JobConfig(inputs=5, model="m"), TypeError, "inputs must be a file name, a path or a list of them, not 5"),
    (lambda _: JobConfig(inputs=(), model="m"), UsageError, "no input; name a file, a folder, a glob or - for standard input"),
    (lambda _: JobConfig(inputs="a", model="m", output=5), TypeError, "output must be text or a path, not 5"),
    (lambda _: JobConfig(inputs="a", model="m", sampling=5), TypeError, "sampling must be SamplingParams, not 5"),
    (lambda _: JobConfig(inputs="a", model="m", keep=[5]), TypeError, "keep must be text or a list of texts, not [5]"),
    (lambda _: JobConfig(inputs="a", model="m", window="some"), UsageError, "--window must be all, or a whole number of at least 1, not 'some'"),
    (lambda _: PromptConfig(chat_template_kwargs=[("a", 1)]), TypeError, "chat_template_kwargs must be a dict, not [('a', 1)]"),
    (lambda _: SamplingParams(json_schema=dict), TypeError, "json_schema must be an object, or its JSON as text"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_a_value_of_a_wrong_type_is_named_at_the_call(llm, call, error, message):
    with pytest.raises(error) as caught:
        call(llm)
    assert str(caught.value).startswith(message)
    assert llm.unfinished == 0
