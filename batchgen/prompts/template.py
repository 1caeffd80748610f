"""`--template`: a prompt's text from a row's columns, by sandboxed Jinja. Knows nothing of chat and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.errors import RowError, UsageError
from batchgen.prompts.messages import first_line

# No prompt is as long as this; a template that loops wild is.
_MOST_CHARACTERS = 10_000_000
_WHOLE_ROW = "row"


class _TooLongError(Exception):
    pass


class _NullWrittenError(Exception):
    pass


class _Environment(ImmutableSandboxedEnvironment):
    """Also refuses to build a huge value by one multiplication or power, before there is any output to measure."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(right, int | float) and abs(right) > 1000:
                raise _TooLongError
        else:
            for one, other in ((left, right), (right, left)):
                if (
                    isinstance(one, str | list | tuple)
                    and isinstance(other, int)
                    and len(one) * other > _MOST_CHARACTERS
                ):
                    raise _TooLongError
        return super().call_binop(context, operator, left, right)


def _written(value: Any) -> Any:
    """What `{{ }}` writes. A null would come out as the word None and nobody would notice."""
    if value is None:
        raise _NullWrittenError
    return value


class RowTemplate:
    """A Jinja template over a row's columns; `row` is all of them, for names such as `row["my column"]`."""

    def __init__(self, source: str) -> None:
        """Raises `UsageError` where the source is no Jinja."""
        environment = _Environment(undefined=StrictUndefined, finalize=_written, autoescape=False)
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as e:
            raise UsageError(f"--template is not valid Jinja (line {e.lineno}): {e.message}", "mend it") from None
        self.columns = frozenset(meta.find_undeclared_variables(parsed) - environment.globals.keys() - {_WHOLE_ROW})
        """The columns that it names."""

    def render(self, columns: Mapping[str, Any]) -> str:
        """The text for one row. Raises `RowError("template_error")`, naming a column that is missing."""
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate({_WHOLE_ROW: columns, **columns}):
                pieces.append(piece)
                length += len(piece)
                if length > _MOST_CHARACTERS:
                    raise _TooLongError
        except _TooLongError:
            raise RowError("template_error", f"template: more than {_MOST_CHARACTERS} characters come out") from None
        except _NullWrittenError:
            raise RowError("template_error", f"template: {self._null(columns)}") from None
        except UndefinedError as e:
            raise RowError("template_error", f"template: {self._undefined(columns, e)}") from None
        except Exception as e:  # noqa: BLE001 - a template is a program of its own and raises what it likes
            raise RowError("template_error", f"template: {first_line(e)}") from None
        return "".join(pieces)

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
