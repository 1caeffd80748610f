"""Any row becomes one draft or one error row, and does not affect other rows."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.errors import ROW_ERROR_TYPES
from batchgen.prompts.params import NAMES
from batchgen.request import Request
from support.params import examples, slow_but

TEXT = st.text(max_size=8) | st.sampled_from(
    ["", "a", "<s>", "\ud800", "POST", "[]", "{}", "1e999", "user", "assistant", "text"]
)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | TEXT
KEYS = st.sampled_from(["role", "content", "type", "text", "prompt", "messages", "model", "n", "x", *sorted(NAMES)])
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT}),
    min_size=1,
    max_size=3,
)
PARAMS = st.dictionaries(st.sampled_from([*sorted(NAMES), "n", "logprobs"]), JSON, max_size=3)
BODY = st.fixed_dictionaries(
    {}, optional={"messages": MESSAGES | JSON, "prompt": TEXT | JSON, "seed": SCALAR, "model": SCALAR}
)
COLUMNS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": TEXT | JSON,
        "messages": MESSAGES | JSON,
        "sampling_params": PARAMS | JSON,
        "seed": SCALAR,
        "temperature": SCALAR,
        "custom_id": SCALAR,
        "method": st.just("POST") | SCALAR,
        "url": st.sampled_from(["/v1/completions", "/v1/chat/completions"]) | SCALAR,
        "body": BODY | JSON,
    },
)


ALL_OF_THEM = {"template": "{{ prompt }}", "prefix": "P", "system": "S"}


@pytest.mark.parametrize("options", slow_but([{}, ALL_OF_THEM], [{}, {"chat": False}, ALL_OF_THEM]))
@settings(max_examples=examples(6, 80), suppress_health_check=list(HealthCheck))
@given(columns=COLUMNS)
def test_any_row_becomes_a_draft_or_an_error_row(tools, options, columns):
    b = tools.builder(chat_template=tools.CHATML, row_params=("seed", "temperature"), context=60, **options)
    before = copy.deepcopy(columns)
    first, other, last = b.build(tools.rows(columns, {"prompt": "a"}, columns))
    assert repr(columns) == repr(before)
    assert tools.text_of(other).replace("<s>", "").replace("<|im_start|>user\n", "")
    if isinstance(first, Request):
        assert first.tokens.tolist() == last.tokens.tolist()
        assert first.key == last.key
        assert 1 <= len(first.tokens) < 60
        assert 1 <= first.max_tokens <= 60 - len(first.tokens)
        return
    assert first.error_type in ROW_ERROR_TYPES
    assert (first.error_type, first.error_message) == (last.error_type, last.error_message)
    assert (first.row, last.row, first.text, first.finish_reason) == (0, 2, None, "error")
    assert "\n" not in first.error_message
    assert first.error_message.encode().decode() == first.error_message
