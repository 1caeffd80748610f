"""Rows that cannot be run fail alone and with the reason, and options that cannot be met are refused: one table of each.

The last test builds any row at all.
"""

import copy
from datetime import date

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.errors import ROW_ERROR_TYPES, UsageError
from batchgen.prompts.params import NAMES
from batchgen.request import Request
from batchgen.sampling_params import SamplingParams
from support.params import examples, slow_but
from support.tokenizers_by_hand import CHAT, CHATML, RAW, USER, asks

ML = {"chat_template": CHATML}
USER_FIRST = {"chat_template": "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"}
CHANGED = {"chat_template": "{% for m in messages %}{{ m.role }} {{ m.content | length }}{% endfor %}"}
DEEP = "[" * 100_000  # deep enough for a JSON parser to give up
SCORED = {"score": True, "completion_column": "answer"}


PROMPTS = [
    ({"prompt": 5}, "column 'prompt' must be text, not a number"),
    ({"prompt": ["a"]}, "column 'prompt' must be text, not a list"),
    ({"prompt": [{"role": "user"}]}, "column 'prompt' must be text, not a list (--messages-column prompt takes a list of messages)"),
    ({"prompt": None}, "column 'prompt' is null"),
    ({"prompt": None, "messages": None}, "column 'prompt' is null and column 'messages' is null"),
    ({"prompt": None, "messages": ""}, "column 'prompt' is null and column 'messages' is empty"),
    ({"other": "a"}, "the row has no column 'prompt'"),
    ({"messages": [{"role": "user", "content": "a"}]}, "column 'messages' needs a chat template: the model has none"),
    ({"prompt": [5, 260]}, "column 'prompt' must be token ids from 0 to 259; one is 260"),
    ({"prompt": [5, "a"]}, "column 'prompt' must be token ids from 0 to 259; one is text"),
    ({"prompt": "ab\ud800"}, "the prompt cannot be tokenized: character 2 is half of a surrogate pair (U+D800)"),
    (asks(CHAT, messages=[USER]), "/v1/chat/completions needs a chat template: the model has none"),
]  # fmt: skip
MESSAGES = [
    (5, "column 'messages' must be a list of messages, not a number"),
    ('{"a": 1}', "column 'messages' must be a list of messages, not text"),
    ("[{'role': 'user', 'content': 'a'}]", "column 'messages' must be a list of messages, not text (this is Python's form; json.dumps writes JSON)"),
    ([], "column 'messages' is an empty list"),
    (["a"], "messages[0] must be an object with role and content, not text"),
    ([USER, {"role": None, "content": "a"}], "messages[1].role must be text, not null"),
    ([{"from": "human", "value": "a"}], "messages[0] has no role: a message has role and content, and this one 'from', 'value'"),
    ([{}], "messages[0] has no role: a message has role and content, and this one no fields"),
    ([{"role": "", "content": "a"}], "messages[0].role must be text, not empty"),
    ([{"role": "user"}], "messages[0].content must be text or a list of text parts, not null"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0] must be an object with type and text, not text"),
    ([{"role": "user", "content": [{"type": 5}]}], "messages[0].content[0] has type 5; only text can be sent"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be text, not null"),
    *(
        ([USER, {"role": "assistant", "content": "", "tool_calls": calls}], "messages[1].tool_calls must be a list of objects")
        for calls in ("add", [1], {"function": {"name": "add"}})
    ),
]  # fmt: skip
PARAMETERS = [
    (5, ("invalid_row", "column 'sampling_params' must be an object, not a number")),
    ("{x", ("invalid_row", "column 'sampling_params' is text that is not JSON")),
    ("[1]", ("invalid_row", "column 'sampling_params' must be an object, not a list")),
    ({"max_tokens": 0}, ("unsupported_parameter", "max_tokens must be at least 1, not 0")),
    ({"temperature": "hot"}, ("unsupported_parameter", "temperature must be a number, not 'hot'")),
    ({"temprature": 1}, ("unsupported_parameter", "unknown parameter 'temprature'")),
    ({"regex": "a", "json_schema": {}}, ("unsupported_parameter", "regex cannot be combined with json_schema")),
    ({"top_p": 10**400}, ("unsupported_parameter", f'a number is too large: {{"top_p": 1{"0" * 69}…')),
    (
        {"json_schema": {"const": date(2026, 1, 2)}},
        ("unsupported_parameter", "json_schema is not JSON: Object of type date is not JSON serializable"),
    ),
    ({"top_logprobs": 3}, ("unsupported_parameter", "top_logprobs needs logprobs: true")),
    ({"logit_bias": {"5": 1}}, ("unsupported_parameter", 'logit_bias is not supported: {"5": 1}')),
]  # fmt: skip
REQUESTS = [
    (asks(CHAT, messages=[USER], top_logprobs=3), ("unsupported_parameter", "top_logprobs needs logprobs: true")),
    (asks(CHAT, messages=[USER], stream=True), ("unsupported_parameter", "stream is not supported: true")),
    (asks(CHAT, messages=[USER], tools="search"), ("invalid_row", "body.tools must be a list of objects, not text")),
    (asks(RAW, prompt="a", tools=[{"type": "function"}]), ("unsupported_parameter", 'tools is not supported: [{"type": "function"}]')),
    (asks(CHAT, messages=[USER], tool_choice="required"), ("unsupported_parameter", 'tool_choice is not supported: "required"')),
    (asks(CHAT, messages=[USER], response_format={"type": "yaml"}), ("unsupported_parameter", "response_format must be text, json_object, or json_schema with its schema")),
    (asks(CHAT, messages=[USER], structured_outputs={"grammar": "root ::= 'a'"}), ("unsupported_parameter", "structured_outputs.grammar is not supported")),
    (asks(CHAT, messages=[USER], structured_outputs={"json": {}, "whitespace_pattern": " "}), ("unsupported_parameter", "structured_outputs.whitespace_pattern is not supported")),
    (asks(CHAT, messages=[USER], structured_outputs="json"), ("unsupported_parameter", "structured_outputs must be an object, not text")),
    (asks(RAW, prompt="a", reasoning_effort="low"), ("unsupported_parameter", "unknown parameter 'reasoning_effort'")),
    (asks(CHAT, messages=[USER], chat_template_kwargs=5), ("invalid_row", "body.chat_template_kwargs must be an object, not a number")),
    (asks(CHAT, messages=[USER], chat_template_kwargs={"tokenize": True}), ("unsupported_parameter", "body.chat_template_kwargs cannot set tokenize")),
    (asks(CHAT, messages=[]), ("invalid_row", "body.messages is an empty list")),
    (asks(CHAT, messages=[{"role": "user"}]), ("invalid_row", "body.messages[0].content must be text or a list of text parts, not null")),
    (asks(CHAT, prompt="a"), ("invalid_row", "body has no messages; it has prompt, which belongs to /v1/completions")),
    (asks(RAW, messages=[USER]), ("invalid_row", "body has no prompt; it has messages, which belongs to /v1/chat/completions")),
    (asks(RAW), ("invalid_row", "body has no prompt")),
    (asks(RAW, prompt=["a", "b"]), ("unsupported_parameter", "body.prompt holds 2 prompts; a row can have only one")),
    (asks(RAW, prompt=5), ("invalid_row", "body.prompt must be text or token ids, not a number")),
    (asks(RAW, prompt="a", echo=True), ("unsupported_parameter", "echo is not supported: true")),
    (asks("/v1/embeddings", input="a"), ("invalid_row", "url is /v1/embeddings; add --embed for it")),
    (asks("/v1/score", input="a"), ("invalid_row", "url is '/v1/score'; use /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses")),
    (asks(7, prompt="a"), ("invalid_row", "url is a number; use /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses")),
    (asks(RAW, prompt="a") | {"method": "GET"}, ("invalid_row", "method is 'GET'; it must be POST")),
    ({"url": RAW, "body": "{"}, ("invalid_row", "body is text that is not JSON")),
    ({"url": RAW, "body": "[1]"}, ("invalid_row", "body must be an object, not a list")),
    ({"url": RAW, "body": None, "custom_id": "a"}, ("invalid_row", "body must be an object, not null")),
    ({"url": RAW}, ("invalid_row", "the request has no body")),
    ({"custom_id": "a", "method": "POST"}, ("invalid_row", "the request has no body")),
]  # fmt: skip
BROKEN = [
    *((columns, {}, ("invalid_row", why)) for columns, why in PROMPTS),
    *(({"messages": messages}, ML, ("invalid_row", why)) for messages, why in MESSAGES),
    *(({"prompt": "a", "sampling_params": value}, {}, error) for value, error in PARAMETERS),
    *((columns, ML, error) for columns, error in REQUESTS),
    *(
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "See?"}, {"type": kind, kind: {"url": "a.png"}}]}]},
            ML, ("unsupported_content", f"messages[0].content[1] has type {kind!r}; only text can be sent"),
        )
        for kind in ("image", "image_url", "input_audio", "video", "file")
    ),
    *(
        (columns, {"row_params": ("seed", "choices")} | ML, ("invalid_row", "the row has a value that is nested too deeply"))
        for columns in (
            *({"prompt": "a", name: DEEP} for name in ("sampling_params", "seed", "choices")), {"messages": DEEP}, {"url": RAW, "body": DEEP},
        )
    ),
    ({"messages": [{"role": "system", "content": "S"}]}, ML | {"prefix": "P:"}, ("invalid_row", "column 'messages' has no user message, which --prefix needs")),
    ({"messages": [USER]}, ML | {"chat": False}, ("invalid_row", "column 'messages' needs a chat template: --no-chat turns it off")),
    ({"messages": [{"role": "tool", "content": "a"}]}, USER_FIRST, ("template_error", "chat template: user first")),
    ({"messages": [USER, {"role": "assistant", "content": "bcd"}]}, CHANGED, ("template_error", "chat template: it changes the last assistant message, so that message cannot be continued")),
    ({"prompt": ""}, {"bos": False}, ("empty_prompt", "the prompt has no tokens")),
    (asks(RAW, prompt=[]), {}, ("empty_prompt", "the prompt has no tokens")),
    ({"prompt": [5, 0, 9]}, ML | {"system": "Be."}, ("invalid_row", "column 'prompt' is a list of token ids, which cannot be combined with --system")),
    (asks(RAW, prompt=[5, 6]), {"prefix": "P"}, ("invalid_row", "body.prompt is a list of token ids, which cannot be combined with --prefix")),
    # Texts to score, and priorities.
    ({"prompt": "a"}, SCORED, ("invalid_row", "column 'answer' is missing")),
    ({"prompt": "a", "answer": None}, SCORED, ("invalid_row", "column 'answer' must be text, not null")),
    ({"prompt": [5], "answer": [7, 10**6]}, SCORED, ("invalid_row", "column 'answer' must be token ids from 0 to 259; one is 1000000")),
    ({"prompt": [5], "answer": [7, "x"]}, SCORED, ("invalid_row", "column 'answer' must be token ids from 0 to 259; one is text")),
    *(
        ({"prompt": "a", "answer": "b", "sampling_params": own}, SCORED, ("unsupported_parameter", f"{next(iter(own))} cannot be combined with --score"))
        for own in ({"choices": ["a", "b"]}, {"regex": "a"}, {"json_schema": "{}"}, {"n": 2}, {"logprobs": 0})
    ),
    *(({"prompt": "a", "p": value}, {"priority_column": "p"}, ("invalid_row", "column 'p' must be a number")) for value in ("soon", True, float("nan"), [1])),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "options", "error"), BROKEN)
