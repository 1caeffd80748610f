"""What rows become: one table of columns, options and the prompt's text with its special tokens, and one of rows and parameters."""

import datetime as dt
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from batchgen.records import Row
from batchgen.sampling_params import SamplingParams
from support.tokenizers_by_hand import CHAT, CHATML, OPEN, RAW, USER, asks, says, turn

SYSTEM, ANSWER = says("system", "S"), says("assistant", "b")
AB = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
S, U = turn("system", "S"), turn("user", "a")
ML = {"chat_template": CHATML}
PARTS_ONLY = CHATML.replace(  # as in Qwen2.5-VL and SmolVLM, which silently leave out plain text
    "{{ m.content }}", "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
)
SYSTEM_IN_PARTS = CHATML.replace(  # as in Gemma 3: the system message must be a list of parts
    "{{ m.content }}", "{{ m.content[0].text if m.role == 'system' else m.content }}"
)
WRITES_PARTS = {  # as in Granite 4: parts that are texts are lines; the system message must be a text
    "chat_template": "{% for m in messages %}{{ m.role }}:{% if m.content is string or m.role == 'system' %}{{ m.content }}"
    "{% else %}{{ m.content | map(attribute='text') | join('\n') }}{% endif %};{% endfor %}"
}
FIRST_PART = {
    "chat_template": "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }};{% endfor %}"
}
NAMED = {"chat_template": "{% for m in messages %}{{ m.content }}{{ m.name is defined }}{% endfor %}"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS = "{# answers may have <tool_call> #}{% if tools %}[{{ tools|length }}:{{ tools[0].function.name }}]{% endif %}"
DOCUMENTS = "{% if documents %}{% for d in documents %}<{{ d.title }}={{ d.text }}>{% endfor %}{% endif %}"
USES = {"chat_template": TOOLS + DOCUMENTS + "{{ messages[-1].content }}", "bos": False}
CALLED = {
    "chat_template": "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments|tojson }}{% endfor %};{% endfor %}"
}
TEXT_ARGUMENTS = {"chat_template": CALLED["chat_template"].replace("|tojson", " + ''")}  # as in DeepSeek V3
WRITTEN_ARGUMENTS = {
    "chat_template": CALLED["chat_template"].replace("|tojson", "")
}  # Python writes an object in its own way
BESIDE_NULL = {  # as in the distilled models of DeepSeek R1
    "chat_template": "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.role }}:{{ m.content }}{% endif %};{% endfor %}"
}
KNOWS_DEVELOPERS = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.content }}{% endfor %}"
EFFORT = {"chat_template": "{{ reasoning_effort }}{{ b }}"}


def calling(arguments, content=None):
    return says("assistant", content, tool_calls=[{"id": "1", "function": {"name": "add", "arguments": arguments}}])


def t(template, **options):
    return {"template": template, **options}


