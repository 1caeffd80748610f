"""Reading and writing JSON lines, one line at a time."""

import datetime as dt
import decimal
import json
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.records.jsonl import MAX_DEPTH, parse_line, to_json


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{nope}", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b'{"a": 1', "not JSON: Expecting ',' delimiter at column 8"),
        (b'{"a": 1} {"a": 2}', "not JSON: Extra data at column 10"),
        (b'{"a": "\x00"}', "not JSON: Invalid control character at column 8 (in text it is written \\u0000)"),
        (b"\x00\x00\x00", "not JSON: Expecting value at column 1"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 8 (if the file is in Latin-1 or Windows-1252: --encoding cp1252)"),
        (b'{"a": "\xc3\xa9 \xff"}', "not UTF-8 at byte 11"),
        (b'\xff\xfe{\x00"\x00', "not UTF-8 at byte 1 (if the file is in UTF-16: --encoding utf-16)"),
        (
            b'{"a": "\xed\xa0\x80"}',
            "not UTF-8 at byte 8 (if the file is in Latin-1 or Windows-1252: --encoding cp1252)",
        ),
        (b"[1]", "not an object but a list"),
        (b'"text"', "not an object but text"),
        (b"12.5", "not an object but a number"),
        (b"true", "not an object but true or false"),
        (b"null", "not an object but null"),
        (b"NaN", "not an object but a number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not usable: a whole number with thousands of digits"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested more than 100 levels deep"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 100 levels deep"),
        (b"[" * 100_000, "nested more than 100 levels deep"),
    ],
)
def test_a_malformed_line_gives_its_reason(line, reason):
    assert parse_line(line) == reason


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (b"[", "(a JSON array becomes JSONL with: jq -c '.[]')"),
        (b"[{", "(a JSON array becomes JSONL with: jq -c '.[]')"),
        (b'[{"a": 1},', "(a JSON array becomes JSONL with: jq -c '.[]')"),
        (b'[{"a": 1}]', "(a JSON array becomes JSONL with: jq -c '.[]')"),
        (b'[{"role": "user", "content": "a"}]', "(a list of messages becomes a row with: jq -c '{messages: .}')"),
        (b"{", "(objects over several lines become JSONL with: jq -c .)"),
        (b'{"a": 1,}', "(leave out the comma before the bracket)"),
        (b'{"a": [1, ]}', "(leave out the comma before the bracket)"),
        (b'{"a": 1},', "(leave out the comma after the object)"),
        (b"{'a': 1}", "(this is Python's form; json.dumps writes JSON)"),
        (b'{"a": True}', "(this is Python's form; json.dumps writes JSON)"),
        (b'{"a": [None]}', "(this is Python's form; json.dumps writes JSON)"),
        (b"# a", "(JSON has no comments)"),
        (b"// a", "(JSON has no comments)"),
        (b'{"a": "\t"}', "(in text it is written \\u0009)"),
    ],
)
def test_common_mistakes_in_json_give_a_hint(line, hint):
    reason = parse_line(line)
    assert isinstance(reason, str)
    assert reason.endswith(hint)


def test_nesting_is_accepted_up_to_the_limit_and_brackets_in_text_are_not_nesting():
    depth = MAX_DEPTH - 1
    deep = parse_line(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")
    assert isinstance(deep, dict)
    assert json.loads(to_json(deep)) == deep
    assert parse_line(b'{"a": "' + b"[{" * 500 + b'"}') == {"a": "[{" * 500}


def test_values_that_json_does_not_have_are_converted():
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    row = {
        "bytes": b"\x00\xff",
        "moment": moment,
        "day": dt.date(2026, 1, 2),
        "time": dt.time(3, 4),
        "span": dt.timedelta(seconds=90),
        "money": decimal.Decimal("1.10"),
        "id": uuid.UUID(int=1),
        1: ("a", float("inf")),
    }
    assert json.loads(to_json(row)) == {
        "bytes": "AP8=", "moment": "2026-01-02T03:04:05+00:00", "day": "2026-01-02", "time": "03:04:00",
        "span": 90.0, "money": "1.10", "id": "00000000-0000-0000-0000-000000000001", "1": ["a", None],
    }  # fmt: skip


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_any_value_is_written_as_one_line_of_strict_json(value):
    line = to_json(value)
    assert b"\n" not in line
    read_back = json.loads(line.decode("utf-8"), parse_constant=pytest.fail)
    assert to_json(read_back) == line
