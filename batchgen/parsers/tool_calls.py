"""How models write calls of tools: the formats that are known, which one a tokenizer has, and the calls in an answer.

The formats are response templates of transformers (`transformers.utils.chat_parsing`), which has the parser. A checkpoint may bring its
own (`response_template` of its tokenizer); otherwise the chat template tells the format by its marks.

Blanks are matched up to 64 at a time: without a limit, an answer of thousands of blanks would take minutes to search.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from batchgen.parsers.json_schemas import referenced
from batchgen.parsers.thinking import HARMONY, thinking_format
from batchgen.result import ToolCall

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_OBJECT = {"type": "function", "function": "{content}"}
_EACH = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_TEXT = {"content": "text", "repeats": True, "join": "\n"}
_NAMED: dict[str, Any] = {"repeats": True, "content": "json", "transform": _CALL}
"""The settings of calls whose names stand before the JSON of their arguments."""
_LISTED: dict[str, Any] = {"content": "json", "transform": _EACH, "transform_each": True}
"""The settings of a JSON list of calls, with names and arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class ToolFormat:
    """How one family of models writes its calls."""

    template: Mapping[str, Any]
    """The response template, with the fields `content` and `tool_calls`."""
    whole: bool = False
    """Whether it describes the whole completion after its prompt, not only an answer after thoughts."""
    only_known: bool = False
    """Whether only names of the row's own tools are calls: an answer of other JSON would look the same."""
    rewrite: Callable[[str], str] | None = None
    """Returns an answer with its calls in a form that the template describes; None if they have it. Raises an error that `find_calls` knows if there are none."""


def _format(only_known: bool = False, rewrite: Callable[[str], str] | None = None, **calls: Any) -> ToolFormat:
    fields = {"content": _TEXT, "tool_calls": calls}
    return ToolFormat({"start_anchor": "\0", "fields": fields}, only_known=only_known, rewrite=rewrite)


def _list_between(open: str, close: str, listed: Callable[[str], str]) -> ToolFormat:
    """Returns the format of calls between two marks, of whose text `listed` makes a JSON list of names and arguments."""
    text = re.compile(rf"(?<={re.escape(open)}).*?(?={re.escape(close)}|\Z)", re.DOTALL)
    return _format(
        rewrite=lambda answer: text.sub(lambda found: listed(found[0].strip()), answer),
        open_pattern=rf"\s{{0,64}}{re.escape(open)}",
        close=close,
        **_LISTED,
    )


def _python_list(text: str) -> str:
    """Returns the calls of a list, or a single call, as Python writes them."""
    (line,) = _parsed(text).body
    written = line.value if isinstance(line, ast.Expr) else line
    return _python_calls(written.elts if isinstance(written, ast.List) else [written])


def _python_lines(text: str) -> str:
    """Returns calls that stand one to a line, as Python writes them, whose values may have the constants of JSON."""
    lines = _JsonConstants().visit(_parsed(text)).body
    return _python_calls([line.value if isinstance(line, ast.Expr) else line for line in lines])


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except MemoryError:  # Python's word for a row of thousands of minus signs
        raise ValueError("nested too deeply") from None


class _JsonConstants(ast.NodeTransformer):
    _VALUES: ClassVar = {"null": None, "true": True, "false": False}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def _python_calls(written: Sequence[ast.AST]) -> str:
    """Returns the calls as JSON. Raises `ValueError` if one is no call with named arguments."""
    calls = []
    for call in written:
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError("not a call with named arguments")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        calls.append({"name": ast.unparse(call.func), "arguments": arguments})
    return json.dumps(calls)


def _json_lines(text: str) -> str:
    """Returns calls that stand one to a line, as JSON objects."""
    return json.dumps([json.loads(line) for line in text.split("\n") if line.strip()])


def _json_pairs(text: str) -> str:
    """Returns the calls of a JSON list of objects, each with a name as its only key."""
    calls = []
    for call in json.loads(text):
        ((name, arguments),) = call.items()
        calls.append({"name": name, "arguments": arguments})
    return json.dumps(calls)


_NO_SEPARATOR = re.compile(r"[^\s;]")


def _from_objects(answer: str) -> str:
    """Returns an answer that consists of JSON objects with names, in a list or not, as one list of calls. Raises an error for any other answer."""
    text = re.sub(r"<\|python_(?:tag|start|end)\|>", "", answer)
    found: list[Any] = []
    end = 0
    while start := _NO_SEPARATOR.search(text, end):
        value, end = json.JSONDecoder().raw_decode(text, start.start())
        found += value if isinstance(value, list) else [value]
    given = [(call["name"], call.get("parameters", call.get("arguments"))) for call in found]
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in given])