TEXTS = [
    # Raw prompts: the tokenizer's special tokens, once.
    ({"prompt": "ab"}, {}, "<s>ab"),
    ({"prompt": "<s>a"}, {}, "<s>a"),
    ({"prompt": "a<s>"}, {}, "<s>a<s>"),
    ({"prompt": "a"}, {"bos": False}, "a"),
    ({"prompt": "<s><s>a"}, {"bos": False}, "<s><s>a"),
    ({"prompt": "a"}, {"prefix": "P:"}, "<s>P:a"),
    ({"prompt": ""}, {"prefix": "P:"}, "<s>P:"),
    ({"prompt": "a"}, {"prefix": "<s>P:"}, "<s>P:a"),
    ({"prompt": "a"}, ML | {"chat": False}, "<s>a"),
    ({"prompt": "p", "messages": [USER]}, ML | {"chat": False}, "<s>p"),
    ({"prompt": "p", "messages": [USER]}, ML, U + OPEN),
    # A chat template.
    ({"prompt": "a"}, ML, U + OPEN),
    ({"prompt": "a"}, {"chat_template": "{{ bos_token }}" + CHATML}, "<s>" + U + OPEN),
    ({"prompt": "a"}, ML | {"system": "S", "prefix": "P:"}, S + turn("user", "P:a") + OPEN),
    ({"prompt": "a"}, {"chat_template": {"default": CHATML, "tool_use": "no"}}, U + OPEN),
    ({"prompt": "x"}, {"chat_template": "{% generation %}a{% endgeneration %}{% for m in messages %}b{% break %}{% endfor %}"}, "ab"),
    # Messages.
    ({"messages": [SYSTEM, USER]}, ML, S + U + OPEN),
    ({"messages": json.dumps([USER])}, ML, U + OPEN),
    *(({"messages": [USER, says("assistant", end)]}, ML, U + OPEN + end) for end in ("b", "b ", "b\n", "")),
    ({"messages": [USER, ANSWER, USER]}, ML, U + turn("assistant", "b") + U + OPEN),
    ({"messages": [says("system", "own"), USER]}, ML | {"system": "S"}, turn("system", "own") + U + OPEN),
    ({"messages": [USER]}, ML | {"system": "S"}, S + U + OPEN),
    ({"messages": [SYSTEM, USER, ANSWER, USER]}, ML | {"prefix": "P:"}, S + turn("user", "P:a") + turn("assistant", "b") + U + OPEN),
    ({"messages": [says("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], name=None)]}, NAMED, "abFalse"),
    ({"messages": [says("system", AB), says("user", AB)]}, WRITES_PARTS, "system:ab;user:a\nb;"),
    ({"messages": [says("user", AB)]}, WRITES_PARTS | {"prefix": "P "}, "user:P a\nb;"),
    ({"messages": [says("user", AB), says("assistant", AB)]}, WRITES_PARTS, "user:a\nb;assistant:a\nb"),
    ({"messages": [says("tool", AB)]}, WRITES_PARTS, "tool:ab;"),
    ({"messages": [says("user", AB)]}, FIRST_PART, "ab;"),
    ({"messages": [says("user", AB)]}, {"chat_template": PARTS_ONLY}, turn("user", "ab") + OPEN),
    *(({"messages": [USER, ANSWER]}, {"chat_template": own, "system": "S"}, S + U + OPEN + "b") for own in (CHATML, PARTS_ONLY, SYSTEM_IN_PARTS)),
    ({"question": "q", "messages": [USER]}, ML | {"prompt_column": "question"}, turn("user", "q") + OPEN),
    ({"prompt": "p", "messages": None}, ML, turn("user", "p") + OPEN),
    ({"messages": [USER, calling('{"x": 1}'), says("tool", "2")]}, CALLED, 'user:a;assistant:{"x": 1};tool:2;'),
    ({"messages": [USER, calling({"x": 2}, "")]}, CALLED, 'user:a;assistant:{"x": 2};'),
    ({"messages": [calling("{x", "")]}, CALLED, 'assistant:"{x";'),
    ({"messages": [USER, calling({"x": "é"})]}, TEXT_ARGUMENTS, 'user:a;assistant:{"x": "é"};'),
    ({"messages": [USER, calling('{"x":2}', "Hm.")]}, TEXT_ARGUMENTS, 'user:a;assistant:Hm.{"x": 2};'),
    ({"messages": [USER, calling({"x": None})]}, WRITTEN_ARGUMENTS, 'user:a;assistant:{"x": null};'),
    ({"messages": [USER, calling({"x": 2}), says("tool", "2")]}, BESIDE_NULL, 'user:a;add{"x": 2};tool:2;'),
    ({"messages": [USER, calling("{x")], "tools": [TOOL]}, BESIDE_NULL, "user:a;add{x;"),
    ({"messages": [says("developer", "Be."), USER]}, CALLED, "system:Be.;user:a;"),
    ({"messages": [says("developer", "Be."), USER]}, {"chat_template": KNOWS_DEVELOPERS}, "DBe.a"),
    # Tools and documents.
    *(({**prompt, "tools": tools}, USES, "[1:add]a") for prompt in ({"messages": [USER]}, {"prompt": "a"}) for tools in ([TOOL], json.dumps([TOOL]), [TOOL | {"extra": None}])),
    (asks(CHAT, messages=[USER], tools=[TOOL], tool_choice="auto"), USES, "[1:add]a"),
    (asks(CHAT, messages=[USER], tools=[]), USES, "a"),
    ({"prompt": "a", "tools": None, "documents": ""}, USES, "a"),
    ({"prompt": "a", "documents": [{"title": None, "text": "ab"}]}, USES, "<=ab>a"),
    ({"tools": "hammer"}, USES | t("Use a {{ tools }}"), "Use a hammer"),
    ({"messages": [USER], "documents": [{"title": "T", "text": "abcd"}]}, USES, "<T=abcd>a"),
    # A template over the columns.
    ({"examples": [{"q": "x", "a": 1}, {"q": "y", "a": 2}], "question": "z", "prompt": "no"}, t("{% for e in examples %}{{ e.q }}={{ e.a }};{% endfor %}{{ question | upper }}\n"), "<s>x=1;y=2;Z"),
    ({"a": "x"}, ML | t("{{ a }}", prefix="P:", system="S"), S + turn("user", "P:x") + OPEN),
    ({"my column": "x"}, t("{{ row['my column'] }}"), "<s>x"),
    ({"my column": "y", "row": {"my column": "z"}}, t("{{ row['my column'] }}"), "<s>z"),
    ({"a": None}, t("{{ a or '-' }}{% if b is defined %}{{ b }}{% endif %}{{ c | default('?') }}"), "<s>-?"),
    ({"a": "<b> & 'c'"}, t("{{ a }}"), "<s><b> & 'c'"),
    ({"d": dt.date(2024, 2, 29), "n": Decimal("1.5")}, t("{{ d.year + 1 }} {{ n * 2 }}"), "<s>2025 3.0"),
    *(
        ({"a": None, "b": " b "}, t(template), f"<s>{text}")  # filters and joined texts, as Jinja has them
        for template, text in (
            ("{{ (a or '') | trim }}!", "!"), ("{{ a | default('none', true) | upper }}", "NONE"), ("{{ b ~ 1 ~ 'x' }}", " b 1x"),
            ("{{ [1, b, 2.5] | join('-') }}", "1- b -2.5"), ("{{ [{'k': 1}, {'k': 2}] | join(', ', attribute='k') }}", "1, 2"),
            ("{{ b | trim | replace('b', 'c', 1) | center(3) }}", " c "), ("{{ a is none }} {{ a | tojson }}", "True null"),
        )
    ),
    *(
        ({"range": "10-20", "dict": {"k": "v"}, "namespace": "n", "my column": "m"}, t(template), f"<s>{text}")
        for template, text in (
            ("{{ range }}", "10-20"), ("{{ dict.k }} {{ namespace }}", "v n"), ("{% for i in range(2) %}{{ i }}{% endfor %}", "01"),
            ("{{ row['my column'] }} {% for i in range(2) %}{{ i }}{% endfor %}", "m 01"), ("{% set ns = namespace(x=1) %}{{ ns.x }}", "1"),
        )
    ),
    # OpenAI's Batch form.
    (asks(CHAT, messages=[USER], temperature=None), ML | {"system": "S"}, S + U + OPEN),
    *((asks(url, prompt=prompt), ML | {"prefix": "P:"}, "<s>P:a") for url, prompt in ((RAW, "a"), (RAW, ["a"]), ("https://api/v1/completions/", "a"))),
    ({"custom_id": "1", "body": {"messages": None, "prompt": "a"}}, ML, "<s>a"),  # as a table fills them in
    ({"custom_id": "1", "body": {"messages": [USER]}}, ML, U + OPEN),
    (asks(RAW) | {"body": json.dumps({"prompt": "a"})}, {}, "<s>a"),
    ({"body": "Dear all", "prompt": "a", "url": "http://x/y"}, {}, "<s>a"),
    ({"body": {"x": 1}, "prompt": "a"}, {}, "<s>a"),
    ({"body": None, "prompt": "a", "url": None, "custom_id": None}, {}, "<s>a"),
    (asks(CHAT, messages=[USER], chat_template_kwargs={"b": "row"}), {"chat_template": "{{ a }}{{ b }}", "chat_template_kwargs": {"a": "cmd", "b": "cmd"}}, "cmdrow"),
    (asks(CHAT, messages=[USER], reasoning_effort="low", chat_template_kwargs={"b": "!"}), EFFORT, "low!"),
    (asks(CHAT, messages=[USER], reasoning_effort="low"), EFFORT, "low"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "options", "text"), TEXTS)
def test_a_row_becomes_its_text(tools, columns, options, text):
    before = repr(columns)
    assert tools.text_of(tools.one(columns, **options)) == text
    assert repr(columns) == before


@pytest.mark.parametrize("typed", [False, True], ids=["JSON", "table"])
def test_nulls_of_tools_and_of_arguments_reach_the_template_unless_a_table_has_added_them(tools, typed):
    template = "{{ tools|tojson }}{% for m in messages %}{{ m.tool_calls|tojson if m.tool_calls }}{% endfor %}"
    found = tools.builder(chat_template=template, bos=False)

    def text(tool, arguments):
        call = says("assistant", None, tool_calls=[{"id": None, "function": {"name": "f", "arguments": arguments}}])
        row = Row(0, {"messages": [USER, call, says("tool", "ok")], "tools": tool}, None, "", typed=typed)
        return tools.text_of(found.build([row])[0])

    tool = {"name": "f", "parameters": {"default": None}}
    kept = '[{"name": "f", "parameters": {"default": null}}][{"function": {"name": "f", "arguments": {"a": null}}}]'
    bare = '[{"name": "f", "parameters": {}}][{"function": {"name": "f", "arguments": {}}}]'
    assert text([tool], {"a": None}) == (bare if typed else kept)
    assert text(json.dumps([tool]), '{"a": null}') == kept
    assert text([tool], None).endswith('[{"function": {"name": "f"}}]')


@pytest.mark.parametrize(
    "given",
    [
        {"sampling_params": {"json_schema": {"type": "object", "properties": {"a": {"type": "string"}, "b": None}}}},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "string"}, "b": None}}},
        asks("/v1/chat/completions", messages=[USER], guided_json={"type": "object", "properties": {"a": {"type": "string"}, "b": None}}),
    ],
)  # fmt: skip
def test_a_schema_of_a_row_has_no_nulls_that_a_table_has_added(tools, given):
    row = Row(0, {"prompt": "a", **given}, None, "", typed=True)
    (request,) = tools.builder(**ML, row_params=["json_schema"]).build([row])
    assert json.loads(request.params.json_schema) == {"type": "object", "properties": {"a": {"type": "string"}}}


