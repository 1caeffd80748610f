"""Tool calls are read from answers in every known format, with and without thoughts, and returned in OpenAI's form."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from batchgen.parsers.tool_calls import HARMONY_CALLS, find_calls, tool_format
from batchgen.result import ToolCall
from batchgen.sampling.stopping import Stopper
from support.marked import EOS, HARMONY_TOKENS, complete, make
from support.params import FULL

PARAMETERS = {
    "city": {"type": "string"},
    "code": {"type": "string"},
    "days": {"type": "integer"},
    "metric": {"type": "boolean"},
}
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PARAMETERS}}}
        for name in ("weather", "news")
    ]
)
ARGUMENTS = {"city": "Bern, «é»", "code": "\n    if a:\n        b \n\n", "days": 3, "metric": True}
J = json.dumps(ARGUMENTS, ensure_ascii=False)
OBJECTS = json.dumps([{"name": n, "arguments": ARGUMENTS} for n in ("weather", "news")], ensure_ascii=False)
ACTIONS = json.dumps(
    [{"tool_call_id": "0", "tool_name": n, "parameters": ARGUMENTS} for n in ("weather", "news")], ensure_ascii=False
)


def xml(open: str, close: str) -> str:
    return "".join(open.format(k) + (v if isinstance(v, str) else json.dumps(v)) + close for k, v in ARGUMENTS.items())


def both(call: str) -> str:
    return call.replace("NAME", "weather") + call.replace("NAME", "news")


FORMATS = {
    "Hermes, Qwen 3": ("<tool_call>", both('\n<tool_call>\n{"name": "NAME", "arguments": ' + J + "}\n</tool_call>")),
    "Qwen 3.5": (
        "<tool_call>\n<function=",
        both(
            "\n<tool_call>\n<function=NAME>\n"
            + xml("<parameter={}>\n", "\n</parameter>\n")
            + "</function>\n</tool_call>"
        ),
    ),
    "GLM": (
        "<arg_key>",
        both("\n<tool_call>NAME\n" + xml("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n") + "</tool_call>"),
    ),
    "MiniMax": (
        "<minimax:tool_call>",
        "\n<minimax:tool_call>\n"
        + both('<invoke name="NAME">\n' + xml('<parameter name="{}">', "</parameter>\n") + "</invoke>\n")
        + "</minimax:tool_call>",
    ),
    "Seed-OSS": (
        "<seed:tool_call>",
        both(
            "\n<seed:tool_call>\n<function=NAME>\n"
            + xml("<parameter={}>", "</parameter>\n")
            + "</function>\n</seed:tool_call>"
        ),
    ),
    "DeepSeek V3.2": (
        "｜DSML｜",
        "\n\n<｜DSML｜function_calls>\n"
        + both(
            '<｜DSML｜invoke name="NAME">\n'
            + xml('<｜DSML｜parameter name="{}" string="true">', "</｜DSML｜parameter>\n")
            + "</｜DSML｜invoke>\n"
        )
        + "</｜DSML｜function_calls>",
    ),
    "Functionary 3.1": ("start_tag => `<function`", both("<function=NAME>" + J + "</function>\n")),
    "FunctionGemma": (
        "<start_function_call>",
        both(
            "<start_function_call>call:NAME{city:<escape>Bern, «é»<escape>,code:<escape>\n    if a:\n        b \n\n<escape>,days:3,metric:true}<end_function_call>"
        ),
    ),
    "Hunyuan": ("<tool_call> <tool_calls>", "\n<tool_calls>" + OBJECTS + "</tool_calls>"),
    "LFM 2": (
        "<|tool_call_start|>",
        "<|tool_call_start|>["
        + ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in ARGUMENTS.items())})"
            for name in ("weather", "news")
        )
        + "]<|tool_call_end|>",
    ),
    "MiniMax M1": (
        '<tool_calls>\n{"name": <tool-name>, "arguments": <args-json-object>}',
        "\n<tool_calls>\n" + both('{"name": "NAME", "arguments": ' + J + "}\n") + "</tool_calls>",
    ),
    "OLMo 3": (
        "{{- '<function_calls>' + message['function_calls'] + '</function_calls>' -}}",
        "<function_calls>"
        + both(f"NAME({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in ARGUMENTS.items())})\n")
        + "</function_calls>",
    ),
    "Apertus": (
        "<|tools_prefix|>",
        f'<|tools_prefix|>[{{"weather": {J}}}, {{"news": {J}}}]<|tools_suffix|>',
    ),
    "Phi 4 mini": ("functools[", "functools" + OBJECTS),
    "Kimi": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|>"
        + both("<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>" + J + "<|tool_call_end|>")
        + "<|tool_calls_section_end|>",
    ),
    "DeepSeek V3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜>"
        + both("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n" + J + "\n```<｜tool▁call▁end｜>\n")
        + "<｜tool▁calls▁end｜>",
    ),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜>"
        + both("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>" + J + "<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>",
    ),
    "Gemma 4": (
        "<|tool_call>",
        both(
            '<|tool_call>call:NAME{city:<|"|>Bern, «é»<|"|>,code:<|"|>\n    if a:\n        b \n\n<|"|>,days:3,metric:true}<tool_call|>'
        ),
    ),
    "Mistral": ("[TOOL_CALLS] [ARGS]", both("[TOOL_CALLS]NAME[ARGS]" + J)),
    "Mistral before": ("[TOOL_CALLS]", "[TOOL_CALLS]" + OBJECTS),
    "Nemotron Nano 2": ("<TOOLCALL>", "<TOOLCALL>" + OBJECTS + "</TOOLCALL>"),
    "Command A": ("<|START_ACTION|>", "<|START_ACTION|>" + ACTIONS + "<|END_ACTION|>"),
    "Granite 3": ("<|tool_call|>", "<|tool_call|>" + OBJECTS),
}


BOTH = [("weather", ARGUMENTS), ("news", ARGUMENTS)]


def answered(template: str, answer: str) -> Stopper:
    """A whole completion of a model with this chat template."""
    return complete(make(template=template), "q", answer + EOS, tools=TOOLS)


def named(calls: Iterable[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("thoughts", ["", "Hm, <b> é.</think>\n\n"])
@pytest.mark.parametrize("beside", ["", "I will look."])
def test_tool_calls_are_read_in_the_format_of_each_family(family, thoughts, beside):
    mark, written = FORMATS[family]
    tokenizer = make(template=mark + ("<think></think>" if thoughts else ""))
    prompt = "q<think>" if thoughts else "q"
    stopper = complete(tokenizer, prompt, thoughts + beside + written + EOS, tools=TOOLS)
    calls = stopper.tool_calls("c")
    assert named(calls) == BOTH
    assert (stopper.text, stopper.reasoning) == (beside, "Hm, <b> é." if thoughts else None)
    assert [call.id for call in calls] == (
        ["functions.weather:0", "functions.news:0"] if family == "Kimi" else ["c_0", "c_1"]
    )


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("thoughts", ["", "I must <b> look 🙂."])
@pytest.mark.parametrize("opened", [True, False])
def test_calls_at_the_end_of_thoughts_that_were_not_closed_are_read(family, thoughts, opened):
    mark, written = FORMATS[family]
    tokenizer = make(template=mark + "<think></think>")
    prompt, begin = ("q<think>", "") if opened else ("q", "<think>")
    stopper = complete(tokenizer, prompt, begin + thoughts + written + EOS, tools=TOOLS)
    assert (stopper.text, stopper.finish_reason) == (None, "stop")
    assert named(stopper.tool_calls("c")) == BOTH
    assert (stopper.text, stopper.reasoning) == ("", thoughts or None)
    blanks = written[: len(written) - len(written.lstrip())]
    before = tokenizer.encode(begin + thoughts + blanks, add_special_tokens=False)
    assert stopper.reasoning_tokens == len(before)
    unsplit = complete(tokenizer, prompt, begin + thoughts + written + EOS, tools=TOOLS, reasoning="off")
    assert (len(unsplit.tool_calls("c")), unsplit.text) == (2, begin + thoughts)


def test_a_call_in_the_middle_of_thoughts_is_a_thought():
    mark, written = FORMATS["Hermes, Qwen 3"]
    tokenizer = make(template=mark + "<think></think>")
    for whole in (f"Maybe {written} or not.", f"Maybe {written} or not.</think>No."):
        stopper = complete(tokenizer, "q<think>", whole + EOS, tools=TOOLS)
        reasoning, _, answer = whole.partition("</think>")
        assert (stopper.tool_calls("c"), stopper.text, stopper.reasoning) == ((), answer or None, reasoning)


@pytest.mark.parametrize("family", FORMATS)
def test_tool_calls_cut_before_the_end_token_stay_text(family):
    mark, written = FORMATS[family]
    tokenizer = make(template=mark)
    size = len(tokenizer.encode(written))
    for max_tokens in (size, size // 2):
        stopper = complete(tokenizer, "q", written, max_tokens=max_tokens, tools=TOOLS)
        text = stopper.text
        assert (stopper.finish_reason, stopper.tool_calls("c"), stopper.text) == ("length", (), text)
        assert text.startswith(written[:20])


@pytest.mark.parametrize(
    "answer",
    [
        "It is sunny.",
        "<tool_call>\nweather(Bern)\n</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": " ", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "args": {"city": "Bern"}}</tool_call>',
        "",
    ],
)
def test_an_answer_without_a_readable_call_stays_unchanged(answer):
    stopper = answered("<tool_call>", answer)
    assert (stopper.tool_calls("c"), stopper.text) == ((), answer)


TAGS = {
    "Qwen 3.5": ("<parameter=city", "</parameter>\n"),
    "GLM": ("<arg_key>city", "</arg_value>\n"),
    "MiniMax": ('<parameter name="city', "</parameter>\n"),
    "Seed-OSS": ("<parameter=city", "</parameter>\n"),
    "DeepSeek V3.2": ('<｜DSML｜parameter name="city', "</｜DSML｜parameter>\n"),
}
"""The beginning of the first argument and the end of each in the families whose arguments stand between tags."""


@pytest.mark.parametrize("family", TAGS)
def test_an_argument_that_is_not_closed_ends_before_the_next_argument_or_with_its_call(family):
    mark, written = FORMATS[family]
    arguments = ARGUMENTS | {"code": "a\n\n  b"}
    written = written.replace(ARGUMENTS["code"], arguments["code"]).replace(TAGS[family][1], "")
    stopper = answered(mark, written)
    assert named(stopper.tool_calls("c")) == [("weather", arguments), ("news", arguments)]
    assert stopper.text == ""


def test_a_tag_within_a_line_is_a_part_of_the_argument():
    mark, written = FORMATS["Qwen 3.5"]
    code = "if '<parameter=city>' in x:\n    f('</function', '</tool_call>')"
    stopper = answered(mark, written.replace(ARGUMENTS["code"], code))
    assert [json.loads(call.arguments) for call in stopper.tool_calls("c")] == [ARGUMENTS | {"code": code}] * 2


@pytest.mark.parametrize("family", [*TAGS, "Functionary 3.1"])
def test_a_call_with_anything_beside_its_arguments_stays_text(family):
    mark, written = FORMATS[family]
    first = TAGS.get(family, ("{", ""))[0]
    answer = written.replace(first, 'city: "Bern"\n' + first)
    stopper = answered(mark, answer)
    assert (stopper.tool_calls("c"), stopper.text) == ((), answer)


@pytest.mark.parametrize(
    ("family", "last", "instead"),
    [("Qwen 3.5", "</function>\n", ""), ("MiniMax", "</invoke>\n", ""), ("DeepSeek V3", "\n```<", "```<")],
)
def test_the_last_call_may_lack_its_end_or_have_its_code_fence_on_the_line_of_the_arguments(family, last, instead):
    mark, written = FORMATS[family]
    stopper = answered(mark, instead.join(written.rsplit(last, 1)))
    assert named(stopper.tool_calls("c")) == BOTH


@pytest.mark.parametrize(
    "schema", [{"type": ["string", "integer"]}, {"anyOf": [{"type": "integer"}, {"type": "string"}]}]
)
def test_a_text_in_json_stays_text_where_the_schema_allows_text(schema):
    properties = {"zip": schema, "note": {"type": ["string", "null"]}, "days": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": properties}}}]
    given = {"zip": "01234", "note": "null", "days": "3"}
    written = "<tool_call>" + json.dumps({"name": "weather", "arguments": given}) + "</tool_call>" + EOS
    (call,) = complete(make(template="<tool_call>"), "q", written, tools=json.dumps(tools)).tool_calls("c")
    assert json.loads(call.arguments) == given | {"days": 3}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/Count"}], "description": "how many"}, "3", 3),
        ({"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}, "3", 3),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": True}, "true", True),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"$ref": "#/$defs/Color"}, "1", "1"),
        ({"$ref": "#/$defs/Loop"}, "3", 3),
        ({"$ref": "#/$defs/No"}, "3", "3"),
        ({}, "3", "3"),
    ],
)
def test_an_argument_that_is_written_as_text_has_the_type_of_its_schema_wherever_that_stands(schema, written, value):
    definitions = {
        "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "Count": {"type": "integer"},
        "Color": {"enum": ["0", "1"]},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Count"}]},
    }
    parameters = {"type": "object", "properties": {"q": schema}, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    call = f"<tool_call>\n<function=weather>\n<parameter=q>\n{written}\n</parameter>\n</function>\n</tool_call>"
    found = find_calls(tool_format(make(template="<function=")), call, json.dumps(tools))
    assert [json.loads(one.arguments) for one in found[1]] == [{"q": value}]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("[weather(city='a\\'b\\d')]", [("weather", {"city": "a'b\\d"})]),
        ("weather.of(tags=[1, {'a': None}])", [("weather.of", {"tags": [1, {"a": None}]})]),
        ("[weather()]", [("weather", {})]),
        ("[weather('Bern')]", []),
        ("[weather(**{'city': 'Bern'})]", []),
        ("[weather(city=Bern)]", []),
        ("[weather(city={1, 2})]", []),
        ("['weather']", []),
        ("[weather(", []),
        ("x = weather()", []),
        ("weather()\nnews()", []),
    ],
)
def test_calls_as_in_python_have_named_arguments_with_plain_values(written, found):
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    for tokenizer in (make(template=marks[0]), make(special=marks, template="{{ tools }}")):
        whole = marks[0] + written + marks[1] + EOS
        assert named(complete(tokenizer, "q", whole, tools=TOOLS).tool_calls("c")) == found


@pytest.mark.parametrize("family", ["LFM 2", "OLMo 3"])
def test_a_call_that_python_cannot_parse_for_its_depth_stays_text(family):
    mark, written = FORMATS[family]
    known: Any = tool_format(make(template=mark))
    for signs in (100, 6001, 100_000):
        assert find_calls(known, written.replace("days=3", f"days={'-' * signs}"), TOOLS) is None


@pytest.mark.parametrize(
    ("family", "written", "found"),
    [
        ("OLMo 3", "<function_calls>weather(metric=true, city=null, tags=['a', {'b': False}])</function_calls>",
         [("weather", {"metric": True, "city": None, "tags": ["a", {"b": False}]})]),
        ("OLMo 3", "<function_calls>\nweather()\n\nnews(days=-1)\n</function_calls>", [("weather", {}), ("news", {"days": -1})]),
        ("OLMo 3", "<function_calls>weather()\nx = 1</function_calls>", []),
        ("OLMo 3", "<function_calls>weather(city=Bern)</function_calls>", []),
        ("OLMo 3", "weather(city='Bern')", []),
        ("Apertus", '<|tools_prefix|>[{"weather": {}}]<|tools_suffix|>', [("weather", {})]),
        ("Apertus", '<|tools_prefix|>[{"weather": {}, "news": {}}]<|tools_suffix|>', []),
        ("Apertus", '<|tools_prefix|>[{"weather": "Bern"}]<|tools_suffix|>', []),
        ("Apertus", '<|tools_prefix|>{"weather": {}}<|tools_suffix|>', []),
        ("MiniMax M1", '<tool_calls>{"name": "weather", "arguments": {}}</tool_calls>', [("weather", {})]),
        ("MiniMax M1", '<tool_calls>{"name": "weather", "arguments": {"city": "a\u2028b"}}</tool_calls>', [("weather", {"city": "a\u2028b"})]),
        ("MiniMax M1", '<tool_calls>\n{"name": "weather"\n, "arguments": {}}\n</tool_calls>', []),
    ],
)  # fmt: skip
def test_calls_of_a_list_are_read_together_or_not_at_all(family, written, found):
    stopper = answered(FORMATS[family][0], written)
    assert named(stopper.tool_calls("c")) == found
    assert stopper.text == ("" if found else written)


@pytest.mark.parametrize("template", ["{{ tools }}", "]<]minimax[>[<tool_call>"])
def test_a_template_without_a_known_mark_or_with_that_of_another_family_in_its_own_has_no_format(template):
    assert tool_format(make(template=template)) is None


def test_a_row_without_tools_has_no_calls():
    mark, written = FORMATS["Hermes, Qwen 3"]
    stopper = complete(make(template=mark), "q", written + EOS)
    assert (stopper.tool_calls("c"), stopper.text) == ((), written)


LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'


def test_an_answer_that_is_a_json_object_is_a_call_if_it_names_a_tool():
    written = json.dumps({"name": "weather", "parameters": ARGUMENTS})
    for before in ("", "<|python_tag|>"):
        stopper = answered(LLAMA, before + written)
        (call,) = stopper.tool_calls("c")
        assert (call.name, json.loads(call.arguments), stopper.text) == ("weather", ARGUMENTS, "")
    other = json.dumps({"name": "Ada", "parameters": {}})
    stopper = answered(LLAMA, other)
    assert (stopper.tool_calls("c"), stopper.text) == ((), other)


@pytest.mark.parametrize(
    "written",
    ["{}; {}", "{}\n{}", "{}{}", "[{}, {}]", "<|python_tag|>{};\n{};", "<|python_start|>{}\n{}<|python_end|>"],
)
@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_an_answer_of_several_objects_is_their_calls_if_all_name_tools(written, key):
    objects = [json.dumps({"name": name, key: ARGUMENTS}) for name in ("weather", "news", "stocks")]
    whole = written.replace("{}", "%s") % tuple(objects[:2])
    stopper = answered(LLAMA, whole)
    assert named(stopper.tool_calls("c")) == BOTH
    assert stopper.text == ""
    for other in (written.replace("{}", "%s") % tuple(objects[1:]), f"Look: {whole}", f"{whole} Done.", f"{whole} 1"):
        stopper = answered(LLAMA, other)
        text = stopper.text
        assert (stopper.tool_calls("c"), stopper.text) == ((), text)


PROMPT = "<|start|>user<|message|>q<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        " to=functions.weather<|channel|>commentary json<|message|>",
    ],
)
@pytest.mark.parametrize("thought", [True, False])
def test_harmony_messages_to_functions_are_calls_and_not_thoughts(header, thought):
    tokenizer = make(special=HARMONY_TOKENS)
    assert tool_format(tokenizer) is HARMONY_CALLS
    written = (THOUGHT if thought else "") + header + J + "<|call|>"
    stopper = complete(tokenizer, PROMPT, written, tools=TOOLS)
    (call,) = stopper.tool_calls("c")
    assert (call.id, call.name, json.loads(call.arguments)) == ("c_0", "weather", ARGUMENTS)
    assert (stopper.text, stopper.reasoning) == ("", "Think." if thought else None)
    before = THOUGHT.removesuffix("<|start|>assistant") if thought else ""
    assert stopper.reasoning_tokens == len(tokenizer.encode(before, add_special_tokens=False))
    unsplit = complete(tokenizer, PROMPT, written, tools=TOOLS, reasoning="off")
    assert len(unsplit.tool_calls("c")) == 1
    assert unsplit.text == ("analysisThink." if thought else "")


@pytest.mark.parametrize("thought", [THOUGHT, ""])
@pytest.mark.parametrize("more", ["", THOUGHT, "<|channel|>final<|message|>Again.<|end|><|start|>assistant"])
def test_an_answer_before_a_harmony_call_is_its_text(thought, more):
    answer = "<|channel|>final<|message|>I will look.<|end|><|start|>assistant"
    written = thought + answer + more + "<|channel|>commentary to=functions.weather<|message|>" + J + "<|call|>"
    stopper = complete(make(special=HARMONY_TOKENS), PROMPT, written, tools=TOOLS)
    assert len(stopper.tool_calls("c")) == 1
    assert (stopper.text, stopper.reasoning) == ("I will look.", "Think." if thought else None)


def test_a_function_that_is_only_named_in_harmony_thoughts_is_not_called():
    thought = "<|channel|>analysis<|message|>Either to=functions.news or weather.<|end|><|start|>assistant"
    header = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    stopper = complete(make(special=HARMONY_TOKENS), PROMPT, thought + header + J + "<|call|>", tools=TOOLS)
    assert [call.name for call in stopper.tool_calls("c")] == ["weather"]
    assert (stopper.text, stopper.reasoning) == ("", "Either to=functions.news or weather.")


def test_a_checkpoint_may_define_its_own_format():
    tokenizer = make(template="<tool_call>")
    tokenizer.response_template = {
        "start_anchor": "<bot>",
        "fields": {
            "content": {"content": "text"},
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+) ",
                "close": ";",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    stopper = complete(tokenizer, "q CALL no {};<bot>", f"Yes.CALL weather {J};{EOS}", tools=TOOLS)
    (call,) = stopper.tool_calls("c")
    assert (call.name, json.loads(call.arguments), stopper.text) == ("weather", ARGUMENTS, "Yes.")


@pytest.mark.parametrize("family", FORMATS)
def test_broken_answers_never_raise(family):
    mark, written = FORMATS[family]
    known: Any = tool_format(make(template=mark))
    for at in range(0, len(written), 1 if FULL else 3):
        for answer in (written[:at], written[at:], written[:at] + "}" + written[at:]):
            find_calls(known, answer, TOOLS)