def test_a_row_that_cannot_be_run_fails_alone_with_the_reason(tools, columns, options, error):
    bad, good = tools.builder(**options).build(tools.rows(columns, {"prompt": "a", "answer": "b"}))
    assert tools.error_of(bad) == error
    assert isinstance(good, Request)


NEEDS_TEMPLATE = "needs a chat template, and the model has none; use --chat-template FILE, or --no-chat for raw prompts"
REFUSED = [
    (None, {"system": "S"}, f"--system {NEEDS_TEMPLATE}"),
    (None, {"chat": True}, f"--chat {NEEDS_TEMPLATE}"),
    (None, {"chat_template_kwargs": {"a": 1}}, f"--chat-template-kwargs {NEEDS_TEMPLATE}"),
    ({"a": "x", "b": "y"}, {}, "the model has no default among its chat templates (a, b); use --chat-template FILE, or --no-chat for raw prompts"),
    ("x", {"system": "S", "chat": False}, "--system cannot be combined with --no-chat; leave one of them out"),
    ("x", {"chat_template_kwargs": {"tools": "add"}}, """--chat-template-kwargs: tools must be a list of objects, not text; use one such as {"tools": [{"type": "function", "function": {…}}]}"""),
    ("x", {"chat_template_kwargs": {"messages": []}}, "--chat-template-kwargs cannot set 'messages'; leave it out"),
    ("{% if %}", {}, "the model's chat template is not valid Jinja (line 1): Expected an expression, got 'end of statement block'; correct it, or give another"),
    (None, {"template": "{{ a | nofilter }}"}, "--template is not valid Jinja (line 1): No filter named 'nofilter'; correct the template"),
    ("x", {"template": "a\n{{ b"}, "--template is not valid Jinja (line 2): unexpected end of template, expected 'end of print statement'; correct the template"),
    *(
        (None, {"score": True, "sampling": SamplingParams(**{option.replace("-", "_"): value})}, f"--score cannot be combined with --{option}; leave one of them out")
        for option, value in (("choices", ("a", "b")), ("regex", "a"), ("json-schema", "{}"), ("n", 2), ("logprobs", 0))
    ),
    (None, {"row_params": ("temprature",)}, "--row-params 'temprature' is not a sampling parameter; use choices, frequency_penalty, ignore_eos, json_schema, "
        "json_whitespace, logprobs, max_repeats, max_tokens, min_p, n, presence_penalty, reasoning, reasoning_budget, regex, repetition_penalty, seed, stop, stop_token_id, "
        "stop_token_ids, temperature, top_choices, top_k, top_p"),
]  # fmt: skip


