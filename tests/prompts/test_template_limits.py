"""Jinja's sandbox limits what one render of a template may write, loop over and call."""

from __future__ import annotations

import tracemalloc

import pytest

from batchgen.errors import RowError, UsageError
from batchgen.prompts.template import RowTemplate
from support.params import slow_but

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSIVE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
LOOPS = "its loops run more than 10000000 times"
CALLS = "it makes more than 1000000 calls"
SIZE = "it writes more than 10000000 characters"


@pytest.mark.parametrize(("template", "why"), slow_but([(ENDLESS, LOOPS)], [(ENDLESS, LOOPS), (RECURSIVE, CALLS)]))
def test_a_template_that_does_not_end_fails_only_its_row(tools, template, why):
    b = tools.builder(template="{% if a %}" + template + "{% endif %}b")
    first, second, third = b.build(tools.rows({"a": 0}, {"a": 1}, {"a": 0}))
    assert tools.text_of(first) == tools.text_of(third) == "<s>b"
    assert tools.error_of(second) == ("template_error", f"template: {why}")


def test_a_chat_template_that_recurses_for_ever_is_refused_before_the_first_row(tools):
    with pytest.raises(
        UsageError, match=r"^the model's chat template does not work for a short message: .*recursion.*; correct it"
    ):
        tools.builder(chat_template="{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 'x' * (big * 10000) }}", "the result of * is too large"),
        ("{{ (big * 10000) * 'x' }}", "the result of * is too large"),
        ("{{ [0] * (big * 10000) }}", "the result of * is too large"),
        ("{{ 10 ** big }}", "the result of ** is too large"),
        ("{% set x = 'x' * big %}{% for i in range(9999) %}{{ x }}{% endfor %}", SIZE),
        ("{% set x = 'x' * big %}{% macro m() %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endmacro %}{{ m() | length }}", SIZE),
    ],
)  # fmt: skip
def test_a_template_that_grows_without_end_fails_its_row_before_memory_runs_out(tools, template, why):
    b = tools.builder(template="{% set big = 1000000 %}" + template)
    tracemalloc.start()
    try:
        (row,) = b.build(tools.rows({"a": 1}))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tools.error_of(row) == ("template_error", f"template: {why}")
    assert peak < 100_000_000


def test_usual_templates_are_not_refused(tools):
    template = (
        "{{ 'a' * 3 }}|{{ 2 ** 10 }}|{{ 2 ** 0.5 }}|{{ 3000 * 4000 * 5000 }}|{{ 1.5 * 2 }}|{{ '%05d' % 7 }}|{{ 'x' | center(3) }}"
        "|{{ a + ['b'] }}|{% for i in range(2, 9, 3) %}{{ i }}{% endfor %}|{{ a | tojson(indent=2) }}"
    )
    said = "aaa|1024|1.4142135623730951|60000000000|3.0|00007| x |['a', 'b']|258|[\n  \"a\"\n]"
    (draft,) = tools.builder(template=template).build(tools.rows({"a": ["a"]}))
    assert tools.text_of(draft) == "<s>" + said
    chat = tools.builder(chat_template="{% set a = ['a'] %}" + template, bos=False)
    (draft,) = chat.build(tools.rows({"prompt": "a"}))
    assert tools.text_of(draft) == said


def test_the_limits_apply_to_each_render_separately():
    template = RowTemplate("{{ a.strip() }}{{ a.strip() }}", max_calls=3)
    assert [template.render({"a": " x "}) for _ in range(5)] == ["xx"] * 5
    with pytest.raises(RowError, match="it makes more than 3 calls"):
        RowTemplate("{% for i in a %}{{ i.strip() }}{% endfor %}", max_calls=3).render({"a": ["x"] * 4})


def test_running_out_of_memory_or_recursion_fails_the_row(tools, monkeypatch):
    endless = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    b = tools.builder(template="{% if a %}" + endless + "{% endif %}b")
    first, second = b.build(tools.rows({"a": 1}, {"a": 0}))
    assert tools.error_of(first)[0] == "template_error"
    assert "recursion" in tools.error_of(first)[1]
    assert tools.text_of(second) == "<s>b"

    def no_memory(*_: object) -> str:
        raise MemoryError

    template = RowTemplate("x")
    monkeypatch.setattr(template._template, "render", no_memory)
    with pytest.raises(RowError, match="template: MemoryError"):
        template.render({})


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "{% if 1 %}" * 3000 + "{% endif %}" * 3000]
)
def test_a_template_that_cannot_be_compiled_is_a_usage_error(tools, source):
    with pytest.raises(UsageError):
        tools.builder(template=source)
