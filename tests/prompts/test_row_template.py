"""`--template`: Jinja over a row's columns."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest


def build(tools, template, *columns, **options):
    return tools.builder(template=template, **options).build(tools.rows(*columns))


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
