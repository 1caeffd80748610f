"""A template that only copies the contents of messages is not rendered for every row; any other one is."""

from collections.abc import Iterator
from typing import Any

import pytest

from batchgen.process.templates import TemplateProcess, TemplateShape

TEXTS = ["a", " a \n", "{{ a }}", "<t>a</t>", "<t>", "\0a\0", "\ud800", "no", "x" * 99]


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def given(*texts: str) -> dict[str, Any]:
    roles = ("user",) if len(texts) == 1 else ("system", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return {"conversations": [messages], "continue_final_message": False, "add_generation_prompt": True, "eos": "</s>"}


def shape_of(process: TemplateProcess, template: str, *texts: str) -> TemplateShape | None:
    (shape,) = process.render("shape", template, [given(*texts)])
    return shape if isinstance(shape, TemplateShape) else None


COPIED = [
    "{{ messages[0].content }}",
    "{{ messages[0]['content'] | trim }}b",
    "{{ 'a' + messages[0].content.strip() + 'b' }}",
    "{% set t = 'q: ' + messages[0].content %}{% set t = t + 'b' %}{{ t }}",
    "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}{{ messages[0].content[0].text }}{% endif %}",
    "{% if messages[0].content is mapping or not messages[0].content %}b{% else %}{{ messages[0].content }}{% endif %}",
    "{% if not (messages[0].content.startswith('<t>') and messages[0].content.endswith('</t>')) %}{{ messages[0].content }}{% endif %}",
    "{% if 'no' in messages[0].content %}b{% else %}{{ messages[0].content }}{% endif %}",
    "{% if messages[0].content.strip().startswith('a') %}b{% else %}{{ messages[0].content }}{% endif %}",
    "{% macro end(t) %}{{ t ~ eos }}{% endmacro %}{{ messages[0].content }}{{ end('b') }}",
    "no content",
]
LOOKED_AT = [
    "{{ messages[0].content | length }}",
    "{{ messages[0].content | upper }}",
    "{{ messages[0].content[0] }}",
    "{{ messages[0].content.strip('a') }}",
    "{{ messages[0].content.split('t')[0] }}",
    "{{ ('a' + messages[0].content) | trim }}",
    "{{ ('%s' % messages[0].content) | trim }}",
    "{{ ('{}'.format(messages[0].content)) | trim }}",
    "{{ (messages[0].content ~ 'b') | length }}",
    "{% if messages[0].content == 'a' %}b{% else %}{{ messages[0].content }}{% endif %}",
    "{% if messages[0].content is iterable %}b{% endif %}",
    "{% if messages[0].content is sequence %}b{% endif %}",
    "{% if messages[0].content is lower %}b{% endif %}",
    "{% if messages[0].content in ['a', 'no'] %}b{% endif %}",
    "{% for c in messages[0].content %}{{ c }}.{% endfor %}",
    "{% set t %}{{ messages[0].content }}{% endset %}{{ t | length }}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "{% macro f(t) %}{{ t }}{% endmacro %}{{ f(messages[0].content) | length }}",
    "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "{{ messages | tojson }}",
    "{{ messages | string }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages[0].content }}{{ messages[0].content }}",
    "{{ messages[0].content }}{{ [1, 2] | random }}",
    "{{ messages[0].content }}{{ lipsum() }}",
    "{{ raise_exception(messages[0].content) }}",
]


@pytest.mark.parametrize("template", COPIED)
def test_the_shape_of_a_template_that_copies_gives_what_it_renders(process, template):
    shape = shape_of(process, template, "a")
    found = [shape.filled([text]) for text in TEXTS]
    rendered = process.render("chat", template, [given(text) for text in TEXTS])
    held = [(text, real) for text, real in zip(found, rendered, strict=True) if text is not None]
    assert len(held) >= 6
    assert [text for text, _ in held] == [real for _, real in held]


@pytest.mark.parametrize("template", LOOKED_AT)
def test_a_template_that_looks_at_a_content_has_no_shape(process, template):
    assert shape_of(process, template, "a") is None


def test_a_shape_does_not_hold_for_an_empty_text(process):
    shape = shape_of(process, "{{ messages[0].content }}", "a")
    assert [shape.filled([text]) for text in ("", " \n", "a")] == [None, None, "a"]


def test_rows_of_a_template_that_copies_are_rendered_once(tools, monkeypatch):
    builder = tools.builder(chat_template=tools.CHATML, system="S")
    forms: list[str] = []
    render = TemplateProcess.render

    def seen(self: TemplateProcess, form: Any, source: str, inputs: Any, is_stopped: Any = lambda: False) -> list[Any]:
        forms.append(form)
        return render(self, form, source, inputs, is_stopped)

    monkeypatch.setattr(TemplateProcess, "render", seen)
    conversation = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = tools.rows({"prompt": "a"}, {"prompt": " b "}, {"messages": conversation})
    one, two, long = map(tools.text_of, builder.build(rows))
    assert forms == ["shape", "chat"]
    start, end = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert [text.partition(start)[2] for text in (one, two)] == [f"a{end}", f" b {end}"]
    assert long.endswith(f"c{end}")
