"""Chat templates that write the date: all runs and shards of a job write the date of its first run."""

from dataclasses import replace
from datetime import datetime

import pytest

import batchgen.job_setup
from batchgen import JobConfig, ModelConfig, PromptConfig, SamplingParams, plan_job, run_job
from batchgen.assembly import merge_job
from batchgen.process.templates import template_process
from batchgen.prompts.chat_template import ChatTemplate
from support.tokenizers_by_hand import byte_tokenizer

pytestmark = pytest.mark.usefixtures("loaded_once")

# As Llama 3.2 has it.
TEMPLATE = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
    "{{- 'Today Date: ' + date_string }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
)


class Clock:
    """Replaces the class `datetime`; the test sets what `now` returns."""

    time = datetime(2026, 3, 1, 23, 59, 58)

    def now(self):
        return self.time


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(batchgen.job_setup, "datetime", clock)
    return clock


@pytest.fixture
def config(tiny_model_dir, write_jsonl):
    source = write_jsonl([{"prompt": "a"}, {"prompt": "b"}])
    return JobConfig(
        inputs=source, output=str(source.with_name("out.jsonl")), model=ModelConfig(model=str(tiny_model_dir)),
        prompts=PromptConfig(chat_template=TEMPLATE), sampling=SamplingParams(max_tokens=2),
    )  # fmt: skip


def test_results_of_yesterday_are_used_again_today(config, clock, write_jsonl):
    run_job(config)
    clock.time = datetime(2026, 3, 2, 0, 0, 1)
    write_jsonl([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    stats = run_job(config).stats
    assert (stats["rows_resumed"], stats["rows_ok"]) == (2, 1)
    tokens = len("Today Date: 01 Mar 2026<|user|>c") - len("<|user|>") + 1  # which is one token
    assert stats["prefill_tokens"] == tokens
    stats = run_job(replace(config, overwrite=True)).stats
    assert (stats["rows_resumed"], stats["rows_ok"]) == (0, 3)


def test_a_plan_uses_the_date_of_a_job_that_has_begun(config, clock):
    run_job(config)
    assert plan_job(config).figures["tree"][0]["text"] == "Today Date: 01 Mar 2026<|user|>"
    for other in (replace(config, overwrite=True), replace(config, output=f"{config.output}.jsonl")):
        text = plan_job(other).figures["tree"][0]["text"]
        assert text.startswith("Today Date: ")
        assert "01 Mar 2026" not in text


def test_shards_that_start_together_are_one_job(config, clock, monkeypatch):
    run_job(replace(config, shard="1/2"))
    clock.time = datetime(2026, 3, 1, 23, 59, 59)
    found = [None]  # the second shard looked before the first had begun the job
    look = batchgen.job_setup.date_of_job
    monkeypatch.setattr(batchgen.job_setup, "date_of_job", lambda *place: found.pop() if found else look(*place))
    run_job(replace(config, shard="2/2"))
    assert found == []
    assert merge_job(str(config.output)).stats["job"]["rows_ok"] == 2


NOW = datetime(2026, 3, 1, 9, 5, 7)
ASKED = "%Y-%m-%d %-d %B %b %H:%M:%S %I %p %A %a %y %j %f %G-W%V-%u %R %s 100%% %%d %%%d %"
OF_TOOLS = {"default": "{{ strftime_now('%Y') }} plain", "tool_use": "{{ strftime_now('%Y') }} {{ tools[0].name }}"}


@pytest.mark.parametrize(
    ("source", "variables", "expected"),
    [
        # Chat templates remove the newline after a block.
        ("\n {% if true %}{{ strftime_now(" + repr(ASKED) + ") }}{% endif %}\n{{ messages[0].content }}", None, f"\n{NOW.strftime(ASKED)}x"),
        (OF_TOOLS, None, "2026 plain"),
        (OF_TOOLS, {"tools": [{"name": "f"}]}, "2026 f"),
    ],
)  # fmt: skip
def test_dates_in_templates_are_formatted_as_in_python_also_in_those_for_tools(source, variables, expected):
    own = source if isinstance(source, str) else None
    template = ChatTemplate(byte_tokenizer(chat_template=None if own else source), own, {}, now=NOW)
    messages = [{"role": "user", "content": "x"}]
    call = template.call(messages, variables)
    (answer,) = template_process().render(call.form, call.source, [call.given])
    assert template.text(messages, answer) == expected
