"""`--template`: a prompt's text from a row's columns, by sandboxed Jinja. Knows nothing of chat and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, meta

from batchgen.errors import BatchgenError, RowError, UsageError
from batchgen.prompts.limits import Limited, LimitError
from batchgen.prompts.messages import first_line
from batchgen.prompts.sandbox import GuardedEnvironment

_WHOLE_ROW = "row"


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
        environment = GuardedEnvironment(undefined=StrictUndefined, finalize=_written, autoescape=False)
        self._limited = Limited("template")
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
            named = meta.find_undeclared_variables(parsed)
        except TemplateSyntaxError as e:
            raise UsageError(f"--template is not valid Jinja (line {e.lineno}): {e.message}", "mend it") from None
        except (RecursionError, MemoryError, LimitError):
            raise UsageError("--template is nested too deeply, or too long", "make it simpler") from None
        self.columns = frozenset(named - environment.globals.keys() - {_WHOLE_ROW})
        """The columns that it names."""

    def render(self, columns: Mapping[str, Any]) -> str:
        """The text for one row. Raises `RowError("template_error")`, naming a column that is missing."""
        try:
            return self._limited(lambda: self._template.render({_WHOLE_ROW: columns, **columns}))
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
