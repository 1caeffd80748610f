"""An input in which no row has a prompt is refused before anything is generated."""

from __future__ import annotations

import pytest

from batchgen.errors import RowError, UsageError
from batchgen.records.rows import Row

USER = [{"role": "user", "content": "a"}]
BATCH = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": USER}}


def refusal(tools, *columns, **options):
    with pytest.raises(UsageError) as e:
        tools.builder(**options).check_columns(tools.rows(*columns))
    return str(e.value)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ([{"text": "a"}, {"id": 1}], {}, "no row has a column 'prompt'; the input has 'text', 'id'; name one with --prompt-column or --messages-column, or make the prompt with --template"),
        ([{"text": "a"}], {"chat_template": "x"}, "no row has a column 'prompt' or 'messages'; the input has 'text'; name one with --prompt-column or --messages-column, or make the prompt with --template"),
        ([{}], {}, "no row has a column 'prompt'; the input has no columns at all; name one with --prompt-column or --messages-column, or make the prompt with --template"),
        ([{"text": "a"}] * 1000, {"prompt_column": "q"}, "none of the first 1000 rows has the column 'q' of --prompt-column; the input has 'text'"),
        ([{"messages": USER}], {"prompt_column": "q", "chat_template": "x"}, "no row has the column 'q' of --prompt-column; the input has 'messages'"),
        ([{"prompt": "a"}], {"messages_column": "m"}, "no row has the column 'm' of --messages-column; the input has 'prompt'"),
        ([{"prompt": "a"}], {"row_params": ("seed",)}, "no row has the column 'seed' of --row-params; the input has 'prompt'"),
        ([{"messages": USER}], {}, "column 'messages' needs a chat template: the model has none; give one with --chat-template FILE, or name a --prompt-column"),
        ([{"messages": USER}], {"chat_template": "x", "chat": False}, "column 'messages' needs a chat template: --no-chat turns it off; leave --no-chat out, or name a --prompt-column"),
        ([BATCH], {}, "/v1/chat/completions needs a chat template: the model has none; give one with --chat-template FILE, or name a --prompt-column"),
        ([{"a": 1}], {"template": "{{ a }}{{ b }}"}, "no row has the column 'b' of --template; the input has 'a'"),
        ([{f"c{i}": 1 for i in range(22)}], {"template": "{{ b }}"}, "no row has the column 'b' of --template; the input has " + ", ".join(f"'c{i}'" for i in range(20)) + " and 2 more"),
    ],
)  # fmt: skip
def test_the_refusal_names_the_missing_column_and_the_columns_there_are(tools, columns, options, message):
    assert refusal(tools, *columns, **options) == message


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ([{"text": "a"}, {"prompt": "a"}], {}),
        ([{"prompt": None}], {}),
        ([{"messages": USER}], {"chat_template": "x"}),
        ([{"messages": USER}, {"prompt": "a"}], {}),
        ([BATCH], {"chat_template": "x"}),
        ([{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "a"}}], {}),
        ([{"custom_id": "1", "url": "/v1/nonsense", "body": {}}], {}),
        ([{"a": 1}], {"template": "{{ a }}{{ b | default('') }}"}),
        ([{"a": None}], {"template": "{{ a }}"}),
        ([{"a": 1}], {"template": "{% for i in range(3) %}{{ i }}{{ row.a }}{% endfor %}"}),
        ([{"prompt": "a", "seed": None}], {"row_params": ("seed",)}),
        ([], {}),
    ],
)
def test_an_input_in_which_some_row_has_a_prompt_is_accepted(tools, columns, options):
    tools.builder(**options).check_columns(tools.rows(*columns))


def test_an_input_of_malformed_rows_alone_is_accepted(tools):
    row = Row(number=0, columns={}, error=RowError("invalid_row", "not JSON"), source="in.jsonl:1")
    tools.builder().check_columns([row])
