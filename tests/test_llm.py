"""A model in a Python program."""

from pathlib import Path

import pytest

from batchgen import LLM, EngineConfig, PromptConfig, SamplingParams
from batchgen.errors import ModelError

SHARED = "A shared prefix that is long enough for several chunks of sixteen tokens. "


def test_results_come_in_the_order_of_the_prompts(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir))
    prompts = [f"{SHARED}{i}" for i in (3, 1, 2)]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    results = llm.generate(prompts, params)
    assert [r.row for r in results] == [0, 1, 2]
    assert [r.completion_tokens for r in results] == [5, 5, 5]
    assert [llm.generate([p], params)[0].text for p in prompts] == [r.text for r in results]


def test_the_greedy_text_is_that_of_transformers(tiny_model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    (result,) = LLM(str(tiny_model_dir)).generate(["Once upon a time"], SamplingParams(max_tokens=12))
    assert list(result.token_ids) == ids.tolist()


def test_messages_go_through_the_chat_template(tiny_chat_model_dir: Path) -> None:
    llm = LLM(str(tiny_chat_model_dir), dtype="float32", device="cpu", engine=EngineConfig(batch_size=2))
    results = llm.generate(["hi", [{"role": "user", "content": "hi"}]], SamplingParams(max_tokens=3))
    assert results[0].prompt_tokens == results[1].prompt_tokens == 6
    (raw,) = llm.generate(["hi"], SamplingParams(max_tokens=3), prompt_options=PromptConfig(chat=False))
    assert raw.prompt_tokens == 3


def test_a_prompt_that_cannot_be_run_fails_alone(tiny_model_dir: Path) -> None:
    long, short = LLM(str(tiny_model_dir)).generate(["x" * 600, "x"], SamplingParams(max_tokens=2))
    assert (long.finish_reason, long.error_type, long.text) == ("error", "prompt_too_long", None)
    assert short.error_type is None


def test_a_prefix_of_an_earlier_call_is_not_run_again(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir))
    params = SamplingParams(max_tokens=2)
    llm.generate([f"{SHARED}a", f"{SHARED}b"], params)
    before = llm.engine.stats.prefill_tokens
    llm.generate([f"{SHARED}c", f"{SHARED}d"], params)
    assert before == 1 + len(SHARED) + 2
    assert llm.engine.stats.prefill_tokens - before == 2


def test_no_prompts_give_no_results(tiny_model_dir: Path) -> None:
    assert LLM(str(tiny_model_dir)).generate([]) == []


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        LLM(str(tmp_path / "nothing"))
