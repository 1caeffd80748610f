"""`--template`: Jinja over a row's columns."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest


def build(tools, template, *columns, **options):
    return tools.builder(template=template, **options).build(tools.rows(*columns))


def test_the_template_makes_the_prompt_from_the_columns(tools):
    template = "{% for e in examples %}{{ e.q }}={{ e.a }};{% endfor %}{{ question | upper }}\n"
    (draft,) = build(
        tools, template, {"examples": [{"q": "x", "a": 1}, {"q": "y", "a": 2}], "question": "z", "prompt": "no"}
    )
    assert tools.text_of(draft) == "<s>x=1;y=2;Z"


def test_a_rendered_prompt_is_the_users_message_and_has_the_prefix(tools):
    (draft,) = build(tools, "{{ a }}", {"a": "x"}, chat_template=tools.CHATML, prefix="P:", system="S")
    assert tools.text_of(draft).startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nP:x<|im_end|>")


def test_row_gives_access_to_columns_whose_names_are_not_identifiers(tools):
    first, second = build(
        tools, "{{ row['my column'] }}", {"my column": "x"}, {"my column": "y", "row": {"my column": "z"}}
    )
    assert (tools.text_of(first), tools.text_of(second)) == ("<s>x", "<s>z")


@pytest.mark.parametrize(
    ("template", "columns", "message"),
    [
        ("{{ a }}{{ b }}", {"a": 1}, "template: the row has no column 'b'"),
        ("{% if b %}x{% endif %}", {"a": 1}, "template: the row has no column 'b'"),
        ("{{ a.b }}", {"a": {}}, "template: 'dict object' has no attribute 'b'"),
        ("{{ a }}", {"a": None}, "template: column 'a' is null; write `or ''` after it to allow that"),
        ("{{ a.b }}", {"a": {"b": None}}, "template: a value is null; write `or ''` after it to allow that"),
        ("{{ a / 0 }}", {"a": 1}, "template: division by zero"),
        ("{{ a | nofilter }}", None, None),
        ("{{ a.__class__ }}", {"a": 1}, "template: access to attribute '__class__' of 'int' object is unsafe."),
        ("{{ a.append(1) }}", {"a": []}, "template: access to attribute 'append' of 'list' object is unsafe."),
        ("{{ 'x' * a }}", {"a": 10**12}, "template: it needs more than 2048 MiB of memory"),
        ("{{ a }}", {"a": (i for i in ())}, "template: a value cannot be sent to the process that renders templates: cannot pickle 'generator' object"),
    ],
)  # fmt: skip
def test_an_error_in_the_template_fails_only_its_row(tools, template, columns, message):
    from batchgen.errors import UsageError

    if columns is None:
        with pytest.raises(UsageError, match=r"--template is not valid Jinja \(line 1\): No filter named 'nofilter'"):
            build(tools, template)
        return
    (result,) = build(tools, template, columns)
    assert tools.error_of(result) == ("template_error", message)


def test_a_template_can_handle_missing_and_null_columns(tools):
    template = "{{ a or '-' }}{% if b is defined %}{{ b }}{% endif %}{{ c | default('?') }}"
    first, second = build(tools, template, {"a": None}, {"a": "x", "b": "y", "c": "z"})
    assert (tools.text_of(first), tools.text_of(second)) == ("<s>-?", "<s>xyz")


def test_html_is_not_escaped(tools):
    (draft,) = build(tools, "{{ a }}", {"a": "<b> & 'c'"})
    assert tools.text_of(draft) == "<s><b> & 'c'"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Decimal("1.50"), '"1.50"'),
        (dt.date(2024, 2, 29), '"2024-02-29"'),
        (dt.datetime(2024, 2, 29, 1, 2, 3, tzinfo=dt.UTC), '"2024-02-29T01:02:03+00:00"'),
        (dt.time(1, 2), '"01:02:00"'),
        (dt.timedelta(seconds=1.5), "1.5"),
        (b"ab", '"YWI="'),
        (np.int64(7), "7"),
        (np.float32(0.5), "0.5"),
        (np.bool_(True), "true"),
        (np.datetime64("2024-02-29"), '"2024-02-29"'),
        (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        (pa.scalar(Decimal("0.10")), '"0.10"'),
    ],
)
def test_tojson_knows_what_tables_hold(tools, value, text):
    (draft,) = build(tools, "{{ items | tojson }}", {"items": [{"a": value}]})
    assert tools.text_of(draft) == f'<s>[{{"a": {text}}}]'
    chat = "{{ documents | tojson }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = tools.rows({"prompt": "p", "documents": [{"a": value}]})
    (draft,) = tools.builder(chat_template=chat, bos=False).build(rows)
    assert tools.text_of(draft) == f'[{{"a": {text}}}]|p'


def test_a_template_sees_dates_and_numbers_as_such(tools):
    (draft,) = build(tools, "{{ d.year + 1 }} {{ n * 2 }}", {"d": dt.date(2024, 2, 29), "n": Decimal("1.5")})
    assert tools.text_of(draft) == "<s>2025 3.0"
