"""`--template`: a prompt's text from a row's columns, by sandboxed Jinja. Knows nothing of chat and tokens.

The sandbox is Jinja's own (no attributes that begin with `_`, nothing that a template is given can be changed). On top of it a render
may take so many steps and write so many characters; decision 0008 says what is not limited, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.errors import BatchgenError, RowError, UsageError
from batchgen.prompts.messages import first_line

_WHOLE_ROW = "row"
MAX_CALLS = 1_000_000
"""Calls of macros and functions in one render."""
MAX_LOOPS = 10_000_000
"""Numbers in all ranges of one render together."""
MAX_CHARACTERS = 10_000_000
"""Characters that a render, a macro or a block may give."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which what a template writes and how often it calls is limited. Raises `OverflowError`."""

    intercepted_binops = frozenset({"*", "**"})
    calls = 0
    """Of the render that is under way."""

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        kept, length = [], 0
        for piece in pieces:
            kept.append(piece)
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise OverflowError(f"more than {MAX_CHARACTERS} characters come out")
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [
            len(x) if hasattr(x, "__len__") else abs(x)
            for x in (left, right)
            if hasattr(x, "__len__") or isinstance(x, int)
        ]
        sequence = hasattr(left, "__len__") or hasattr(right, "__len__")
        if len(sizes) == 2 and (
            (sequence and sizes[0] * sizes[1] > MAX_CHARACTERS) or (operator == "**" and sizes[1] > 1000)
        ):
            raise OverflowError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise OverflowError(f"it makes more than {MAX_CALLS} calls")
        return super().call(context, obj, *args, **kwargs)


class _NullWrittenError(Exception):
    pass


def _written(value: Any) -> Any:
    """What `{{ }}` writes. A null would come out as the word None and nobody would notice."""
    if value is None:
        raise _NullWrittenError
    return value


class RowTemplate:
    """A Jinja template over a row's columns; `row` is all of them, for names such as `row["my column"]`."""

    def __init__(self, source: str) -> None:
        """Raises `UsageError` where the source is no Jinja."""
        self._sandbox = environment = _Sandbox(undefined=StrictUndefined, finalize=_written, autoescape=False)
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
            named = meta.find_undeclared_variables(parsed)
        except TemplateSyntaxError as e:
            raise UsageError(
                f"--template is not valid Jinja (line {e.lineno}): {(e.message or '').rstrip('.')}",
                "correct the template",
            ) from None
        except (RecursionError, MemoryError, OverflowError):
            raise UsageError("--template is nested too deeply, or too long", "make it simpler") from None
        self.columns = frozenset(named - environment.globals.keys() - {_WHOLE_ROW})
        """The columns that it names."""

    def render(self, columns: Mapping[str, Any]) -> str:
        """The text for one row. Raises `RowError("template_error")`, naming a column that is missing."""
        try:
            self._sandbox.calls = 0
            return str(self._template.render({"range": _bounded_range(), _WHOLE_ROW: columns, **columns}))
        except BatchgenError:  # a signal's, or of all rows
            raise
        except _NullWrittenError:
            raise RowError("template_error", f"template: {self._null(columns)}") from None
        except UndefinedError as e:
            raise RowError("template_error", f"template: {self._undefined(columns, e)}") from None
        except Exception as e:  # noqa: BLE001 - a template is a program of its own and raises what it likes
            raise RowError("template_error", f"template: {first_line(e)}") from None

    def missing(self, columns: Mapping[str, Any]) -> list[str]:
        """The columns that it names and the row does not have."""
        return sorted(self.columns - columns.keys())

    def _undefined(self, columns: Mapping[str, Any], error: UndefinedError) -> str:
        for name in self.missing(columns):
            if error.message == f"{name!r} is undefined":
                return f"the row has no column {name!r}"
        return first_line(error)

    def _null(self, columns: Mapping[str, Any]) -> str:
        nulls = [name for name in sorted(self.columns) if columns.get(name, "") is None]
        which = f"column {nulls[0]!r}" if len(nulls) == 1 else "a value"
        return f"{which} is null; write `or ''` after it where that may be"


def _bounded_range() -> Callable[..., range]:
    """Python's `range` for one render. Raises `OverflowError`."""
    left = MAX_LOOPS

    def bounded(*bounds: int) -> range:
        nonlocal left
        numbers = range(*bounds)
        left -= len(numbers)
        if left < 0:
            raise OverflowError(f"its loops run more than {MAX_LOOPS} times")
        return numbers

    return bounded