def test_variables_of_a_body_in_a_table_that_other_rows_have_are_not_defined(tools):
    template = "{{ 'b' if thinking is defined }}{{ effort }}"
    body = asks("/v1/chat/completions", messages=[USER], chat_template_kwargs={"thinking": None, "effort": "c"})
    texts = [
        tools.text_of(tools.builder(chat_template=template, bos=False).build([Row(0, body, None, "", typed=typed)])[0])
        for typed in (False, True)
    ]
    assert texts == ["bc", "c"]


def test_messages_that_are_maps_of_arrow_are_objects(tools):
    maps = pa.array([[[*USER.items(), ("name", None)], [*ANSWER.items()]]], pa.list_(pa.map_(pa.string(), pa.string())))
    row = Row(0, {"messages": maps[0].as_py()}, None, "", typed=True)
    assert tools.text_of(tools.builder(**ML).build([row])[0]) == U + OPEN + "b"


def test_a_map_whose_keys_are_objects_fails_its_row_alone(tools):
    row = Row(0, {"messages": [({"a": 1}, "b")]}, None, "", typed=True)
    (result,) = tools.builder(**ML).build([row])
    assert result.error_message == "messages[0] must be an object with role and content, not a list"


NEUTRAL = {"n": 1, "logprobs": False, "top_logprobs": 0, "stream": False, "tools": None, "logit_bias": {}, "best_of": 1}
OF_VLLM = {
    "top_k": -1, "min_tokens": 0, "skip_special_tokens": True, "include_stop_str_in_output": False, "use_beam_search": False, "length_penalty": 1.0,
    "add_generation_prompt": True, "continue_final_message": False, "return_token_ids": None, "priority": 3, "request_id": "x",
}  # fmt: skip
OF_OPENAI = {
    "model": "m", "max_completion_tokens": 9, "temperature": 0.5, "top_p": 1, "stop": ["x"], "seed": 3, "frequency_penalty": 1, "presence_penalty": -1,
    "n": 1, "stream": False, "logprobs": False, "top_logprobs": None, "user": "u", "response_format": {"type": "text"}, "tool_choice": "none",
}  # fmt: skip
CSV = (
    "stop", "stop_token_ids", "ignore_eos", "choices", "regex", "json_schema", "n", "logprobs", "guided_choice",
    "max_completion_tokens",
)  # fmt: skip
PLAIN = ("temperature", "top_p", "seed")
LONG_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}}}
HALF = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7)


