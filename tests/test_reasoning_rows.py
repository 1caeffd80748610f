"""Jobs with a thinking model separate thoughts from answers in every output format, and read them back."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen import LLM, EngineConfig, JobConfig, SamplingParams, run_job
from support.records import json_rows
from support.tiny_model import THINKING_TEMPLATE, save_tiny_llama


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "thinking", chat=THINKING_TEMPLATE)


def job(model: Path, rows: list[dict[str, Any]], output: Path, **options: Any) -> None:
    source = output.parent / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = {"max_tokens": 4, "ignore_eos": True} | options.pop("sampling", {})
    assert run_job(JobConfig(inputs=source, output=output, model=model, sampling=sampling, **options)).exit_code == 0


ROWS = [{"prompt": "a"}, {"prompt": "b", "reasoning": "the input's own"}]


def test_a_row_cut_inside_its_thoughts_has_no_text(thinking_model, tmp_path):
    output = tmp_path / "out.jsonl"
    job(thinking_model, ROWS, output)
    first, second = json_rows(output)
    assert (first["text"], first["finish_reason"], first["error"]) == (None, "length", None)
    assert isinstance(first["reasoning"], str)
    assert first["usage"] == {
        "prompt_tokens": first["usage"]["prompt_tokens"],
        "completion_tokens": 4,
        "reasoning_tokens": 4,
    }
    assert second["input_reasoning"] == "the input's own"
    keys = list(first)
    assert keys.index("reasoning") == keys.index("finish_reason") + 1


def test_the_openai_format_has_thoughts_in_the_message(thinking_model, tmp_path):
    output = tmp_path / "out.jsonl"
    job(thinking_model, ROWS[:1], output, output_format="openai")
    body = json.loads(output.read_text())["response"]["body"]
    message = body["choices"][0]["message"]
    assert (message["content"], body["choices"][0]["finish_reason"]) == (None, "length")
    assert isinstance(message["reasoning_content"], str)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


@pytest.mark.parametrize("options", [{}, {"output_format": "openai"}])
def test_rows_cut_inside_their_thoughts_are_kept_when_the_input_grows(thinking_model, tmp_path, options):
    output = tmp_path / "out.jsonl"
    job(thinking_model, ROWS[:1], output, **options)
    before = output.read_text()
    job(thinking_model, [*ROWS[:1], {"prompt": "more"}], output, **options)
    stats = json.loads((tmp_path / "out.jsonl.job" / "stats.json").read_text())
    assert output.read_text().splitlines()[0] == before.splitlines()[0]
    assert (stats["rows"], stats["rows_resumed"]) == (1, 1)


def test_labels_and_scores_use_the_prompt_with_thinking_off(thinking_model):
    from batchgen import PromptConfig

    llm = LLM(thinking_model, dtype="float32")
    params = SamplingParams(choices=("yes", "no"))
    off = PromptConfig(chat_template_kwargs={"enable_thinking": False})
    (label,) = llm.generate("Is it?", params)
    (switched,) = llm.generate("Is it?", params, prompt_options=off)
    assert (label.choice_probs, label.prompt_tokens) == (pytest.approx(switched.choice_probs), switched.prompt_tokens)
    (score,), (same) = llm.score("Is it?", "yes"), llm.score("Is it?", "yes", prompt_options=off)[0]
    assert (score.prompt_tokens, score.score.logprob) == (same.prompt_tokens, pytest.approx(same.score.logprob))
    on = PromptConfig(chat_template_kwargs={"enable_thinking": True})
    (forced,) = llm.generate("Is it?", params, prompt_options=on)
    assert forced.prompt_tokens == label.prompt_tokens - len("</think>")
    (thought,) = llm.generate("Is it?", SamplingParams(max_tokens=3, ignore_eos=True))
    assert (thought.text, thought.reasoning_tokens) == (None, 3)


def test_a_finished_completion_with_empty_thoughts_is_not_kept_for_a_resume(thinking_model):
    llm, lengths, kept = LLM(thinking_model), {}, []
    params = SamplingParams(reasoning_budget=0, n=4, temperature=1.0, max_tokens=60, stop=tuple("abcdefgh"))

    def on_token(*_: Any) -> None:
        kept.extend(part for parts in llm.engine.under_way().values() for part in parts.values())

    llm.add("x", params, on_result=lambda result: lengths.update(enumerate(result.completions)), on_token=on_token)
    llm.run()
    assert len({len(c.token_ids) for c in lengths.values()}) > 1, "all ended together"
    assert {c.reasoning for c in lengths.values()} == {None}
    assert {part.finish_reason for part in kept} == {""}  # else the tokens of the marks would not be counted


def test_thoughts_and_answer_are_the_same_after_preemption(thinking_model):
    pytest.importorskip("llguidance")
    params = SamplingParams(regex="([a-z]{3} ){12}", temperature=1.0, max_tokens=90, reasoning_budget=20)
    prompts = [f"{i}" * 30 for i in range(4)]
    want = LLM(thinking_model, dtype="float32").generate(prompts, params)
    small = LLM(thinking_model, dtype="float32", engine=EngineConfig(debug=True))
    block = small.engine.sizes.bytes_per_token * small.engine.sizes.block_size
    small = LLM(thinking_model, dtype="float32", engine=EngineConfig(debug=True, kv_memory=f"{block * 6}B"))
    got = small.generate(prompts, params)
    assert small.stats.preemptions > 0
    assert [(r.text, r.reasoning) for r in got] == [(r.text, r.reasoning) for r in want]
    assert all(r.finish_reason == "stop" for r in got)
