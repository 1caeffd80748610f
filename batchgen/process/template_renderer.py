"""The child process of `templates.py`: renders Jinja templates in Jinja's own sandbox, within the limits of time and memory of its arguments."""

from __future__ import annotations

import os
import pickle
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, lru_cache, wraps
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, meta, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Environment, Template
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.errors import first_line
from batchgen.json_values import plain
from batchgen.process.signals import ignore_stop_signals
from batchgen.process.template_shapes import shape_of, stand_ins
from batchgen.process.templates import Form, TemplateFailure, TemplateShape

MAX_CHARACTERS = 10_000_000
"""Characters that a template may write, in addition to those of its input."""
_TRIAL = "‘a’ <b> 1.5\u2028"
_IDLE_SECONDS = 0.05
_SEND_BYTES, _SEND_SECONDS = 1 << 20, 0.1  # answers wait for others up to here
_TEXT_FILTERS = (
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "replace", "safe", "string", "striptags",
    "title", "trim", "upper", "urlencode", "urlize", "wordcount", "wordwrap",
)  # fmt: skip
"""Filters that make a text of their value and arguments: of a null the word None."""


def main() -> None:
    """Runs until the other end has gone. Arguments: the numbers of an open socket and of the file for the place in the batch, seconds, bytes."""
    ignore_stop_signals()
    os.chdir("/")  # the parent's folder may be removed
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads take address space, 40 MB each, and are not needed
    socket, place, seconds, memory = map(int, sys.argv[1:])
    connection = Connection(socket)
    connection.send_bytes(pickle.dumps(True))
    if not connection.poll(_IDLE_SECONDS):
        _chat_templates()  # while the parent does something else
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory)
    with suppress(EOFError, OSError):
        while True:
            form, source, inputs = pickle.loads(connection.recv_bytes())
            _answer_all(connection, place, seconds, form, source, inputs)


def _answer_all(
    connection: Connection[Any, Any], place: int, seconds: int, form: Form, source: str, inputs: list[bytes]
) -> None:
    """Sends an answer to each input, some at a time."""
    answers: list[Any] = []
    size, sent, processor_time = 0, time.monotonic(), 0
    for i, packed in enumerate(inputs):
        os.pwrite(place, i.to_bytes(8, "little"), 0)
        if time.process_time() + seconds > processor_time:
            processor_time = int(time.process_time()) + seconds + 1
            _limit(resource.RLIMIT_CPU, processor_time)
        answers.append(_answer(form, source, packed))
        size += len(answers[-1]) if isinstance(answers[-1], str) else 0
        if i + 1 == len(inputs) or size > _SEND_BYTES or time.monotonic() > sent + _SEND_SECONDS:
            connection.send_bytes(pickle.dumps(answers, pickle.HIGHEST_PROTOCOL))
            answers, size, sent = [], 0, time.monotonic()


def _limit(kind: int, value: int) -> None:
    """Sets a soft limit, or the hard limit if that is lower."""
    hard = resource.getrlimit(kind)[1]
    with suppress(ValueError, OSError):  # macOS does not limit the address space
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


class _NullWrittenError(Exception):
    pass


def _written(value: Any) -> Any:
    """Returns what `{{ }}` writes. Raises an error for a null, which Jinja would write as the word None."""
    if value is None:
        raise _NullWrittenError
    return value