def own(value):
    return {"sampling_params": value}


def chats(**asked):
    return asks(CHAT, messages=[USER], **asked)


def raw(**asked):
    return asks(RAW, prompt="a", **asked)


PARAMS = [
    # The column sampling_params, over the command's values.
    *((own(value), HALF, {}, HALF) for value in (None, {}, "", "null")),
    (own({"temperature": 1, "max_tokens": None, "stop": "x"}), HALF, {}, SamplingParams(temperature=1.0, top_p=0.9, max_tokens=7, stop=("x",))),
    (own('{"seed": 3, "stop": ["x", "y"]}'), {}, {}, {"seed": 3, "stop": ("x", "y")}),
    (own(NEUTRAL), {}, {}, {}),
    (own({"choices": ["x", "y"]}), {"regex": "[0-9]"}, {}, {"choices": ("x", "y")}),
    (own({"max_completion_tokens": 9, "max_tokens": 5}), {}, {}, {"max_tokens": 9}),
    (own({"max_new_tokens": 9}), {}, {}, {"max_tokens": 9}),
    (own({"top_k": -1}), {"top_k": 3}, {}, {"top_k": 0}),
    (own({"logprobs": True, "top_logprobs": 2}), {"top_k": 3}, {}, {"top_k": 3, "logprobs": 2}),
    (own({"guided_json": {"type": "null"}}), {}, {}, {"json_schema": '{"type": "null"}'}),
    (own({"structured_outputs": {"regex": "a+"}}), {}, {}, {"regex": "a+"}),
    (own({"structured_outputs": {"json": {}, "disable_any_whitespace": False}}), {}, {}, {"json_schema": "{}", "json_whitespace": True}),
    (own({"guided_decoding": {"json_object": True}}), {}, {}, {"json_schema": '{"type": "object"}'}),
    (own({"response_format": {"type": "json_object"}}), {}, {}, {"json_schema": '{"type": "object"}'}),
    # Columns that the command names; text, as in a CSV file.
    ({"temperature": 0.5, "seed": 4.0, "top_k": 5}, {}, {"row_params": PLAIN}, {"temperature": 0.5, "seed": 4}),
    ({"temperature": None, "seed": ""}, {}, {"row_params": PLAIN}, {}),
    ({"temperature": 0.5, "top_p": 0.5, "sampling_params": {"temperature": 1.0}}, {}, {"row_params": PLAIN}, {"temperature": 1.0, "top_p": 0.5}),
    ({"stop": "5", "stop_token_ids": "[1, 2]", "ignore_eos": "True"}, {}, {"row_params": CSV}, {"stop": ("5",), "stop_token_ids": (1, 2), "ignore_eos": True}),
    ({"stop": '["x", "y"]'}, {}, {"row_params": CSV}, {"stop": ("x", "y")}),
    *(({"stop": text}, {}, {"row_params": CSV}, {"stop": (text,)}) for text in ("[]", "[1]", '["', '{"a": 1}', "null", '"x"')),
    ({"stop": "", "stop_token_ids": "", "ignore_eos": "false"}, {}, {"row_params": CSV}, {}),
    ({"choices": "yes, no"}, {}, {"row_params": CSV}, {"choices": ("yes", "no")}),
    ({"regex": "[1]", "n": "2", "logprobs": "0"}, {}, {"row_params": CSV}, {"regex": "[1]", "n": 2, "logprobs": 0}),
    ({"max_completion_tokens": "7", "guided_choice": None}, {}, {"row_params": CSV}, {"max_tokens": 7}),
    ({"guided_choice": "yes, no"}, {}, {"row_params": CSV}, {"choices": ("yes", "no")}),
    # OpenAI's Batch form.
    (chats(**OF_OPENAI), {}, ML, {"max_tokens": 9, "temperature": 0.5, "stop": ("x",), "seed": 3, "frequency_penalty": 1.0, "presence_penalty": -1.0}),
    (chats(temperature=None), {"temperature": 0.7, "max_tokens": 5}, ML, {"temperature": 0.7, "max_tokens": 5}),
    (chats(n=3), {}, ML, {"n": 3}),
    (chats(logprobs=True), {}, ML, {"logprobs": 0}),
    (chats(logprobs=True, top_logprobs=4), {}, ML, {"logprobs": 4}),
    (chats(response_format={"type": "json_object"}), {}, ML, {"json_schema": '{"type": "object"}'}),
    (chats(response_format=LONG_SCHEMA), {}, ML, {"json_schema": '{"b": 1, "a": 2}'}),
    (chats(guided_json={"type": "null"}), {}, ML, {"json_schema": '{"type": "null"}'}),
    (raw(logprobs=2), {}, {}, {"logprobs": 2}),
    (raw(guided_regex="a+", guided_choice=None), {}, {}, {"regex": "a+"}),
    (raw(guided_choice=["a", "b"]), {}, {}, {"choices": ("a", "b")}),
    (raw(structured_outputs={"choice": ["a", "b"], "json": None}), {}, {}, {"choices": ("a", "b")}),
    (raw(structured_outputs={"json": {}, "json_object": False}), {}, {}, {"json_schema": "{}"}),
    (raw(**OF_VLLM), {"top_k": 5}, ML, {}),
    (raw(max_tokens=5, max_completion_tokens=6), {}, {}, {"max_tokens": 6}),
    (raw(seed=3) | {"sampling_params": {"seed": 4, "top_k": 5}}, {}, {}, {"seed": 3, "top_k": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "command", "options", "params"), PARAMS)
def test_a_row_has_its_parameters(tools, columns, command, options, params):
    given, expected = (p if isinstance(p, SamplingParams) else SamplingParams(**p) for p in (command, params))
    request = tools.one({"prompt": "a"} | columns if "body" not in columns else columns, sampling=given, **options)
    assert request.params == expected


# -- templates over the columns


def build(tools, template, *columns, **options):
    return tools.builder(template=template, **options).build(tools.rows(*columns))


@pytest.mark.parametrize(
    ("template", "columns", "message"),
    [
        ("{{ a }}{{ b }}", {"a": 1}, "template: the row has no column 'b'"),
        ("{% if b %}x{% endif %}", {"a": 1}, "template: the row has no column 'b'"),
        ("{{ a.b }}", {"a": {}}, "template: 'dict object' has no attribute 'b'"),
        ("{{ a }}", {"a": None}, "template: column 'a' is null; write `(a or '')` instead to allow that"),
        ("{{ a.b }}", {"a": {"b": None}}, "template: a value is null; write `(… or '')` instead to allow that"),
        ("{{ a / 0 }}", {"a": 1}, "template: division by zero"),
        ("{{ a.__class__ }}", {"a": 1}, "template: access to attribute '__class__' of 'int' object is unsafe."),
        ("{{ a.append(1) }}", {"a": []}, "template: access to attribute 'append' of 'list' object is unsafe."),
        ("{{ 'x' * a }}", {"a": 10**12}, "template: it needs more than 2048 MiB of memory"),
        ("{{ a }}", {"a": (i for i in ())}, "template: a value cannot be sent to the process that renders templates: cannot pickle 'generator' object"),
    ],
)  # fmt: skip
def test_an_error_in_the_template_fails_only_its_row(tools, template, columns, message):
    (result,) = build(tools, template, columns)
    assert tools.error_of(result) == ("template_error", message)


@pytest.mark.parametrize(
    "template",
    [
        "{{ a | upper }}", "{{ a | trim }}", "{{ a | e }}", "{{ a | string }}", "{{ 'x' ~ a }}", "{{ a ~ 'x' ~ b }}", "{{ 'ab' | replace('a', a) }}",
        "{{ '%s' | format(a) }}", "{{ ['x', a] | join(', ') }}", "{{ [{'k': 'x'}, {'k': a}] | join(attribute='k') }}",
        "{{ ['x', a] | map('upper') | list }}", "{% if ('x' ~ a) == 'xNone' %}y{% endif %}",
    ],
)  # fmt: skip
def test_no_filter_writes_a_null_as_a_word(tools, template):
    failed, built = build(tools, template, {"a": None, "b": "b"}, {"a": "a", "b": "b"})
    error = ("template_error", "template: column 'a' is null; write `(a or '')` instead to allow that")
    assert tools.error_of(failed) == error
    assert "None" not in tools.text_of(built)


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
