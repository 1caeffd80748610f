"""Request files from the documentation of OpenAI's Batch API and vLLM's run_batch run unchanged and are answered in OpenAI's format."""

from pathlib import Path
from typing import Any

import pytest

from batchgen import JobConfig, JobReport, SamplingParams, run_job
from batchgen.errors import Interrupted
from batchgen.progress import Silent
from support.progress import Recorder, interrupt, rows_done
from support.records import json_rows

pytestmark = pytest.mark.usefixtures("loaded_once")

Rows = list[dict[str, Any]]
CHAT, RAW = "/v1/chat/completions", "/v1/completions"


def ask(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "some-model-8b", **body}}


def talk(system: str, user: Any) -> Rows:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


CHAIR = [
    {"type": "text", "text": "chair"},
    {"type": "image_url", "image_url": {"url": "https://example.org/chair.jpg"}},
]
# Like the examples of OpenAI's guide: a temperature and a JSON object as response format; and a picture, which is not supported.
IN_JSON = {"temperature": 0.1, "max_tokens": 8, "response_format": {"type": "json_object"}}
EXAMPLES = [
    ask("task-0", CHAT, messages=talk("Answer in JSON.", "A film about ships."), **IN_JSON),
    ask("task-1", CHAT, messages=talk("Describe it.", CHAIR), temperature=0.2, max_tokens=8),
]
# Like vLLM's: max_completion_tokens; and embeddings and scores, which this job does not support.
VLLM = [
    ask("request-1", CHAT, messages=talk("You are a friendly clerk.", "Good morning!"), max_completion_tokens=6),
    ask("request-2", CHAT, messages=talk("You are a grumpy clerk.", "Good morning!"), max_completion_tokens=6),
    ask("request-3", "/v1/embeddings", input="You are a friendly clerk."),
    ask("request-4", "/v1/score", text_1="Where is it?", text_2=["Here.", "There."]),
]


def run(model: Path, source: Path, progress: Silent | None = None, **options: Any) -> JobReport:
    options = {"output": str(source.with_name("out.jsonl")), "sampling": SamplingParams(max_tokens=4)} | options
    options.setdefault("output_format", "openai")
    return run_job(JobConfig(inputs=source, model=model, **options), progress)


def bodies(report: JobReport) -> Rows:
    return [record["response"]["body"] for record in json_rows(report.output)]


def test_the_files_of_the_documentation_are_answered_and_unsupported_requests_fail_alone(
    tiny_chat_model_dir, write_jsonl
):
    progress = Recorder()
    report = run(tiny_chat_model_dir, write_jsonl([*EXAMPLES, *VLLM]), progress)
    answers = json_rows(report.output)
    assert report.exit_code == 3
    assert [record["custom_id"] for record in answers] == [ask["custom_id"] for ask in (*EXAMPLES, *VLLM)]
    served = "use /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses"
    picture = "body.messages[1].content[1] has type 'image_url'; only text can be sent"
    assert [record["error"] and (record["error"]["code"], record["error"]["message"]) for record in answers] == [
        None,
        ("unsupported_content", picture),
        None,
        None,
        ("invalid_row", "url is /v1/embeddings; add --embed for it"),
        ("invalid_row", f"url is '/v1/score'; {served}"),
    ]
    first = answers[0]["response"]["body"]
    assert first["choices"][0]["message"]["content"].startswith("{")
    assert first["model"] == str(tiny_chat_model_dir)
    note = f"rows ask for model 'some-model-8b'; all rows are run on {str(tiny_chat_model_dir)!r}"
    assert progress.notes.count(note) == 1


def test_chats_and_completions_with_their_own_parameters_can_share_a_file_and_a_custom_id(
    tiny_chat_model_dir, write_jsonl
):
    rows = [
        ask("same", RAW, prompt="Once upon", max_tokens=3),
        ask("same", CHAT, messages=talk("Hm.", "Hello"), max_tokens=2, temperature=1.5, seed=3, n=2, top_k=-1),
        ask("same", RAW, prompt="Once upon", max_tokens=3),
        ask("own", RAW, prompt=["Once upon"], logprobs=2, stream=False),
        ask("own", CHAT, messages=talk("Hm.", "Hello"), logprobs=True, top_logprobs=1),
        {"custom_id": "label", "method": "POST", "url": RAW, "body": {"prompt": "Yes or no? ", "guided_choice": ["yes", "no"]}},
    ]  # fmt: skip
    report = run(tiny_chat_model_dir, write_jsonl(rows))
    one, two, again, raw, chat, label = bodies(report)
    assert report.exit_code == 0
    ids = [record["custom_id"] for record in json_rows(report.output)]
    assert ids == ["same", "same", "same", "own", "own", "label"]
    assert [b["object"] == "chat.completion" for b in (one, two, again, raw, chat, label)] == [0, 1, 0, 0, 1, 0]
    assert (one["choices"], one["usage"]["completion_tokens"]) == (again["choices"], 3)
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["usage"]["completion_tokens"] <= 4  # of both
    entries = raw["choices"][0]["logprobs"]
    assert {len(entries[n]) for n in entries} == {raw["usage"]["completion_tokens"]}
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == chat["usage"]["completion_tokens"]
    # Greedy: the sampled token is the likeliest one.
    assert all(e["top_logprobs"] == [{k: e[k] for k in ("token", "logprob", "bytes")}] for e in content)
    assert label["choices"][0]["text"] in ("yes", "no")
    assert sum(label["choice_probs"].values()) == pytest.approx(1.0)


def test_a_resumed_run_writes_the_same_bytes(tiny_chat_model_dir, write_jsonl):
    rows = [ask(f"r{i}", (CHAT, RAW)[i % 2], messages=talk("Hm.", f"{i}"), prompt=f"{i}", temperature=1, n=1 + i % 3) for i in range(12)]  # fmt: skip
    source = write_jsonl([*rows, ask("e", "/v1/embeddings", input="x"), rows[0]])
    whole = run(tiny_chat_model_dir, source, output=str(source.with_name("whole.jsonl")))
    with pytest.raises(Interrupted):
        run(tiny_chat_model_dir, source, Recorder(rows_done(6), interrupt))
    resumed = run(tiny_chat_model_dir, source)
    assert 0 < resumed.stats["rows_resumed"] < 13
    assert Path(resumed.output).read_bytes() == Path(whole.output).read_bytes()


def test_a_finished_output_is_converted_to_another_format_without_the_model_with_its_logprobs(
    tiny_chat_model_dir, write_jsonl
):
    source = write_jsonl([*VLLM, ask("raw", RAW, prompt="Once", temperature=1, n=2, logprobs=1)])
    first = run(tiny_chat_model_dir, source)
    answers = Path(first.output).read_bytes()
    assert run(tiny_chat_model_dir, source).already_finished
    progress = Recorder()
    rows = run(tiny_chat_model_dir, source, progress, output_format="rows")
    assert (rows.stats["rows_resumed"], rows.stats["steps"]) == (3, 0)
    assert progress.notes[0] == f"{rows.output} was finished: 3 of its results are used again"
    assert [list(row)[-1] for row in json_rows(rows.output)] == ["error"] * 5
    back = run(tiny_chat_model_dir, source)
    assert (back.stats["rows_resumed"], back.stats["steps"]) == (3, 0)
    assert Path(back.output).read_bytes() == answers