@pytest.mark.parametrize(("own", "options", "message"), REFUSED)
def test_options_that_cannot_be_met_are_refused_with_the_reason(tools, own, options, message):
    with pytest.raises(UsageError) as e:
        tools.builder(chat_template=own, **options)
    assert str(e.value) == message


# -- inputs in which no row has a prompt


BATCH = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [USER]}}


def refusal(tools, *columns, **options):
    with pytest.raises(UsageError) as e:
        tools.builder(**options).columns.check(tools.rows(*columns))
    return str(e.value)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ([{"text": "a"}, {"id": 1}], {}, "no row has a column 'prompt'; the input has 'text', 'id'; name one with --prompt-column or --messages-column, or make the prompt with --template"),
        ([{"text": "a"}], {"chat_template": "x"}, "no row has a column 'prompt' or 'messages'; the input has 'text'; name one with --prompt-column or --messages-column, or make the prompt with --template"),
        ([{}], {}, "no row has a column 'prompt'; the input has no columns at all; name one with --prompt-column or --messages-column, or make the prompt with --template"),
        ([{"text": "a"}] * 1000, {"prompt_column": "q"}, "none of the first 1000 rows has the column 'q' of --prompt-column; the input has 'text'"),
        ([{"messages": [USER]}], {"prompt_column": "q", "chat_template": "x"}, "no row has the column 'q' of --prompt-column; the input has 'messages'"),
        ([{"prompt": "a"}], {"messages_column": "m"}, "no row has the column 'm' of --messages-column; the input has 'prompt'"),
        ([{"prompt": "a"}], {"row_params": ("seed",)}, "no row has the column 'seed' of --row-params; the input has 'prompt'"),
        ([{"messages": [USER]}], {}, "column 'messages' needs a chat template: the model has none; give one with --chat-template FILE, or name a --prompt-column"),
        ([{"messages": [USER]}], {"chat_template": "x", "chat": False}, "column 'messages' needs a chat template: --no-chat turns it off; leave --no-chat out, or name a --prompt-column"),
        ([BATCH], {}, "/v1/chat/completions needs a chat template: the model has none; give one with --chat-template FILE, or name a --prompt-column"),
        ([{"a": 1}], {"template": "{{ a }}{{ b }}"}, "no row has the column 'b' of --template; the input has 'a'"),
        ([{"a": 1}], {"template": "{{ b | default('') }}{{ c }}"}, "no row has the column 'c' of --template; the input has 'a'"),
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
        ([{"messages": [USER]}], {"chat_template": "x"}),
        ([{"messages": [USER]}, {"prompt": "a"}], {}),
        ([BATCH], {"chat_template": "x"}),
        ([{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "a"}}], {}),
        ([{"custom_id": "1", "url": "/v1/nonsense", "body": {}}], {}),
        ([{"a": 1}], {"template": "{{ a }}{{ b | default('') }}"}),
        ([{"a": None}], {"template": "{{ a }}"}),
        ([{"a": None}], {"template": "{{ b | default('') }}{{ a }}"}),
        ([{"a": 1}], {"template": "{% for i in range(3) %}{{ i }}{{ row.a }}{% endfor %}"}),
        ([{"prompt": "a", "seed": None}], {"row_params": ("seed",)}),
        ([], {}),
    ],
)
def test_an_input_in_which_some_row_has_a_prompt_is_accepted(tools, columns, options):
    tools.builder(**options).columns.check(tools.rows(*columns))


# -- any row at all


TEXT = st.text(max_size=8) | st.sampled_from(
    ["", "a", "<s>", "\ud800", "POST", "[]", "{}", "1e999", "user", "assistant", "text"]
)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | TEXT
KEYS = st.sampled_from(["role", "content", "type", "text", "prompt", "messages", "model", "n", "x", *sorted(NAMES)])
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
ANY_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT}),
    min_size=1,
    max_size=3,
)
PARAMS = st.dictionaries(st.sampled_from([*sorted(NAMES), "n", "logprobs"]), JSON, max_size=3)
BODY = st.fixed_dictionaries(
    {}, optional={"messages": ANY_MESSAGES | JSON, "prompt": TEXT | JSON, "seed": SCALAR, "model": SCALAR}
)
COLUMNS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": TEXT | JSON,
        "messages": ANY_MESSAGES | JSON,
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
