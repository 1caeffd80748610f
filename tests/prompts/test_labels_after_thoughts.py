"""Labels and scored texts come after the model's thoughts, even if the chat template cannot switch thinking off."""

from dataclasses import replace
from typing import Any

import pytest

from batchgen.config import PromptConfig
from batchgen.parsers.thinking import FORMATS, HARMONY, ThinkingFormat
from batchgen.prompts import PromptBuilder
from batchgen.request import Request
from batchgen.sampling_params import SamplingParams
from support.tokenizers_by_hand import byte_tokenizer, loaded, rows, text_of

THINK = FORMATS[1]
R1 = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SWITCH = PLAIN + "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"


def prompt(template: str, thinking: ThinkingFormat | None, row: dict[str, Any], **options: Any) -> str:
    sampling = options.pop("sampling", SamplingParams(choices=("yes", "no")))
    tokenizer = replace(loaded(byte_tokenizer(bos=False, chat_template=template)), thinking=thinking)
    (built,) = PromptBuilder(tokenizer, PromptConfig(**options), sampling).build(rows(row))
    assert isinstance(built, Request), built
    return text_of(built)


@pytest.mark.parametrize(
    ("template", "thinking", "expected"),
    [
        (R1, THINK, "user: a|assistant: <think>\n\n</think>\n\n"),
        (PLAIN, THINK, "user: a|assistant: "),
        (R1, None, "user: a|assistant: <think>\n"),
        (SWITCH, THINK, "user: a|assistant: "),
        (OSS, HARMONY, "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_labels_and_scores_begin_at_the_answer(template, thinking, expected):
    assert prompt(template, thinking, {"prompt": "a"}) == expected
    assert prompt(template, thinking, {"messages": [{"role": "user", "content": "a"}]}) == expected
    scored = prompt(template, thinking, {"prompt": "a", "completion": "b"}, score=True, sampling=SamplingParams())
    assert scored == expected


def test_thoughts_stay_open_for_completions_and_where_the_user_asks_for_them():
    opened = "user: a|assistant: <think>\n"
    assert prompt(R1, THINK, {"prompt": "a"}, sampling=SamplingParams()) == opened
    assert prompt(R1, THINK, {"prompt": "a"}, sampling=SamplingParams(choices=("x", "y"), reasoning="off")) == opened
    assert prompt(SWITCH, THINK, {"prompt": "a"}, chat_template_kwargs={"enable_thinking": True}) == opened
    assert prompt(R1, THINK, {"prompt": "a"}, prompt_logprobs=True, sampling=SamplingParams()) == opened