def _without_nulls(text_filter: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the filter, with an error for a null as its value or an argument."""

    @wraps(text_filter)
    def filtered(*given: Any, **named: Any) -> Any:
        for value in given:
            _written(value)
        return text_filter(*given, **named)

    return filtered


@pass_environment
def _join(environment: Environment, values: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    """Jinja's filter `join`, with an error for a null."""
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return str(_written(d)).join(str(_written(value)) for value in values)


class _CodeWithoutNulls(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 - Jinja's name
        """Has the parts of `a ~ b` pass the filter `string`."""
        for joined in node.find_all(nodes.Concat):
            joined.nodes = [
                nodes.Filter(part, "string", [], [], None, None, lineno=part.lineno) for part in joined.nodes
            ]
        node.set_environment(self.environment)
        super().visit_Template(node, frame)


_SANDBOX = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_written, autoescape=False)
_SANDBOX.policies["json.dumps_kwargs"] = {"sort_keys": True, "default": plain}  # of the filter tojson
_SANDBOX.globals["range"] = range  # without Jinja's own limit of 100,000
_SANDBOX.filters |= {name: _without_nulls(_SANDBOX.filters[name]) for name in _TEXT_FILTERS} | {"join": _join}
_SANDBOX.code_generator_class = _CodeWithoutNulls
_WITHOUT_FUNCTIONS = _SANDBOX.overlay()
_WITHOUT_FUNCTIONS.globals = {}


@lru_cache
def _compiled(source: str) -> Template:
    return _SANDBOX.from_string(source)


@lru_cache
def _read_names(source: str) -> frozenset[str]:
    """Returns the names that a template reads and that must be given. Those of Jinja's functions are not among them where they are only called."""
    tree = _WITHOUT_FUNCTIONS.parse(source)
    called = {id(call.node) for call in tree.find_all(nodes.Call)}
    values = {name.name for name in tree.find_all(nodes.Name) if id(name) not in called}
    return frozenset(meta.find_undeclared_variables(tree) - (_SANDBOX.globals.keys() - values))


def _names(source: str, _: object) -> frozenset[str]:
    """Returns the names that the template reads. Compiles it, too, which finds more errors."""
    _compiled(source)
    return _read_names(source)


def _row(source: str, columns: Mapping[str, Any]) -> str:
    read = {name: columns[name] for name in _read_names(source) if name in columns}
    return str(_compiled(source).render({"row": columns, **read}))


@cache
def _chat_templates() -> Any:
    """Imports the part of transformers that renders chat templates. It needs no torch, and this process nothing else."""
    for package in ("torch", "PIL"):
        sys.modules[package] = None  # type: ignore[assignment]  # as if it were not installed
    return import_module("transformers.utils.chat_template_utils")


def _chat(source: str, arguments: Mapping[str, Any]) -> str:
    texts, _ = _chat_templates().render_jinja_template(chat_template=source, **arguments)
    return str(texts[0])


def _shape(source: str, arguments: dict[str, Any]) -> TemplateShape | None:
    """Returns the shape of a conversation whose contents are texts; None if there is none, or a trial does not agree with it."""
    (messages,) = arguments.pop("conversations")
    del arguments["continue_final_message"]
    texts = stand_ins(len(messages))
    variables = {"tools": None, "documents": None, **arguments}
    variables["messages"] = [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
    shape = shape_of(_chat_templates()._compile_jinja_template(source).environment, source, variables, texts)
    trial = [f"\n {number}: {{{{ {_TRIAL}\t" for number in range(len(messages))]
    tried = [{**message, "content": text} for message, text in zip(messages, trial, strict=True)]
    text = None if shape is None else shape.filled(trial)
    if text is None or len(text) > MAX_CHARACTERS or text != _chat(source, {**arguments, "conversations": [tried]}):
        return None
    return shape


_FORMS: Mapping[Form, Callable[[str, Any], Any]] = {"names": _names, "row": _row, "chat": _chat, "shape": _shape}


def _answer(form: Form, source: str, packed: bytes) -> Any:
    try:
        answer = _FORMS[form](source, pickle.loads(packed))
    except _NullWrittenError:
        return TemplateFailure("null", "it writes a null")
    except TemplateSyntaxError as e:
        return TemplateFailure("syntax", first_line(e), e.lineno)
    except RecursionError as e:
        return TemplateFailure("limit", first_line(e))
    except UndefinedError as e:
        return TemplateFailure("undefined", first_line(e))
    except MemoryError:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0] >> 20
        return TemplateFailure("limit", f"it needs more than {limit} MiB of memory")
    except Exception as e:  # noqa: BLE001 - a template is a program of its own and raises what it likes
        return TemplateFailure("error", first_line(e))
    if isinstance(answer, str) and len(answer) > MAX_CHARACTERS + len(packed):
        return TemplateFailure("limit", f"it writes more than {MAX_CHARACTERS} characters")
    return answer


if __name__ == "__main__":
    main()
