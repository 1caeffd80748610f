"""Renders `--template`: a prompt's text from a row's columns, by sandboxed Jinja. Knows nothing of chats and tokens.

The sandbox is Jinja's own: a template cannot read attributes that begin with `_`, nor change what it is given. In addition, calls, loops and
characters of a render are limited. Decision 0008 says what is not limited, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.errors import RowError, UsageError
from batchgen.prompts.messages import first_line

_WHOLE_ROW = "row"
MAX_CALLS = 1_000_000
"""Calls of macros and functions in one render."""
MAX_LOOPS = 10_000_000
"""Total of the numbers in all ranges of one render."""
MAX_CHARACTERS = 10_000_000
"""Characters that a render, a macro or a block may produce."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that limits what a template writes and how often it calls. Raises `OverflowError`."""

    intercepted_binops = frozenset({"*", "**"})
    calls = 0
    """Calls of the current render."""
    max_calls = MAX_CALLS

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        kept, length = [], 0
        for piece in pieces:
            kept.append(piece)
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise OverflowError(f"it writes more than {MAX_CHARACTERS} characters")
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
        if self.calls > self.max_calls:
            raise OverflowError(f"it makes more than {self.max_calls} calls")
        return super().call(context, obj, *args, **kwargs)


class _NullWrittenError(Exception):
    pass


def _written(value: Any) -> Any:
    """Returns what `{{ }}` writes. Raises an error for a null, which Jinja would write as the word None."""
    if value is None:
        raise _NullWrittenError
    return value


class RowTemplate:
    """A Jinja template over a row's columns; `row` is all of them, for names such as `row["my column"]`."""

    def __init__(self, source: str, max_calls: int = MAX_CALLS) -> None:
        """Raises `UsageError` if the source is not valid Jinja."""
        self._sandbox = environment = _Sandbox(undefined=StrictUndefined, finalize=_written, autoescape=False)
        environment.max_calls = max_calls
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
        """The columns that the template uses."""

    def render(self, columns: Mapping[str, Any]) -> str:
        """Returns the text of one row. Raises `RowError("template_error")`, which names a missing column."""
        try:
            self._sandbox.calls = 0
            return str(self._template.render({"range": _bounded_range(), _WHOLE_ROW: columns, **columns}))
        except _NullWrittenError:
            raise RowError("template_error", f"template: {self._null(columns)}") from None
        except UndefinedError as e:
            raise RowError("template_error", f"template: {self._undefined(columns, e)}") from None
        except Exception as e:  # noqa: BLE001 - a template is a program of its own and raises what it likes
            raise RowError("template_error", f"template: {first_line(e)}") from None

    def missing(self, columns: Mapping[str, Any]) -> list[str]:
        """Returns the columns that the template uses and the row does not have."""
        return sorted(self.columns - columns.keys())

    def _undefined(self, columns: Mapping[str, Any], error: UndefinedError) -> str:
        for name in self.missing(columns):
            if error.message == f"{name!r} is undefined":
                return f"the row has no column {name!r}"
        return first_line(error)

    def _null(self, columns: Mapping[str, Any]) -> str:
        nulls = [name for name in sorted(self.columns) if columns.get(name, "") is None]
        which = f"column {nulls[0]!r}" if len(nulls) == 1 else "a value"
        return f"{which} is null; write `or ''` after it to allow that"


def _bounded_range() -> Callable[..., range]:
    """Returns a `range` for one render, which raises `OverflowError` if all ranges together have more than `MAX_LOOPS` numbers."""
    left = MAX_LOOPS

    def bounded(*bounds: int) -> range:
        nonlocal left
        numbers = range(*bounds)
        left -= len(numbers)
        if left < 0:
            raise OverflowError(f"its loops run more than {MAX_LOOPS} times")
        return numbers

    return bounded
