"""Thoughts in output rows: a job with a model that marks them, in every form of output, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen import LLM, JobConfig, SamplingParams, run_job
from batchgen.config import ModelConfig
from batchgen.prompts import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% else %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinking_model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template that opens thoughts; its end mark is the byte `A`, which it writes soon enough."""
    import shutil

    folder = tmp_path_factory.mktemp("models") / "thinking"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_model_is_known_to_think_by_its_template(thinking_model: Path, tiny_chat_model_dir: Path) -> None:
    thinking = load_tokenizer(ModelConfig(model=thinking_model)).thinking
    assert thinking is not None
    assert (thinking.open, thinking.close) == ("<think>", "</think>")
    assert load_tokenizer(ModelConfig(model=tiny_chat_model_dir)).thinking is None


def job(model: Path, rows: list[dict[str, Any]], output: Path, **options: Any) -> None:
    source = output.parent / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = {"max_tokens": 4, "ignore_eos": True} | options.pop("sampling", {})
    assert run_job(JobConfig(inputs=source, output=output, model=model, sampling=sampling, **options)).exit_code == 0


ROWS = [{"prompt": "a"}, {"prompt": "b", "reasoning": "the input's own"}]


def test_a_row_that_is_cut_inside_of_its_thoughts_has_no_text(thinking_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    job(thinking_model, ROWS, output)
    first, second = map(json.loads, output.read_text().splitlines())
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


def test_off_is_as_if_there_were_no_marks(thinking_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    job(thinking_model, ROWS, output, sampling={"reasoning": "off"})
    first, second = map(json.loads, output.read_text().splitlines())
    assert isinstance(first["text"], str)
    assert "reasoning" not in first
    assert "reasoning_tokens" not in first["usage"]
    assert second["reasoning"] == "the input's own"


def test_parquet_has_columns_for_them(thinking_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    job(thinking_model, ROWS[:1], output, sampling={"n": 2, "temperature": 1.0})
    (row,) = pq.read_table(output).to_pylist()
    assert (row["text"], row["usage"]["reasoning_tokens"]) == (None, 8)
    assert [choice["text"] for choice in row["choices"]] == [None, None]
    assert row["reasoning"] == row["choices"][0]["reasoning"]
    assert isinstance(row["choices"][1]["reasoning"], str)


def test_openais_form_has_them_in_the_message(thinking_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    job(thinking_model, ROWS[:1], output, output_format="openai")
    body = json.loads(output.read_text())["response"]["body"]
    message = body["choices"][0]["message"]
    assert (message["content"], body["choices"][0]["finish_reason"]) == (None, "length")
    assert isinstance(message["reasoning_content"], str)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


@pytest.mark.parametrize("options", [{}, {"output_format": "openai"}])
def test_rows_that_were_cut_inside_are_kept_when_the_input_grows(
    thinking_model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    output = tmp_path / "out.jsonl"
    job(thinking_model, ROWS[:1], output, **options)
    before = output.read_text()
    job(thinking_model, [*ROWS[:1], {"prompt": "more"}], output, **options)
    stats = json.loads((tmp_path / "out.jsonl.job" / "stats.json").read_text())
    assert output.read_text().splitlines()[0] == before.splitlines()[0]
    assert (stats["rows"], stats["rows_resumed"]) == (1, 1)


def test_labels_and_scores_are_those_of_the_prompt_with_thinking_switched_off(thinking_model: Path) -> None:
    from batchgen import PromptConfig

    llm = LLM(thinking_model, dtype="float32")
    params = SamplingParams(choices=("yes", "no"))
    off = PromptConfig(chat_template_kwargs={"enable_thinking": False})
    (label,) = llm.generate("Is it?", params)
    (switched,) = llm.generate("Is it?", params, prompt_options=off)
    assert (label.choice_probs, label.prompt_tokens) == (pytest.approx(switched.choice_probs), switched.prompt_tokens)
    (score,), (same) = llm.score("Is it?", "yes"), llm.score("Is it?", "yes", prompt_options=off)[0]
    assert score.score is not None
    assert same.score is not None
    assert (score.prompt_tokens, score.score.logprob) == (same.prompt_tokens, pytest.approx(same.score.logprob))
    on = PromptConfig(chat_template_kwargs={"enable_thinking": True})
    (forced,) = llm.generate("Is it?", params, prompt_options=on)
    assert forced.prompt_tokens == label.prompt_tokens - len("</think>")
    (thought,) = llm.generate("Is it?", SamplingParams(max_tokens=3, ignore_eos=True))
    assert (thought.text, thought.reasoning_tokens) == (None, 3)
