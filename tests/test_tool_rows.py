"""Tools in rows and OpenAI bodies reach the chat template, and calls of them appear in every output format."""

import datetime as dt
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import JobConfig, PromptConfig, run_job
from support.progress import Recorder
from support.records import json_rows
from support.tiny_model import save_tiny_llama

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<|assistant|>"
# With this format, everything the model writes is a call; its lines `key: value` are the arguments.
RESPONSE = {
    "start_anchor": "<|user|>",
    "fields": {
        "tool_calls": {
            "open": "<|assistant|>",
            "content": "kv-lines",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "weather", "arguments": "{content}"}},
        }
    },
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
ENDS = {"max_tokens": 3, "stop_token_ids": list(range(260))}
"""The first token ends a completion."""
CALL = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.fixture(scope="module")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_llama(tmp_path_factory.mktemp("models") / "calling", chat=TEMPLATE)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"response_template": RESPONSE}))
    return folder


def run(model: Path, rows: list[dict[str, Any]], output: Path, **options: Any) -> None:
    source = output.parent / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = ENDS | options.pop("sampling", {})
    assert run_job(JobConfig(inputs=source, output=output, model=model, sampling=sampling, **options)).exit_code == 0


ROWS = [{"prompt": "a", "tools": TOOLS, "tool_calls": "the input's own"}, {"prompt": "a"}]


def without_ids(calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if calls is None else [{k: v for k, v in call.items() if k != "id"} for call in calls]


def test_a_row_with_tools_has_the_calls_of_its_answer(calling_model, tmp_path):
    output = tmp_path / "out.jsonl"
    run(calling_model, ROWS, output)
    first, second = json_rows(output)
    assert without_ids(first["tool_calls"]) == [CALL]
    assert first["tool_calls"][0]["id"].startswith("call_")
    assert (first["text"], first["finish_reason"], first["input_tool_calls"]) == ("", "stop", "the input's own")
    assert "tool_calls" not in second
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] + len(json.dumps(TOOLS))


def test_the_openai_format_has_calls_in_the_message(calling_model, tmp_path):
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    rows = [
        {"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": body | more}
        for i, more in enumerate(({}, {"tool_choice": "none"}, {"n": 2}))
    ]
    output = tmp_path / "out.jsonl"
    run(calling_model, rows, output, output_format="openai")
    called, silent, twice = (row["response"]["body"]["choices"] for row in json_rows(output))
    assert called[0]["finish_reason"] == "tool_calls"
    assert called[0]["message"]["content"] is None
    assert without_ids(called[0]["message"]["tool_calls"]) == [CALL]
    assert (silent[0]["finish_reason"], silent[0]["message"]["content"]) == ("stop", "")
    assert "tool_calls" not in silent[0]["message"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in twice}
    assert len(ids) == 2


def test_tools_of_the_command_apply_to_every_row_but_a_body_with_tool_choice_none(calling_model, tmp_path):
    body = {"messages": [{"role": "user", "content": "a"}], "tool_choice": "none"}
    rows = [{"prompt": "a"}, {"url": "/v1/chat/completions", "body": body}]
    output = tmp_path / "out.jsonl"
    run(calling_model, rows, output, prompts=PromptConfig(chat_template_kwargs={"tools": TOOLS}))
    first, second = json_rows(output)
    assert (without_ids(first["tool_calls"]), "tool_calls" in second) == ([CALL], False)


@pytest.fixture
def naming_model(calling_model: Path, tmp_path: Path) -> Path:
    """A model whose template shows only the names of tools."""
    folder = tmp_path / "naming"
    shutil.copytree(calling_model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("tools | tojson", "tools[0].function.name"))
    return folder


def test_tools_may_have_values_that_json_does_not_have(naming_model, tmp_path):
    since = {"type": "function", "function": {"name": "weather", "since": dt.date(2020, 1, 1)}}
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "tools": [since]}]), tmp_path / "in.parquet")
    output = tmp_path / "out.jsonl"
    run_job(JobConfig(inputs=tmp_path / "in.parquet", output=output, model=naming_model, sampling=ENDS, keep=()))
    assert without_ids(json_rows(output)[0]["tool_calls"]) == [CALL]


def test_tools_with_a_lone_surrogate_can_be_stored(naming_model, tmp_path):
    tool = {"type": "function", "function": {"name": "weather", "description": "half of \ud83d"}}
    output = tmp_path / "out.jsonl"
    run(naming_model, [{"prompt": "a", "tools": [tool]}], output, shard="1/1", merge=True)
    assert without_ids(json_rows(output)[0]["tool_calls"]) == [CALL]


def test_a_model_with_an_unknown_format_of_calls_gives_a_note(tiny_model_dir, tmp_path):
    output, told = tmp_path / "out.jsonl", Recorder()
    prompts = PromptConfig(chat_template=TEMPLATE)
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(ROWS[0]) + "\n")
    run_job(JobConfig(inputs=source, output=output, model=tiny_model_dir, sampling=ENDS, prompts=prompts), told)
    assert "tool_calls" not in json_rows(output)[0]
    assert (
        "rows have tools, but batchgen does not know how this model writes calls: they stay in the text" in told.notes
    )