def _tags(open: str, close: str, lines: str = "") -> dict[str, Any]:
    """Returns the settings of a call whose arguments stand between tags. `open` has the group `key`. `lines` is the line end between tags and value.

    A value that is not closed ends before the next argument or with the call. Whatever is no argument matches without a key, for which the
    parser raises `ValueError`: no part of a call is dropped.
    """
    next_open = re.sub(r"\(\?P<key>(.*?)\)", r"\1", open)
    next_open = rf"\n{next_open}\n" if lines else rf"\n?{next_open}"
    value = rf"{lines}(?P<value>.*?)(?:{lines}{close}|(?={next_open})|\n?\Z)"
    return {
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": rf"{open}{value}|\S"},
        "transform": _CALL,
    }


def _within(outer: str, close: str) -> str:
    """Returns the pattern of the end of a call inside an element: `close`, which may be missing at the end of the element."""
    return rf"{close}(?:\s{{0,64}}</{outer}>)?|</{outer}>(?=\s{{0,64}}(?:<{outer}>|\Z))"


HARMONY_CALLS = _format(
    open_pattern=r"to=functions\.(?P<name>[\w.-]+)(?:(?!<\|(?:message|end|start|call|return)\|>)[^{]){0,200}<\|message\|>",
    close="<|call|>",
    **_NAMED,
)
"""gpt-oss: messages to a function, in the channel `commentary`. A header ends with its own message: thoughts may name a function too."""
_BY_MARK: tuple[tuple[str, ToolFormat | None], ...] = (
    ("]<]minimax[>[", None),  # MiniMax M3, which has the marks of others in its own
    (  # MiniMax M1
        "<tool_calls>\n{",
        _list_between("<tool_calls>", "</tool_calls>", _json_lines),
    ),
    (  # MiniMax M2
        "<minimax:tool_call>",
        _format(
            open_pattern=r'\s{0,64}(?:<minimax:tool_call>\s{0,64})?<invoke name="(?P<name>[^"]+)">',
            close_pattern=_within("minimax:tool_call", "</invoke>"),
            **_tags(r'<parameter name="(?P<key>[^"]+)">', "</parameter>"),
        ),
    ),
    (  # DeepSeek V3.2 and V4
        "｜DSML｜",
        _format(
            open_pattern=r"\s{0,64}(?:<｜DSML｜(?:function|tool)_calls>\s{0,64})?<｜DSML｜invoke name=\"(?P<name>[^\"]+)\">",
            close_pattern=_within("｜DSML｜(?:function|tool)_calls", "</｜DSML｜invoke>"),
            **_tags(r'<｜DSML｜parameter name="(?P<key>[^"]+)"(?: string="(?:true|false)")?>', "</｜DSML｜parameter>"),
        ),
    ),
    (  # Kimi K2
        "<|tool_calls_section_begin|>",
        _format(
            open_pattern=r"\s{0,64}(?:<\|tool_calls_section_begin\|>\s{0,64})?<\|tool_call_begin\|>\s{0,64}"
            r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s{0,64}<\|tool_call_argument_begin\|>",
            close_pattern=r"<\|tool_call_end\|>(?:\s{0,64}<\|tool_calls_section_end\|>)?",
            repeats=True,
            content="json",
            transform={"id": "{id}", **_CALL},
        ),
    ),
    (  # DeepSeek R1 and V3 with the code fence, V3.1 without
        "<｜tool▁calls▁begin｜>",
        _format(
            open_pattern=r"\s{0,64}(?:<｜tool▁calls▁begin｜>\s{0,64})?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
            r"(?P<name>[^\n<]+)(?:<｜tool▁sep｜>|\n```json\n)",
            close_pattern=r"(?:\n?```)?<｜tool▁call▁end｜>(?:\s{0,64}<｜tool▁calls▁end｜>)?",
            **_NAMED,
        ),
    ),
    (  # Gemma 4
        "<|tool_call>",
        _format(
            open_pattern=r"\s{0,64}<\|tool_call>call:(?P<name>[\w.-]+)",
            close="<tool_call|>",
            **_NAMED,
            content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        ),
    ),
    (  # FunctionGemma
        "<start_function_call>",
        _format(
            open_pattern=r"\s{0,64}<start_function_call>call:(?P<name>[\w.-]+)",
            close="<end_function_call>",
            **_NAMED,
            content_args={"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        ),
    ),
    (  # Mistral since Small 3.2, Magistral, Devstral
        "[ARGS]",
        _format(
            open_pattern=r"\s{0,64}\[TOOL_CALLS\]\s{0,64}(?P<name>[\w.-]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
            close_pattern=r"(?=\[TOOL_CALLS\])",
            **_NAMED,
        ),
    ),
    (  # Mistral before
        "[TOOL_CALLS]",
        _format(open_pattern=r"\s{0,64}\[TOOL_CALLS\]", **_LISTED),
    ),
    (  # GLM 4.5 and later
        "<arg_key>",
        _format(
            open_pattern=r"\s{0,64}<tool_call>\s{0,64}(?P<name>[^\s<]+)",
            close="</tool_call>",
            **_tags(r"<arg_key>\s{0,64}(?P<key>[^<]{1,200}?)\s{0,64}</arg_key>\s{0,64}<arg_value>", "</arg_value>"),
        ),
    ),
    (  # Seed-OSS
        "<seed:tool_call>",
        _format(
            open_pattern=r"\s{0,64}(?:<seed:tool_call>\s{0,64})?<function=(?P<name>[^>\n]+)>",
            close_pattern=_within("seed:tool_call", "</function>"),
            **_tags(r"<parameter=(?P<key>[^>\n]+)>", "</parameter>"),
        ),
    ),
    (  # Functionary 3.1, Llama 3.1 with the calls of Meta's documentation
        "start_tag => `<function`",
        _format(
            open_pattern=r"\s{0,64}<function=(?P<name>[^>\n]+)>",
            close="</function>",
            **_NAMED,
        ),
    ),
    (  # Qwen 3 Coder, 3.5 and later, Nemotron 3
        "<function=",
        _format(
            open_pattern=r"\s{0,64}(?:<tool_call>\s{0,64})?<function=(?P<name>[^>\n]+)>",
            close_pattern=_within("tool_call", "</function>"),
            **_tags(r"<parameter=(?P<key>[^>\n]+)>", "</parameter>", lines=r"\n?"),
        ),
    ),
    (  # Hunyuan, Apriel, Jamba
        "<tool_calls>",
        _format(
            open_pattern=r"\s{0,64}<tool_calls>",
            close="</tool_calls>",
            **_LISTED,
        ),
    ),
    (  # Hermes, Qwen 2.5 and 3, SmolLM 3, Granite 4
        "<tool_call>",
        _format(
            open_pattern=r"\s{0,64}<tool_call>", close="</tool_call>", repeats=True, content="json", transform=_OBJECT
        ),
    ),
    (  # Nemotron Nano 2
        "<TOOLCALL>",
        _format(
            open_pattern=r"\s{0,64}<TOOLCALL>",
            close="</TOOLCALL>",
            **_LISTED,
        ),
    ),
    (  # Command A, Command R7B
        "<|START_ACTION|>",
        _format(
            open_pattern=r"\s{0,64}<\|START_ACTION\|>",
            close="<|END_ACTION|>",
            content="json",
            transform={"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            transform_each=True,
        ),
    ),
    (  # Granite 3
        "<|tool_call|>",
        _format(open_pattern=r"\s{0,64}<\|tool_call\|>", **_LISTED),
    ),
    (  # LFM 2
        "<|tool_call_start|>",
        _list_between("<|tool_call_start|>", "<|tool_call_end|>", _python_list),
    ),
    (  # OLMo 3
        "<function_calls>' + message['function_calls']",
        _list_between("<function_calls>", "</function_calls>", _python_lines),
    ),
    (  # Apertus
        "<|tools_prefix|>",
        _list_between("<|tools_prefix|>", "<|tools_suffix|>", _json_pairs),
    ),
    (  # Phi 4 mini with the template of vLLM
        "functools[",
        _format(open_pattern=r"\s{0,64}functools(?=\[)", **_LISTED),
    ),
    (  # Llama 3.1 to 3.3, 4: the whole answer is an object, or several
        '"parameters": dictionary of argument name and its value',
        _format(
            only_known=True,
            rewrite=_from_objects,
            open_pattern=r'\A(?=\[\{"name")',
            **_LISTED,
        ),
    ),
)


_TOKENS = {"<|tool_call_start|>"}
"""Marks that not all templates of their family have, but its tokenizers."""


def tool_format(tokenizer: Any) -> ToolFormat | None:
    """Returns the format in which a model with this transformers tokenizer writes calls; None if it is not known."""
    own = getattr(tokenizer, "response_template", None)
    if isinstance(own, Mapping) and "tool_calls" in own.get("fields", {}):
        return ToolFormat(own, whole=True)
    if thinking_format(tokenizer) is HARMONY:
        return HARMONY_CALLS
    templates = getattr(tokenizer, "chat_template", None)
    text = "\n".join(templates.values() if isinstance(templates, dict) else [templates or ""])
    text = text.replace("\\n", "\n").replace('\\"', '"')
    text += " ".join(_TOKENS & getattr(tokenizer, "get_added_vocab", dict)().keys())
    return next((found for mark, found in _BY_MARK if mark in text), None)


def find_calls(
    format: ToolFormat, answer: str, tools: str, *, prompt: str = "", id_start: str = "call"
) -> tuple[str, tuple[ToolCall, ...]] | None:
    """Returns the text of an answer and the calls in it; None if it has no call, or one that cannot be read.

    `answer` has its special tokens written out, but not its end token. `tools` is the JSON of the row's tools, by whose schemas arguments
    that are written as text get their types. The ids of calls are `id_start` and a number, unless the model writes ids itself.
    """
    from transformers.utils.chat_parsing import parse_response

    known = json.loads(tools)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes in texts as in Python
            answer = answer if format.rewrite is None else format.rewrite(answer)
        as_json = format.template["fields"]["tool_calls"].get("content") == "json"
        # What JSON has as a text is no number where it may be a text.
        typed = [_with_types(tool, not as_json) for tool in known]
        message = parse_response(answer, _response_template(format), prefix=prompt if format.whole else "", tools=typed)
        found = message.get("tool_calls") or []
        calls = tuple(
            _call(value, f"{id_start}_{i}") for i, value in enumerate(found if isinstance(found, list) else [found])
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SyntaxError):
        return None
    if not calls or (format.only_known and not {call.name for call in calls} <= _tool_names(known)):
        return None
    content = message.get("content") or ""
    return (content.strip() if isinstance(content, str) else ""), calls


_TYPE_NAMES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def _with_types(tool: Any, texts: bool) -> Any:
    """Returns a tool with the types of its arguments in `type`; without `texts` none of the arguments that may be texts.

    The parser of transformers reads `type`, `anyOf` and `oneOf` of a tool's schema; schemas say it in other ways too.
    """
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    parameters = function.get("parameters") if isinstance(function, dict) else None
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(function, dict) or not isinstance(properties, dict):
        return tool
    types = {name: _type_names(schema, parameters, set()) for name, schema in properties.items()}
    known = {name: {"type": found} for name, found in types.items() if found and (texts or "string" not in found)}
    return {"name": function.get("name"), "parameters": {"properties": known}}


def _type_names(schema: Any, root: Any, seen: set[str]) -> list[str]:
    """Returns the names of the types that a schema allows, in its order; those of all its parts, and of what it refers to in `root` and that was not `seen` before."""
    if not isinstance(schema, dict):
        return []
    named = schema.get("type")
    types = [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
    for union in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types += _type_names(choice, root, seen)
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref not in seen:
        seen.add(ref)
        types += _type_names(referenced(schema, root), root, seen)
    if not types:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        types = [_TYPE_NAMES[type(value)] for value in values] if isinstance(values, list) else []
    if schema.get("nullable"):  # transformers' mark of an optional argument
        types.append("null")
    return list(dict.fromkeys(types))


@lru_cache(maxsize=64)
def _response_template(format: ToolFormat) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(dict(format.template))


def _call(value: Any, id: str) -> ToolCall:
    """Raises `TypeError`, `KeyError` or `ValueError` where the value is no call, or its arguments are not JSON (NaN)."""
    function = value["function"]
    name, given = function["name"], [key for key in ("arguments", "parameters") if key in function]
    if not given and not function.keys() <= {"name", "id"}:  # its arguments have a name that nobody knows
        raise TypeError("not a call")
    arguments = function[given[0]] if given else {}
    if isinstance(arguments, str):  # JSON as text, as OpenAI has it
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise TypeError("not a call")
    own = value.get("id") or function.get("id")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(own if isinstance(own, str) else id, name.strip(), text)


def _tool_names(tools: Sequence[Any]) -> set[str]:
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return {str(f["name"]) for f in functions if isinstance(f, Mapping) and "name" in f}


def harmony_call_start(pieces: Sequence[str]) -> int:
    """The number of tokens before the first message to a function in a harmony completion; `pieces` are the texts of its tokens."""
    start, header = 0, ""
    for at, piece in enumerate(pieces):
        if piece == "<|start|>":
            start, header = at, ""
        elif piece == "<|message|>":
            if re.search(r"\bto=functions\.", header):
                return start
            header = ""
        else:
            header += piece
    return len(pieces)
